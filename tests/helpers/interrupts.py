"""Work that ends in an interrupt at a chosen line."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import windlass

PACKAGE = str(Path(windlass.__file__).parent)


def interrupted_at(line: int, work: Callable[[], object]) -> bool:
    """Return True if `work` ended in the interrupt before the `line`-th line of the package that it ran."""
    left = line

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            left -= 1
            if left == 0:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False
