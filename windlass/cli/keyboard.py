"""Keys that are typed while a chat is at work."""

import io
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unechoed() -> Iterator[None]:
    """A block during which typed keys are not shown but wait for the next line that is asked for; Ctrl-C works.

    Does nothing where stdin is no terminal.
    """
    try:
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
    except (io.UnsupportedOperation, termios.error):
        yield
        return
    input_flags, output_flags, control_flags, local_flags, *rest = before
    local_flags &= ~(termios.ECHO | termios.ICANON)
    # Enter stays Enter: the next line is read key by key.
    waiting = [input_flags & ~termios.ICRNL, output_flags, control_flags, local_flags, *rest]
    termios.tcsetattr(terminal, termios.TCSANOW, waiting)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSANOW, before)
