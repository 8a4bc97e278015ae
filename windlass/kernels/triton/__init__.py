"""The kernels in Triton, for tensors in a GPU's memory. `kernels.reference` defines the meaning of each function."""

from windlass.kernels.triton.attend import attend, can_read, mean_key_cosine
from windlass.kernels.triton.tiles import knows

__all__ = ["attend", "can_read", "knows", "mean_key_cosine"]
