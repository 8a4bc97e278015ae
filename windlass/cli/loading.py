"""What a terminal shows while a command imports and loads what it needs, which takes seconds."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

CLEAR: Final = "\r\x1b[K"  # to the start of the line, and erase it


@contextmanager
def loading(is_quiet: bool = False) -> Iterator[None]:
    """`loading ...` on stderr while the block runs; it leaves the screen.

    Nothing if `is_quiet`, or where stderr is no terminal.
    """
    is_shown = sys.stderr.isatty() and not is_quiet
    try:
        if is_shown:
            print("loading ...", end="", file=sys.stderr, flush=True)
        yield
    finally:
        if is_shown:
            print(CLEAR, end="", file=sys.stderr, flush=True)
