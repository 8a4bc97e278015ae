"""The kernels in Triton, for tensors in a GPU's memory; what each means is told in `kernels.reference`."""

from windlass.kernels.triton.arguments import knows
from windlass.kernels.triton.attend import attend, can_read
from windlass.kernels.triton.typicality import typicality

__all__ = ["attend", "can_read", "knows", "typicality"]
