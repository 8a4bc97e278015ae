"""Checks of arguments: accepted values, refused ones, and the form of a value in an error."""

import re
from collections.abc import Callable

import numpy as np
import pytest
import torch

from windlass import UsageError
from windlass.core.errors import check_kind, real_number, shown, whole_number
from windlass.policies import KeyDiff


@pytest.mark.parametrize("value", [7, np.int64(7), np.uint8(7)])
def test_a_whole_number_is_one_of_python(value: object) -> None:
    assert type(whole_number("a", value, 5, 9)) is int
    assert whole_number("a", value, 5, 9) == 7
    assert type(real_number("a", value)) is float


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: whole_number("a", 64.0, 5, 99), "a must be a whole number from 5 to 99, got 64.0. Write 64"),
    (lambda: whole_number("a", 6.5, 5, 9, ", or None"), "a must be a whole number from 5 to 9, or None, got 6.5"),
    (lambda: whole_number("a", True, 0, 9), "a must be a whole number from 0 to 9, got True"),
    (lambda: whole_number("a", np.bool_(True), 0, 9), "a must be a whole number from 0 to 9, got a bool"),
    (lambda: whole_number("a", "7", 0, 9), "a must be a whole number from 0 to 9, got '7'"),
    (lambda: whole_number("a", float("inf"), 0, 9), "a must be a whole number from 0 to 9, got inf"),
    (lambda: whole_number("a", 10**40, 0, 9), f"a must be from 0 to 9, got {10**40}"),
    (lambda: real_number("a", "x"), "a must be a number, got 'x'"),
    (lambda: real_number("a", False), "a must be a number, got False"),
    (lambda: check_kind("a", 3, str, "a text"), "a must be a text, got 3"),
    (lambda: check_kind("a", None, str, "a text", "Write one"), "a must be a text, got None. Write one"),
]


@pytest.mark.parametrize(("call", "says"), WRONG, ids=[says for _, says in WRONG])
def test_what_is_wrong_is_told_in_one_line(call: Callable[[], object], says: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(says)}$"):
        call()


def test_a_long_value_is_shown_by_its_type() -> None:
    assert shown({"temperature": 1}) == "{'temperature': 1}"
    assert shown("a\nb") == r"'a\nb'"
    assert len(shown("x" * 10**6)) < 60
    assert shown(["a" * 30] * 9) == "a list"
    assert shown(torch.nn.Linear(2, 3)) == "a Linear"
    assert shown(torch.zeros(5)) == "a Tensor"
    assert shown(UsageError("x")) == "an UsageError"
    assert shown(KeyDiff) == "the class KeyDiff"
