"""Rotary positions and rotation: pictures, branches of a position mode, RoPE itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from windlass.core.errors import UsageError
from windlass.core.parse import MAX_NUMBER
from windlass.core.types import (
    PinnedRanges,
    QueryPositions,
    RotaryKeys,
    RotaryQueries,
    Scores,
    SlotIndex,
    SlotPositions,
)

EMPTY = -1  # position of a slot that holds no token, and of a padding token
RESERVED = -2  # position of a slot whose token was evicted but can still be rolled back
HIGHEST: Final = torch.finfo(torch.float32).max / 2  # score of a token that is not pinned


@dataclass(frozen=True)
class RotaryBranch:
    """Rotary positions of one set of logits. All are at least 0 and below `PositionMode.bound`."""

    queries: RotaryQueries
    keys: RotaryKeys


@dataclass(frozen=True)
class RotaryIndex:
    """The rotary position of each query and of each slot's key.

    Keys at distance `near_window` and beyond take their logit from `far`, which is None when one branch serves every
    distance.
    """

    near: RotaryBranch
    far: RotaryBranch | None = None
    near_window: int = 0


@dataclass(frozen=True)
class ReadRule:
    """The rotary positions at which the newest token of each row reads its slots.

    Queries at `ranked_from` and beyond read tokens at their ranks in their row and head, others at their positions.
    Keys at a distance below `near` keep it, others are read in steps of `group`. The query stands at `limit`, if there
    is one. Where a model was trained on texts of `trained` tokens, `group` is the least power of two that keeps a row's
    distances below that, and all positions are below it.
    """

    ranked_from: int = MAX_NUMBER
    group: int = 1
    near: int = MAX_NUMBER
    limit: int | None = None
    trained: int | None = None

    def branch(
        self, slots: SlotPositions, queries: QueryPositions, order: SlotIndex | None, places: int
    ) -> RotaryBranch:
        """Rotary positions of each row's query and slots, whose places are all below `places`.

        `order` has each row's slots by their positions, where tokens may be read at ranks. Never waits for the device.
        """
        at, keys_at = queries.clamp(min=0)[:, None].expand(-1, slots.shape[1], -1), slots.clamp(min=0)
        q, k = at, keys_at
        if order is not None and self.is_ranked:
            held, count = slots >= 0, torch.arange(slots.shape[-1], device=slots.device).expand_as(order)
            ranks = torch.empty_like(order).scatter_(-1, order, count).where(held, 0)
            is_ranked = (queries >= self.ranked_from)[:, None]
            q, k = torch.where(is_ranked, held.sum(-1, keepdim=True) - 1, at), torch.where(is_ranked, ranks, keys_at)
        most, group = q.amax(1, keepdim=True), torch.full_like(q, self.group)
        for each in self.groups(places)[:-1]:
            group = torch.where(most >= self.reach(each), 2 * each, group)
        far = q // group + self.near - self.near // group if self.limit is None else torch.full_like(q, self.limit)
        keys = torch.where(at - keys_at < self.near, far - (q - k).clamp(min=0), k // group)
        last = MAX_NUMBER if self.trained is None else self.trained - 1
        return RotaryBranch(far.clamp(max=last), keys.clamp(0, last))

    @property
    def is_ranked(self) -> bool:
        """Return True if tokens may be read at their ranks."""
        return self.ranked_from < MAX_NUMBER

    def reach(self, group: int) -> int:
        """Places of a text that `group` brings below the trained length."""
        trained = MAX_NUMBER if self.trained is None else self.trained
        return group * (trained - self.near + self.near // group)

    def groups(self, places: int) -> list[int]:
        """All groups that a query may need where no place is `places` or more."""
        groups = [self.group]
        while self.trained is not None and self.reach(groups[-1]) < places:
            groups.append(2 * groups[-1])
        return groups


PLACE: Final = "rotary_place"  # state: the place of the slot's token
BLOCK_START: Final = "rotary_block_start"  # state: the first place of the picture that the token belongs to
BLOCK_END: Final = "rotary_block_end"  # state: one past the last position of that picture, on any axis
PLACES: Final = (PLACE, BLOCK_START, BLOCK_END)
MAX_PLACE: Final = 2**24  # state is float32, which is exact for whole numbers up to this


class Picture(NamedTuple):
    """The positions from `start` up to `stop` of a text, which one picture takes.

    The place of a token of text is its position plus the `offset` of the last picture before it.
    """

    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class SlotPlaces:
    """Where the tokens of a layer's slots are read, EMPTY in free slots. All else as in `Places`."""

    at: SlotPositions
    block_start: SlotPositions
    block_end: SlotPositions


@dataclass(frozen=True)
class Places:
    """Where the tokens of a step are read.

    `at` is the place of each, EMPTY where padding. The picture that a token belongs to reaches from `block_start` up to
    `block_end`, on all axes. A token of text is one by itself. `end` is one past the last place of any row. `pictures`
    are those that begin in the step, per row.
    """

    at: QueryPositions
    block_start: QueryPositions
    block_end: QueryPositions
    end: int
    pictures: tuple[tuple[Picture, ...], ...] = ()

    @classmethod
    def of_text(cls, positions: QueryPositions, offsets: Tensor | int, end: int) -> Places:
        """Places of a step without pictures: `offsets` (batch, 1) beside the positions."""
        at = (positions + offsets).where(positions >= 0, EMPTY)
        return cls(at, at, at + 1, end)

    @property
    def has_pictures(self) -> bool:
        """Return True if a picture begins in the step."""
        return any(self.pictures)

    def columns(self, start: int, stop: int) -> Places:
        """The places of some columns."""
        at, first, last = (each[:, start:stop].contiguous() for each in (self.at, self.block_start, self.block_end))
        return Places(at, first, last, self.end)

    @property
    def state(self) -> dict[str, Tensor]:
        """The places of each token, as its slot stores them."""
        each = (self.at, self.block_start, self.block_end)
        return {name: tensor[:, None].clamp(min=0) for name, tensor in zip(PLACES, each, strict=True)}


def places_of_axes(positions: QueryPositions, axes: Tensor, next_places: list[int]) -> Places:
    """Places of the tokens at `positions`, for which a model gives positions on all `axes` (axes, batch, tokens).

    A token begins a block if all of its axes lie beyond all that came before. `next_places` is where each row goes on.

    Raises: UsageError where a block does not begin one past the one before, and where the last token of a row does not
    reach as far as those before it: models do not agree on where the text goes on then.
    """
    is_token, low, high = positions >= 0, axes.amin(0), axes.amax(0)
    first = torch.tensor(next_places, device=positions.device)[:, None]
    reached = torch.cat((first - 1, high.where(is_token, EMPTY)), 1).cummax(1).values
    before, total = reached[:, :-1], reached[:, -1:]
    is_start = is_token & (low > before)
    _check_follows(axes, is_token, is_start, low, before)
    last = positions.argmax(1, keepdim=True)
    is_short = is_token.gather(1, last) & (high.gather(1, last) < total)
    if bool(is_short.any()):
        row = int(is_short.nonzero()[0, 0])
        raise UsageError(
            f"position_ids of row {row} end at {int(high[row, last[row]])}, inside of a video that reaches "
            f"{int(total[row])}: models do not agree on the next position. Put more text after the video"
        )
    block_start = low.where(is_start, EMPTY).cummax(1).values
    block_end = _next(low, is_start, total + 1)
    stop = _next(positions, is_start, positions.amax(1, keepdim=True) + 1)
    is_picture = is_start & ((block_end - block_start > 1) | (stop - positions > 1))
    found: list[list[Picture]] = [[] for _ in next_places]
    for row, column in is_picture.nonzero().tolist():
        start, end, after = (int(each[row, column]) for each in (positions, stop, block_end))
        found[row].append(Picture(start, end, after - end))
    at = axes[0].where(is_token, EMPTY)
    return Places(at, block_start, block_end, int(total.max()) + 1, tuple(map(tuple, found)))


def _next(values: Tensor, is_start: Tensor, last: Tensor) -> Tensor:
    """Per column, the value at the next start after it, or `last` where no start follows."""
    later = torch.cat((values.where(is_start, MAX_NUMBER)[:, 1:], last), 1)
    return later.flip(1).cummin(1).values.flip(1)


def _check_follows(axes: Tensor, is_token: Tensor, is_start: Tensor, low: Tensor, before: Tensor) -> None:
    is_wrong = (is_start & (low != before + 1)) | (is_token & (is_start.cumsum(1) == 0))
    if bool(is_wrong.any()):
        row, column = is_wrong.nonzero()[0].tolist()
        raise UsageError(
            f"position_ids[:, {row}, {column}] are {axes[:, row, column].tolist()}, but the text of row {row} "
            f"continues at {int(before[row, column]) + 1}. A picture is read in one pass, and tokens are consecutive: "
            "leave position_ids out, or use rollback, drop or shift to move the text"
        )


def pinned(positions: SlotPositions, pins: PinnedRanges) -> Tensor:
    """A mask of the positions (batch, score_heads, slots) that lie in one of their row's ranges."""
    found = torch.zeros_like(positions, dtype=torch.bool)
    for bounds in pins.unbind(1):
        start, stop = (each[:, None, None] for each in bounds.unbind(1))
        found |= (positions >= start) & (positions < stop)
    return found


def rank_pinned(score: Scores, positions: SlotPositions, pins: PinnedRanges | None) -> Scores:
    """`score` with pinned positions above all others."""
    return score if pins is None else score.float().clamp(max=HIGHEST).masked_fill(pinned(positions, pins), torch.inf)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair (i, i + n) of the first 2n channels rotated by its angle. The other channels stay as they are.

    `cos` and `sin` have n columns, one per pair. The other axes broadcast.
    """
    pairs = cos.shape[-1]
    first, second = states[..., :pairs], states[..., pairs : 2 * pairs]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*rotated, states[..., 2 * pairs :]) if states.shape[-1] > 2 * pairs else rotated, -1)


def unrotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The inverse of `rotate`, the scaling within `cos` and `sin` included."""
    scale = cos.square() + sin.square()
    return rotate(states, cos / scale, -sin / scale)
