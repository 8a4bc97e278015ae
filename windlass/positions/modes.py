"""Position modes by name.

To add a mode, write a frozen dataclass of whole numbers that subclasses `PositionMode`, and add it to `MODES`.
"""

from dataclasses import MISSING, dataclass, fields
from typing import Final

import torch

from windlass.core.check import check_kind
from windlass.core.close_names import near_to
from windlass.core.errors import UsageError
from windlass.core.limits import MAX_NUMBER, check_range
from windlass.core.places import Places, SlotPlaces
from windlass.core.rotary_index import RotaryBranch, RotaryIndex
from windlass.core.shapes import QueryPositions, SlotPositions
from windlass.core.spec import check_given, parse_ints, parse_spec
from windlass.positions.base import PositionMode as PositionMode
from windlass.positions.base import Reading, as_they_stand, at_ranks, per_rank, rebased
from windlass.positions.blocks import in_blocks
from windlass.positions.windowed import Windowed


@dataclass(frozen=True)
class Original(PositionMode):
    """A key at distance d is read at d, as the model itself does."""

    name = "original"

    def rotary_index(self, slots: SlotPositions, queries: QueryPositions) -> RotaryIndex:
        return as_they_stand(slots, queries)

    def bound(self, end: int, occupancy: int, tokens: int) -> int:
        return end

    def stands_until(self) -> int:
        return MAX_NUMBER

    def keeps_places(self, end: int, occupancy: int) -> bool:
        return True

    def reading_at(self, slots: SlotPlaces, queries: Places) -> Reading:
        return Reading(as_they_stand(slots.at, queries.at), queries.end, queries.end)


@dataclass(frozen=True)
class Compact(PositionMode):
    """A key is read at its rank among the kept tokens, so distances never exceed what is held.

    Source: position assignment of StreamingLLM, Xiao et al. 2023 (arXiv:2309.17453), section 3.2.
    Differs: each (row, kv head) ranks its own tokens, so any policy may be combined with it; within
    a chunk distances may reach `budget + chunk`. A picture of which a token is kept takes all of its extent, and its
    tokens stand in it as they did: so they keep their distances, and no text stands within it.
    """

    name = "compact"

    def rotary_index(self, slots: SlotPositions, queries: QueryPositions) -> RotaryIndex:
        return at_ranks(slots, queries)

    def bound(self, end: int, occupancy: int, tokens: int) -> int:
        return occupancy

    def keeps_places(self, end: int, occupancy: int) -> bool:
        return True

    def reading_at(self, slots: SlotPlaces, queries: Places) -> Reading:
        return Reading(in_blocks(slots, queries), queries.end, queries.end)


@dataclass(frozen=True)
class SelfExtend(PositionMode):
    """Distances below `window` are read as they are, longer ones in steps of `group` tokens.

    Source: Jin et al. 2024 (arXiv:2401.01325), equation 4.
    Differs: the near branch is counted from the oldest key it can reach, which changes no distance
    and keeps the rotary table short.
    """

    name = "self_extend"

    group: int = 8
    window: int = 64

    def __post_init__(self) -> None:
        check_range("group", self.group)
        check_range("window", self.window)

    def rotary_index(self, slots: SlotPositions, queries: QueryPositions) -> RotaryIndex:
        q, k = per_rank(queries, slots), slots.clamp(min=0)
        far_q = q // self.group + self.window - self.window // self.group
        far_k = k // self.group
        if queries.shape[1] == 1:
            distance = (q - k).clamp(min=0)  # a padding query stands at 0, before its keys
            keys = torch.where(distance < self.window, far_q - distance, far_k)
            return RotaryIndex(RotaryBranch(far_q, keys.clamp(min=0)))
        return RotaryIndex(rebased(q, k, self.window), RotaryBranch(far_q, far_k), self.window)

    def bound(self, end: int, occupancy: int, tokens: int) -> int:
        return max(end // self.group + self.window, self.window + tokens) + 1


@dataclass(frozen=True)
class Clamp(PositionMode):
    """A key at distance d is read at min(d, limit): far text is simply "far".

    Source: ReRoPE, Su 2023 (github.com/bojone/rerope); InfLLM, Xiao et al. 2024 (arXiv:2402.04617).
    """

    name = "clamp"

    limit: int

    def __post_init__(self) -> None:
        check_range("limit", self.limit)

    def rotary_index(self, slots: SlotPositions, queries: QueryPositions) -> RotaryIndex:
        q, k = per_rank(queries, slots), slots.clamp(min=0)
        far_q = torch.full_like(q, self.limit)
        if queries.shape[1] == 1:
            return RotaryIndex(RotaryBranch(far_q, (far_q - (q - k)).clamp(0, self.limit)))
        return RotaryIndex(rebased(q, k, self.limit), RotaryBranch(far_q, torch.zeros_like(k)), self.limit)

    def bound(self, end: int, occupancy: int, tokens: int) -> int:
        return self.limit + tokens + 1


@dataclass(frozen=True)
class Auto(PositionMode):
    """Reads as the model itself does while a text is inside of the trained length; beyond it, so that it stays inside.

    Where the tokens that a row holds fit into the trained length, a query beyond it reads them at their ranks, as
    `compact` does; else as `self_extend` does, by the smallest group that keeps all distances inside. `Windowed` has
    the rule. A model whose trained length nobody knows, and a layer with a sliding window, are read as they are.
    """

    name = "auto"

    def within(self, trained_length: int | None, is_bounded: bool) -> PositionMode:
        return Original() if trained_length is None else Windowed(trained_length, is_bounded)

    def rotary_index(self, slots: SlotPositions, queries: QueryPositions) -> RotaryIndex:
        return as_they_stand(slots, queries)

    def bound(self, end: int, occupancy: int, tokens: int) -> int:
        return end


MODES: Final[dict[str, type[PositionMode]]] = {mode.name: mode for mode in (Auto, Original, Compact, SelfExtend, Clamp)}


def position_mode(spec: str | PositionMode) -> PositionMode:
    """The mode that `spec` names: `"compact"`, `"self_extend(8, 64)"`, or a mode itself.

    Raises: UsageError for an unknown name, wrong numbers, or what is neither a mode nor a name.
    """
    if isinstance(spec, PositionMode):
        return spec
    check_kind("positions", spec, str, "a position mode or its name", 'write positions="compact" or windlass.Compact()')
    typed = parse_spec(spec)
    if typed is None or typed.name not in MODES:
        forms = ", ".join(map(_form, MODES.values()))
        raise UsageError(f"positions={spec!r} is not a position mode; use one of: {forms}{near_to(spec, MODES)}")
    mode = MODES[typed.name]
    numbers = parse_ints(f"positions={spec!r}", typed, [field.name for field in fields(mode)])
    check_given(spec, mode.name, [field.name for field in fields(mode) if field.default is MISSING], numbers)
    return mode(**numbers)


def _form(mode: type[PositionMode]) -> str:
    names = ", ".join(field.name for field in fields(mode))
    return f"{mode.name}({names})" if names else mode.name
