"""A conversation that outlives its process: the written file, reading it back, and its owner."""

import json
import os
import pty
import re
import select
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest

import windlass
from tests.helpers import chats, cli
from tests.helpers.chats import FIRST, SECOND, THIRD, Make
from tests.helpers.cli import START
from tests.helpers.models import MODEL
from windlass.cli.chat import conversation
from windlass.cli.chat.commands import ChatCommands
from windlass.cli.chat.conversation import Exchange, Journal, SavedChat
from windlass.cli.chat.dialogue import Dialogue
from windlass.cli.chat.run import offer

model, dialogue = cli.model, chats.dialogue  # fixtures


def journals(folder: Path) -> list[Path]:
    return sorted((folder / "chats").glob("*"))


def left_behind(talk: Dialogue) -> Dialogue:
    """As if its process had been killed: the lock is gone, the file is as it was."""
    talk.journal._file.close()
    talk.journal._file = None
    return talk


def chat_of(found: tuple[Path, SavedChat] | None) -> SavedChat:
    assert found is not None, "no conversation was found"
    return found[1]


def said(turns: list[Exchange]) -> list[tuple[str, str]]:
    return [(turn.line, turn.reply) for turn in turns]


def test_what_was_left_behind_goes_on(dialogue: Make, tmp_path: Path):
    talk = dialogue(system="Be brief.")
    for line in (FIRST, SECOND):
        talk.answer(line)
    talk.undo()
    talk.answer(THIRD)
    assert dialogue().journal.unfinished() is None, "its process still runs"
    left_behind(talk)
    other = dialogue()
    assert chat_of(other.journal.found()).turns == talk.conversation.turns
    ChatCommands(other).obey("resume", "")
    assert other.conversation.ids == talk.conversation.ids
    assert other.cache.tokens == [talk.conversation.ids]
    assert other.conversation.system == "Be brief."
    assert len(journals(tmp_path)) == 1, "the old journal is part of the new one"
    for each in (talk, other):
        each.answer(SECOND)
    assert other.conversation.turns == talk.conversation.turns


@pytest.mark.parametrize("is_killed", [False, True])
def test_turns_on_a_branch_that_was_left(dialogue: Make, is_killed: bool):
    """They are found, though the last branch has none."""
    talk = dialogue()
    talk.answer(FIRST)
    turns = [*talk.conversation.turns]
    talk.branch("other")
    talk.undo()
    if is_killed:
        left_behind(talk)
    else:
        talk.journal.close()
    other = dialogue()
    if is_killed:
        offer(other.journal)
    ChatCommands(other).obey("resume", "")
    assert (other.conversation.branch, other.conversation.turns) == ("other", [])
    other.branch("main")
    assert other.conversation.turns == turns


def test_chats_at_once_keep_their_journals_apart(dialogue: Make, tmp_path: Path):
    talk, other = dialogue(), dialogue()
    for line in (FIRST, SECOND):
        talk.answer(line)
        other.answer(line.upper())
    files = journals(tmp_path)
    assert {conversation.read(file).turns[0].line for file in files} == {FIRST, FIRST.upper()}
    assert [len(conversation.read(file).turns) for file in files] == [2, 2]
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    assert stat.S_IMODE(files[0].parent.stat().st_mode) == 0o700


def test_a_chat_that_ended_is_not_offered_but_found(dialogue: Make, tmp_path: Path):
    talk = dialogue()
    talk.answer(FIRST)
    talk.journal.close()
    other = dialogue()
    assert other.journal.unfinished() is None
    assert said(chat_of(other.journal.found()).turns) == said(talk.conversation.turns)
    other.answer(SECOND)
    other.reset()
    other.journal.close()  # no message since: the ended conversation stays
    assert said(chat_of(dialogue().journal.found()).turns) == said(talk.conversation.turns)
    ChatCommands(dialogue()).obey("resume", "no")
    assert journals(tmp_path) == []
    assert dialogue().journal.found() is None


def test_another_model_is_offered_nothing(dialogue: Make, tmp_path: Path):
    talk = left_behind_after(dialogue)
    other = Journal(tmp_path / "chats", conversation.Origin("other", "0" * 64))
    assert other.found() is None
    assert chat_of(dialogue().journal.unfinished()).turns == talk.conversation.turns


def left_behind_after(dialogue: Make) -> Dialogue:
    talk = dialogue()
    for line in (FIRST, SECOND):
        talk.answer(line)
    return left_behind(talk)


BAD = (b"", b"{", b"[1, 2]", b"null", b'{"role": "user"}', b'{"role": "user", "content": 3}', b"\xff\xfe", b"[" * 10**5)


def test_bad_lines_lose_nothing_but_themselves(dialogue: Make, tmp_path: Path):
    talk = left_behind_after(dialogue)
    file = journals(tmp_path)[0]
    header, *lines = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([*BAD, header, *(each for pair in zip(BAD, lines, strict=False) for each in pair)]))
    saved = conversation.read(file)
    assert said(saved.turns) == said(talk.conversation.turns)
    assert saved.skipped == len(BAD) + len(lines)
    other = dialogue()
    assert "lines of the file could not be read" in other.take(saved)
    assert other.cache.tokens == [other.conversation.ids]


def test_a_damaged_field_costs_no_line(dialogue: Make, tmp_path: Path):
    talk = left_behind_after(dialogue)
    header, *lines = map(json.loads, journals(tmp_path)[0].read_text().splitlines())
    damaged = [header | {"time": "then", "start": [-1]}, *(line | {"tokens": ["x"], "end": 3} for line in lines)]
    file = tmp_path / "damaged"
    file.write_text("".join(json.dumps(each) + "\n" for each in damaged) + '{"role": "user", "cont')
    saved = conversation.read(file)
    assert (said(saved.turns), saved.skipped) == (said(talk.conversation.turns), 1)
    other = dialogue()
    assert ", 1 line of the file could not be read" in other.take(saved)
    assert other.cache.tokens == [other.conversation.ids]


def test_every_cut_of_a_journal_is_read(dialogue: Make, tmp_path: Path):
    """Wherever a crash has cut it, the lines before the cut are there."""
    left_behind_after(dialogue)
    data = journals(tmp_path)[0].read_bytes()
    whole = conversation.read(journals(tmp_path)[0])
    ends = [at for at, byte in enumerate(data) if byte == ord("\n")]
    cut = tmp_path / "cut"
    for end in range(ends[0], len(data), 37):
        cut.write_bytes(data[:end])
        saved = conversation.read(cut)
        messages = 2 * len(saved.turns) + (saved.pending is not None)
        assert messages >= sum(at <= end for at in ends) - 1
        assert saved.turns == whole.turns[: len(saved.turns)]


def test_a_lost_message_costs_no_other(dialogue: Make, tmp_path: Path):
    talk = left_behind_after(dialogue)
    header, *lines = journals(tmp_path)[0].read_text().splitlines()
    first, second = talk.conversation.turns
    wanted = [
        [("", first.reply), (second.line, second.reply)],
        [(first.line, ""), (second.line, second.reply)],
        [(first.line, first.reply), ("", second.reply)],
        [(first.line, first.reply)],
    ]
    for at, turns in enumerate(wanted):
        file = tmp_path / f"lost-{at}"
        file.write_text("\n".join([header, *lines[:at], *lines[at + 1 :]]))
        saved = conversation.read(file)
        assert said(saved.turns) == turns
        assert (saved.pending is not None) == (at == 3)
        other = dialogue()
        other.take(saved)
        assert other.cache.tokens == [other.conversation.ids]


def test_a_folder_that_cannot_be_written_is_told_once(
    dialogue: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "chats").write_text("a file")
    talk = dialogue()
    for line in (FIRST, SECOND):
        talk.answer(line)
    assert capsys.readouterr().err.count("windlass: note: no journal of this conversation is kept: File exists") == 1
    assert len(talk.conversation.turns) == 2


# Tests that need a process of their own.


class Terminal:
    """A chat at a terminal of its own."""

    def __init__(self, state: Path, *options: str) -> None:
        self._ours, theirs = pty.openpty()
        root = str(Path(windlass.__file__).parents[1])
        environment = {**os.environ, "PYTHONPATH": root, "HF_HUB_OFFLINE": "1", "TERM": "xterm"}
        environment |= {"XDG_STATE_HOME": str(state), "PROMPT_TOOLKIT_NO_CPR": "1", "OMP_NUM_THREADS": "1"}
        command = [*START, "chat", MODEL, "--dtype", "float32", "-n", "7", *options]
        self.process = subprocess.Popen(
            command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        os.close(theirs)
        self.shown = ""

    def wait_for(self, text: str, seconds: float = 90.0) -> None:
        """Wait until `text` is shown, after the text of the last wait."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            ready, _, _ = select.select([self._ours], [], [], max(end - time.monotonic(), 0))
            assert ready, f"{text!r} was not shown: {self.shown!r}"
            self.shown += re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", os.read(self._ours, 65536).decode())
        self.shown = self.shown.partition(text)[2]

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def close(self) -> int:
        os.close(self._ours)
        return self.process.wait(30)


@pytest.mark.slow
def test_a_killed_chat_is_offered_again(dialogue: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    terminal = Terminal(tmp_path)
    terminal.wait_for("Ctrl-D ends")
    terminal.wait_for("> ")
    terminal.type(FIRST + "\r")
    terminal.wait_for("ended at max_tokens 7")  # said once a session
    terminal.wait_for("> ")
    terminal.type(SECOND + "\r")
    terminal.wait_for("reading")
    terminal.wait_for("> ")
    terminal.process.send_signal(signal.SIGKILL)
    assert terminal.close() == -signal.SIGKILL
    folder = tmp_path / "windlass"
    (left,) = journals(folder)
    twin = dialogue(template=None)
    twin.max_tokens = 7
    for line in (FIRST, SECOND):
        twin.answer(line)
    assert conversation.read(left).turns == twin.conversation.turns
    assert stat.S_IMODE((folder / "history").stat().st_mode) == 0o600

    journal = Journal(folder / "chats", twin.journal.origin)
    offer(journal)
    assert re.fullmatch(
        r"an unfinished conversation of 2 turns from \d\d:\d\d exists. /resume continues it\n",
        capsys.readouterr().err.splitlines(keepends=True)[-1],
    )
    other = dialogue(template=None)
    other.journal = journal
    ChatCommands(other).obey("resume", "")
    assert other.cache.tokens == twin.cache.tokens
    journal.close()
    (ended,) = journals(folder)
    assert ended.name.endswith(".last.jsonl")
    assert conversation.read(ended).turns == twin.conversation.turns
