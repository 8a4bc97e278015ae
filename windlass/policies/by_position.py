"""Slots sorted by position, the order of the text, and back."""

import torch
from torch import Tensor

from windlass.core.shapes import Scores, SlotIndex


def gather_sorted(states: Tensor, order: SlotIndex) -> Tensor:
    """`states` (batch, kv_heads, slots, channels) in the order of the text, which `kernels.argsort_positions` gives."""
    heads = torch.arange(states.shape[0] * states.shape[1], device=order.device).view(*states.shape[:2], 1)
    rows = (heads * states.shape[2] + order).flatten()
    # Whole rows are copied several times as fast as their numbers one by one, which is what gather does.
    return states.flatten(0, 2).index_select(0, rows).view(*order.shape, -1)


def scatter_sorted(scores: Scores, order: SlotIndex) -> Scores:
    """Scores in the order of the text, put back into the order of the slots."""
    return torch.empty_like(scores).scatter_(-1, order, scores)


def lexsort_ranks(*keys: Tensor) -> Scores:
    """The rank of each entry by the first of `keys`; equal ones by the second, and so on, and last by their index."""
    order = torch.arange(keys[0].shape[-1], device=keys[0].device).expand_as(keys[0])
    for key in reversed(keys):
        order = order.gather(-1, key.gather(-1, order).argsort(dim=-1, stable=True))
    return order.argsort(dim=-1).float()
