"""The errors a user of windlass can meet.

WindlassError            every error below: the command line prints it as one line, exit code 2
  UsageError             an argument, a prompt or a position that cannot be honoured
  PolicyError            a policy broke its contract, or could not be found or loaded
  UnsupportedModel       the model cannot work with a cache of un-rotated keys, and why
  PromptCacheError       a prompt-cache file that is damaged, foreign or too new
  RecordingError         a recording of a cache that is damaged or too new

WindlassWarning          a note to the user, which the command line prints
"""

import reprlib
from numbers import Integral, Real


class WindlassError(Exception):
    """Any error that a user can mend."""


class UsageError(WindlassError, ValueError):
    """An argument, a prompt or a position that cannot be honoured."""


class PolicyError(WindlassError):
    """A policy that is unknown, does not load, or breaks its contract."""


class UnsupportedModel(WindlassError):
    """A model that cannot work with a cache of un-rotated keys."""


class PromptCacheError(WindlassError):
    """A prompt-cache file that is damaged, was made by another model, or is too new."""


class RecordingError(WindlassError):
    """A recording of a cache that is damaged, too new, or none at all."""


class WindlassWarning(UserWarning):
    """A notice for the user. The work continues."""


BUILTIN = (str, bytes, Real, list, tuple, dict, set, type(None))
MAX_SHOWN = 60  # characters of a value in an error


def shown(value: object) -> str:
    """`value` as an error shows it: short ones as they are, all else by type, such as `a LlamaForCausalLM`."""
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
        raise UsageError(f"{name} must be {wanted}, got {shown(value)}" + (f". {way_out}" if way_out else ""))


def whole_number(name: str, value: object, least: int, most: int, otherwise: str = "") -> int:
    """`value`, of Python or numpy, as a Python int. `otherwise` names further accepted values: `" or None"`.

    Raises: UsageError if it is no whole number (64.0 and True are none), or out of range.
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        hint = f". Write {round(value)}" if isinstance(value, float) and value.is_integer() else ""
        raise UsageError(f"{name} must be a whole number from {least} to {most}{otherwise}, got {shown(value)}{hint}")
    number = int(value)
    if not least <= number <= most:
        raise UsageError(f"{name} must be from {least} to {most}, got {number}")
    return number


def real_number(name: str, value: object) -> float:
    """`value`, of Python or numpy, as a Python number. Raises: UsageError if it is no number. True is none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise UsageError(f"{name} must be a number, got {shown(value)}")
    return float(value)
