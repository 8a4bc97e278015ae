"""A conversation as messages, and the text of it that a model has not read yet."""

import fcntl
import json
import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Final
from uuid import uuid4

from transformers import PreTrainedTokenizerBase

from windlass.cli.terminal import note, private_file
from windlass.core.errors import UsageError
from windlass.core.files import read_bytes
from windlass.engine import templates
from windlass.engine.text import encode

MAIN: Final = "main"  # the first branch


@dataclass(frozen=True)
class Exchange:
    """A message of the user and the reply to it, as text and as the token ids that were fed.

    `prompt` holds the tokens that were fed before the reply, `tokens` the reply itself. `ended_with` is the text of the
    reply's last token where it ended by itself, which is no part of `reply`.
    """

    line: str
    reply: str
    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ended_with: str = ""


class Conversation:
    """Turns on one text, and the tokens that each turn adds.

    With a chat template, these are the tokens from the end of the last reply up to the start of the next. Without one,
    they are the message itself, on a new line. `start` are the ids of a text before the first turn. Where that text
    ends within a message, the first turn goes on with it.

    `branch` is its name among conversations that begin alike.

    Raises: UsageError as `tell` does.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        start: Sequence[int] = (),
        system: str | None = None,
        branch: str = MAIN,
    ) -> None:
        self._tokenizer, self.branch = tokenizer, branch
        self.start, self.turns = list(start), list[Exchange]()
        self.system: str | None = None
        if system is not None:
            self.tell(system)

    @property
    def has_template(self) -> bool:
        """Return True if the model was made for chat."""
        return templates.has_template(self._tokenizer)

    @property
    def ids(self) -> list[int]:
        """Ids of the whole text, including tokens before the first turn."""
        return [*self.start, *(token for turn in self.turns for token in (*turn.prompt, *turn.tokens))]

    @property
    def messages(self) -> list[str]:
        """Texts of the user's messages and the replies, in turn."""
        return [text for turn in self.turns for text in (turn.line, turn.reply)]

    def turn_of(self, number: int) -> int:
        """The index of the turn of a message, the first of which is 1. Raises: UsageError for another number."""
        if not 1 <= number <= 2 * len(self.turns):
            has = f"has the messages 1 to {2 * len(self.turns)}" if self.turns else "has no message yet"
            raise UsageError(f"message {number} is not there: this conversation {has}. /history lists them")
        return (number - 1) // 2

    def edit(self, number: int, text: str) -> None:
        """Replace the text of a message, and encode the conversation anew.

        Raises: UsageError, and changes nothing, for a message that is not there, or as `missing` does.
        """
        at, before = self.turn_of(number), list(self.turns)
        turn = self.turns[at]
        self.turns[at] = replace(turn, line=text) if number % 2 else replace(turn, reply=text, tokens=[])
        try:
            self.encode_again()
        except UsageError:
            self.turns = before
            raise

    def copied(self, branch: str) -> "Conversation":
        """A copy under another name."""
        twin = Conversation(self._tokenizer, self.start, branch=branch)
        twin.system, twin.turns = self.system, list(self.turns)
        return twin

    def tell(self, system: str | None) -> None:
        """Change the system text, and with it the ids of all prompts (None: no system text).

        Raises: UsageError, and changes nothing, where the model's template has no place for it, or fails.
        """
        if system is not None:
            if self.start:
                raise UsageError("a system text stands at the start, and this conversation continues a prompt cache")
            first = [*templates.of_system(system), templates.message("user", "?")]
            if system.strip() not in templates.first_prompt(self._tokenizer, first):
                raise UsageError("this model's chat template leaves the system text out. Put it in a message")
        before, self.system = self.system, system
        try:
            self.encode_again()
        except UsageError:
            self.system = before
            raise

    def encoded(self, line: str) -> tuple[str, list[int]]:
        """The text to feed for `line`, and its ids. Raises: UsageError as `missing` does."""
        text = self.missing(line)
        return text, encode(self._tokenizer, text, is_start=not self.ids)

    def missing(self, line: str, after: int | None = None) -> str:
        """The text to feed for `line` after the first `after` turns (default: all). Nothing is changed.

        Raises: UsageError for a chat template that fails, or does not show earlier replies as they were.
        """
        earlier = self.turns[:after]
        if not self.has_template:
            return f"\n{line}" if earlier else line
        messages = templates.of_system(self.system)
        for turn in earlier:
            messages += [templates.message("user", turn.line), templates.message("assistant", turn.reply)]
        messages.append(templates.message("user", line))
        if earlier:
            return templates.next_prompt(self._tokenizer, messages, earlier[-1].ended_with)
        if not self.start:
            return templates.first_prompt(self._tokenizer, messages)
        end, ended_with = templates.text_end(self._tokenizer, self.start)
        if end == "user":  # the start is a text that this message ends
            return templates.user_end(self._tokenizer, line)
        if end == "reply":
            before = [templates.message("user", ""), templates.message("assistant", "")]
            return templates.next_prompt(self._tokenizer, [*before, *messages], ended_with)
        return templates.first_prompt(self._tokenizer, messages)

    def encode_again(self) -> None:
        """Make the ids of all prompts anew. Replies keep their ids.

        Raises: UsageError as `missing` does, and changes nothing.
        """
        texts = [self.missing(turn.line, after) for after, turn in enumerate(self.turns)]
        for at, (turn, text) in enumerate(zip(self.turns, texts, strict=True)):
            prompt = encode(self._tokenizer, text, is_start=at == 0 and not self.start)
            tokens = turn.tokens or encode(self._tokenizer, turn.reply + turn.ended_with, is_start=False)
            self.turns[at] = replace(turn, prompt=prompt, tokens=tokens)


def checked_branch(name: str) -> str:
    """The name of a branch. Raises: UsageError for one that is no part of a file's name."""
    if not re.fullmatch(r"[\w-]{1,40}", name):
        raise UsageError(f"branch {name!r} is no name. Use up to 40 letters, digits, - and _")
    return name


KIND: Final = "windlass chat"
VERSION: Final = 1


@dataclass(frozen=True)
class Origin:
    """The model that a conversation was held with: its folder's name, and its fingerprint."""

    model: str
    fingerprint: str


@dataclass(frozen=True)
class SavedChat:
    """A conversation as a file has it.

    `pending` is a message that has no reply yet, with an empty one. `skipped` lines could not be read. `others` are
    further branches of it.
    """

    origin: Origin
    time: datetime
    system: str | None
    start: list[int]
    turns: list[Exchange]
    pending: Exchange | None = None
    skipped: int = 0
    branch: str = MAIN
    others: tuple["SavedChat", ...] = ()

    @property
    def is_exact(self) -> bool:
        """Return True if the token ids of all that was said are there."""
        return not self.skipped and all(turn.prompt and turn.tokens for turn in self.turns)


def lines_of(origin: Origin, conversation: Conversation) -> str:
    """The lines of a whole conversation."""
    time = datetime.now().astimezone().isoformat(timespec="seconds")
    before = {"system": conversation.system, "start": conversation.start, "branch": conversation.branch}
    header = _line({"kind": KIND, "version": VERSION, **vars(origin), "time": time, **before})
    return header + "".join(asked(turn) + replied(turn) for turn in conversation.turns)


def asked(turn: Exchange) -> str:
    """The line of a user's message."""
    return _line({"role": "user", "content": turn.line, "tokens": turn.prompt})


def replied(turn: Exchange) -> str:
    """The line of a model's reply."""
    return _line({"role": "assistant", "content": turn.reply, "tokens": turn.tokens, "end": turn.ended_with})


def read(path: Path) -> SavedChat:
    """The conversation in a file.

    Raises: UsageError when it cannot be read, is none, or is of a newer version.
    """
    what = f"conversation {path}"
    chat: SavedChat | None = None
    branches, skipped = dict[str, SavedChat](), 0
    for raw in read_bytes(path, what).splitlines():
        record = _record(raw)
        if record.get("kind") == KIND:
            chat = _begun(record, what)
        elif chat is not None and record.get("event") == "undo":
            turns = chat.turns if chat.pending is not None else chat.turns[:-1]
            chat = replace(chat, turns=turns, pending=None)
        elif chat is not None and isinstance(record.get("content"), str):
            chat = _with(chat, record)
        else:
            skipped += 1
        if chat is not None:
            branches[chat.branch] = chat
    if chat is None:
        raise UsageError(f"{what} is not one that windlass saved. Give a file that /save wrote")
    del branches[chat.branch]
    others = tuple(replace(each, skipped=skipped) for each in branches.values())
    return replace(chat, skipped=skipped, others=others)


def _begun(record: dict[str, Any], what: str) -> SavedChat:
    version, system = record.get("version"), record.get("system")
    if version != VERSION:
        raise UsageError(f"{what} has format version {version!r}, this windlass reads {VERSION}. Use the one it is of")
    try:
        time = datetime.fromisoformat(str(record.get("time")))
    except ValueError:
        time = datetime.fromtimestamp(0)
    origin = Origin(str(record.get("model")), str(record.get("fingerprint")))
    return SavedChat(
        origin=origin,
        time=time,
        system=system if isinstance(system, str) else None,
        start=_ids(record.get("start")),
        turns=[],
        branch=checked_branch(str(record.get("branch", MAIN))),
    )


def _with(chat: SavedChat, record: dict[str, Any]) -> SavedChat:
    """The turns with one more message. A turn may have lost its reply, or answer no message."""
    text, tokens = str(record["content"]), _ids(record.get("tokens"))
    if record.get("role") == "user":
        unanswered = [] if chat.pending is None else [chat.pending]
        return replace(chat, turns=[*chat.turns, *unanswered], pending=Exchange(text, "", tokens))
    answered = replace(
        chat.pending or Exchange("", ""), reply=text, tokens=tokens, ended_with=str(record.get("end", ""))
    )
    return replace(chat, turns=[*chat.turns, answered], pending=None)


def _record(raw: bytes) -> dict[str, Any]:
    """The object of one line, or an empty one where it is no JSON object."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _ids(found: object) -> list[int]:
    """A list of token ids, empty for any other value."""
    is_right = isinstance(found, list) and all(type(each) is int and each >= 0 for each in found)
    return found if isinstance(found, list) and is_right else []


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


UNDO: Final = _line({"event": "undo"})
"""Takes back the latest message of the user, and the reply to it."""


class Journal:
    """Written line by line, each safe on the disk before the next step, or not at all where `folder` is None.

    A folder that cannot be written is reported once, and the conversation goes on without a journal.
    """

    def __init__(self, folder: Path | None, origin: Origin) -> None:
        self.origin = origin
        self._folder = folder
        self._file: IO[str] | None = None
        self._path = Path()

    def begin(self, conversation: Conversation) -> None:
        """Begin a file for this conversation. One without messages leaves no file."""
        if self._file is not None or conversation.turns:
            self._write(lines_of(self.origin, conversation))

    def add(self, conversation: Conversation, line: str) -> None:
        """Write one more line, after those of the conversation where it has no file yet."""
        begun = "" if self._file is not None else lines_of(self.origin, conversation)
        self._write(begun + line)

    def close(self) -> None:
        """End the journal. Its file becomes the last conversation, which `/resume` finds."""
        if self._file is None:
            return
        with suppress(OSError):
            if _first([self._path]) is None:
                self._path.unlink()
            else:
                self._path.replace(self._last())
        self._file.close()
        self._file = None

    def unfinished(self) -> tuple[Path, SavedChat] | None:
        """The newest conversation with this model whose process has died."""
        if self._folder is None:
            return None
        left = [path for path in self._folder.glob(f"{self._prefix()}-*.jsonl") if _is_left_behind(path)]
        return _first(sorted(left, key=_written_at, reverse=True))

    def found(self) -> tuple[Path, SavedChat] | None:
        """The conversation to resume: an unfinished one, or else the last that has ended."""
        return self.unfinished() or (None if self._folder is None else _first([self._last()]))

    def _prefix(self) -> str:
        return self.origin.fingerprint[:16]

    def _last(self) -> Path:
        return (self._folder or Path()) / f"{self._prefix()}.last.jsonl"

    def _write(self, lines: str) -> None:
        if self._folder is None:
            return
        try:
            if self._file is None:
                self._path = self._folder / f"{self._prefix()}-{uuid4().hex}.jsonl"
                self._file = private_file(self._path).open("a", encoding="utf-8", errors="replace")
                fcntl.flock(self._file, fcntl.LOCK_EX)  # other processes hold it only for a moment, to test it
            self._file.write(lines)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            note(f"windlass: note: no journal of this conversation is kept: {error.strerror}")
            self._folder = None


def _first(paths: Sequence[Path]) -> tuple[Path, SavedChat] | None:
    """The first in which something was said, on any branch."""
    for path in paths:
        with suppress(UsageError):
            chat = read(path)
            if any(each.turns or each.pending is not None for each in (chat, *chat.others)):
                return path, chat
    return None


def _is_left_behind(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _written_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
