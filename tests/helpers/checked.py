"""Check annotations while tests run: beartype, in the first calls of each function in a test."""

import functools
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Final, get_args

import jaxtyping
from beartype import beartype

# A check takes longer than most functions do, and a long test makes the same calls again and again.
MOST_CALLS: Final = 32


class Checks:
    """Counts the calls of each function in a test, and ends its checks when there were enough."""

    def __init__(self) -> None:
        self.most_calls = MOST_CALLS
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
        """Note a call of the function of this number. Returns True if it is the last one to be checked."""
        self._calls[number] += 1
        return self._calls[number] == self.most_calls

    def end(self, function: Callable[..., Any]) -> None:
        """Check `function` no more until the next test."""
        function.__no_type_check__ = True  # type: ignore[attr-defined]
        self._ended.add(function)


CHECKS: Final = Checks()
_jaxtyped = jaxtyping.jaxtyped


def of_shapes(found: Any = None, /, *, typechecker: Any) -> Any:
    """`jaxtyping.jaxtyped`, but that a function whose annotations name no shape is left as it is.

    Even a check that is turned off takes longer than most of these do, and mypy has checked them.
    """
    if found is None:
        return functools.partial(of_shapes, typechecker=typechecker)
    is_checked = inspect.isclass(found) or _has_shapes(found)
    return _jaxtyped(found, typechecker=typechecker) if is_checked else found


def _has_shapes(found: object) -> bool:
    inner = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
    names = getattr(inner, "__globals__", {})
    return any(_is_shape(each, names) for each in getattr(inner, "__annotations__", {}).values())


def _is_shape(annotation: object, names: Mapping[str, object]) -> bool:
    if isinstance(annotation, str):
        return any(_is_shape(names.get(word), {}) for word in re.findall(r"\w+", annotation))
    is_array = isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray)
    return is_array or any(_is_shape(each, names) for each in get_args(annotation))


jaxtyping.jaxtyped = of_shapes  # type: ignore[assignment]  # the import hook looks it up by name


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
