"""Chat through a pipe: the same turns as the library's, commands, and errors in one line."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

import windlass
from tests.helpers import cli
from tests.helpers.chats import TEMPLATE
from tests.helpers.cli import PROMPT, Ran, assert_refused
from tests.helpers.models import MODEL

run, model, tokenizer, in_library = cli.run, cli.model, cli.tokenizer, cli.in_library  # fixtures
OPTIONS = ("--dtype", "float32", "--max-tokens", "12")
OTHER = str(Path(__file__).parents[1] / "models" / "stories260K")


def test_chat_goes_on_in_one_cache(
    run: Callable[..., Ran], in_library: Callable[..., windlass.Result], model: PreTrainedModel
):
    cache = windlass.KVCache(model, 24)
    first = in_library(PROMPT, cache).text
    second = in_library("\nThen he", cache).text
    state = cache.describe()
    fresh = in_library("Then he", windlass.KVCache(model, 24)).text
    lines = [PROMPT, "", "Then he", "/describe", "/what", "/reset", "Then he", "/quit", "unread"]
    options = ("--budget", "24", "--dtype", "float32", "--max-tokens", "12")
    ran = run("chat", MODEL, *options, stdin="\n".join(lines).encode())
    assert (ran.code, ran.out) == (0, f"{first}\n{second}\n{state}\n{fresh}\n")
    assert ran.err.count("held") == 3
    assert "/what is no command. /help lists the commands. //what sends it" in ran.err


def test_chat_at_a_bad_line_keeps_what_was_said(run: Callable[..., Ran], in_library: Callable[..., windlass.Result]):
    ran = run("chat", MODEL, "--dtype", "float32", "--max-tokens", "12", stdin=PROMPT.encode() + b"\n\xff\n")
    assert (ran.code, ran.out) == (2, in_library().text + "\n")
    assert ran.err.endswith("windlass: error: a line on stdin is not UTF-8 text. Convert it first\n")


def chat(run: Callable[..., Ran], *options: str, model: str = MODEL, lines: str = "") -> Ran:
    return run("chat", model, *OPTIONS, *options, stdin=lines.encode())


def test_system_text_is_never_evicted(run: Callable[..., Ran], tmp_path: Path) -> None:
    """From the first message on, and after commands that leave a conversation empty."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    lines = f"{PROMPT}\n/undo\n/system Be kind.\n{PROMPT}\n/rewind 0\n/reset\n{PROMPT}\n/cache\n"
    ran = chat(run, "--budget", "48", "--keep-system", "--system", "Brief.", model=str(folder), lines=lines)
    assert ran.code == 0, ran.err
    assert ran.err.count("held") == 3
    with_none = chat(run, "--budget", "48", "--keep-system", model=str(folder), lines=f"{PROMPT}\n")
    assert with_none.code == 0, with_none.err


def test_a_reply_written_again_after_an_edit_under_recall(run: Callable[..., Ran], tmp_path: Path) -> None:
    """Evicted tokens are stored in the order in which they came, which is no longer that of the text."""
    folder, path = tmp_path / "model", tmp_path / "c.json"
    shutil.copytree(MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    lines = f"hello\nwho\n/edit 1 hi\n/retry\n/save {path}\n"
    options = ("--budget", "96", "--recall", "64")
    assert chat(run, *options, model=str(folder), lines=lines).code == 0
    ran = chat(run, "--load", str(path), model=str(folder), lines="and\n")
    assert ran.code == 0, ran.err
    assert "damaged" not in ran.err


def test_a_damaged_cache_beside_a_conversation(run: Callable[..., Ran], tmp_path: Path) -> None:
    """Its text is read again, as by /load."""
    path = tmp_path / "c.json"
    assert chat(run, lines=f"{PROMPT}\n/save {path}\n").code == 0
    beside = tmp_path / "c.json.cache"
    beside.write_bytes(beside.read_bytes()[:3000])
    ran = chat(run, "--load", str(path), lines="and\n")
    assert ran.code == 0, ran.err
    assert "its text was read again" in ran.err


def test_a_saved_conversation_has_its_own_system_text(run: Callable[..., Ran], tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    assert chat(run, lines=f"{PROMPT}\n/save {path}\n").code == 0
    (tmp_path / "c.json.cache").unlink()
    ran = chat(run, "--load", str(path), "--system", "Only in French.")
    assert_refused(ran, "both --load and --system were given")


@pytest.fixture
def templated(tmp_path: Path) -> Callable[[str], str]:
    """A folder with the shipped model under another chat template."""

    def make(template: str) -> str:
        folder = tmp_path / "templated"
        shutil.copytree(MODEL, folder)
        (folder / "chat_template.jinja").write_text(template)
        return str(folder)

    return make


def test_a_pipe_needs_no_terminal_library_and_no_colour(run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "prompt_toolkit"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prompt_toolkit", None)  # to import it is an error
    ran = chat(run, lines=PROMPT + "\\\nand\n/help\n")
    assert ran.code == 0
    assert ran.out.count("\n") == 2, "a line is a turn, whatever its end"
    assert "\x1b" not in ran.out + ran.err


def test_only_a_base_model_is_told_so(run: Callable[..., Ran], templated: Callable[[str], str]):
    told = "windlass: note: this model has no chat template"
    assert chat(run).err.count(told) == 1
    assert told not in chat(run, model=templated(TEMPLATE)).err


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ messages }", "chat template fails: unexpected '}'"),
        ("{{ raise_exception('no words') }}", "chat template fails: no words"),
        ("{{ 1 / 0 }}", "chat template fails: division by zero"),
    ],
)
def test_a_broken_template_ends_the_chat_before_it_begins(
    run: Callable[..., Ran], templated: Callable[[str], str], template: str, says: str
):
    assert_refused(chat(run, model=templated(template), lines="\n"), says)


@pytest.mark.parametrize(
    ("line", "message"),
    [("/etc/passwd is a file", "/etc/passwd is a file"), ("//quit", "/quit"), ("// the end", "/ the end")],
)
def test_messages_may_begin_with_a_slash(
    run: Callable[..., Ran], in_library: Callable[..., windlass.Result], line: str, message: str
):
    assert chat(run, lines=line + "\n").out.rstrip("\n") == in_library(message).text.rstrip("\n")


@pytest.mark.parametrize("line", ["/quit", "/exit", " /quit "])
def test_words_after_a_slash_are_commands(run: Callable[..., Ran], line: str):
    assert chat(run, lines=f"{line}\nunread\n").out == ""
    ran = chat(run, lines=f"{line.strip()} now\n")
    assert (ran.code, ran.out) == (0, "")
    assert f"{line.strip()} takes nothing after it" in ran.err


def test_a_saved_conversation_goes_on_in_another_process(run: Callable[..., Ran], tmp_path: Path):
    file = str(tmp_path / "talk")
    whole = chat(run, "--budget", "16", lines=f"{PROMPT}\nThen he\nAnd\n")
    saved = chat(run, "--budget", "16", lines=f"{PROMPT}\nThen he\n/save {file}\n")
    assert saved.code == 0
    rest = chat(run, "--load", file, lines="And\n")
    assert saved.out + rest.out == whole.out
    assert "2 turns" in rest.err
    assert_refused(chat(run, "--load", file, "--budget", "20"), f"--budget 20 contradicts {file}.cache")
    assert_refused(chat(run, "--load", file, "--prompt-cache", file), "use one")
    Path(file + ".cache").unlink()
    assert_refused(chat(run, "--load", file, model=OTHER), "was held with finder-3m, this is stories260K")
    assert_refused(chat(run, "--load", str(tmp_path / "none")), "cannot be read: No such file")
    assert "read again" in chat(run, "--load", file, lines="And\n").err


def test_a_command_that_fails_ends_a_pipe(run: Callable[..., Ran], tmp_path: Path):
    ran = chat(run, lines=f"/load {tmp_path}\nunread\n")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.splitlines()[-1].startswith("windlass: error: conversation")
