"""Which cell takes an evicted token, by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import normalize

from windlass import kernels
from windlass.core.packed import Held
from windlass.core.rotary_index import EMPTY
from windlass.core.shapes import SlotIndex, SlotKeys, SlotPositions

FINENESS: Final = 2.0**16  # steps of a cosine, so that rounding does not choose between equal keys
BLOCK: Final = 256  # tokens whose cosines with all cells are alive at once
BEYOND: Final = 2**31 - 1


@dataclass(frozen=True)
class Seekers:
    """Evicted tokens that look for a cell, as slots.

    `keys` are those of all slots, un-rotated. `positions` are of before the eviction.
    """

    keys: SlotKeys
    positions: SlotPositions
    is_cell: Tensor  # (batch, ranked, slots)
    evicted: SlotIndex


def next_cell(seekers: Seekers) -> SlotIndex:
    """For each evicted slot the first cell at or after its place in the text, else the last one."""
    places, order = seekers.positions.where(seekers.is_cell, BEYOND).sort(dim=-1)
    found = torch.searchsorted(places, seekers.positions.gather(-1, seekers.evicted))
    last = seekers.is_cell.sum(-1, keepdim=True) - 1
    return order.gather(-1, torch.minimum(found, last).clamp(min=0))


def nearest_cell(seekers: Seekers) -> SlotIndex:
    """For each evicted slot the cell whose key has the largest cosine with its own; of equal ones the newer.

    Where all heads of a row hold the same tokens, their mean cosine decides.
    """
    most = max(1, seekers.is_cell.shape[-1] - seekers.evicted.shape[-1])  # no more are held
    places, order = seekers.positions.where(seekers.is_cell, -1).sort(dim=-1, descending=True, stable=True)
    # What is no cell stands last, and is replaced by the newest cell: of equal ones the first is found.
    cells = order.where(places >= 0, order[..., :1])[..., :most]
    theirs, own = (_units(seekers.keys, index) for index in (cells, seekers.evicted))
    theirs = theirs.mT * (FINENESS / (seekers.keys.shape[1] if cells.shape[1] == 1 else 1))
    newness = torch.arange(most, 0, -1, dtype=own.dtype, device=own.device)
    newest = []
    for some in own.split(BLOCK, dim=2):
        cosines = (some @ theirs).round_()
        below = cosines.sub_(cosines.amax(-1, keepdim=True))  # 0 or a step at least: only equal ones stay above 0
        newest.append(torch.add(newness, below, alpha=most, out=below).amax(-1))  # in half the time of argmax
    return cells.gather(-1, most - torch.cat(newest, -1).long())


Target = Callable[[Seekers], SlotIndex]
TARGETS: dict[str, Target] = {"nearest": nearest_cell, "next": next_cell}
"""A slot for each evicted one. Where a row and head has no cell at all, any slot."""


def without_rare(seekers: Seekers, share: float) -> Tensor:
    """The cells without the `share` of them whose keys are least like the mean key; of equal ones the newer stay out.

    Source: the measure of KeyDiff, Park et al. 2025 (arXiv:2504.15364).
    """
    keys = Held(seekers.keys.contiguous(), 8 * seekers.keys.itemsize)
    cosines = kernels.typicality(keys, seekers.positions.scatter(-1, seekers.evicted, EMPTY))
    if seekers.positions.shape[1] == 1:
        cosines = cosines.mean(1, keepdim=True)
    steps = (cosines * FINENESS).round().long()
    order = ((steps << 32) - seekers.positions).masked_fill(~seekers.is_cell, torch.iinfo(torch.int64).max)
    ranks = order.argsort(dim=-1, stable=True).argsort(dim=-1)
    is_left: Tensor = ranks >= (seekers.is_cell.sum(-1, keepdim=True) * share).long()
    return seekers.is_cell & is_left


def likeness_of(keys: SlotKeys, evicted: SlotIndex, cells: SlotIndex) -> Tensor:
    """The cosine of each evicted slot's key with that of its cell, (batch, ranked, evicted).

    Where all heads of a row hold the same tokens, their mean.
    """
    theirs, own = (_units(keys, index) for index in (cells, evicted))
    return (theirs * own).sum(-1) / (keys.shape[1] if cells.shape[1] == 1 else 1)


def _units(keys: SlotKeys, index: SlotIndex) -> Tensor:
    """The keys at `index` as float32 unit vectors: (batch, ranked, n, channels), the heads of a ranked row in one."""
    units = normalize(kernels.read(keys, index).float(), dim=-1)
    return units if index.shape[1] == keys.shape[1] else units.transpose(1, 2).flatten(2)[:, None]
