"""Checks of a field's value. Each takes the field's name and its value, and gives the value that is used."""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

from windlass.core.check import shown
from windlass.serve.errors import BadField

Check = Callable[[str, Any], Any]


def whole(least: int, most: int) -> Check:
    """A whole number in a range; `true` and 4.0 are none."""

    def check(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise BadField(name, f"must be a whole number from {least} to {most}, got {shown(value)}")
        if not least <= value <= most:
            raise BadField(name, f"must be from {least} to {most}, got {shown(value)}")
        return value

    return check


def real(least: float, most: float, is_open: bool = False) -> Check:
    """A number in a range, without `least` if it `is_open` there."""
    wanted = f"{'above' if is_open else 'from'} {least:g} {'and at most' if is_open else 'to'} {most:g}"

    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BadField(name, f"must be a number {wanted}, got {shown(value)}")
        if not least <= value <= most or not math.isfinite(value) or (is_open and value == least):
            raise BadField(name, f"must be {wanted}, got {shown(value)}")
        return float(value)

    return check


def flag(name: str, value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise BadField(name, f"must be true or false, got {shown(value)}")
    return value


def text(most: int, least: int = 0) -> Check:
    """A string of so many characters."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise BadField(name, f"must be a string, got {shown(value)}")
        if not least <= len(value) <= most:
            raise BadField(name, f"must have from {least} to {most} characters, got {len(value)}")
        return value

    return check


def name_of(most: int) -> Check:
    """A word that somebody made up, of so many characters."""

    def check(name: str, value: Any) -> str:
        given = str(text(most, least=1)(name, value))
        if not all(sign.isascii() and (sign.isalnum() or sign in "_-.") for sign in given):
            raise BadField(name, f"may have letters, digits, _, - and . only, got {shown(given)}")
        return given

    return check


def one_of(names: Collection[str]) -> Check:
    """One of some words."""

    def check(name: str, value: Any) -> str:
        if not isinstance(value, str) or value not in names:
            raise BadField(name, f"must be one of {', '.join(names)}; got {shown(value)}")
        return value

    return check


def listed(each: Check, most: int, least: int = 0) -> Check:
    """A list of so many values."""

    def check(name: str, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise BadField(name, f"must be a list, got {shown(value)}")
        if not least <= len(value) <= most:
            raise BadField(name, f"must have from {least} to {most} entries, got {len(value)}")
        return [each(f"{name}.{at}", one) for at, one in enumerate(value)]

    return check


def record(checks: Mapping[str, Check], needed: Collection[str] = ()) -> Check:
    """An object with some of these fields, and all of those `needed`; null stands for a field that is not there."""

    def check(name: str, value: Any) -> dict[str, Any]:
        given = mapping(name, value)
        for field in needed:
            if given.get(field) is None:
                raise BadField(f"{name}.{field}", "is missing", "missing_required_parameter")
        for field, one in given.items():
            if field not in checks and one is not None:
                raise BadField(f"{name}.{short(field)}", "is not supported", "unknown_parameter")
        return {field: checks[field](f"{name}.{field}", one) for field, one in given.items() if one is not None}

    return check


def mapping(name: str, value: Any) -> dict[str, Any]:
    """An object of any fields."""
    if not isinstance(value, dict):
        raise BadField(name, f"must be an object, got {shown(value)}")
    return value


def short(name: str) -> str:
    """A name that a client made up, as an error may repeat it."""
    return name if len(name) <= 64 and name.isprintable() else repr(name[:32]) + "..."
