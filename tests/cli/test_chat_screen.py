"""Lines typed at a terminal, by keys as terminals send them, and words at the screen's edge."""

import io
import os
import pty
import random
import select
import stat
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from prompt_toolkit.data_structures import Size
from prompt_toolkit.input import PipeInput, create_pipe_input
from prompt_toolkit.output import ColorDepth, DummyOutput
from prompt_toolkit.utils import get_cwidth

from windlass.cli import terminal as state
from windlass.cli.chat.run import Screen, show_reply
from windlass.cli.terminal import INTERRUPTED, Bar, Page, hide_keys

ENTER, ALT_ENTER, CTRL_C, CTRL_D, UP = "\r", "\x1b\r", "\x03", "\x04", "\x1b[A"
Asked = Callable[..., "str | None"]


def pasted(text: str) -> str:
    return f"\x1b[200~{text}\x1b[201~"


@pytest.fixture
def keys() -> Iterator[PipeInput]:
    with create_pipe_input() as made:
        yield made


@pytest.fixture
def asked(keys: PipeInput) -> Asked:
    """The line that a screen gives for these keys."""

    def ask(typed: str, history: Path | None = None, screen: Screen | None = None) -> str | None:
        keys.send_text(typed)
        return (screen or Screen(history, (), keys, DummyOutput())).ask("status")

    return ask


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("hello" + ENTER, "hello"),
        (pasted("one\ntwo\r\nthree") + ENTER, "one\ntwo\nthree"),
        (pasted("one\n") + pasted("  two") + " more" + ENTER, "one\n  two more"),
        ("one" + ALT_ENTER + "  two" + ENTER, "one\n  two"),
        ("one\\" + ENTER + "two\\" + ENTER + ENTER, "one\ntwo\n"),
        ("a \\ b" + ENTER, "a \\ b"),
        ("abc" + CTRL_C + "def" + ENTER, "def"),
        (CTRL_C + "abc" + CTRL_C + "def" + ENTER, "def"),
        ("abc" + CTRL_C + CTRL_C + "def" + ENTER, "def"),
        ("abc" + CTRL_D + "d" + ENTER, "abcd"),
        (CTRL_D, None),
        ("gr\u00fc\u00df \u4f60\u597d" + ENTER, "gr\u00fc\u00df \u4f60\u597d"),
    ],
)
def test_what_keys_make(asked: Asked, typed: str, message: str | None):
    assert asked(typed) == message


def test_ctrl_c_twice_on_an_empty_line_ends(asked: Asked):
    for typed in (CTRL_C + CTRL_C, "abc" + CTRL_C + CTRL_C + CTRL_C):
        with pytest.raises(KeyboardInterrupt):
            asked(typed)


def test_lines_come_back_in_the_next_session(asked: Asked, tmp_path: Path):
    history = state.private_file(tmp_path / "deep" / "history")
    assert asked("one\\" + ENTER + "two" + ENTER, history) == "one\ntwo"
    assert asked("three" + ENTER, history) == "three"
    assert asked(UP + ENTER, history) == "three"
    assert asked(UP + UP + ENTER, history) == "one\ntwo"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert stat.S_IMODE(history.parent.stat().st_mode) == 0o700


def test_without_history_nothing_is_written(asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert asked("one" + ENTER) == "one"
    assert list(tmp_path.iterdir()) == []


class Screenful(DummyOutput):
    """Notes the drawn text."""

    def __init__(self) -> None:
        self.drawn = ""
        self.is_coloured = False

    def get_size(self) -> Size:
        return Size(rows=20, columns=60)

    def get_default_color_depth(self) -> ColorDepth:
        return ColorDepth.DEPTH_4_BIT

    def write(self, data: str) -> None:
        self.drawn += data

    def set_attributes(self, attrs: object, color_depth: ColorDepth) -> None:
        self.is_coloured |= color_depth is not ColorDepth.MONOCHROME


@pytest.mark.parametrize("is_plain", [True, False])
def test_a_line_of_status_and_colours(keys: PipeInput, monkeypatch: pytest.MonkeyPatch, is_plain: bool):
    monkeypatch.delenv("NO_COLOR", raising=False)
    if is_plain:
        monkeypatch.setenv("NO_COLOR", "1")
    output = Screenful()
    keys.send_text("hello" + ENTER)
    assert Screen(None, (), keys, output).ask("12 tokens seen") == "hello"
    assert "12 tokens seen" in output.drawn
    assert output.is_coloured is not is_plain


def test_the_folder_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state.state_folder() == tmp_path / "windlass"
    monkeypatch.setenv("HOME", str(tmp_path))
    for platform, folder in (("linux", ".local/state"), ("darwin", "Library/Application Support")):
        monkeypatch.setattr("sys.platform", platform)
        for unset in ("", "relative/path"):
            monkeypatch.setenv("XDG_STATE_HOME", unset)
            assert state.state_folder() == tmp_path / folder / "windlass"


def written(pieces: list[str], width: int) -> str:
    shown: list[str] = []
    page = Page(shown.append, lambda: width)
    for piece in pieces:
        page.push(piece)
    page.end()
    return "".join(shown)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("one two three", ["one two", "three"]),
        ("exactly8", ["exactly8"]),
        ("exactly8 one", ["exactly8", "one"]),
        ("one  two\n\n  three", ["one  two", "", "  three"]),
        ("much-too-long-for-it", ["much-too-long-for-it"]),
        ("a much-too-long-for-it b", ["a", "much-too-long-for-it b"]),  # four columns into a line of its own
        ("\u4f60\u597d\u4e16\u754c\u4f60\u597d", ["\u4f60\u597d\u4e16\u754c", "\u4f60\u597d"]),
        ("caf\u00e9 cr\u00e8me", ["caf\u00e9 ", "cr\u00e8me"]),
    ],
)
def test_words_are_whole_at_the_edge(text: str, lines: list[str]):
    assert [line.rstrip() for line in written([text], 8).splitlines()] == [line.rstrip() for line in lines]


def test_words_are_whole_however_they_come():
    draw = random.Random(5)
    words = [
        "a",
        "is",
        "the",
        "boat,",
        "sitting",
        "d\u00e9j\u00e0",
        "river.\n",
        "\n  and",
        "\u4f60\u597d",
        "understood",
    ]
    for width in (13, 21, 34):
        text = " ".join(draw.choices(words, k=60))
        cuts = sorted(draw.sample(range(1, len(text)), 25))
        pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        shown = written(pieces, width)
        assert shown == written([text], width)
        assert shown.replace("\n", "").replace(" ", "") == text.replace("\n", "").replace(" ", "")
        assert max(map(get_cwidth, shown.splitlines())) <= width
        assert shown.endswith("\n")


def test_an_interrupt_shows_no_further_word(monkeypatch: pytest.MonkeyPatch):
    def pieces() -> Iterator[str]:
        yield from ("Once upon", " a ti", "me")
        raise KeyboardInterrupt

    shown: list[str] = []
    monkeypatch.setattr("windlass.cli.chat.run.say", shown.append)
    assert show_reply(cast(Any, pieces())) == INTERRUPTED
    assert "".join(shown) == "Once upon a \n"


def test_typed_keys_wait_unseen(monkeypatch: pytest.MonkeyPatch):
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "r") as terminal:
        monkeypatch.setattr("sys.stdin", terminal)
        before = termios.tcgetattr(theirs)
        with hide_keys():
            os.write(ours, b"typed ahead\r")
            assert os.read(theirs, 100) == b"typed ahead\r"
            assert select.select([ours], [], [], 0.1)[0] == [], "typed keys are shown"
        assert termios.tcgetattr(theirs) == before
    os.close(ours)


@pytest.mark.parametrize("total", [1067, 4])
def test_a_bar_tells_its_total_from_the_start(monkeypatch: pytest.MonkeyPatch, total: int):
    stderr = io.StringIO()
    monkeypatch.setattr(stderr, "isatty", lambda: True)
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setenv("TERM", "xterm")
    with Bar("reading again", total):
        pass
    assert f"0/{total}" in stderr.getvalue()
