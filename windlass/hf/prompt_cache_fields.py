"""The fields of a JSON object that need not come from a friend: each is checked when it is taken."""

from typing import Any, NoReturn

from windlass.core.limits import MAX_NUMBER
from windlass.hf.policy_note import MAX_POLICY_NUMBER, MAX_TEXT, is_policy_number


class InconsistentFile(Exception):
    """Something in a file that `save` would not have written; the message says what, in one short line."""


class Fields:
    """The fields of a JSON object, each checked when it is taken. Errors name the field and the object, `where`."""

    def __init__(self, data: object, where: str) -> None:
        if not isinstance(data, dict):
            raise InconsistentFile(f"{where} is {shown(data)}, not an object")
        self._left, self._where = dict(data), where

    def end(self) -> None:
        """To be called when all fields are taken. Raises: InconsistentFile for one that is left."""
        for name in self._left:
            raise InconsistentFile(f"{self._where} has an unknown field {shown(name)}")

    def text(self, name: str) -> str:
        value = self._take(name)
        # What is shown in an error must neither break its line nor steer a terminal.
        if isinstance(value, str) and len(value) <= MAX_TEXT and value.isprintable():
            return value
        return self._refuse(name, value, f"a text of one line and at most {MAX_TEXT} characters")

    def text_or_none(self, name: str) -> str | None:
        return self._take(name) if self._is_none(name) else self.text(name)

    def whole(self, name: str, least: int = 0) -> int:
        value = self._take(name)
        if is_whole(value, least):
            return int(value)
        return self._refuse(name, value, f"a whole number from {least} to {MAX_NUMBER}")

    def whole_or_none(self, name: str, least: int = 0) -> int | None:
        return self._take(name) if self._is_none(name) else self.whole(name, least)

    def wholes(self, name: str, count: int) -> list[int]:
        values = self.items(name)
        if len(values) == count and all(map(is_whole, values)):
            return values
        return self._refuse(name, values, f"{count} whole numbers from 0 to {MAX_NUMBER}, one per row")

    def lists(self, name: str, count: int) -> list[list[Any]]:
        values = self.items(name)
        if len(values) == count and all(isinstance(each, list) for each in values):
            return values
        return self._refuse(name, values, f"{count} lists, one per row")

    def numbers(self) -> dict[str, float | int | bool | None]:
        """All fields: finite numbers, true, false or null."""
        numbers, self._left = self._left, {}
        for name, value in numbers.items():
            if not is_policy_number(value):
                self._refuse(name, value, "a number")
        return numbers

    def objects(self) -> list[str]:
        """The names of the fields that are objects."""
        return [name for name, value in self._left.items() if isinstance(value, dict)]

    def flag(self, name: str) -> bool:
        value = self._take(name)
        return value if isinstance(value, bool) else self._refuse(name, value, "true or false")

    def items(self, name: str) -> list[Any]:
        value = self._take(name)
        return value if isinstance(value, list) else self._refuse(name, value, "a list")

    def inner(self, name: str) -> "Fields":
        return Fields(self._take(name), f"{name} in {self._where}")

    def any(self, name: str) -> object:
        return self._take(name)

    def null(self, name: str) -> object:
        value = self._take(name)
        return value if value is None else self._refuse(name, value, "null")

    def _is_none(self, name: str) -> bool:
        return name in self._left and self._left[name] is None

    def _take(self, name: str) -> Any:
        if name not in self._left:
            raise InconsistentFile(f"{self._where} has no field {name!r}")
        return self._left.pop(name)

    def _refuse(self, name: str, value: object, wanted: str) -> NoReturn:
        raise InconsistentFile(f"{name} in {self._where} is {shown(value)}, not {wanted}")


def is_whole(value: object, least: int = 0) -> bool:
    return type(value) is int and least <= value <= MAX_NUMBER


def object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Without it, of two fields of one name the first would be lost silently."""
    data = dict(pairs)
    if len(data) < len(pairs):
        raise ValueError("a field is there twice")
    return data


def constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def shown(value: object) -> str:
    """A short form of what a file holds, on one line and without signs that steer a terminal."""
    if isinstance(value, list | dict):
        return f"a list of {len(value)}" if isinstance(value, list) else "an object"
    if isinstance(value, int | float) and not abs(value) <= MAX_POLICY_NUMBER:
        return "a huge number"
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."
