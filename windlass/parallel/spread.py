"""Tensors of which each process has a part. A PyTorch that was built without processes has none."""

import torch.distributed as dist
from torch import Tensor


def is_spread(tensor: object) -> bool:
    """Whether `tensor` is one of which each process has a part."""
    if not dist.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def whole_of(tensor: Tensor) -> Tensor:
    """All of a tensor: where it is spread a copy, and a collective call; else itself."""
    if not is_spread(tensor):
        return tensor
    whole: Tensor = tensor.full_tensor()  # type: ignore[attr-defined]  # a DTensor
    return whole
