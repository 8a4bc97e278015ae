"""A conversation in a file: one line of JSON that says whose it is, then one for each message.

`/save` writes such a file as a whole; the journal of a chat grows with it. Reading is forgiving: a line that a crash
has cut short costs no other line.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from windlass.cli.conversation import Conversation, Turn
from windlass.core.errors import UsageError
from windlass.core.files import read_bytes

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

    `pending` is a message that has no reply yet, with an empty one. `skipped` lines could not be read.
    """

    origin: Origin
    time: datetime
    system: str | None
    start: list[int]
    turns: list[Turn]
    pending: Turn | None = None
    skipped: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether the token ids of all that was said are there."""
        return not self.skipped and all(turn.prompt and turn.tokens for turn in self.turns)


def lines_of(origin: Origin, conversation: Conversation) -> Iterator[str]:
    """The lines of a whole conversation."""
    yield _line(
        {
            "kind": KIND,
            "version": VERSION,
            "model": origin.model,
            "fingerprint": origin.fingerprint,
            "time": datetime.now().astimezone().isoformat(timespec="seconds"),
            "system": conversation.system,
            "start": conversation.start,
        }
    )
    for turn in conversation.turns:
        yield asked(turn)
        yield replied(turn)


def asked(turn: Turn) -> str:
    """The line of a user's message."""
    return _line({"role": "user", "content": turn.line, "tokens": turn.prompt})


def replied(turn: Turn) -> str:
    """The line of a model's reply."""
    return _line({"role": "assistant", "content": turn.reply, "tokens": turn.tokens, "end": turn.ended_with})


def taken_back() -> str:
    """The line that takes back the latest message of the user, and the reply to it."""
    return _line({"event": "undo"})


def read(path: Path) -> SavedChat:
    """The conversation in a file.

    Raises: UsageError when it cannot be read, is none, or is of a newer version.
    """
    what = f"conversation {path}"
    chat: SavedChat | None = None
    skipped = 0
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
    if chat is None:
        raise UsageError(f"{what} is not one that windlass saved; give a file that /save wrote")
    return replace(chat, skipped=skipped)


def _begun(record: dict[str, Any], what: str) -> SavedChat:
    version, system = record.get("version"), record.get("system")
    if version != VERSION:
        raise UsageError(f"{what} has format version {version!r}, this windlass reads {VERSION}; use the one it is of")
    try:
        time = datetime.fromisoformat(str(record.get("time")))
    except ValueError:
        time = datetime.fromtimestamp(0)
    origin = Origin(str(record.get("model")), str(record.get("fingerprint")))
    return SavedChat(origin, time, system if isinstance(system, str) else None, _ids(record.get("start")), [])


def _with(chat: SavedChat, record: dict[str, Any]) -> SavedChat:
    """With one more message. One whose reply was lost has none; a reply whose message was lost answers nothing."""
    text, tokens = str(record["content"]), _ids(record.get("tokens"))
    if record.get("role") == "user":
        unanswered = [] if chat.pending is None else [chat.pending]
        return replace(chat, turns=[*chat.turns, *unanswered], pending=Turn(text, "", tokens))
    answered = replace(chat.pending or Turn("", ""), reply=text, tokens=tokens, ended_with=str(record.get("end", "")))
    return replace(chat, turns=[*chat.turns, answered], pending=None)


def _record(raw: bytes) -> dict[str, Any]:
    """One line; empty where it is no JSON object."""
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _ids(found: object) -> list[int]:
    """A list of token ids; empty where it is none."""
    is_right = isinstance(found, list) and all(type(each) is int and each >= 0 for each in found)
    return found if isinstance(found, list) and is_right else []


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"
