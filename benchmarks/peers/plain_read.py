"""How fast this machine reads memory at the moment: the measure that rates of decode are put beside."""

import time

import torch

READ_BYTES = 2**30


class PlainRead:
    """PyTorch's sum of a gibibyte of float32."""

    def __init__(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self.numbers = torch.ones(READ_BYTES // 4)

    def gb_per_s(self) -> float:
        """Read all of it once."""
        start = time.perf_counter()
        self.numbers.sum()
        return READ_BYTES / (time.perf_counter() - start) / 1e9
