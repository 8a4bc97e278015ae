"""Which word is the model and which the prompt: every case, worked by hand."""

from pathlib import Path

import pytest

from windlass.cli.options import file_of_info, model_and_prompt, resolve_model
from windlass.core.errors import UsageError

DEFAULT, TYPED = True, False


@pytest.mark.parametrize(
    ("words", "model", "has_file", "is_default", "expected"),
    [
        (("a", "b c"), None, False, TYPED, ("a", "b c")),
        (("a",), None, False, TYPED, ("a", None)),
        ((), "m", False, TYPED, ("m", None)),
        (("a",), "m", False, TYPED, ("m", "a")),
        (("org/name",), "m", False, TYPED, ("m", "org/name")),
        (("folder",), "m", False, TYPED, ("m", "folder")),
        # WINDLASS_MODEL
        ((), "m", False, DEFAULT, ("m", None)),
        (("a b",), "m", False, DEFAULT, ("m", "a b")),
        (("once",), "m", False, DEFAULT, ("m", "once")),
        (("-",), "m", False, DEFAULT, ("m", "-")),
        (("/etc/passwd is a file",), "m", False, DEFAULT, ("m", "/etc/passwd is a file")),
        (("a", "b"), "m", False, DEFAULT, ("a", "b")),
        (("folder",), "m", False, DEFAULT, ("folder", None)),
        (("./gone",), "m", False, DEFAULT, ("./gone", None)),
        (("org/name",), "m", True, DEFAULT, ("org/name", None)),
        (("either or/both",), "m", False, DEFAULT, ("m", "either or/both")),
    ],
)
def test_words_are_a_model_and_a_prompt(
    words: tuple[str, ...],
    model: str | None,
    has_file: bool,
    is_default: bool,
    expected: tuple[str, str | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    first, second = (*words, None, None)[:2]
    assert model_and_prompt(first, second, model, has_file, is_default) == expected


@pytest.mark.parametrize(
    ("words", "model", "is_default", "says"),
    [
        ((), None, TYPED, "no model. Name one first, with -m, or in WINDLASS_MODEL"),
        (("Once upon a time",), None, TYPED, "'Once upon a time' looks like a prompt"),
        (("a", "b"), "m", TYPED, "-m m, and two words more, 'a' and 'b'. Quote a prompt of many words"),
        (("org/name",), "m", DEFAULT, "org/name can be a model or a prompt. Write -m org/name, or -m m org/name"),
    ],
)
def test_what_can_be_meant_as_either_is_refused(words: tuple[str, ...], model: str | None, is_default: bool, says: str):
    first, second = (*words, None, None)[:2]
    with pytest.raises(UsageError) as caught:
        model_and_prompt(first, second, model, False, is_default)
    assert says in str(caught.value)


def test_a_model_alone():
    assert resolve_model("a", None, TYPED) == "a"
    assert resolve_model(None, "m", TYPED) == "m"
    assert resolve_model("a", "m", DEFAULT) == "a"
    assert resolve_model(None, "m", DEFAULT) == "m"
    with pytest.raises(UsageError, match=r"two models, a and -m m\. Give one of them"):
        resolve_model("a", "m", TYPED)
    with pytest.raises(UsageError, match="no model"):
        resolve_model(None, None, TYPED)


def test_both_ways_to_ask_what_is_in_a_file():
    assert file_of_info("f", "info") == file_of_info("info", "f") == Path("f")
    assert [file_of_info(*words) for words in ((None, None), ("info", None), ("f", "text"))] == [None] * 3
