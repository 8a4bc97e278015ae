"""The kernels in Triton, for tensors in a GPU's memory; what each means is told in `kernels.reference`."""

from windlass.kernels.triton.attend import attend, can_read

__all__ = ["attend", "can_read"]
