"""Lists and numbers in what a user typed: `"plain,int4(sinks=4, newest=32)"`."""

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from windlass.core.errors import UsageError

Value = TypeVar("Value")


def list_of(option: str, typed: str, make: Callable[[str], Value]) -> list[Value]:
    """What `make` gives for each part of a list; commas inside parentheses belong to a part.

    Raises: UsageError, beginning with `option`, for an empty part; and whatever `make` raises.
    """
    parts, depth = [""], 0
    for sign in typed:
        depth += (sign == "(") - (sign == ")")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    parts = [part.strip() for part in parts]
    if not all(parts):
        raise UsageError(f"{option} {typed!r} has an empty value; put one comma between two values")
    return [make(part) for part in parts]


def whole_number(option: str, least: int, most: int) -> Callable[[str], int]:
    """A reader of whole numbers in a range. It raises: UsageError, beginning with `option`, for all else."""

    def read(part: str) -> int:
        if not re.fullmatch(r"[0-9]{1,10}", part) or not least <= int(part) <= most:
            raise UsageError(f"{option} {part!r} is not a whole number from {least} to {most}")
        return int(part)

    return read


def whole_numbers(setting: str, kind: str, names: Sequence[str], typed: str) -> dict[str, int]:
    """The numbers that were typed in the parentheses of `kind`, in order or by name.

    Raises: UsageError, beginning with `setting`, for another name, one given twice, or no number.
    """
    numbers: dict[str, int] = {}
    for place, word in enumerate(word.strip() for word in typed.split(",") if word.strip()):
        name, _, number = word.rpartition("=")
        name = name.strip() or (names[place] if place < len(names) else "")
        if name not in names or name in numbers:
            takes = f"{' and '.join(names)}, each once" if names else "no numbers"
            raise UsageError(f"{setting}: {kind} takes {takes}")
        if not re.fullmatch(r"\s*-?\d+", number):
            raise UsageError(f"{setting}: {name} must be a whole number, got {number.strip()!r}")
        numbers[name] = int(number)
    return numbers
