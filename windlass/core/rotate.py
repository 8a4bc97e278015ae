"""RoPE, applied and undone: channel i of a pair is i, its partner i + n, n being half of the rotated channels."""

import torch
from torch import Tensor


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair (i, i + n) of the first 2n channels rotated by its angle; the other channels stay as they are.

    `cos` and `sin` have n columns, one per pair; the other axes broadcast.
    """
    pairs = cos.shape[-1]
    first, second = states[..., :pairs], states[..., pairs : 2 * pairs]
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*rotated, states[..., 2 * pairs :]) if states.shape[-1] > 2 * pairs else rotated, -1)


def unrotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The inverse of `rotate`, the scaling within `cos` and `sin` included."""
    scale = cos.square() + sin.square()
    return rotate(states, cos / scale, -sin / scale)
