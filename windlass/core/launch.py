"""The processes that `torchrun` started, told from the environment. Nothing of PyTorch is imported for it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from windlass.core.errors import UsageError

VARIABLES: Final = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
START: Final = "Start it with `torchrun --nproc-per-node 2 -m windlass ...`"


@dataclass(frozen=True)
class Launch:
    """One of `size` processes: `number` among all of them, and `local` among those of its machine."""

    number: int
    local: int
    size: int
    address: str

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Launch:
        """Settings that `torchrun` gave this process. Raises: UsageError, with the way out, if it did not start it."""
        missing = [name for name in VARIABLES if name not in environment]
        if missing:
            raise UsageError(
                f"--tensor-parallel: this is one process, which has no others ({', '.join(missing)} not set). {START}"
            )
        numbers = [environment[name] for name in VARIABLES[:3]]
        if not all(each.isascii() and each.isdigit() for each in numbers):
            raise UsageError(f"--tensor-parallel: {', '.join(VARIABLES[:3])} must be numbers, got {numbers}. {START}")
        number, local, size = map(int, numbers)
        return cls(number, local, size, environment["MASTER_ADDR"])

    @property
    def is_first(self) -> bool:
        """Return True if this process prints."""
        return self.number == 0


MARK: Final = "TORCHELASTIC_RUN_ID"  # set by torchrun, but not by users who start ranks by hand
LOOK_S: Final = 1.0
GRACE_S: Final = 30.0  # as torchrun itself gives its ranks


def end_with_starter(environment: Mapping[str, str], look_s: float = LOOK_S, grace_s: float = GRACE_S) -> None:
    """Watch in a thread, every `look_s` seconds, that `torchrun` still runs, and end this process when it does not.

    `torchrun` ends its ranks itself, unless it is killed by a signal that no process can handle. Then each rank sends
    itself SIGTERM, and SIGKILL after `grace_s` seconds. Ranks that other programs started are left alone.
    """
    if MARK in environment:
        threading.Thread(target=_watch, args=(os.getppid(), look_s, grace_s), daemon=True).start()


def _watch(starter: int, look_s: float, grace_s: float) -> None:
    while os.getppid() == starter:
        time.sleep(look_s)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os.kill(os.getpid(), signal.SIGKILL)
