"""Codes of 8 and 4 bits made in C++, bit for bit those of `reference.encode`."""

import torch
from torch import Tensor

from windlass.kernels.cpu import MAX_CHANNELS, instruction_set, native
from windlass.kernels.cpu.arguments import FLOATS, address


def can_encode(states: Tensor, bits: int) -> bool:
    """Whether `encode` knows the type of these numbers, which are in a CPU's memory, and how many there are."""
    width = states.shape[-1]
    return states.dtype in FLOATS and 0 < width <= MAX_CHANNELS and width * bits % 8 == 0


def encode(states: Tensor, means: Tensor | None, bits: int) -> tuple[Tensor, Tensor]:
    """See `reference.encode`."""
    batch, kv_heads, tokens, width = states.shape
    if states.stride(-1) != 1:
        states = states.contiguous()
    means = None if means is None else means.float().contiguous()
    codes = states.new_empty(batch, kv_heads, tokens, width * bits // 8, dtype=torch.int8 if bits == 8 else torch.uint8)
    scales = states.new_empty(batch, kv_heads, tokens, 1, dtype=torch.float16)
    native.encode(
        (batch, kv_heads, tokens, width, bits),
        FLOATS[states.dtype],
        states.data_ptr(),
        states.stride()[:3],
        address(means),
        codes.data_ptr(),
        scales.data_ptr(),
        instruction_set(),
        torch.get_num_threads(),
    )
    return codes, scales
