"""Signals that end a process, for commands that write what they have before they end."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, NoReturn

ENDING: Final = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def as_interrupts(is_wanted: bool = True) -> Iterator[None]:
    """A block in which SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, unless they are handled already."""
    if not is_wanted or threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [each for each in ENDING if signal.getsignal(each) is signal.SIG_DFL]
    for each in taken:
        signal.signal(each, _interrupt)
    try:
        yield
    finally:
        for each in taken:
            signal.signal(each, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001  # what Python gives
    raise KeyboardInterrupt
