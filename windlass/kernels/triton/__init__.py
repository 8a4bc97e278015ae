"""The kernels in Triton, for tensors in a GPU's memory; `kernels.reference` says what each function means."""

from windlass.kernels.triton.arguments import knows
from windlass.kernels.triton.attend import attend, can_read
from windlass.kernels.triton.mean_key_cosine import mean_key_cosine

__all__ = ["attend", "can_read", "knows", "mean_key_cosine"]
