"""`--stop`: the texts are those of the library, and a line break is typed as `\\n`."""

from collections.abc import Callable
from pathlib import Path

import pytest

import windlass
from tests.helpers import cli
from tests.helpers.cli import Ran, assert_refused
from windlass.cli.options import unescaped

run = cli.run  # a fixture
STORIES = str(Path(__file__).parents[1] / "models" / "stories260K")
PROMPT, OPTIONS = "Once upon a time", ("--dtype", "float32", "-n", "16")


def test_generate_and_chat_end_before_any_of_the_texts(run: Callable[..., Ran]) -> None:
    model, tokenizer = windlass.load(STORIES, "float32")
    (free,) = windlass.generate(model, tokenizer, [PROMPT], max_tokens=16)
    cut = free.text.index("girl")
    stops = ("--stop", "never\\nwritten", "--stop", "girl")
    for ran in (
        run("generate", STORIES, PROMPT, *OPTIONS, *stops),
        run("chat", STORIES, *OPTIONS, *stops, stdin=PROMPT.encode()),
    ):
        assert (ran.code, ran.out) == (0, free.text[:cut] + "\n")
    assert_refused(run("generate", STORIES, PROMPT, *OPTIONS, "--stop", ""), "--stop is an empty text")


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (None, None),
        ([], None),
        ([r"\n\n", "END", ""], ["\n\n", "END", ""]),
        ([r"a\tb", r"\\n", r"\x", "\\"], ["a\tb", r"\n", r"\x", "\\"]),
    ],
    ids=repr,
)
def test_line_breaks_are_typed_with_a_backslash(typed: list[str] | None, meant: list[str] | None) -> None:
    assert unescaped(typed) == meant
