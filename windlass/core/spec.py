"""The grammar of what a user types: lists, numbers in a range, and `name(a, b=1)`.

Every option of a cache, and every task, is typed as `name` or `name(a, b=1)`. It is parsed here; which names and
arguments there are is checked where they are defined.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from windlass.core.errors import UsageError

Value = TypeVar("Value")


AUTO: Final = "auto"  # of a policy, a mode, a number type or a device: it is chosen
NO_MERGE: Final = "none"  # the label of a cache that drops what it evicts
NO_SHARES: Final = "none"
NO_RECALL: Final = "none"


@dataclass(frozen=True)
class Spec:
    """A name with its arguments, as text: `self_extend(8, window=64)`.

    `named` keeps the order and what is given twice. `inside` is the text between the parentheses, for an argument
    that may hold any sign, such as the name of a file; None without parentheses.
    """

    name: str
    positional: tuple[str, ...] = ()
    named: tuple[tuple[str, str], ...] = ()
    inside: str | None = None


def parse_spec(text: str) -> Spec | None:
    """The name and the arguments of `text`; None where it has another form.

    Arguments are separated by commas, and may be of the same form themselves. One comma may stand after the last.
    """
    match = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", text, re.DOTALL)
    if match is None or not _is_balanced(match[2] or ""):
        return None
    parts = list(_parts(match[2] or ""))
    if not parts[-1]:
        parts.pop()
    if not all(parts):
        return None
    positional, named = [], []
    for part in parts:
        pair = re.fullmatch(r"(\w+)\s*=\s*(.*)", part, re.DOTALL)
        if pair is None:
            positional.append(part)
        else:
            named.append((pair[1], pair[2]))
    return Spec(match[1], tuple(positional), tuple(named), match[2])


def parse_list(option: str, typed: str, make: Callable[[str], Value]) -> list[Value]:
    """What `make` gives for each part of a list; commas inside parentheses belong to a part.

    Raises: UsageError, beginning with `option`, for an empty part; and whatever `make` raises.
    """
    parts = list(_parts(typed))
    if not all(parts):
        raise UsageError(f"{option} {typed!r} has an empty value; put one comma between two values")
    return [make(part) for part in parts]


def int_parser(option: str, least: int, most: int) -> Callable[[str], int]:
    """A parser of whole numbers in a range. It raises: UsageError, beginning with `option`, for all else."""

    def parse(part: str) -> int:
        if not re.fullmatch(r"[0-9]{1,10}", part) or not least <= int(part) <= most:
            raise UsageError(f"{option} {part!r} is not a whole number from {least} to {most}")
        return int(part)

    return parse


def parse_ints(setting: str, spec: Spec, names: Sequence[str]) -> dict[str, int]:
    """The arguments of `spec` as whole numbers by name; those without a name are taken in the order of `names`.

    Raises: UsageError, beginning with `setting`, for another name, one given twice, or no number.
    """
    numbers: dict[str, int] = {}
    unnamed = [(names[place] if place < len(names) else "", value) for place, value in enumerate(spec.positional)]
    for name, value in (*unnamed, *spec.named):
        if name not in names or name in numbers:
            takes = f"{' and '.join(names)}, each once" if names else "no numbers"
            raise UsageError(f"{setting}: {spec.name} takes {takes}")
        if not re.fullmatch(r"-?\d+", value):
            raise UsageError(f"{setting}: {name} must be a whole number, got {value!r}")
        numbers[name] = int(value)
    return numbers


def parse_bytes(option: str, typed: str) -> int:
    """A number of bytes as people write it: `"64MiB"`, `"1.5 GiB"` or `"4096"`; units are powers of 1024.

    Raises: UsageError, beginning with `option`, for another form, or less than one byte.
    """
    match = re.fullmatch(r"\s*([0-9]{1,12}(?:\.[0-9]{1,9})?)\s*([KMGT]?)(?:i?B)?\s*", typed, re.IGNORECASE)
    size = int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " ")) if match else 0
    if not size:
        raise UsageError(f"{option} {typed!r} is no number of bytes; write it as 64MiB, 1.5GiB or 4096")
    return size


def check_given(spec: str, name: str, needed: Sequence[str], numbers: Mapping[str, int]) -> None:
    """Raises: UsageError where a position mode lacks a number that only the user knows."""
    for number in needed:
        if number not in numbers:
            raise UsageError(f"positions={spec!r}: {name} takes a {number} in tokens; write {name}(256), for example")


def _parts(text: str) -> Iterator[str]:
    """The text between the commas that stand outside of parentheses, without spaces around it."""
    start = depth = 0
    for place, sign in enumerate(text):
        depth += (sign == "(") - (sign == ")")
        if sign == "," and depth == 0:
            yield text[start:place].strip()
            start = place + 1
    yield text[start:].strip()


def _is_balanced(text: str) -> bool:
    """Whether every parenthesis is closed after it was opened."""
    depth = 0
    for sign in text:
        depth += (sign == "(") - (sign == ")")
        if depth < 0:
            return False
    return depth == 0
