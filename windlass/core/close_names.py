"""The name that was meant by one that is unknown."""

import difflib
from collections.abc import Collection, Iterable
from typing import Final

CLOSE: Final = 0.65  # of 1, for equal names; names that share only some letters have less


def did_you_mean(typed: str, names: Iterable[str]) -> str:
    """A question with the name that is close to `typed`, for an error; nothing where none is.

    Case, `_` and `-` do not matter, nor does what stands in parentheses.
    """
    known = {plain(name): name for name in names}
    near = difflib.get_close_matches(plain(typed.partition("(")[0].strip()), list(known), n=1, cutoff=CLOSE)
    return f"did you mean {known[near[0]]}? " if near else ""


def use_one_of(typed: str, names: Collection[str]) -> str:
    """The way out of an error about an unknown name: all names, and one that is close to it, if any."""
    return f"use one of: {', '.join(names)}{near_to(typed, names)}"


def near_to(typed: str, names: Iterable[str]) -> str:
    """The same question in parentheses, after a list of names."""
    asked = did_you_mean(typed, names).strip()
    return asked and f" ({asked})"


def plain(name: str) -> str:
    """A name without what does not matter in it."""
    return name.lower().replace("_", "").replace("-", "")
