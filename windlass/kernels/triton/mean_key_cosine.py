"""The cosine of each key with the mean direction of its row and head, on a GPU, in two passes over the keys.

The first pass sums the directions of each split of the slots and stores each key's scale, which makes it one long.
The second adds up the splits, always in the same order, and multiplies.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from windlass.core.packed import PackedStates
from windlass.core.shapes import PerSlot, SlotPositions
from windlass.kernels import reference
from windlass.kernels.triton import plan
from windlass.kernels.triton.arguments import as_plane, packed_tensors
from windlass.kernels.triton.tiles import at_head, load_states

MIN_NORM = tl.constexpr(reference.MIN_NORM)


def mean_key_cosine(keys: PackedStates, positions: SlotPositions) -> PerSlot:
    """See `reference.mean_key_cosine`; asks the device nothing, so that a CUDA graph can hold it."""
    batch, kv_heads, slots = keys.data.shape[:3]
    at = plan.stream_plan(keys.channels)
    splits, each = plan.splits(batch * kv_heads, slots, at, positions.device)
    out = torch.empty(batch, kv_heads, slots, dtype=torch.float32, device=positions.device)
    partials = torch.empty(batch, kv_heads, splits, keys.channels, dtype=torch.float32, device=positions.device)
    tensors, grid = packed_tensors(keys), (batch * kv_heads * splits,)
    sizes = {"WIDTH": keys.channels, "CHANNELS": triton.next_power_of_2(keys.channels), "BITS": keys.bits}
    with torch.cuda.device_of(positions):
        sums_kernel[grid](
            tensors, as_plane(positions), partials, out, kv_heads, slots, splits, each, **sizes, BLOCK=at.block,
            num_warps=at.warps, num_stages=at.stages,
        )  # fmt: skip
        cosines_kernel[grid](
            tensors, partials, out, kv_heads, slots, splits, each, **sizes, BLOCK=at.block,
            SOME=min(16, triton.next_power_of_2(splits)), num_warps=at.warps, num_stages=at.stages,
        )  # fmt: skip
    return out


@triton.jit
@no_type_check
def sums_kernel(
    keys,
    positions,
    partials,  # (batch, kv_heads, splits, channels)
    scales,  # (batch, kv_heads, slots)
    kv_heads,
    slots,
    splits,
    each,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of the directions of one split of the slots; a key times its scale is its direction."""
    index = (tl.program_id(0) // splits).to(tl.int64)
    i_split = tl.program_id(0) % splits
    i_batch, i_head = index // kv_heads, index % kv_heads
    o_channels = tl.arange(0, CHANNELS)
    m_channels = o_channels < WIDTH
    sums = tl.zeros((BLOCK, CHANNELS), tl.float32)
    last = tl.minimum(i_split * each + each, slots)
    for start in range(i_split * each, last, BLOCK):
        o_slots = start + tl.arange(0, BLOCK)
        m_slots = o_slots < last
        m_held = tl.load(at_head(positions, i_batch, i_head) + o_slots, mask=m_slots, other=-1) >= 0
        k = load_states(keys, index, i_head, o_slots, m_held, o_channels, m_channels, slots, WIDTH, BITS).to(tl.float32)
        norms = tl.maximum(tl.sqrt(tl.sum(k * k, 1)), MIN_NORM)
        b_scales = tl.where(m_held, 1 / norms, 0.0)
        tl.store(scales + index * slots + o_slots, b_scales, mask=m_slots)
        sums += k * b_scales[:, None]
    tl.store(partials + (index * splits + i_split) * WIDTH + o_channels, tl.sum(sums, 0), mask=m_channels)


@triton.jit
@no_type_check
def cosines_kernel(
    keys,
    partials,
    out,  # scales, overwritten by the cosines
    kv_heads,
    slots,
    splits,
    each,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    SOME: tl.constexpr,
):
    """The cosines of one split of the slots with the sum over all splits."""
    index = (tl.program_id(0) // splits).to(tl.int64)
    i_split = tl.program_id(0) % splits
    i_head = index % kv_heads
    o_channels = tl.arange(0, CHANNELS)
    m_channels = o_channels < WIDTH
    sums = tl.zeros((SOME, CHANNELS), tl.float32)
    for start in range(0, splits, SOME):
        o_some = start + tl.arange(0, SOME)
        mask = (o_some < splits)[:, None] & m_channels[None, :]
        sums += tl.load(partials + (index * splits + o_some)[:, None] * WIDTH + o_channels[None, :], mask=mask, other=0)
    anchor = tl.sum(sums, 0)
    anchor = anchor / tl.maximum(tl.sqrt(tl.sum(anchor * anchor, 0)), MIN_NORM)
    last = tl.minimum(i_split * each + each, slots)
    for start in range(i_split * each, last, BLOCK):
        o_slots = start + tl.arange(0, BLOCK)
        m_slots = o_slots < last
        scales = tl.load(out + index * slots + o_slots, mask=m_slots, other=0)
        m_held = scales != 0
        k = load_states(keys, index, i_head, o_slots, m_held, o_channels, m_channels, slots, WIDTH, BITS).to(tl.float32)
        tl.store(out + index * slots + o_slots, tl.sum(k * anchor[None, :], 1) * scales, mask=m_slots)
