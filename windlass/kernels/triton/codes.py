"""Codes of 8 and 4 bits made on a GPU in one launch, bit for bit those of `reference.encode`."""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

FLOAT16_MAX = tl.constexpr(torch.finfo(torch.float16).max)
ROUNDER = tl.constexpr(1.5 * 2**23)  # a float32 beside it has no fraction: adding it rounds, ties to even


def encode(states: Tensor, means: Tensor | None, bits: int) -> tuple[Tensor, Tensor]:
    """See `reference.encode`."""
    batch, heads, tokens, width = states.shape
    rows = 8 // bits  # channels that share a byte
    codes = states.new_empty(batch, heads, tokens, width // rows, dtype=torch.int8 if bits == 8 else torch.uint8)
    scales = states.new_empty(batch, heads, tokens, 1, dtype=torch.float16)
    if codes.numel():
        _encode[(tokens, heads, batch)](
            states,
            states.stride(),
            means,
            (0, 0) if means is None else means.stride(),
            codes,
            scales,
            width // rows,
            bits,
            triton.next_power_of_2(width // rows),
            num_warps=1,
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
def _ends(b_numbers, m_width):
    """The lowest and the highest number."""
    low = tl.min(tl.where(m_width, b_numbers, float("inf")), 0)
    return low, tl.max(tl.where(m_width, b_numbers, float("-inf")), 0)


@triton.jit
@no_type_check
def _coded(b_numbers, divisor, least: tl.constexpr):
    """Whole numbers: `tl.div_rn` divides as PyTorch does, `/` only nearly so."""
    b_codes = tl.div_rn(b_numbers, tl.zeros_like(b_numbers) + divisor)
    b_codes = tl.minimum(tl.maximum(b_codes, least), -least - 1)
    return ((b_codes + ROUNDER) - ROUNDER).to(tl.int32)


@triton.jit
@no_type_check
def _encode(
    p_states, strides, p_means, mean_strides, p_codes, p_scales, width, BITS: tl.constexpr, WIDTH: tl.constexpr
):
    """One token of one row and head; of 4 bits, its first and its second half side by side."""
    i_token, i_head, i_batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    i_row = (i_batch * tl.num_programs(1) + i_head) * tl.num_programs(0) + i_token
    o_width = tl.arange(0, WIDTH)
    m_width = o_width < width
    p_states += i_batch * strides[0] + i_head * strides[1] + i_token * strides[2]
    if p_means is not None:
        p_means += i_head * mean_strides[0]
    b_first = _numbers(p_states, strides[3], p_means, mean_strides[1], o_width, m_width)
    low, high = _ends(b_first, m_width)
    if BITS == 4:
        b_second = _numbers(p_states, strides[3], p_means, mean_strides[1], width + o_width, m_width)
        other_low, other_high = _ends(b_second, m_width)
        low, high = tl.minimum(low, other_low), tl.maximum(high, other_high)
    least: tl.constexpr = -(2 ** (BITS - 1))
    scale = tl.where(-low > high, low, high) * (1.0 / least)  # a power of two: exact
    scale = tl.minimum(tl.maximum(scale, -FLOAT16_MAX), FLOAT16_MAX).to(tl.float16)
    tl.store(p_scales + i_row, scale)
    divisor = scale.to(tl.float32)
    divisor = tl.where(divisor == 0.0, 1.0, divisor)
    b_codes = _coded(b_first, divisor, least)
    if BITS == 4:
        b_codes = (b_codes + 8) | ((_coded(b_second, divisor, least) + 8) << 4)
    tl.store(p_codes + i_row * width + o_width, b_codes.to(p_codes.dtype.element_ty), mask=m_width)
