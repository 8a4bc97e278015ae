"""A rank ends when the `torchrun` that started it has ended. Nothing of PyTorch is imported for it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import Final

MARK: Final = "TORCHELASTIC_RUN_ID"  # which torchrun sets, and who starts ranks by hand does not
LOOK_S: Final = 1.0
GRACE_S: Final = 30.0  # as torchrun itself gives its ranks


def end_with_starter(environment: Mapping[str, str], look_s: float = LOOK_S, grace_s: float = GRACE_S) -> None:
    """Look every `look_s` seconds, in a thread, whether `torchrun` still runs; when it does not, end this process.

    `torchrun` ends its ranks itself, unless it is killed by a signal that no process can handle. Then each rank sends
    itself SIGTERM, and SIGKILL after `grace_s` seconds. Ranks that something else started are left alone.
    """
    if MARK in environment:
        threading.Thread(target=_watch, args=(os.getppid(), look_s, grace_s), daemon=True).start()


def _watch(starter: int, look_s: float, grace_s: float) -> None:
    while os.getppid() == starter:
        time.sleep(look_s)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os.kill(os.getpid(), signal.SIGKILL)
