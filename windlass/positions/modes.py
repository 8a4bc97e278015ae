"""Stored positions to rotary positions.

A slot stores the index of its token in the text and nothing else. Where that token is *read* is
decided here, anew at every step, by a pure function of stored and query positions. So a mode may
be exchanged between two steps, and no edit of positions ever touches a key.
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields

import torch

from windlass import kernels
from windlass.core.errors import UsageError
from windlass.core.rotary_index import Branch, Reading
from windlass.core.shapes import QueryPositions, RotaryKeys, RotaryQueries, SlotPositions
from windlass.core.spec import whole_numbers


class PositionMode(ABC):
    """Decides at which rotary distance a kept token is read."""

    @abstractmethod
    def read(self, slots: SlotPositions, queries: QueryPositions) -> Reading:
        """The rotary positions of one step. `slots` already holds the tokens of `queries`."""

    @abstractmethod
    def bound(self, end: int, held: int, tokens: int) -> int:
        """A length no rotary position of the step reaches.

        `end` is one past the newest position of any row, `held` the most tokens that a row holds, and
        `tokens` the columns of the step.
        """


@dataclass(frozen=True)
class Original(PositionMode):
    """A key at distance d is read at d: what the model itself does."""

    def read(self, slots: SlotPositions, queries: QueryPositions) -> Reading:
        return Reading(Branch(_per_rank(queries, slots), slots.clamp(min=0)))

    def bound(self, end: int, held: int, tokens: int) -> int:
        return end

    def __str__(self) -> str:
        return "original"


@dataclass(frozen=True)
class Compact(PositionMode):
    """A key is read at its rank among the kept tokens, so distances never exceed what is held.

    Source: position assignment of StreamingLLM, Xiao et al. 2023 (arXiv:2309.17453), section 3.2.
    Differs: each (row, kv head) ranks its own tokens, so any policy may be combined with it; within
    a chunk distances may reach `budget + chunk`.
    """

    def read(self, slots: SlotPositions, queries: QueryPositions) -> Reading:
        held = slots >= 0
        order = kernels.text_order(slots)
        ranks = torch.arange(slots.shape[-1], device=slots.device).expand_as(order)
        keys = torch.empty_like(order).scatter_(-1, order, ranks).where(held, 0)
        # The queries are the newest tokens of their row, so their ranks end at the number held.
        real = queries >= 0
        newer = real.flip(-1).cumsum(-1).flip(-1).clamp(min=1)  # padding at the end reads nothing, within the bound
        ranked = held.sum(-1, keepdim=True) - newer[:, None, :]
        return Reading(Branch(ranked.clamp(min=0), keys))

    def bound(self, end: int, held: int, tokens: int) -> int:
        return held

    def __str__(self) -> str:
        return "compact"


@dataclass(frozen=True)
class SelfExtend(PositionMode):
    """Distances below `window` are read as they are, longer ones in steps of `group` tokens.

    Source: Jin et al. 2024 (arXiv:2401.01325), equation 4.
    Differs: the near branch is counted from the oldest key it can reach, which changes no distance
    and keeps the rotary table short.
    """

    group: int = 8
    window: int = 64

    def __post_init__(self) -> None:
        _at_least("group", self.group, 1)
        _at_least("window", self.window, 1)

    def read(self, slots: SlotPositions, queries: QueryPositions) -> Reading:
        q, k = _per_rank(queries, slots), slots.clamp(min=0)
        far_q = q // self.group + self.window - self.window // self.group
        far_k = k // self.group
        if queries.shape[1] == 1:
            distance = (q - k).clamp(min=0)  # a padding query stands at 0, before its keys
            return Reading(Branch(far_q, torch.where(distance < self.window, far_q - distance, far_k).clamp(min=0)))
        return Reading(_rebased(q, k, self.window), Branch(far_q, far_k), self.window)

    def bound(self, end: int, held: int, tokens: int) -> int:
        return max(end // self.group + self.window, self.window + tokens) + 1

    def __str__(self) -> str:
        return f"self_extend({self.group}, {self.window})"


@dataclass(frozen=True)
class Clamp(PositionMode):
    """A key at distance d is read at min(d, limit): far text is simply "far".

    Source: ReRoPE, Su 2023 (github.com/bojone/rerope); InfLLM, Xiao et al. 2024 (arXiv:2402.04617).
    """

    limit: int = 256

    def __post_init__(self) -> None:
        _at_least("limit", self.limit, 1)

    def read(self, slots: SlotPositions, queries: QueryPositions) -> Reading:
        q, k = _per_rank(queries, slots), slots.clamp(min=0)
        far_q = torch.full_like(q, self.limit)
        if queries.shape[1] == 1:
            return Reading(Branch(far_q, (far_q - (q - k)).clamp(0, self.limit)))
        return Reading(_rebased(q, k, self.limit), Branch(far_q, torch.zeros_like(k)), self.limit)

    def bound(self, end: int, held: int, tokens: int) -> int:
        return self.limit + tokens + 1

    def __str__(self) -> str:
        return f"clamp({self.limit})"


MODES: dict[str, type[PositionMode]] = {
    "original": Original,
    "compact": Compact,
    "self_extend": SelfExtend,
    "clamp": Clamp,
}


def position_mode(spec: str | PositionMode) -> PositionMode:
    """The mode that `spec` names: `"compact"`, `"self_extend(8, 64)"`, or a mode itself.

    Raises: UsageError for an unknown name or wrong numbers.
    """
    if isinstance(spec, PositionMode):
        return spec
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(([^()]*)\))?\s*", spec)
    if match is None or match[1] not in MODES:
        forms = "original, compact, self_extend(group, window), clamp(limit)"
        raise UsageError(f"positions={spec!r} is not a position mode; use one of: {forms}")
    mode = MODES[match[1]]
    names = [each.name for each in fields(mode)]  # type: ignore[arg-type]  # every mode is a dataclass
    return mode(**whole_numbers(f"positions={spec!r}", match[1], names, match[2] or ""))


def _per_rank(queries: QueryPositions, slots: SlotPositions) -> RotaryQueries:
    return queries.clamp(min=0)[:, None, :].expand(-1, slots.shape[1], -1)


def _rebased(q: RotaryQueries, k: RotaryKeys, window: int) -> Branch:
    """Positions counted from the oldest key that any query reaches within `window`."""
    # Padding queries stand at 0 and would pull the base down, but never below a real one minus the chunk.
    base = (q.amax(-1, keepdim=True) - q.shape[-1] - window).clamp(min=0)
    # A row of padding only stands at 0 as a whole: its keys are beyond reach, and must stay within the bound.
    return Branch((q - base).clamp(min=0), (k - base).clamp(0, q.shape[-1] + window))


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise UsageError(f"{name} must be at least {least}, got {value}")
