"""Position modes by name.

To add a mode, write a frozen dataclass of whole numbers that subclasses `PositionMode`, and add it to `MODES`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, astuple, dataclass, fields
from typing import ClassVar, Final

import torch
from torch import Tensor

from windlass import kernels
from windlass.core.errors import UsageError, check_kind
from windlass.core.parse import MAX_NUMBER, check_given, check_range, near_to, parse_ints, parse_spec
from windlass.core.positions import Places, ReadRule, RotaryBranch, RotaryIndex, SlotPlaces
from windlass.core.step import Step
from windlass.core.types import QueryPositions, RotaryKeys, RotaryQueries, SlotPositions


@dataclass(frozen=True)
class Reading:
    """At which rotary positions some columns of a step read, from column `start` on.

    `is_read` (batch, columns) marks the queries that do (None: all of the step's). `bound` is the number of rows of a
    rotary table that this takes, and `length` the length of text that the table is for, which no number of columns
    changes.
    """

    index: RotaryIndex
    bound: int
    length: int
    start: int = 0
    is_read: Tensor | None = None


@dataclass(frozen=True)
class PositionMode(ABC):
    """Decides at which rotary distance a kept token is read. Its fields are whole numbers."""

    name: ClassVar[str]
    """The mode's name in options, which may be followed by its fields in parentheses: `"self_extend(8, 64)"`."""

    @abstractmethod
    def rotary_index(self, slots: SlotPositions, queries: QueryPositions) -> RotaryIndex:
        """The rotary positions of one step. `slots` already holds the positions of `queries`, the newest tokens.

        Positions below 0 are those of free slots and of padding. Their rotary positions are not used, but must be from
        0 and below `bound`.
        """

    @abstractmethod
    def bound(self, end: int, occupancy: int, tokens: int) -> int:
        """The length of rotary table that a step needs: every rotary position is below it.

        `end` is one past the newest position of any row, `occupancy` the most tokens that a row holds, and
        `tokens` the columns of the step.
        """

    def within(self, trained_length: int | None, is_bounded: bool) -> "PositionMode":
        """The mode in a layer of a model trained on texts of `trained_length` tokens (None: unknown).

        `is_bounded` tells whether the layer has a budget. Modes that depend on neither return themselves.
        """
        return self

    def stands_until(self) -> int:
        """Length of the longest text whose tokens are each read at their own position, or 0 where it is unknown."""
        return 0

    def rule(self) -> ReadRule | None:
        """How the newest token of each row reads its slots, for kernels. None: as `rotary_index` alone says."""
        return None

    def keeps_places(self, end: int, occupancy: int) -> bool:
        """Return True if keys and queries are read at their positions or ranks, and not just at some distance.

        In a text up to `end`, of which a row holds `occupancy` tokens at most. Only with norms after RoPE it matters.
        """
        return False

    def readings(self, slots: SlotPositions, step: Step, occupancy: int) -> Sequence[Reading]:
        """How the queries of `step` read the slots, which hold its tokens already. Each query is in one reading.

        `occupancy` is the most tokens that a row holds, or holds while a graph replays the step.
        """
        bound = self.bound(step.end, occupancy, step.positions.shape[1])
        return [Reading(self.rotary_index(slots, step.positions), bound, self.bound(step.end, occupancy, 1))]

    def reading_at(self, slots: SlotPlaces, queries: Places) -> Reading:
        """How the queries of a step read the slots, of a text with pictures.

        Raises: UsageError for a mode that can't.
        """
        raise UsageError(
            f'positions="{self}" can\'t read a text with pictures. Set cache.positions to "original" or "compact"'
        )

    def __str__(self) -> str:
        """The text that `position_mode` reads back."""
        numbers = ", ".join(map(str, astuple(self)))
        return f"{self.name}({numbers})" if numbers else self.name


def per_head(queries: QueryPositions, slots: SlotPositions) -> RotaryQueries:
    """Query positions for each score head, padding at 0."""
    return queries.clamp(min=0)[:, None, :].expand(-1, slots.shape[1], -1)


def at_positions(slots: SlotPositions, queries: QueryPositions) -> RotaryIndex:
    """Rotary index of tokens at their own positions."""
    return RotaryIndex(RotaryBranch(per_head(queries, slots), slots.clamp(min=0)))


def at_ranks(slots: SlotPositions, queries: QueryPositions) -> RotaryIndex:
    """Each token at its rank among those that its row and head hold."""
    held = slots >= 0
    order = kernels.argsort_positions(slots)
    ranks = torch.arange(slots.shape[-1], device=slots.device).expand_as(order)
    keys = torch.empty_like(order).scatter_(-1, order, ranks).where(held, 0)
    # The queries are the newest tokens of their row, so their ranks end at the number held.
    real = queries >= 0
    newer = real.flip(-1).cumsum(-1).flip(-1).clamp(min=1)  # padding at the end reads nothing, within the bound
    query_ranks = held.sum(-1, keepdim=True) - newer[:, None, :]
    return RotaryIndex(RotaryBranch(query_ranks.clamp(min=0), keys))


def _of_one_column(rule: ReadRule, slots: SlotPositions, queries: QueryPositions, places: int) -> RotaryIndex:
    """One branch for all rows, at any places below `places`."""
    order = kernels.argsort_positions(slots) if rule.is_ranked else None
    return RotaryIndex(rule.branch(slots, queries, order, places))


def rebased(q: RotaryQueries, k: RotaryKeys, window: int) -> RotaryBranch:
    """Positions counted from the oldest key that any query reaches within `window`."""
    # Padding queries stand at 0 and would pull the base down, but never below a real one minus the chunk.
    base = (q.amax(-1, keepdim=True) - q.shape[-1] - window).clamp(min=0)
    # A row of padding only stands at 0 as a whole: its keys are beyond reach, and must stay within the bound.
    return RotaryBranch((q - base).clamp(min=0), (k - base).clamp(0, q.shape[-1] + window))


NEAR_SHARE = 8  # one in so many tokens of the trained length keeps its distance, see docs/results/findings.md


@dataclass(frozen=True)
class Windowed(PositionMode):
    """Up to `trained_length` as `original`. Beyond it at places, in steps of several where these exceed it, too.

    A query at a position below `trained_length` reads as `original`. Beyond, tokens have places: their ranks in a layer
    that `is_bounded` by a budget, else their positions. Where the query's own place is below `trained_length`, keys are
    read at places, which is `compact`. Else they are read as by `self_extend` over places, with the smallest `group` of
    1, 2, 4, ... that keeps distances below `trained_length`, and an eighth of it as the near `window`.

    Only the query and the tokens that its row holds decide, those of a whole pass among them: other rows do not matter,
    and the columns of a pass only by their number. Where heads
    hold different numbers of tokens, after an edit, the fullest one decides the group.
    """

    name = "auto"

    trained_length: int
    is_bounded: bool

    def rotary_index(self, slots: SlotPositions, queries: QueryPositions) -> RotaryIndex:
        """For queries of one column, in rows of any length."""
        return _of_one_column(self.rule(), slots, queries, int(slots.max()) + 1)

    def bound(self, end: int, occupancy: int, tokens: int) -> int:
        if end <= self.trained_length:
            return end
        return self.trained_length if tokens == 1 else max(self.trained_length, tokens + self.near + 1)

    def stands_until(self) -> int:
        return self.trained_length

    def rule(self) -> ReadRule:
        ranked_from = self.trained_length if self.is_bounded else MAX_NUMBER
        return ReadRule(ranked_from, near=self.near, trained=self.trained_length)

    def keeps_places(self, end: int, occupancy: int) -> bool:
        return self.label(end, occupancy) in ("original", "compact")

    @property
    def near(self) -> int:
        """Distances below it are never grouped."""
        return self.trained_length // NEAR_SHARE

    def readings(self, slots: SlotPositions, step: Step, occupancy: int) -> Sequence[Reading]:
        if step.end <= self.trained_length:
            return [Reading(at_positions(slots, step.positions), step.end, step.end)]
        places = occupancy if self.is_bounded else step.end
        if step.positions.shape[1] == 1:
            trained = self.trained_length
            return [Reading(_of_one_column(self.rule(), slots, step.positions, places), trained, trained)]
        return list(self._of_columns(slots, step, places))

    def reading_at(self, slots: SlotPlaces, queries: Places) -> Reading:
        if queries.end > self.trained_length:
            raise UsageError(
                f'positions="auto" can\'t read a text with pictures beyond the trained length of {self.trained_length}'
                f', and it reaches {queries.end}. Set cache.positions to "compact" or "original"'
            )
        return Reading(at_positions(slots.at, queries.at), queries.end, queries.end)

    def label(self, end: int, occupancy: int) -> str:
        """The explicit mode by which the newest token of a text up to `end` reads `occupancy` tokens."""
        if end <= self.trained_length:
            return "original"
        group = self.rule().groups(occupancy if self.is_bounded else end)[-1]
        return "compact" if group == 1 else f"self_extend({group}, {self.near})"

    def _of_columns(self, slots: SlotPositions, step: Step, places: int) -> Iterator[Reading]:
        """A reading for all queries of one group, of the columns that have any."""
        queries, trained = step.positions, self.trained_length
        q, k = per_head(queries, slots), slots.clamp(min=0)
        is_beyond = queries >= trained
        inside = _columns(step, 0, trained)
        if inside is not None:
            index = RotaryIndex(RotaryBranch(q[..., inside].clamp(max=trained - 1), k.clamp(max=trained - 1)))
            yield Reading(index, trained, trained, inside.start, ((queries >= 0) & ~is_beyond)[:, inside])
        if self.is_bounded:
            ranks = at_ranks(slots, queries).near
            q, k = ranks.queries, ranks.keys
        most, least, rule = q.amax(1), 0, self.rule()
        for group in rule.groups(places):
            reach = rule.reach(group)
            start, stop = (trained, step.end) if self.is_bounded else (max(least, trained), reach)
            columns = _columns(step, start, stop)
            if columns is not None:
                is_read = is_beyond & (most >= least) & (most < reach)
                yield self._grouped(q[..., columns], k, group, columns.start, is_read[:, columns])
            least = reach

    def _grouped(self, q: RotaryQueries, k: RotaryKeys, group: int, start: int, is_read: Tensor) -> Reading:
        """Queries and keys at places, by one group."""
        last = self.trained_length - 1
        far_q = (q // group + self.near - self.near // group).clamp(max=last)
        far = RotaryBranch(far_q, (k // group).clamp(max=last))
        if group == 1:
            return Reading(RotaryIndex(far), self.trained_length, self.trained_length, start, is_read)
        near = rebased(q, k, self.near)
        bound = max(self.trained_length, q.shape[-1] + self.near + 1)
        return Reading(RotaryIndex(near, far, self.near), bound, self.trained_length, start, is_read)


def _columns(step: Step, start: int, stop: int) -> slice | None:
    """The columns from the first to the last that may have a token at a position from `start` and below `stop`."""
    found = [at for at, (low, high) in enumerate(step.column_spans) if low < stop and high >= start]
    return slice(found[0], found[-1] + 1) if found else None


def in_blocks(slots: SlotPlaces, queries: Places) -> RotaryIndex:
    """Each picture of which a token is held in its full extent, each token of text in one place, without gaps.

    The slots hold the tokens of the queries.
    """
    held = slots.at >= 0
    starts, order = slots.block_start.where(held, MAX_NUMBER).sort(-1)
    extents = slots.block_end.gather(-1, order) - starts
    is_first = torch.ones_like(starts, dtype=torch.bool)
    is_first[..., 1:] = starts[..., 1:] != starts[..., :-1]
    ends = extents.where(is_first & (starts < MAX_NUMBER), 0).cumsum(-1)  # ends of each block's places
    at = ends - extents + slots.at.gather(-1, order) - starts
    keys = torch.empty_like(at).scatter_(-1, order, at).where(held, 0)
    per_head = (tensor[:, None].expand(-1, held.shape[1], -1) for tensor in (queries.block_start, queries.at))
    its_start, its_at = (tensor.contiguous() for tensor in per_head)
    found = torch.searchsorted(starts.long(), its_start.long()).clamp(max=starts.shape[-1] - 1)
    base = (ends - extents).gather(-1, found)
    return RotaryIndex(RotaryBranch((base + its_at - its_start).where(its_at >= 0, 0), keys))


@dataclass(frozen=True)
class Original(PositionMode):
    """A key at distance d is read at d, as the model itself does."""

    name = "original"

    def rotary_index(self, slots: SlotPositions, queries: QueryPositions) -> RotaryIndex:
        return at_positions(slots, queries)

    def bound(self, end: int, occupancy: int, tokens: int) -> int:
        return end

    def stands_until(self) -> int:
        return MAX_NUMBER

    def rule(self) -> ReadRule:
        return ReadRule()

    def keeps_places(self, end: int, occupancy: int) -> bool:
        return True

    def reading_at(self, slots: SlotPlaces, queries: Places) -> Reading:
        return Reading(at_positions(slots.at, queries.at), queries.end, queries.end)


@dataclass(frozen=True)
class Compact(PositionMode):
    """A key is read at its rank among the kept tokens, so distances never exceed the number of kept tokens.

    Source: position assignment of StreamingLLM, Xiao et al. 2023 (arXiv:2309.17453), section 3.2.
    Differs: each (row, kv head) ranks its own tokens, so any policy may be combined with it. Within a chunk distances
    may reach `budget + chunk`. A picture with a kept token takes its whole extent. So its tokens keep their distances,
    and no text stands within it.
    """

    name = "compact"

    def rotary_index(self, slots: SlotPositions, queries: QueryPositions) -> RotaryIndex:
        return at_ranks(slots, queries)

    def bound(self, end: int, occupancy: int, tokens: int) -> int:
        return occupancy

    def rule(self) -> ReadRule:
        return ReadRule(ranked_from=0)

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
        if queries.shape[1] == 1:
            return _of_one_column(self.rule(), slots, queries, 0)
        q, k = per_head(queries, slots), slots.clamp(min=0)
        far_q = q // self.group + self.window - self.window // self.group
        return RotaryIndex(rebased(q, k, self.window), RotaryBranch(far_q, k // self.group), self.window)

    def bound(self, end: int, occupancy: int, tokens: int) -> int:
        return max(end // self.group + self.window, self.window + tokens) + 1

    def rule(self) -> ReadRule:
        return ReadRule(group=self.group, near=self.window)


@dataclass(frozen=True)
class Clamp(PositionMode):
    """A key at distance d is read at min(d, limit): far text is simply "far".

    Source: ReRoPE, Su 2023 (github.com/bojone/rerope), and InfLLM, Xiao et al. 2024 (arXiv:2402.04617).
    """

    name = "clamp"

    limit: int

    def __post_init__(self) -> None:
        check_range("limit", self.limit)

    def rotary_index(self, slots: SlotPositions, queries: QueryPositions) -> RotaryIndex:
        if queries.shape[1] == 1:
            return _of_one_column(self.rule(), slots, queries, 0)
        q, k = per_head(queries, slots), slots.clamp(min=0)
        far = RotaryBranch(torch.full_like(q, self.limit), torch.zeros_like(k))
        return RotaryIndex(rebased(q, k, self.limit), far, self.limit)

    def bound(self, end: int, occupancy: int, tokens: int) -> int:
        return self.limit + tokens + 1

    def rule(self) -> ReadRule:
        return ReadRule(limit=self.limit)


@dataclass(frozen=True)
class Auto(PositionMode):
    """Reads as the model does within the trained length. Beyond it, distances are kept inside of that length.

    Where the tokens of a row fit into the trained length, a query beyond it reads them at their ranks, as `compact`
    does. Otherwise it reads as `self_extend` does, by the smallest group that keeps all distances inside. `Windowed`
    has the rule. A model without a known trained length, and a layer with a sliding window, are read at the original
    positions.
    """

    name = "auto"

    def within(self, trained_length: int | None, is_bounded: bool) -> PositionMode:
        return Original() if trained_length is None else Windowed(trained_length, is_bounded)

    def rotary_index(self, slots: SlotPositions, queries: QueryPositions) -> RotaryIndex:
        return at_positions(slots, queries)

    def bound(self, end: int, occupancy: int, tokens: int) -> int:
        return end


MODES: Final[dict[str, type[PositionMode]]] = {mode.name: mode for mode in (Auto, Original, Compact, SelfExtend, Clamp)}


def position_mode(spec: str | PositionMode) -> PositionMode:
    """The mode that `spec` names: `"compact"`, `"self_extend(8, 64)"`, or a mode itself.

    Raises: UsageError for an unknown name, wrong numbers, or a value that is neither a mode nor a name.
    """
    if isinstance(spec, PositionMode):
        return spec
    check_kind(
        "positions",
        spec,
        str,
        "a position mode or its name",
        'Write positions="compact" or windlass.positions.Compact()',
    )
    typed = parse_spec(spec)
    if typed is None or typed.name not in MODES:
        forms = ", ".join(map(_form, MODES.values()))
        raise UsageError(f"positions={spec!r} is not a position mode. Use one of: {forms}{near_to(spec, MODES)}")
    mode = MODES[typed.name]
    numbers = parse_ints(f"positions={spec!r}", typed, [field.name for field in fields(mode)])
    check_given(spec, mode.name, [field.name for field in fields(mode) if field.default is MISSING], numbers)
    return mode(**numbers)


def _form(mode: type[PositionMode]) -> str:
    names = ", ".join(field.name for field in fields(mode))
    return f"{mode.name}({names})" if names else mode.name
