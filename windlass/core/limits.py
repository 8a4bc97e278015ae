"""The limits of the numbers that users give. Nothing here needs torch, so that a wrong number is told at once."""

from collections.abc import Mapping
from typing import Final

from windlass.core.check import whole_number
from windlass.core.errors import UsageError

MAX_NUMBER: Final = 2**30  # positions are 32-bit
DEFAULT_SINKS: Final = 4
SYSTEM: Final = "system"
"""In the place of a number of sinks: the tokens of each row's system text."""
PAGE: Final = 8
"""Tokens that are recalled together: neighbours in the order in which they were written."""
MAX_DEFAULT_WINDOW: Final = 64
LEAST = {  # the last three are those of position modes and stores
    "budget": 1,
    "sinks": 0,
    "window": 1,
    "chunk": 1,
    "batch": 1,
    "rollback": 0,
    "recall": 0,
    "group": 1,
    "limit": 1,
    "newest": 0,
}


def check_limits(options: Mapping[str, object]) -> dict[str, int | None]:
    """The numbers of a cache out of its `options`, by name, as ints of Python; `budget` and `window` may be None.

    Sinks that are those of a system text are no number, and are left out.

    Raises: UsageError for what is no whole number or out of its range, a budget without room for `sinks` and
    `window`, or tokens to recall that are no whole pages.
    """
    if isinstance(options.get("sinks"), str) and options["sinks"] != SYSTEM:
        raise UsageError(f"sinks must be a whole number from 0, or {SYSTEM!r}; got {options['sinks']!r}")
    names = [name for name in LEAST if name in options and not (name == "sinks" and options[name] == SYSTEM)]
    numbers = {name: _checked(name, options[name]) for name in names}
    budget, sinks, window = (numbers.get(name) for name in ("budget", "sinks", "window"))
    sinks = DEFAULT_SINKS if sinks is None else sinks
    if window is None:
        window = default_window(budget, sinks)
    if budget is not None and budget < sinks + window + 1:
        raise UsageError(
            f"budget ({budget} tokens) must be at least sinks ({sinks}) + window ({window}) + 1, "
            f"which is {sinks + window + 1}; raise budget, or lower sinks or window"
        )
    _check_pages(numbers.get("recall") or 0)
    return numbers


def _check_pages(recall: int) -> None:
    if recall % PAGE:
        least = recall // PAGE * PAGE
        raise UsageError(
            f"recall ({recall} tokens) must be a multiple of {PAGE}, the tokens of a page; "
            f"use {least or PAGE}{f' or {least + PAGE}' if least else ''}"
        )


def check_recall(recall: int, budget: int | None, has_folder: bool, has_store: bool) -> None:
    """Raises: UsageError for tokens to recall that no budget evicts, or a folder or a store for none."""
    if has_folder and not recall:
        raise UsageError(
            "recall_folder is where tokens to recall are held, and recall is 0; give recall, or leave it out"
        )
    if has_store and not recall:
        raise UsageError("recall_store is how tokens to recall are held, and recall is 0; give recall, or leave it out")
    if recall and budget is None:
        raise UsageError(
            f"recall ({recall} tokens) needs a budget: without one nothing is evicted that could be recalled"
        )


def _checked(name: str, value: object) -> int | None:
    is_optional = name in ("budget", "window")
    if value is None and is_optional:
        return None
    return whole_number(name, value, LEAST[name], MAX_NUMBER, ", or None" if is_optional else "")


def check_range(name: str, value: object) -> int:
    """`value` as an int of Python. Raises: UsageError for a number that its name does not allow."""
    return whole_number(name, value, LEAST[name], MAX_NUMBER)


def default_window(budget: int | None, sinks: int) -> int:
    """The window where none is given: a quarter of what the sinks leave of the budget, at most 64."""
    return MAX_DEFAULT_WINDOW if budget is None else max(1, min(MAX_DEFAULT_WINDOW, (budget - sinks) // 4))


def check_max_tokens(max_tokens: object) -> int:
    """`max_tokens` as an int of Python. Raises: UsageError for less than one token to write, or no whole number."""
    return whole_number("max_tokens", max_tokens, 1, MAX_NUMBER)
