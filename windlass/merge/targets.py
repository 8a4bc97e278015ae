"""Which kept slot takes an evicted token, by name."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import normalize

from windlass import kernels
from windlass.core.shapes import SlotIndex, SlotKeys, SlotPositions

COSINE_STEPS: Final = 2.0**16  # cosines are compared in steps, so that rounding does not choose between equal keys
BLOCK: Final = 256  # evicted tokens whose cosines with all targets are in memory at once
NO_POSITION: Final = 2**31 - 1  # above any position


@dataclass(frozen=True)
class Candidates:
    """Evicted tokens, and the kept slots that may take them.

    `keys` are those of all slots, before RoPE. `positions` are those before the eviction.
    """

    keys: SlotKeys
    positions: SlotPositions
    is_target: Tensor  # (batch, score_heads, slots): whether a slot may take tokens
    evicted: SlotIndex


def next_target(candidates: Candidates) -> SlotIndex:
    """For each evicted token the first target at or after its position, else the last one."""
    positions, order = candidates.positions.where(candidates.is_target, NO_POSITION).sort(dim=-1, stable=True)
    rank = torch.searchsorted(positions, candidates.positions.gather(-1, candidates.evicted))
    last = candidates.is_target.sum(-1, keepdim=True) - 1
    return order.gather(-1, torch.minimum(rank, last).clamp(min=0))


def nearest_target(candidates: Candidates) -> SlotIndex:
    """For each evicted token the target whose key has the largest cosine with its own; of equal ones the newest.

    Where the policy ranks all heads of a row alike, the mean cosine over the heads decides.
    """
    count = max(1, candidates.is_target.shape[-1] - candidates.evicted.shape[-1])  # no more slots are held
    # Flipped, because of tokens that share a position the newest lies in the highest slot.
    flipped = candidates.positions.where(candidates.is_target, -1).flip(-1)
    positions, order = flipped.sort(dim=-1, descending=True, stable=True)
    order = flipped.shape[-1] - 1 - order
    # Slots that are no targets are sorted last. The newest target replaces them: of equal ones the first is found.
    targets = order.where(positions >= 0, order[..., :1])[..., :count]
    own_keys = _unit_keys(candidates.keys, candidates.evicted)
    target_keys = _unit_keys(candidates.keys, targets).mT * (COSINE_STEPS / _heads_in_one(candidates.keys, targets))
    newness = torch.arange(count, 0, -1, dtype=own_keys.dtype, device=own_keys.device)
    best = []
    for keys in own_keys.split(BLOCK, dim=2):
        cosines = (keys @ target_keys).round_()
        below = cosines.sub_(cosines.amax(-1, keepdim=True))  # 0, or -1 and less: only equal ones stay above 0
        best.append(torch.add(newness, below, alpha=count, out=below).amax(-1))  # in half the time of argmax
    return targets.gather(-1, count - torch.cat(best, -1).long())


Target = Callable[[Candidates], SlotIndex]
TARGETS: dict[str, Target] = {"nearest": nearest_target, "next": next_target}
"""A target slot for each evicted token. Where a row and head has no target at all, any slot."""


def cosine_with_target(keys: SlotKeys, evicted: SlotIndex, targets: SlotIndex) -> Tensor:
    """The cosine of each evicted token's key with that of its target, (batch, score_heads, evicted).

    Where the policy ranks all heads of a row alike, the mean over the heads.
    """
    products = _unit_keys(keys, targets) * _unit_keys(keys, evicted)
    return products.sum(-1) / _heads_in_one(keys, targets)


def _heads_in_one(keys: SlotKeys, index: SlotIndex) -> int:
    """How many heads each row of `_unit_keys` holds."""
    return keys.shape[1] // index.shape[1]


def _unit_keys(keys: SlotKeys, index: SlotIndex) -> Tensor:
    """The keys at `index` as float32 unit vectors, (batch, score_heads, n, channels).

    Where `index` has one row for all heads, their vectors stand side by side.
    """
    units = normalize(kernels.read(keys, index).float(), dim=-1)
    return units if index.shape[1] == keys.shape[1] else units.transpose(1, 2).flatten(2)[:, None]
