"""Kept tokens of a text with pictures, read as close together as pictures allow."""

import torch

from windlass.core.limits import MAX_NUMBER
from windlass.core.places import Places, SlotPlaces
from windlass.core.rotary_index import RotaryBranch, RotaryIndex


def in_blocks(slots: SlotPlaces, queries: Places) -> RotaryIndex:
    """Each picture of which a token is held in its full extent, each token of text in one place, without gaps.

    The slots hold the tokens of the queries.
    """
    held = slots.at >= 0
    starts, order = slots.block_start.where(held, MAX_NUMBER).sort(-1)
    extents = slots.block_end.gather(-1, order) - starts
    is_first = torch.ones_like(starts, dtype=torch.bool)
    is_first[..., 1:] = starts[..., 1:] != starts[..., :-1]
    ends = extents.where(is_first & (starts < MAX_NUMBER), 0).cumsum(-1)  # of each block, where it is read
    at = ends - extents + slots.at.gather(-1, order) - starts
    keys = torch.empty_like(at).scatter_(-1, order, at).where(held, 0)
    per_head = (tensor[:, None].expand(-1, held.shape[1], -1) for tensor in (queries.block_start, queries.at))
    its_start, its_at = (tensor.contiguous() for tensor in per_head)
    found = torch.searchsorted(starts.long(), its_start.long()).clamp(max=starts.shape[-1] - 1)
    base = (ends - extents).gather(-1, found)
    return RotaryIndex(RotaryBranch((base + its_at - its_start).where(its_at >= 0, 0), keys))
