"""The declaration of an option, beside its field: help, range of values and names.

The command line, labels of results, `--kind` and the schema of requests are made of it. Nothing here needs torch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, Final

from windlass.core.errors import UsageError, real_number, whole_number

KEY: Final = "option"  # key of the option in a field's metadata


@dataclass(frozen=True)
class Option:
    """One option of a record. `name` is that of its field.

    `kind` is `int`, `float`, or `str` for a text that stands for an object. A number is from `least` to `most`, or
    above `least` if `is_above`. `off` is the number that disables the option. `words` are taken in place of a number.
    `alone` is the word that the command line takes where no value follows.
    `usual` tells the default, where its value does not. `names` are those that a shell completes to.

    On the command line the option has further `flags`, and a `metavar`, but only if `is_typed`. `label` is the value in
    a row of results, made of the record, and None leaves the option out.
    """

    default: Any
    help: str
    kind: type[int] | type[float] | type[str] = str
    least: int | float = 0
    most: int | float = 0
    is_above: bool = False
    off: int | float | None = None
    words: tuple[str, ...] = ()
    alone: str = ""
    usual: str = ""
    names: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    metavar: str = ""
    is_typed: bool = True
    label: Callable[[Any], int | float | str | None] | None = None
    name: str = ""

    @property
    def variable(self) -> str:
        """The environment variable that gives the option."""
        return f"WINDLASS_{self.name.upper()}"

    @property
    def described(self) -> str:
        """The help, with the default in brackets."""
        default = self.usual or (
            f"{self.off}, off" if self.off is not None and self.default == self.off else self.default
        )
        return f"{self.help} (default: {default})."

    def check(self, value: object) -> Any:
        """Return `value` of this option as a Python number, where it is one. Numbers of numpy are accepted, too.

        Raises: UsageError for a value of another type, or out of range.
        """
        is_optional = self.default is None
        if self.kind is str or (value is None and is_optional) or (isinstance(value, str) and value in self.words):
            return value
        if self.kind is int:
            if self.words and isinstance(value, str):
                words = " or ".join(map(repr, self.words))
                raise UsageError(f"{self.name} must be a whole number from {self.least}, or {words}, got {value!r}")
            return whole_number(self.name, value, int(self.least), int(self.most), ", or None" if is_optional else "")
        number = real_number(self.name, value)
        if not (self.least < number <= self.most or (number == self.least and not self.is_above)):
            bounds = (
                f"above {self.least} and at most {self.most}" if self.is_above else f"from {self.least} to {self.most}"
            )
            off = "" if self.off is None else f" ({self.off}: off)"
            raise UsageError(f"{self.name} must be {bounds}{off}, got {number}")
        return number


def declared(option: Option) -> Any:  # the type of the annotated field
    """The field of a dataclass that `option` declares."""
    return field(default=option.default, metadata={KEY: option})


@cache
def field_info(record: type[Any]) -> dict[str, Option]:
    """The options that the fields of a dataclass declare, by name: default, help, kind and range of each."""
    own = [(each.name, each.metadata[KEY]) for each in fields(record) if KEY in each.metadata]
    return {name: replace(option, name=name) for name, option in own}


def check_fields(record: Any) -> None:
    """Check all numbers of a record, which then are numbers of Python. Raises: UsageError as `Option.check` does."""
    kind: Any = type(record)
    vars(record).update({name: each.check(vars(record)[name]) for name, each in field_info(kind).items()})


def labels_of(record: Any) -> dict[str, Any]:
    """The value of each option that has a label, as rows of results have it."""
    kind: Any = type(record)
    return {name: each.label(record) for name, each in field_info(kind).items() if each.label is not None}
