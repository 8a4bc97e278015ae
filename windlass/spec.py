"""Numbers in what a user typed: `"int4(sinks=4, newest=32)"`."""

import re
from collections.abc import Sequence

from windlass.errors import UsageError


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
