"""Which slots are free, which go, and putting new tokens into them: the compiled functions, see `kernels.reference`."""

import torch
from torch import Tensor

from windlass.core.attention import EvictionInput, Writes
from windlass.core.shapes import SlotIndex, SlotPositions
from windlass.kernels import reference
from windlass.kernels.cpu import native
from windlass.kernels.cpu.arguments import NO_LIMIT, address


def first_free(positions: SlotPositions, count: int) -> SlotIndex:
    """See `reference.first_free`."""
    batch, score_heads, slots = positions.shape
    out = torch.empty(batch, score_heads, count, dtype=torch.int64)
    native.first_free(positions.data_ptr(), batch * score_heads, slots, count, out.data_ptr())
    return out


def argsort_positions(positions: SlotPositions) -> SlotIndex:
    """See `reference.argsort_positions`."""
    batch, score_heads, slots = positions.shape
    out = torch.empty(batch, score_heads, slots, dtype=torch.int64)
    positions = positions.contiguous()
    threads = torch.get_num_threads()
    native.argsort_positions(positions.data_ptr(), batch * score_heads, slots, out.data_ptr(), threads)
    return out


def lowest(call: EvictionInput) -> SlotIndex:
    """See `reference.lowest`."""
    score, positions = call.score.float().contiguous(), call.positions
    ends = call.next_positions.to(torch.int64).contiguous()
    out = torch.empty(*positions.shape[:2], call.count, dtype=torch.int64)
    limits = (call.sinks, call.window, call.sliding_window or 0, call.attention_chunk or NO_LIMIT)
    row_sinks = None if call.row_sinks is None else call.row_sinks.to(torch.int64).contiguous()
    addresses = score.data_ptr(), positions.data_ptr(), ends.data_ptr()
    threads = torch.get_num_threads()
    native.lowest(tuple(positions.shape), *addresses, limits, address(row_sinks), call.count, out.data_ptr(), threads)
    return out


def evict(call: EvictionInput) -> tuple[SlotIndex, SlotIndex]:
    """See `reference.evict`."""
    index = lowest(call)
    return index, reference.reserve(call.positions, index)


def write_all(index: SlotIndex, writes: Writes) -> None:
    """See `reference.write_all`."""
    for states, new in writes:
        if isinstance(new, Tensor) and states.ndim == 4:
            write(states, index, new)
        else:
            reference.write(states, index, new)


def write(states: Tensor, index: SlotIndex, new: Tensor) -> None:
    """Overwrite the slots of `states` (batch, kv_heads, slots, width) at `index` with `new`."""
    new = new.to(states.dtype)
    if new.stride(-1) != 1:
        new = new.contiguous()
    index = index.contiguous()
    batch, kv_heads, slots, width = states.shape
    sizes = (batch, kv_heads, index.shape[1], index.shape[2], slots, width * states.itemsize)
    strides = tuple(stride * new.itemsize for stride in new.stride()[:3])
    native.write(sizes, strides, index.data_ptr(), new.data_ptr(), states.data_ptr())
