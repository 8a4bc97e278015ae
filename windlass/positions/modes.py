"""Position modes: from stored positions to rotary positions.

A slot stores the index of its token in the text and nothing else. A position mode decides at which
rotary position the token's key is *read*: a pure function of stored and query positions, called at
every step. So a mode may be exchanged between two steps, and no edit of positions touches a key.

To add a mode, write a frozen dataclass of whole numbers that subclasses `PositionMode`, and add it to `MODES`.
"""

from abc import ABC, abstractmethod
from dataclasses import astuple, dataclass, fields
from typing import ClassVar, Final

import torch

from windlass import kernels
from windlass.core.errors import UsageError
from windlass.core.rotary_index import RotaryBranch, RotaryIndex
from windlass.core.shapes import QueryPositions, RotaryKeys, RotaryQueries, SlotPositions
from windlass.core.spec import parse_ints, parse_spec
from windlass.core.step import MAX_NUMBER


@dataclass(frozen=True)
class PositionMode(ABC):
    """Decides at which rotary distance a kept token is read. Its fields are whole numbers."""

    name: ClassVar[str]
    """The name that a user types, with the fields in parentheses: `"self_extend(8, 64)"`."""

    @abstractmethod
    def rotary_index(self, slots: SlotPositions, queries: QueryPositions) -> RotaryIndex:
        """The rotary positions of one step. `slots` already holds the positions of `queries`, the newest tokens.

        Positions below 0 are those of free slots and of padding; what is given for them is not used, but must
        be from 0 and below `bound`.
        """

    @abstractmethod
    def bound(self, end: int, occupancy: int, tokens: int) -> int:
        """The length of rotary table that a step needs: every rotary position is below it.

        `end` is one past the newest position of any row, `occupancy` the most tokens that a row holds, and
        `tokens` the columns of the step.
        """

    def __str__(self) -> str:
        """The text that `position_mode` reads back."""
        numbers = ", ".join(map(str, astuple(self)))
        return f"{self.name}({numbers})" if numbers else self.name


@dataclass(frozen=True)
class Original(PositionMode):
    """A key at distance d is read at d, as the model itself does."""

    name = "original"

    def rotary_index(self, slots: SlotPositions, queries: QueryPositions) -> RotaryIndex:
        return RotaryIndex(RotaryBranch(_per_rank(queries, slots), slots.clamp(min=0)))

    def bound(self, end: int, occupancy: int, tokens: int) -> int:
        return end


@dataclass(frozen=True)
class Compact(PositionMode):
    """A key is read at its rank among the kept tokens, so distances never exceed what is held.

    Source: position assignment of StreamingLLM, Xiao et al. 2023 (arXiv:2309.17453), section 3.2.
    Differs: each (row, kv head) ranks its own tokens, so any policy may be combined with it; within
    a chunk distances may reach `budget + chunk`.
    """

    name = "compact"

    def rotary_index(self, slots: SlotPositions, queries: QueryPositions) -> RotaryIndex:
        held = slots >= 0
        order = kernels.argsort_positions(slots)
        ranks = torch.arange(slots.shape[-1], device=slots.device).expand_as(order)
        keys = torch.empty_like(order).scatter_(-1, order, ranks).where(held, 0)
        # The queries are the newest tokens of their row, so their ranks end at the number held.
        real = queries >= 0
        newer = real.flip(-1).cumsum(-1).flip(-1).clamp(min=1)  # padding at the end reads nothing, within the bound
        query_ranks = held.sum(-1, keepdim=True) - newer[:, None, :]
        return RotaryIndex(RotaryBranch(query_ranks.clamp(min=0), keys))

    def bound(self, end: int, occupancy: int, tokens: int) -> int:
        return occupancy


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
        _check_number("group", self.group, 1)
        _check_number("window", self.window, 1)

    def rotary_index(self, slots: SlotPositions, queries: QueryPositions) -> RotaryIndex:
        q, k = _per_rank(queries, slots), slots.clamp(min=0)
        far_q = q // self.group + self.window - self.window // self.group
        far_k = k // self.group
        if queries.shape[1] == 1:
            distance = (q - k).clamp(min=0)  # a padding query stands at 0, before its keys
            keys = torch.where(distance < self.window, far_q - distance, far_k)
            return RotaryIndex(RotaryBranch(far_q, keys.clamp(min=0)))
        return RotaryIndex(_rebased(q, k, self.window), RotaryBranch(far_q, far_k), self.window)

    def bound(self, end: int, occupancy: int, tokens: int) -> int:
        return max(end // self.group + self.window, self.window + tokens) + 1


@dataclass(frozen=True)
class Clamp(PositionMode):
    """A key at distance d is read at min(d, limit): far text is simply "far".

    Source: ReRoPE, Su 2023 (github.com/bojone/rerope); InfLLM, Xiao et al. 2024 (arXiv:2402.04617).
    """

    name = "clamp"

    limit: int = 256

    def __post_init__(self) -> None:
        _check_number("limit", self.limit, 1)

    def rotary_index(self, slots: SlotPositions, queries: QueryPositions) -> RotaryIndex:
        q, k = _per_rank(queries, slots), slots.clamp(min=0)
        far_q = torch.full_like(q, self.limit)
        if queries.shape[1] == 1:
            return RotaryIndex(RotaryBranch(far_q, (far_q - (q - k)).clamp(0, self.limit)))
        return RotaryIndex(_rebased(q, k, self.limit), RotaryBranch(far_q, torch.zeros_like(k)), self.limit)

    def bound(self, end: int, occupancy: int, tokens: int) -> int:
        return self.limit + tokens + 1


MODES: Final[dict[str, type[PositionMode]]] = {mode.name: mode for mode in (Original, Compact, SelfExtend, Clamp)}


def position_mode(spec: str | PositionMode) -> PositionMode:
    """The mode that `spec` names: `"compact"`, `"self_extend(8, 64)"`, or a mode itself.

    Raises: UsageError for an unknown name or wrong numbers.
    """
    if isinstance(spec, PositionMode):
        return spec
    typed = parse_spec(spec)
    if typed is None or typed.name not in MODES:
        forms = ", ".join(map(_form, MODES.values()))
        raise UsageError(f"positions={spec!r} is not a position mode; use one of: {forms}")
    mode = MODES[typed.name]
    return mode(**parse_ints(f"positions={spec!r}", typed, [field.name for field in fields(mode)]))


def _form(mode: type[PositionMode]) -> str:
    names = ", ".join(field.name for field in fields(mode))
    return f"{mode.name}({names})" if names else mode.name


def _per_rank(queries: QueryPositions, slots: SlotPositions) -> RotaryQueries:
    return queries.clamp(min=0)[:, None, :].expand(-1, slots.shape[1], -1)


def _rebased(q: RotaryQueries, k: RotaryKeys, window: int) -> RotaryBranch:
    """Positions counted from the oldest key that any query reaches within `window`."""
    # Padding queries stand at 0 and would pull the base down, but never below a real one minus the chunk.
    base = (q.amax(-1, keepdim=True) - q.shape[-1] - window).clamp(min=0)
    # A row of padding only stands at 0 as a whole: its keys are beyond reach, and must stay within the bound.
    return RotaryBranch((q - base).clamp(min=0), (k - base).clamp(0, q.shape[-1] + window))


def _check_number(name: str, value: int, least: int) -> None:
    if not least <= value <= MAX_NUMBER:
        raise UsageError(f"{name} must be from {least} to {MAX_NUMBER}, got {value}")
