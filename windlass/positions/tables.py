"""What a model's rotary module returns: cos and sin, or complex numbers cos + i sin."""

import torch
from torch import Tensor

from windlass.core.errors import UnsupportedModel

Output = Tensor | tuple[Tensor, Tensor]


def cos_sin(output: object) -> tuple[Tensor, Tensor]:
    """Cos and sin of what a rotary module returned. Raises: UnsupportedModel for anything else."""
    match output:
        case Tensor() if output.is_complex():
            return output.real, output.imag
        case (Tensor() as cos, Tensor() as sin):
            return cos, sin
    raise UnsupportedModel("has a rotary module that returns neither (cos, sin) nor complex numbers")


def unturned(output: object) -> Output:
    """The same without any rotation, or scale."""
    cos, sin = cos_sin(output)
    ones = torch.ones_like(output if isinstance(output, Tensor) else cos)
    return ones if isinstance(output, Tensor) else (ones, torch.zeros_like(sin))
