"""Linear layers of random numbers, in floats and in codes."""

import torch
from torch import Tensor

from windlass.core.inputs import GroupCodes, LinearInput, LinearLayer


def made(shape: tuple[int, int, int], dtype: torch.dtype, kind: str, has_bias: bool) -> LinearInput:
    """A linear layer of random numbers, in 4 bits of the next larger supported size."""
    rows, outputs, width = shape
    block = int(kind.split()[-1]) if kind.startswith("int4") else 0
    if kind.startswith("groups"):
        width = -(-width // 256) * 256
    group = 32 if width < 200 else 64 if width < 1000 else 128
    if block:
        outputs, width = -(-outputs // block) * block, -(-width // group) * group
    generator = torch.Generator().manual_seed(rows * width + outputs)
    inputs = torch.randn(rows, width, generator=generator).to(dtype)
    inputs[::2, :: max(1, width // 3)] *= 300  # some channels of some rows are far larger, as in real models
    bias = torch.randn(outputs, generator=generator).to(dtype) if has_bias else None
    if kind.startswith("groups"):
        return LinearInput(inputs, LinearLayer(in_groups(kind, outputs, inputs.shape[1], generator), bias))
    if block:
        codes = torch.randint(0, 16, (outputs, width), generator=generator, dtype=torch.uint8)
        pairs = torch.randn(width // group, outputs, 2, generator=generator).to(dtype)
        return LinearInput(inputs, LinearLayer(GroupCodes(packed(codes, block), pairs, group, block, outputs), bias))
    if kind == "floats":
        return LinearInput(inputs, LinearLayer(torch.randn(outputs, width, generator=generator).to(dtype), bias))
    codes = torch.randint(-128, 128, (outputs, width), generator=generator, dtype=torch.int8)
    return LinearInput(inputs, LinearLayer(codes, bias, torch.rand(outputs, generator=generator) / 64))


def in_groups(kind: str, outputs: int, width: int, generator: torch.Generator) -> GroupCodes:
    """Random codes of kind `groups of 4` (bits) or `groups of 8`, perhaps `with supers` or `with zeros`.

    The last block is not full.
    """
    bits, has_supers = int(kind.split()[2]), kind.endswith("supers")
    has_zeros = kind.endswith("zeros") or has_supers == (bits == 4)
    rows, group, columns = -(-outputs // 64) * 64, 32 if bits == 4 else 16, 2 if has_zeros else 1
    if bits == 4:
        codes = packed(torch.randint(0, 16, (rows, width), generator=generator, dtype=torch.uint8), 64)
    else:
        codes = torch.randint(-32, 32, (rows, width), generator=generator, dtype=torch.int8)
    size = rows // 64, width // group, columns, 64
    pairs = torch.randint(0, 64, size, generator=generator, dtype=torch.int8)
    supers = (
        torch.randn(rows // 64, width // 256, columns, 64, generator=generator).div(512).half() if has_supers else None
    )
    return GroupCodes(
        codes=codes,
        pairs=pairs if has_supers else torch.randn(size, generator=generator).half(),
        group=group,
        block=64,
        out_features=outputs,
        bits=bits,
        middle=0 if has_supers else 8,
        supers=supers,
    )


def rounded(inputs: Tensor, group: int, is_fine: bool) -> Tensor:
    """Inputs as they meet codes in groups, in float64: 32 of them (16 where 32 do not divide a group) share a scale.

    They are rounded to 127ths of the largest, and to 256ths of these where that is an outlier of its row, or `is_fine`.
    """
    run = 32 if group % 32 == 0 else 16
    numbers = inputs.float()
    limit = 6 * numbers.square().mean(-1, keepdim=True).sqrt()
    runs = numbers.unflatten(-1, (-1, run))
    largest = runs.abs().amax(-1, keepdim=True)
    steps = torch.where(is_fine | (largest > limit[..., None]), 127.0 * 256, 127.0)
    wholes = torch.where(largest > 0, runs * (steps / largest), 0.0).round()
    return (wholes.double() * largest.double() / steps.double()).flatten(-2)


def packed(codes: Tensor, block: int) -> Tensor:
    """Codes of 4 bits, byte by byte as `GroupCodes` tells."""
    outputs, width = codes.shape
    found = torch.empty(outputs // block, width, block // 2, dtype=torch.uint8)
    for j in range(block // 2):
        found[:, :, j] = codes[j::block] + 16 * codes[j + block // 2 :: block]
    return found.view(outputs, width // 2)
