"""What a position mode is: from stored positions to rotary positions.

A slot stores the index of its token in the text and nothing else. A position mode decides at which
rotary position the token's key is *read*: a pure function of stored and query positions, called at
every step. So a mode may be exchanged between two steps, and no edit of positions touches a key.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import ClassVar

import torch
from torch import Tensor

from windlass import kernels
from windlass.core.errors import UsageError
from windlass.core.places import Places, SlotPlaces
from windlass.core.rotary_index import RotaryBranch, RotaryIndex
from windlass.core.shapes import QueryPositions, RotaryKeys, RotaryQueries, SlotPositions
from windlass.core.step import Step


@dataclass(frozen=True)
class Reading:
    """At which rotary positions some columns of a step read, from column `start` on.

    `is_read` (batch, columns) tells which of their queries do; None: all of the step's. `bound` is how many rows of a
    rotary table this takes, and `length` the length of text that the table is for, which no number of columns changes.
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

    def within(self, trained_length: int | None, is_bounded: bool) -> "PositionMode":
        """The mode in a layer of a model trained on texts of `trained_length` tokens; None where nobody knows.

        `is_bounded` tells whether the layer has a budget. Only a mode that asks for them is another one then.
        """
        return self

    def stands_until(self) -> int:
        """The longest text of which each token is read at its own position; 0 where no such length is known."""
        return 0

    def keeps_places(self, end: int, occupancy: int) -> bool:
        """Whether keys and queries are read where they stand, or at their ranks, and not just at some distance.

        In a text up to `end`, of which a row holds `occupancy` tokens at most. Only with norms after RoPE it matters.
        """
        return False

    def readings(self, slots: SlotPositions, step: Step, occupancy: int) -> Sequence[Reading]:
        """How the queries of `step` read the slots, which hold its tokens already; each query is in one reading.

        `occupancy` is the most tokens that a row holds, or holds while a graph replays the step.
        """
        bound = self.bound(step.end, occupancy, step.positions.shape[1])
        return [Reading(self.rotary_index(slots, step.positions), bound, self.bound(step.end, occupancy, 1))]

    def reading_at(self, slots: SlotPlaces, queries: Places) -> Reading:
        """How the queries of a step read the slots, of a text with pictures.

        Raises: UsageError for a mode that can't.
        """
        raise UsageError(
            f'positions="{self}" can\'t read a text with pictures; set cache.positions to "original" or "compact"'
        )

    def __str__(self) -> str:
        """The text that `position_mode` reads back."""
        numbers = ", ".join(map(str, astuple(self)))
        return f"{self.name}({numbers})" if numbers else self.name


def per_rank(queries: QueryPositions, slots: SlotPositions) -> RotaryQueries:
    return queries.clamp(min=0)[:, None, :].expand(-1, slots.shape[1], -1)


def as_they_stand(slots: SlotPositions, queries: QueryPositions) -> RotaryIndex:
    """Each token at its own position."""
    return RotaryIndex(RotaryBranch(per_rank(queries, slots), slots.clamp(min=0)))


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


def rebased(q: RotaryQueries, k: RotaryKeys, window: int) -> RotaryBranch:
    """Positions counted from the oldest key that any query reaches within `window`."""
    # Padding queries stand at 0 and would pull the base down, but never below a real one minus the chunk.
    base = (q.amax(-1, keepdim=True) - q.shape[-1] - window).clamp(min=0)
    # A row of padding only stands at 0 as a whole: its keys are beyond reach, and must stay within the bound.
    return RotaryBranch((q - base).clamp(min=0), (k - base).clamp(0, q.shape[-1] + window))
