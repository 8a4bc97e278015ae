"""The mode `auto` in a layer of a model whose trained length is known."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.core.errors import UsageError
from windlass.core.places import Places, SlotPlaces
from windlass.core.rotary_index import RotaryBranch, RotaryIndex
from windlass.core.shapes import QueryPositions, RotaryKeys, RotaryQueries, SlotPositions
from windlass.core.step import Step
from windlass.positions.base import PositionMode, Reading, as_they_stand, at_ranks, per_rank, rebased

NEAR_SHARE = 8  # of the trained length one in so many is read as near as it stands, see docs/findings.md


@dataclass(frozen=True)
class Windowed(PositionMode):
    """Up to `trained_length` as `original`; beyond it at places, in steps of several where these exceed it, too.

    A query at a position below `trained_length` reads as `original`. Beyond, tokens have places: their ranks in a
    layer that `is_bounded` by a budget, else their positions. Where the query's own place is below `trained_length`,
    keys are read at places, which is `compact`. Else they are read as by `self_extend` over places, with the smallest
    `group` of 1, 2, 4, ... that keeps distances below `trained_length`, and an eighth of it as the near `window`.

    All of it follows from the query and what its row holds: not from the other rows, nor from the columns of a step.
    Where heads hold different numbers of tokens, after an edit, the fullest one decides the group.
    """

    name = "auto"

    trained_length: int
    is_bounded: bool

    def rotary_index(self, slots: SlotPositions, queries: QueryPositions) -> RotaryIndex:
        """For queries of one column, in rows of any length."""
        return self._of_one_column(slots, queries, int(slots.max()) + 1)

    def bound(self, end: int, occupancy: int, tokens: int) -> int:
        if end <= self.trained_length:
            return end
        return self.trained_length if tokens == 1 else max(self.trained_length, tokens + self.near + 1)

    def stands_until(self) -> int:
        return self.trained_length

    def keeps_places(self, end: int, occupancy: int) -> bool:
        return self.label(end, occupancy) in ("original", "compact")

    @property
    def near(self) -> int:
        """Distances below it are never grouped."""
        return self.trained_length // NEAR_SHARE

    def readings(self, slots: SlotPositions, step: Step, occupancy: int) -> Sequence[Reading]:
        if step.end <= self.trained_length:
            return [Reading(as_they_stand(slots, step.positions), step.end, step.end)]
        places = occupancy if self.is_bounded else step.end
        if step.positions.shape[1] == 1:
            trained = self.trained_length
            return [Reading(self._of_one_column(slots, step.positions, places), trained, trained)]
        return list(self._of_columns(slots, step, places))

    def reading_at(self, slots: SlotPlaces, queries: Places) -> Reading:
        if queries.end > self.trained_length:
            raise UsageError(
                f'positions="auto" can\'t read a text with pictures beyond the trained length of {self.trained_length}'
                f', and it reaches {queries.end}; set cache.positions to "compact" or "original"'
            )
        return Reading(as_they_stand(slots.at, queries.at), queries.end, queries.end)

    def reach(self, group: int) -> int:
        """Places of a text that `group` brings below the trained length."""
        return group * (self.trained_length - self.near + self.near // group)

    def groups(self, places: int) -> list[int]:
        """All groups that a query may need where no place is `places` or more."""
        groups = [1]
        while self.reach(groups[-1]) < places:
            groups.append(2 * groups[-1])
        return groups

    def label(self, end: int, occupancy: int) -> str:
        """The explicit mode by which the newest token of a text up to `end` reads `occupancy` tokens."""
        if end <= self.trained_length:
            return "original"
        group = self.groups(occupancy if self.is_bounded else end)[-1]
        return "compact" if group == 1 else f"self_extend({group}, {self.near})"

    def _of_one_column(self, slots: SlotPositions, queries: QueryPositions, places: int) -> RotaryIndex:
        """One branch for all rows, wherever each stands; asks nothing of the device."""
        at, keys_at = per_rank(queries, slots), slots.clamp(min=0)
        q, k = at, keys_at
        if self.is_bounded:
            ranks = at_ranks(slots, queries).near
            is_inside = (queries < self.trained_length)[:, None]
            q, k = at.where(is_inside, ranks.queries), keys_at.where(is_inside, ranks.keys)
        most = q.amax(1, keepdim=True)
        group = torch.ones_like(most)
        for each in self.groups(places)[:-1]:
            group = torch.where(most >= self.reach(each), 2 * each, group)
        far_q = q // group + self.near - self.near // group
        keys = torch.where(at - keys_at < self.near, far_q - (q - k), k // group)
        last = self.trained_length - 1
        return RotaryIndex(RotaryBranch(far_q.clamp(max=last), keys.clamp(0, last)))

    def _of_columns(self, slots: SlotPositions, step: Step, places: int) -> Iterator[Reading]:
        """A reading for all queries of one group, of the columns that have any."""
        queries, trained = step.positions, self.trained_length
        q, k = per_rank(queries, slots), slots.clamp(min=0)
        is_beyond = queries >= trained
        inside = _columns(step, 0, trained)
        if inside is not None:
            index = RotaryIndex(RotaryBranch(q[..., inside].clamp(max=trained - 1), k.clamp(max=trained - 1)))
            yield Reading(index, trained, trained, inside.start, ((queries >= 0) & ~is_beyond)[:, inside])
        if self.is_bounded:
            ranks = at_ranks(slots, queries).near
            q, k = ranks.queries, ranks.keys
        most, least = q.amax(1), 0
        for group in self.groups(places):
            reach = self.reach(group)
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
