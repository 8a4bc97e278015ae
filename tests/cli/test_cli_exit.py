"""How the command line ends: interrupts, pipes and full disks."""

import io
import os
import pty
import signal
import subprocess
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import windlass
from tests.helpers import cli
from tests.helpers.cli import LAST_LINE, PROMPT, START, Ran, generate, rest_of
from tests.helpers.models import MODEL
from windlass.cli import session
from windlass.cli.terminal import Bar, as_interrupts, note

run, model, tokenizer, in_library = cli.run, cli.model, cli.tokenizer, cli.in_library  # fixtures


@pytest.mark.parametrize("when", ["prefill", "decode"])
def test_an_interrupt_keeps_what_was_produced(
    run: Callable[..., Ran], in_library: Callable[..., windlass.Result], monkeypatch: pytest.MonkeyPatch, when: str
):
    count = []
    step = windlass.KVCache.begin

    def begin(cache: windlass.KVCache, *arguments: Any) -> None:
        count.append(1)
        if len(count) == {"prefill": 3, "decode": 11}[when]:
            raise KeyboardInterrupt
        step(cache, *arguments)

    monkeypatch.setattr(windlass.KVCache, "begin", begin)
    ran = run(*generate(PROMPT, "--chunk", "4"))
    monkeypatch.undo()
    whole = in_library().text
    assert ran.code == 130
    assert ran.err.startswith("interrupted, prefill ")
    if when == "prefill":
        assert ran.out == ""
        assert ran.err.startswith("interrupted, prefill 8 of ")
    else:
        assert len(ran.out) > 5
        assert whole.startswith(ran.out.removesuffix("\n"))


def test_an_interrupt_while_text_is_shown_loses_no_token(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
):
    cache = windlass.KVCache(model)
    stream = windlass.stream(model, tokenizer, PROMPT, cache)
    monkeypatch.setattr(session, "say", Mock(side_effect=[None, None, KeyboardInterrupt, None]))
    assert session.write(stream, is_shown=True) == 130
    result = stream.result
    assert len(result.tokens) == 3
    assert cache.tokens_seen == [result.prompt_tokens + 3]


def test_an_interrupted_cache_does_not_replace_an_older_file(
    run: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = tmp_path / "old.safetensors"
    file.write_bytes(b"old")
    with monkeypatch.context() as patched:
        patched.setattr(Bar, "__call__", Mock(side_effect=KeyboardInterrupt))
        ran = run("cache", MODEL, PROMPT, "--prompt-cache", str(file))
    assert (ran.code, ran.out, file.read_bytes()) == (130, "", b"old")
    assert f"{file} stays as it was. {file}.part holds the first 18 of 18 tokens" in ran.err
    assert run("cache", MODEL, PROMPT, "--prompt-cache", str(file)).code == 0
    assert [each.name for each in tmp_path.iterdir()] == [file.name]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_other_signals_end_a_command_as_ctrl_c_does(number: signal.Signals):
    before = signal.signal(number, signal.SIG_DFL)  # tests that nohup starts ignore a hangup
    try:
        with pytest.raises(KeyboardInterrupt), as_interrupts():
            os.kill(os.getpid(), number)
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("is_late", [True, False])
def test_a_note_begins_a_line_where_a_pipe_lags_behind(monkeypatch: pytest.MonkeyPatch, is_late: bool):
    """A row of spaces after a text ends in the next line. Where the cursor is at the start of a line, it stays."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 40))
    terminal = os.fdopen(theirs, "w")
    terminal.write("half a text" * is_late)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr("sys.stdout", io.StringIO())
    note("times: 1 s")
    terminal.close()
    assert screen(rest_of(ours).decode(), 40) == ["half a text"] * is_late + ["times: 1 s"]


def screen(shown: str, columns: int) -> list[str]:
    """The lines of a terminal, which goes to the next one when a sign does not fit."""
    lines, column = [""], 0
    for sign in shown.replace("\x1b[K", ""):
        if sign == "\r":
            column = 0
        elif sign == "\n":
            lines.append("")
        else:
            if column == columns:
                lines.append("")
                column = 0
            lines[-1] = lines[-1][:column].ljust(column) + sign + lines[-1][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines if line.strip()]


# Tests that need a process of their own.


def environment() -> dict[str, str]:
    root = str(Path(windlass.__file__).parents[1])
    return {**os.environ, "PYTHONPATH": root, "HF_HUB_OFFLINE": "1", "TERM": "xterm"}


@pytest.mark.slow
def test_a_pipe_gets_plain_text_and_a_terminal_the_bar(in_library: Callable[..., windlass.Result]):
    ours, theirs = pty.openpty()
    command = [*START, *generate(PROMPT, "--threads", "1", "--chunk", "4")]
    ran = subprocess.run(command, env=environment(), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    shown = rest_of(ours)
    assert "reading" in shown.decode()
    assert "\x1b[" in shown.decode()
    assert ran.stdout.decode() == in_library().text + "\n"


def test_ctrl_c_ends_cleanly():
    command = [*START, "generate", MODEL, PROMPT, "--max-tokens", "100000", "--budget", "64", "--threads", "1"]
    command += ["--dtype", "float32", "--policy", "recent", "--positions", "compact"]  # nothing is left to be noted
    with subprocess.Popen(
        command,
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,  # no text is read ahead, which would be lost
        # A test runner in the background passes on that it ignores interrupts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stdout is not None
        first = b""
        while len(first) < 20 and (more := process.stdout.read(20)):
            first += more
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(first) >= 20
    assert (first + out).endswith(b"\n")
    last = err.decode().strip()
    assert LAST_LINE.fullmatch(last), "more than the last line, or colours"
    assert last.startswith("interrupted, ")


@pytest.mark.slow
def test_a_full_disk_is_no_traceback():
    command = [*START, *generate(PROMPT, "--threads", "1")]
    with Path("/dev/full").open("wb") as full:
        ran = subprocess.run(command, env=environment(), stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE)
    assert (ran.returncode, ran.stderr) == (2, b"windlass: error: the output: No space left on device\n")


@pytest.mark.slow
def test_a_closed_pipe_is_no_traceback():
    command = [*START, *generate(PROMPT, "--threads", "1")]
    reader, writer = os.pipe()
    os.close(reader)
    ran = subprocess.run(command, env=environment(), stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    assert (ran.returncode, ran.stderr) == (1, b"")
