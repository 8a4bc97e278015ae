"""Checks of what a caller passed: its type, its range. Errors name the argument, its value and what is wanted."""

import reprlib
from numbers import Integral, Real

from windlass.core.errors import UsageError

BUILTIN = (str, bytes, Real, list, tuple, dict, set, type(None))
MAX_SHOWN = 60  # signs of a value in an error


def shown(value: object) -> str:
    """`value` as an error shows it: what is short as it is, all else by its type, such as `a LlamaForCausalLM`."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, BUILTIN):
        text = reprlib.repr(value)
        if len(text) <= MAX_SHOWN and text.isprintable():
            return text
    name = type(value).__name__
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def check_kind(name: str, value: object, kinds: type | tuple[type, ...], wanted: str, way_out: str = "") -> None:
    """Raises: UsageError where `value` is of none of `kinds`: `name` must be `wanted`."""
    if not isinstance(value, kinds):
        raise UsageError(f"{name} must be {wanted}, got {shown(value)}" + (f"; {way_out}" if way_out else ""))


def whole_number(name: str, value: object, least: int, most: int, otherwise: str = "") -> int:
    """`value`, of Python or numpy, as an int of Python. `otherwise` tells what else is taken: `" or None"`.

    Raises: UsageError for what is no whole number (64.0 and True are none), or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        hint = f"; write {round(value)}" if isinstance(value, float) and value.is_integer() else ""
        raise UsageError(f"{name} must be a whole number from {least} to {most}{otherwise}, got {shown(value)}{hint}")
    number = int(value)
    if not least <= number <= most:
        raise UsageError(f"{name} must be from {least} to {most}, got {number}")
    return number


def real_number(name: str, value: object) -> float:
    """`value`, of Python or numpy, as a number of Python. Raises: UsageError for what is none; True is none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UsageError(f"{name} must be a number, got {shown(value)}")
    return float(value)
