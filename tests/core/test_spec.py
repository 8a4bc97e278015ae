"""The one grammar of typed specs, by hand."""

import pytest

from windlass.core.errors import UsageError
from windlass.core.parse import Spec, parse_ints, parse_list, parse_spec


@pytest.mark.parametrize(
    ("text", "spec"),
    [
        (" plain ", Spec("plain")),
        ("KEY-diff_2", Spec("KEY-diff_2")),
        ("compact()", Spec("compact", inside="")),
        ("clamp( 7 ,)", Spec("clamp", ("7",), inside=" 7 ,")),
        ("f(a, b=1, c = -2.5)", Spec("f", ("a",), (("b", "1"), ("c", "-2.5")), "a, b=1, c = -2.5")),
        ("f(b=1, b=2)", Spec("f", (), (("b", "1"), ("b", "2")), "b=1, b=2")),
        ("f(g(1, x=2), y=h(3))", Spec("f", ("g(1, x=2)",), (("y", "h(3)"),), "g(1, x=2), y=h(3)")),
        ("f(a/b.txt)", Spec("f", ("a/b.txt",), (), "a/b.txt")),
    ],
)
def test_a_name_and_its_arguments(text: str, spec: Spec) -> None:
    assert parse_spec(text) == spec


@pytest.mark.parametrize(
    "text", ["", " ", "a.b(1)", "f(1", "f(1))", "f(1)(2)", "f(1) 2", "f(,1)", "f(1,,2)", "f(a)b(c)"]
)
def test_another_form_is_none(text: str) -> None:
    assert parse_spec(text) is None


def test_whole_numbers_are_taken_in_order_or_by_name() -> None:
    names = ("group", "window")
    for text in ("f(4, 32)", "f(4, window=32)", "f(window=32, group=4)"):
        spec = parse_spec(text)
        assert spec is not None
        assert parse_ints("x", spec, names) == {"group": 4, "window": 32}
    with pytest.raises(UsageError, match="x: f takes group and window, each once"):
        parse_ints("x", Spec("f", ("1", "2", "3")), names)
    with pytest.raises(UsageError, match=r"x: window must be a whole number, got '1\.5'"):
        parse_ints("x", Spec("f", (), (("window", "1.5"),)), names)


def test_a_comma_inside_parentheses_belongs_to_a_part() -> None:
    assert parse_list("--x", "a, b(1, c(2, 3)),d", str) == ["a", "b(1, c(2, 3))", "d"]
    with pytest.raises(UsageError, match=r"--x 'a,' has an empty value\. Put one comma between two values"):
        parse_list("--x", "a,", str)
