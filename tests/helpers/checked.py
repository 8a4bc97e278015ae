"""What checks annotations while tests run: beartype, in the first calls of each function in a test."""

import functools
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import jaxtyping
from beartype import beartype

# A check takes longer than most functions do, and a long test makes the same calls again and again.
MOST_CALLS: Final = 32


class Checks:
    """Counts the calls of each function in a test, and ends its checks when there were enough."""

    def __init__(self) -> None:
        self._calls: Counter[int] = Counter()
        self._ended: set[Callable[..., Any]] = set()

    def begin(self, is_checked: bool) -> None:
        """Begin a test, of which nothing is checked unless `is_checked`."""
        jaxtyping.config.update("jaxtyping_disable", not is_checked)
        for function in self._ended:
            del function.__no_type_check__  # type: ignore[attr-defined]  # as jaxtyping asks
        self._ended.clear()
        self._calls.clear()

    def count(self, number: int) -> bool:
        """Note a call of the function of this number; returns whether it is its last one to be checked."""
        self._calls[number] += 1
        return self._calls[number] == MOST_CALLS

    def end(self, function: Callable[..., Any]) -> None:
        """Check `function` no more until the next test."""
        function.__no_type_check__ = True  # type: ignore[attr-defined]
        self._ended.add(function)


CHECKS: Final = Checks()


def checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose arguments and results are checked against their annotations. Named in `pyproject.toml`."""
    typed = beartype(function)

    @functools.wraps(typed)
    def check(*args: Any, **kwargs: Any) -> Any:  # of any function of the package, as it is called
        # jaxtyping gives a function of the same annotations, and calls this one beside the one that is meant.
        if CHECKS.count(id(typed)) and (meant := sys._getframe(1).f_locals.get("fn")) is not None:
            CHECKS.end(meant)
        return typed(*args, **kwargs)

    return check
