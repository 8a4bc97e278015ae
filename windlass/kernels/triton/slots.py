"""Slots on a GPU, one launch for each function: which are free, which to evict, and writing to them.

Nothing here waits for the device, copies from the host or has a shape that depends on data, so that a
step can be captured in a graph. `no_type_check` keeps the type checks, which tests put around every
function, away from those that Triton compiles.
"""

from typing import Any, Final, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.core.inputs import EvictionInput, Writes
from windlass.core.positions import RESERVED
from windlass.core.types import SlotIndex, SlotPositions
from windlass.kernels import reference

BLOCK: Final = 4096  # slots that a program takes at once
MAX_REGISTER_SLOTS: Final = 8192  # slots whose keys a program holds in registers
MAX_COUNTED_SLOTS: Final = 8192  # slots that are sorted by counting
FLOAT32_MIN, FLOAT32_MAX = tl.constexpr(torch.finfo(torch.float32).min), tl.constexpr(torch.finfo(torch.float32).max)
ABOVE_ALL = tl.constexpr(2**63 - 1)  # above every number of `total_order`
FREE_LAST = tl.constexpr(2**31 - 1)  # above every position
RESERVED_SLOT = tl.constexpr(RESERVED)


def first_free(positions: SlotPositions, count: int) -> SlotIndex:
    """See `reference.first_free`."""
    batch, score_heads, slots = positions.shape
    out = torch.empty(batch, score_heads, count, dtype=torch.int64, device=positions.device)
    block = min(BLOCK, triton.next_power_of_2(slots))
    if out.numel():
        _first_free[(batch * score_heads, triton.cdiv(slots, block))](positions, out, slots, count, block, num_warps=8)
    return out


def argsort_positions(positions: SlotPositions) -> SlotIndex:
    """See `reference.argsort_positions`.

    Every slot counts those before it, which is quadratic, but one launch and all in parallel. PyTorch's sort takes
    several, in each layer at each token. Only where there are many slots the sort is less work.
    """
    batch, score_heads, slots = positions.shape
    if slots > MAX_COUNTED_SLOTS:
        return reference.argsort_positions(positions)
    positions = positions.contiguous()
    out = torch.empty(batch, score_heads, slots, dtype=torch.int64, device=positions.device)
    block = min(64, triton.next_power_of_2(slots))
    if out.numel():
        _argsort_positions[(batch * score_heads, triton.cdiv(slots, block))](positions, out, slots, block, num_warps=4)
    return out


def evict(call: EvictionInput) -> tuple[SlotIndex, SlotIndex]:
    """See `reference.evict`. The slots come in ascending order."""
    positions, count = call.positions, call.count
    batch, score_heads, slots = positions.shape
    index = torch.empty(batch, score_heads, count, dtype=torch.int64, device=positions.device)
    before = torch.empty(batch, score_heads, count, dtype=positions.dtype, device=positions.device)
    block = min(MAX_REGISTER_SLOTS, triton.next_power_of_2(slots))
    if index.numel():
        _evict[(batch, score_heads)](
            call.score,
            call.score.stride(),
            positions,
            call.next_positions,
            index,
            before,
            slots,
            call.sinks,
            call.next_positions if call.row_sinks is None else call.row_sinks,
            call.row_sinks is not None,
            call.window,
            call.sliding_window or 0,
            call.attention_chunk or 0,
            count,
            slots <= block,
            block,
            num_warps=max(1, min(16, block // 256)),
        )
    return index, before


def write_all(index: SlotIndex, writes: Writes) -> None:
    """See `reference.write_all`."""
    batch, score_heads, tokens = index.shape
    if not index.numel():
        return
    targets, news, sizes, strides, widths, is_tensor = zip(*(_part(*each, tokens) for each in writes), strict=True)
    _write[(tokens, max(heads for heads, _, _ in sizes), batch)](
        targets,
        news,
        sizes,
        strides,
        index,
        (index.stride(0), 0 if score_heads == 1 else index.stride(1), index.stride(2)),
        widths,
        is_tensor,
        num_warps=1,
    )


def _part(target: Tensor, new: Tensor | float, tokens: int) -> tuple[Any, ...]:
    """One part of `write_all`, as `_write` takes it: both tensors, sizes, strides, a block of channels."""
    batch, heads, slots, width = (*target.shape, 1)[:4]
    strides: tuple[int, ...] = (0, 0, 0, 0)
    if isinstance(new, Tensor):
        # Triton's interpreter does not round to bfloat16 as PyTorch does.
        new = new.to(target.dtype) if new.is_floating_point() else new
        new = (new if target.ndim == 4 else new.unsqueeze(3)).expand(batch, heads, tokens, width)
        strides = new.stride()
    return target, new, (heads, slots, width), strides, triton.next_power_of_2(width), isinstance(new, Tensor)


@triton.jit
@no_type_check
def _first_free(p_positions, p_out, slots, count, BLOCK: tl.constexpr):
    """One block of slots of one row and head. All free slots are counted, so that no block waits for another."""
    i_row, i_block = tl.program_id(0), tl.program_id(1)
    o_block = tl.arange(0, BLOCK)
    p_row = p_positions + i_row.to(tl.int64) * slots
    start = i_block * BLOCK
    b_all, b_before = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
    for first in range(0, slots, BLOCK):
        o_slots = first + o_block
        b_free = (tl.load(p_row + o_slots, mask=o_slots < slots, other=0) == -1).to(tl.int32)
        b_all += b_free
        b_before += tl.where(first < start, b_free, 0)
    o_slots = start + o_block
    b_free = (tl.load(p_row + o_slots, mask=o_slots < slots, other=0) == -1).to(tl.int32)
    b_earlier = tl.sum(b_before, 0) + tl.cumsum(b_free, 0) - b_free  # free slots before each
    b_places = tl.where(b_free == 1, b_earlier, tl.sum(b_all, 0) + o_slots - b_earlier)
    m_out = (o_slots < slots) & (b_places < count)
    tl.store(p_out + i_row.to(tl.int64) * count + b_places, o_slots.to(tl.int64), mask=m_out)


@triton.jit
@no_type_check
def _argsort_positions(p_positions, p_out, slots, BLOCK: tl.constexpr):
    """Put a block of slots of one row and head in their places: after as many as come before them."""
    i_row, i_block = tl.program_id(0), tl.program_id(1)
    p_row = p_positions + i_row.to(tl.int64) * slots
    o_own = i_block * BLOCK + tl.arange(0, BLOCK)
    b_own = tl.load(p_row + o_own, mask=o_own < slots, other=-1)
    b_own = tl.where(b_own < 0, FREE_LAST, b_own)
    b_earlier = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, slots, BLOCK):
        o_other = first + tl.arange(0, BLOCK)
        b_other = tl.load(p_row + o_other, mask=o_other < slots, other=-1)
        b_other = tl.where(b_other < 0, FREE_LAST, b_other)
        m_before = b_other[None, :] < b_own[:, None]
        m_before |= (b_other[None, :] == b_own[:, None]) & (o_other[None, :] < o_own[:, None])
        b_earlier += tl.sum(m_before.to(tl.int32), 1)
    tl.store(p_out + i_row.to(tl.int64) * slots + b_earlier, o_own.to(tl.int64), mask=o_own < slots)


@triton.jit
@no_type_check
def _total_order(row, o_slots):
    """`ranking.total_order` of some slots, ABOVE_ALL where there is none, and their positions."""
    p_score, stride, p_positions, slots, end, sinks, window, sliding_window, chunk_start = row
    m_slots = o_slots < slots
    b_score = tl.load(p_score + o_slots * stride, mask=m_slots, other=0.0).to(tl.float32)
    b_positions = tl.load(p_positions + o_slots, mask=m_slots, other=0)
    b_score = tl.where(b_score != b_score, FLOAT32_MIN, tl.minimum(tl.maximum(b_score, FLOAT32_MIN), FLOAT32_MAX))
    b_score = tl.where((b_positions >= end - window) | (b_positions < sinks), float("inf"), b_score)
    b_score = tl.where((sliding_window > 0) & (b_positions <= end - sliding_window), FLOAT32_MIN, b_score)
    b_score = tl.where(b_positions < chunk_start, FLOAT32_MIN, b_score)
    b_score = tl.where(b_positions < 0, float("-inf"), b_score)
    b_bits = tl.where(b_score == 0.0, 0.0, b_score).to(tl.int32, bitcast=True)  # there is no -0.0 then
    b_bits = b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)  # compares as the float does
    return tl.where(m_slots, (b_bits.to(tl.int64) << 32) + b_positions, ABOVE_ALL), b_positions


@triton.jit
@no_type_check
def _evict(
    p_score,
    strides,
    p_positions,
    p_ends,
    p_index,
    p_before,
    slots,
    sinks,
    p_sinks,
    HAS_ROW_SINKS: tl.constexpr,
    window,
    sliding_window,
    attention_chunk,
    count,
    IS_WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row and head, whole in registers or block by block.

    The key that parts the `count` lowest from the others is found by halving the range where it can be. Of slots with
    this very key (free ones, as a rule) the first are taken.
    """
    i_batch, i_rank = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i_row = i_batch * tl.num_programs(1) + i_rank
    p_score += i_batch * strides[0] + i_rank * strides[1]
    p_positions += i_row * slots
    end = tl.load(p_ends + i_batch).to(tl.int64)
    if HAS_ROW_SINKS:
        sinks = tl.load(p_sinks + i_batch).to(tl.int64)
    chunk_start = tl.where(attention_chunk > 0, end - end % tl.maximum(attention_chunk, 1), 0)
    row = p_score, strides[2], p_positions, slots, end, sinks, window, sliding_window, chunk_start
    o_block = tl.arange(0, BLOCK)
    b_keys, b_positions = _total_order(row, o_block)

    low, high = -tl.full((), ABOVE_ALL, tl.int64), tl.full((), ABOVE_ALL, tl.int64)
    found = tl.zeros((), tl.int32) + slots  # number of keys up to `high`. Fewer than `count` keys are up to `low`
    while (found != count) & (low + 1 < high):
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        b_below = (b_keys <= middle).to(tl.int32)
        if not IS_WHOLE:
            for first in range(BLOCK, slots, BLOCK):
                b_more, _ = _total_order(row, first + o_block)
                b_below += (b_more <= middle).to(tl.int32)
        below = tl.sum(b_below, 0)
        is_enough = below >= count
        found = tl.where(is_enough, below, found)
        low, high = tl.where(is_enough, low, middle), tl.where(is_enough, middle, high)

    b_lower = (b_keys < high).to(tl.int32)
    if not IS_WHOLE:
        for first in range(BLOCK, slots, BLOCK):
            b_more, _ = _total_order(row, first + o_block)
            b_lower += (b_more < high).to(tl.int32)
    wanted = count - tl.sum(b_lower, 0)  # number of slots to take with the key `high`
    equal, taken = tl.zeros((), tl.int32), tl.zeros((), tl.int32)
    for first in range(0, slots, BLOCK):
        if not IS_WHOLE:
            b_keys, b_positions = _total_order(row, first + o_block)
        b_equal = (b_keys == high).to(tl.int32)
        m_taken = (b_keys < high) | ((b_equal == 1) & (equal + tl.cumsum(b_equal, 0) <= wanted))
        b_taken = m_taken.to(tl.int32)
        b_places = i_row * count + taken + tl.cumsum(b_taken, 0) - 1
        tl.store(p_index + b_places, (first + o_block).to(tl.int64), mask=m_taken)
        tl.store(p_before + b_places, b_positions, mask=m_taken)
        tl.debug_barrier()  # another thread may still read a position that is overwritten next
        tl.store(p_positions + first + o_block, RESERVED_SLOT, mask=m_taken & (b_positions >= 0))
        equal += tl.sum(b_equal, 0)
        taken += tl.sum(b_taken, 0)


@triton.jit
@no_type_check
def _write(p_targets, p_news, sizes, strides, p_index, index_strides, WIDTHS: tl.constexpr, IS_TENSOR: tl.constexpr):
    """One token of one row and head, in all tensors that have this head."""
    i_token, i_head, i_batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(p_index + i_batch * index_strides[0] + i_head * index_strides[1] + i_token * index_strides[2])
    for part in tl.static_range(len(p_targets)):
        heads, slots, width = sizes[part]
        o_width = tl.arange(0, WIDTHS[part])
        m_width = o_width < tl.where(i_head < heads, width, 0)
        p_target = p_targets[part] + ((i_batch * heads + i_head) * slots + slot) * width
        if IS_TENSOR[part]:
            batch, head, token, channel = strides[part]
            p_new = p_news[part] + i_batch * batch + i_head * head + i_token * token
            b_new = tl.load(p_new + o_width * channel, mask=m_width)
        else:
            b_new = tl.full((WIDTHS[part],), p_news[part], p_target.dtype.element_ty)
        tl.store(p_target + o_width, b_new.to(p_target.dtype.element_ty), mask=m_width)


FLOAT16_MAX = tl.constexpr(torch.finfo(torch.float16).max)
ROUNDER = tl.constexpr(1.5 * 2**23)  # a float32 beside it has no fraction: adding it rounds, ties to even
STEPS = tl.constexpr(reference.STEPS)
MAX_HALVINGS = tl.constexpr(10)  # of a group, before one number is left


def encode(states: Tensor, means: Tensor | None, group: int) -> tuple[Tensor, Tensor]:
    """See `reference.encode`."""
    batch, heads, tokens, width = states.shape
    numbers = 2 * triton.cdiv(width, group) if group else 1
    held = width // 2 if group else width
    codes = states.new_empty(batch, heads, tokens, held, dtype=torch.uint8 if group else torch.int8)
    scales = states.new_empty(batch, heads, tokens, numbers, dtype=torch.float16)
    if codes.numel():
        strides = states.stride(), (0, 0) if means is None else means.stride()
        padded = triton.next_power_of_2(held)
        if group:
            _encode_groups[(tokens, heads, batch)](
                states, strides[0], means, strides[1], codes, scales, width, group, padded,
                num_warps=max(1, min(8, padded // 32)),
            )  # fmt: skip
        else:
            _encode[(tokens, heads, batch)](
                states, strides[0], means, strides[1], codes, scales, width, padded, num_warps=1
            )
    return codes, scales


@triton.jit
@no_type_check
def _numbers(p_states, stride, p_means, mean_stride, o_width, m_width):
    """The numbers to encode, less their means, float32."""
    b_numbers = tl.load(p_states + o_width * stride, mask=m_width, other=0.0).to(tl.float32)
    if p_means is not None:
        b_numbers -= tl.load(p_means + o_width * mean_stride, mask=m_width, other=0.0).to(tl.float32)
    return b_numbers


@triton.jit
@no_type_check
def _bounded(scale):
    return tl.minimum(tl.maximum(scale, -FLOAT16_MAX), FLOAT16_MAX).to(tl.float16)


@triton.jit
@no_type_check
def _coded(b_numbers, divisor, least: tl.constexpr):
    """Whole numbers: `tl.div_rn` divides as PyTorch does, `/` only nearly so."""
    b_codes = tl.div_rn(b_numbers, tl.zeros_like(b_numbers) + tl.where(divisor == 0.0, 1.0, divisor))
    b_codes = tl.minimum(tl.maximum(b_codes, least), -least - 1)
    return ((b_codes + ROUNDER) - ROUNDER).to(tl.int32)


@triton.jit
@no_type_check
def _encode(p_states, strides, p_means, mean_strides, p_codes, p_scales, width, WIDTH: tl.constexpr):
    """Encode one token of one row and head in 8 bits, with one scale."""
    i_token, i_head, i_batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_row = (i_batch * tl.num_programs(1) + i_head) * tl.num_programs(0) + i_token
    o_width = tl.arange(0, WIDTH)
    m_width = o_width < width
    p_states += i_batch * strides[0] + i_head * strides[1] + i_token * strides[2]
    if p_means is not None:
        p_means += i_head * mean_strides[0]
    b_numbers = _numbers(p_states, strides[3], p_means, mean_strides[1], o_width, m_width)
    low = tl.min(tl.where(m_width, b_numbers, float("inf")), 0)
    high = tl.max(tl.where(m_width, b_numbers, float("-inf")), 0)
    scale = _bounded(tl.where(-low > high, low, high) * (1.0 / -128))  # a power of two: exact
    tl.store(p_scales + i_row, scale)
    b_codes = _coded(b_numbers, scale.to(tl.float32), -128)
    tl.store(p_codes + i_row * width + o_width, b_codes.to(p_codes.dtype.element_ty), mask=m_width)


@triton.jit
@no_type_check
def _encode_groups(
    p_states, strides, p_means, mean_strides, p_codes, p_scales, width, GROUP: tl.constexpr, HALF: tl.constexpr
):
    """Encode one token of one row and head in 4 bits: its first and its second half are side by side in a byte."""
    i_token, i_head, i_batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_row = (i_batch * tl.num_programs(1) + i_head) * tl.num_programs(0) + i_token
    p_states += i_batch * strides[0] + i_head * strides[1] + i_token * strides[2]
    if p_means is not None:
        p_means += i_head * mean_strides[0]
    p_scales += i_row * (2 * ((width + GROUP - 1) // GROUP))
    half = width // 2
    o_first = tl.arange(0, HALF)
    row = p_states, strides[3], p_means, mean_strides[1]
    b_first = _group_codes(row, p_scales, o_first, o_first < half, width, GROUP)
    b_second = _group_codes(row, p_scales, half + o_first, o_first < half, width, GROUP)
    b_codes = (b_first + 8) | ((b_second + 8) << 4)
    tl.store(p_codes + i_row * half + o_first, b_codes.to(p_codes.dtype.element_ty), mask=o_first < half)


@triton.jit
@no_type_check
def _group_codes(row, p_scales, o_width, m_width, width, GROUP: tl.constexpr):
    """The codes of some channels. Every channel reads its whole group, and the first one writes scale and offset."""
    p_states, stride, p_means, mean_stride = row
    b_numbers = _numbers(p_states, stride, p_means, mean_stride, o_width, m_width)
    o_group = (o_width // GROUP * GROUP)[:, None] + tl.arange(0, GROUP)[None, :]
    m_own = m_width[:, None] & (o_group < width)
    b_own = m_own.to(tl.float64)
    o_group = tl.minimum(o_group, width - 1)
    b_group = _numbers(p_states, stride, p_means, mean_stride, o_group, m_width[:, None])
    b_wide = tl.where(m_own, tl.minimum(tl.maximum(b_group, FLOAT32_MIN), FLOAT32_MAX), 0.0).to(tl.float64)
    most: tl.constexpr = 7.5 * FLOAT16_MAX  # so that a scale reaches all, and infinities have a middle
    low = tl.minimum(tl.maximum(tl.min(b_group, 1), -most), most)
    high = tl.minimum(tl.maximum(tl.max(b_group, 1), -most), most)
    span = high - low
    scale = _bounded(tl.div_rn(span, tl.zeros_like(span) + 15.0))
    offset = _bounded((low + high) * 0.5 + scale.to(tl.float32) * 0.5)
    b_codes, error = _coded_groups(b_group, m_own, scale, offset)
    count, numbers = tl.maximum(_sum(b_own), 1.0), _sum(b_wide)  # a masked row has no channels
    for _ in tl.static_range(STEPS):
        total = _sum(b_codes * b_own)
        spread = count * _sum(b_codes * b_codes * b_own) - total * total
        b_deviations = (count[:, None] * b_codes - total[:, None]) * b_wide
        new_scale = _rounded(_sum(b_deviations) / tl.where(spread == 0.0, 1.0, spread))
        new_offset = _rounded((numbers - new_scale.to(tl.float64) * total) / count)
        b_new_codes, new_error = _coded_groups(b_group, m_own, new_scale, new_offset)
        is_better = new_error < error
        scale, offset = tl.where(is_better, new_scale, scale), tl.where(is_better, new_offset, offset)
        b_codes, error = tl.where(is_better[:, None], b_new_codes, b_codes), tl.where(is_better, new_error, error)
    p_pairs = p_scales + 2 * (o_width // GROUP)
    is_first = m_width & (o_width % GROUP == 0)
    tl.store(p_pairs, scale, mask=is_first)
    tl.store(p_pairs + 1, offset, mask=is_first)
    return _coded(b_numbers - offset.to(tl.float32), scale.to(tl.float32), -8)


@triton.jit
@no_type_check
def _rounded(number):
    """float64 to float16 by way of float32, as PyTorch does it."""
    return _bounded(tl.minimum(tl.maximum(number, -FLOAT16_MAX), FLOAT16_MAX).to(tl.float32))


@triton.jit
@no_type_check
def _coded_groups(b_group, m_own, scale, offset):
    """Codes of groups, one to a row, and the sum of the squared errors of each group. See `reference.encode`."""
    b_scales, b_offsets = scale.to(tl.float32)[:, None], offset.to(tl.float32)[:, None]
    b_codes = _coded(b_group - b_offsets, b_scales, -8).to(tl.float32)
    b_errors = (b_group - (b_codes * b_scales + b_offsets)).to(tl.float64)
    return b_codes.to(tl.float64), _sum(tl.where(m_own, b_errors * b_errors, 0.0))


@triton.jit
@no_type_check
def _sum(b_numbers):
    """The sums of rows, of which halves are added up. See `reference.encode`."""
    rows: tl.constexpr = b_numbers.shape[0]
    for _ in tl.static_range(MAX_HALVINGS):
        if b_numbers.shape[1] > 1:
            b_pairs = tl.permute(tl.reshape(b_numbers, (rows, 2, b_numbers.shape[1] // 2)), (0, 2, 1))
            b_first, b_second = tl.split(b_pairs)
            b_numbers = b_first + b_second
    return tl.reshape(b_numbers, (rows,))
