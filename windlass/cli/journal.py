"""The conversation of a running chat, in a file that is still there when its process has died.

Each process has a file of its own, which it holds locked for as long as it lives: what is not locked was left behind.
"""

import fcntl
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO
from uuid import uuid4

from windlass.cli import chat_file
from windlass.cli.chat_file import Origin, SavedChat
from windlass.cli.conversation import Conversation, Turn
from windlass.cli.state import private_file
from windlass.cli.terminal import note
from windlass.core.errors import UsageError


class Journal:
    """Written line by line, each of them safe on the disk before the next step; nothing at all where `folder` is None.

    A folder that cannot be written is told once, and the conversation goes on without a journal.
    """

    def __init__(self, folder: Path | None, origin: Origin) -> None:
        self.origin = origin
        self._folder = folder
        self._file: IO[str] | None = None
        self._path = Path()

    def begin(self, conversation: Conversation) -> None:
        """From here on the conversation is this one; one that was never spoken leaves no file."""
        if self._file is None and not conversation.turns:
            return
        self._write("".join(chat_file.lines_of(self.origin, conversation)))

    def asked(self, conversation: Conversation, turn: Turn) -> None:
        """A message of the user, before there is a reply to it."""
        begun = "" if self._file is not None else "".join(chat_file.lines_of(self.origin, conversation))
        self._write(begun + chat_file.asked(turn))

    def replied(self, turn: Turn) -> None:
        """The reply to it."""
        self._write(chat_file.replied(turn))

    def taken_back(self) -> None:
        """The latest message of the user is taken back, and the reply to it."""
        self._write(chat_file.taken_back())

    def close(self) -> None:
        """The conversation has ended as it should: it becomes the last one, which `/resume` still finds."""
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
                fcntl.flock(self._file, fcntl.LOCK_EX)  # others hold it for a moment only, to see whether it is held
            self._file.write(lines)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            note(f"windlass: note: no journal of this conversation is kept: {error.strerror}")
            self._folder = None


def _first(paths: Sequence[Path]) -> tuple[Path, SavedChat] | None:
    """The first in which something was said."""
    for path in paths:
        with suppress(UsageError):
            chat = chat_file.read(path)
            if chat.turns or chat.pending is not None:
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
