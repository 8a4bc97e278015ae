"""The console script, and `python -m windlass`: the command line in a process that is its own."""

import atexit
import gc
import os
import sys
import warnings
from typing import NoReturn, TextIO

from windlass.cli.terminal import CLEAR, end_at_ctrl_c
from windlass.core.errors import WindlassWarning

GARBAGE_EVERY = 100_000  # new objects between two searches for garbage: imports make a million objects, none garbage


def run() -> NoReturn:
    """Run the command line and end the process, as soon as its last line is out.

    Registered exit functions run. Python's own teardown is skipped: it takes modules apart one by one, which with torch
    takes a second, and nobody sees them again.
    """
    gc.set_threshold(GARBAGE_EVERY)
    warnings.showwarning = _note
    warnings.simplefilter("once", WindlassWarning)
    end_at_ctrl_c()
    from windlass.cli.app import main

    code = main()
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(code)


def _note(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,  # noqa: ARG001  # Python passes it
    line: str | None = None,  # noqa: ARG001
) -> None:
    """Show a warning of ours as a line. Python's own options show warnings of libraries."""
    if issubclass(category, WindlassWarning):
        start = CLEAR if sys.stderr.isatty() else ""
        print(f"{start}windlass: note: {message}", file=sys.stderr)
    elif sys.warnoptions:
        print(warnings.formatwarning(message, category, filename, lineno), end="", file=sys.stderr)


if __name__ == "__main__":
    run()
