"""What `torchrun` tells each process that it starts. Nothing of PyTorch is imported for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from windlass.core.errors import UsageError

VARIABLES: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
START: Final = "start it with `torchrun --nproc-per-node 2 -m windlass ...`"


@dataclass(frozen=True)
class Launch:
    """One of `size` processes: `number` among all of them, and `local` among those of its machine."""

    number: int
    local: int
    size: int
    address: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Launch:
        """What `torchrun` told this process. Raises: UsageError where it did not start it, saying how that is done."""
        missing = [name for name in VARIABLES if name not in environment]
        if missing:
            raise UsageError(
                f"--tensor-parallel: this is one process, which has no others ({', '.join(missing)} not set); {START}"
            )
        numbers = [environment[name] for name in VARIABLES[:3]]
        if not all(each.isascii() and each.isdigit() for each in numbers):
            raise UsageError(f"--tensor-parallel: {', '.join(VARIABLES[:3])} must be numbers, got {numbers}; {START}")
        number, local, size = map(int, numbers)
        return cls(number, local, size, environment["MASTER_ADDR"])

    @property
    def is_first(self) -> bool:
        """Whether this is the process that speaks."""
        return self.number == 0
