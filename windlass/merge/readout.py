"""How cells are read, and what must be kept of their tokens' places for that.

"plain": a cell is read like any token. "damped": at the mean position of its tokens, every frequency as
much weaker as their spread blurs it. "anchors": three times, at the first, middle and last position of
its tokens, each time with a third of its weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from windlass.core.packed import Held
from windlass.core.rotary_index import EMPTY
from windlass.core.shapes import Scores, SlotPositions
from windlass.kernels.reference import Mass
from windlass.positions.rotary import Turns, rotate, unrotate
from windlass.stores.base import Store

if TYPE_CHECKING:
    from windlass.merge.base import Groups, Merge

READS: Final = ("plain", "damped", "anchors")
MERGED: Final = "merged"  # state: how many tokens a slot stands for beside its own
OFFSET, SPREAD = "merged_offset", "merged_spread"  # state: mean and variance of their places, from the cell's own
BEFORE, AFTER = "merged_before", "merged_after"  # state: how far the first and last stand from the cell's own place
STATES: Final = {"plain": (), "damped": (OFFSET, SPREAD), "anchors": (BEFORE, AFTER)}
ANCHORS: Final = 3
SOFTEST: Final = 1e-3  # of the damping, which must be undone before a token joins


@dataclass(frozen=True)
class AsRead:
    """What attention is given for a layer's slots; `copies` of each, one after the other."""

    keys: Held
    values: Held
    positions: SlotPositions
    log_counts: Scores | None
    copies: int = 1

    def folded(self, mass: Mass | None) -> Mass | None:
        """The mass of each slot, over its copies."""
        if mass is None or self.copies == 1:
            return mass
        rows, rest = (
            None if part is None else part.unflatten(-1, (self.copies, -1)).sum(-2) for part in (mass.rows, mass.rest)
        )
        assert rows is not None, "mass without rows"
        return Mass(rows, rest)


def as_read(merge: Merge | None, store: Store, positions: SlotPositions, state: dict[str, Tensor]) -> AsRead:
    """What a step attends to; copies nothing but for cells that are read at anchors, which cost three reads."""
    keys, values = store.held_keys(), store.held_values()
    if merge is None:
        return AsRead(keys, values, positions, None)
    log_counts = state[MERGED].log1p() if merge.is_counted else None
    if merge.read != "anchors":
        return AsRead(keys, values, positions, log_counts)
    is_cell = (state[MERGED] > 0) & (positions >= 0)
    first, last = (positions - state[BEFORE].int()).clamp(min=0), positions + state[AFTER].int()
    middle = torch.where(is_cell, (first + last) // 2, positions)
    places = torch.cat((middle, *(at.where(is_cell, EMPTY) for at in (first, last))), -1)
    weights = torch.zeros_like(state[MERGED]) if log_counts is None else log_counts
    weights = weights.masked_fill(~is_cell, 0.0) - is_cell.float() * math.log(ANCHORS)
    return AsRead(_copied(keys), _copied(values), places, weights.repeat(1, 1, ANCHORS), ANCHORS)


def holds_cells(positions: Tensor, state: dict[str, Tensor]) -> bool:
    """Whether any slot of a layer, perhaps an empty one, stands for several tokens."""
    return MERGED in state and bool(((state[MERGED] > 0) & (positions >= 0)).any())


def _copied(held: Held) -> Held:
    assert held.exact is None, "a copy held exactly"
    scales = None if held.scales is None else held.scales.repeat(1, 1, ANCHORS, 1)
    return Held(held.codes.repeat(1, 1, ANCHORS, 1), held.bits, scales, held.centres)


def damped(keys: Tensor, offsets: Tensor, spreads: Tensor, turns: Turns) -> Tensor:
    """Float32 `keys` (batch, kv_heads, n, head_dim), to be read at their cells' positions, moved by `offsets` and
    every frequency w softened by exp(-w^2 spread / 2), but not below `SOFTEST`.

    Source: the mean of turns by normally distributed angles. Differs: the floor, so that `undamped` can undo it.
    """
    cos, sin = _soft_turn(offsets, spreads, turns)
    return rotate(keys, cos, sin)


def undamped(keys: Tensor, offsets: Tensor, spreads: Tensor, turns: Turns) -> Tensor:
    """The inverse of `damped`."""
    cos, sin = _soft_turn(offsets, spreads, turns)
    return unrotate(keys, cos, sin)


def _soft_turn(offsets: Tensor, spreads: Tensor, turns: Turns) -> tuple[Tensor, Tensor]:
    one = turns.one()
    if one is None:
        nothing = offsets.new_zeros(*offsets.shape, 0)
        return nothing, nothing
    speeds = torch.atan2(one[1], one[0])
    angles, soft = offsets[..., None] * speeds, (-0.5 * spreads[..., None] * speeds.square()).exp().clamp(min=SOFTEST)
    return angles.cos() * soft, angles.sin() * soft


def take_places(
    state: dict[str, Tensor], counts: Tensor, positions: SlotPositions, evicted: Tensor, groups: Groups
) -> None:
    """Let the cells of `groups` know of the places of tokens that join: changes what `state` has of `STATES`.

    `counts`, or weights, are those before; `positions` those of before the eviction, both (batch, ranked, slots).
    """
    cells = groups.cells

    def there(whole: Tensor) -> tuple[Tensor, Tensor]:
        return whole.gather(-1, cells), whole.gather(-1, evicted)

    places = positions.gather(-1, evicted) - positions.gather(-1, cells)  # of the tokens, from their cells
    if OFFSET in state:
        n, m = there(counts)
        own, coming = there(state[OFFSET])
        coming = coming + places
        total = n + groups.summed(m)
        mean = (n * own + groups.summed(m * coming)) / total
        own_spread, spread = there(state[SPREAD])
        squares = m * (spread + (coming - mean).square())
        variance = (n * (own_spread + (own - mean).square()) + groups.summed(squares)) / total
        state[OFFSET].scatter_(-1, cells, mean)
        state[SPREAD].scatter_(-1, cells, variance)
    if BEFORE in state:
        for name, sign in ((BEFORE, -1), (AFTER, 1)):
            own, coming = there(state[name])
            state[name].scatter_(-1, cells, torch.maximum(own, groups.largest(coming + sign * places)))
