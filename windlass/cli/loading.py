"""What a terminal shows while a command imports and loads what it needs, which takes seconds."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, NoReturn

CLEAR: Final = "\r\x1b[K"  # to the start of the line, and erase it
INTERRUPTED_LINE: Final = "windlass: interrupted"
INTERRUPTED: Final = 130  # the exit code that shells give to Ctrl-C


@contextmanager
def loading(is_quiet: bool = False) -> Iterator[None]:
    """`loading ...` on stderr while the block runs; it leaves the screen.

    Nothing if `is_quiet`, or where stderr is no terminal. After the block an interrupt raises KeyboardInterrupt, also
    where it ended the process before (`end_at_ctrl_c`).
    """
    is_shown = sys.stderr.isatty() and not is_quiet
    try:
        if is_shown:
            print("loading ...", end="", file=sys.stderr, flush=True)
        yield
    finally:
        if is_shown:
            print(CLEAR, end="", file=sys.stderr, flush=True)
        if signal.getsignal(signal.SIGINT) is _end and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)


def end_at_ctrl_c() -> None:
    """Let an interrupt end the process at once, until the first `loading` is over.

    Nothing but modules is loaded so far, and libraries do not bear a KeyboardInterrupt while they are: torch loses it,
    makes another error of it, or aborts. Does nothing where interrupts are ignored or another handler takes them.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def _end(number: int, frame: FrameType | None) -> NoReturn:  # noqa: ARG001  # what Python gives
    start = CLEAR if os.isatty(2) else ""
    os.write(2, f"{start}{INTERRUPTED_LINE}\n".encode())  # `print` may be what was interrupted
    os._exit(INTERRUPTED)
