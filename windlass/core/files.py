"""Files that a user names: texts that are read, and files that are written whole or not at all."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from windlass.core.errors import UsageError


def read_text(file: Path, what: str) -> str:
    """The text of a file, which errors call `what`; see `decoded`.

    Raises: UsageError when it cannot be read, is empty, or is not UTF-8.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UsageError(f"{what} cannot be read: {error.strerror}") from None
    return decoded(data, what)


def decoded(data: bytes, what: str) -> str:
    """UTF-8 bytes as text, with `\\n` at the ends of lines; one line end at its end is not part of it.

    Raises: UsageError when it is empty, binary, or not UTF-8.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{what} is not UTF-8 text: byte {data[error.start]:#04x} at offset {error.start}; convert it first"
        ) from None
    if "\0" in text:
        raise UsageError(f"{what} is binary: it has a zero byte at offset {data.index(0)}; give a text")
    text = text.replace("\r\n", "\n").removesuffix("\n")
    if not text:
        raise UsageError(f"{what} is empty; give some text")
    return text


def check_writable(path: Path, what: str) -> None:
    """Check that `path` can be written, which is better known before a long run than after it.

    Raises: UsageError, which calls the path `what`, when it is a folder, or its folder is missing or not writable.
    """
    folder = path.expanduser().resolve().parent
    if path.is_dir():
        raise UsageError(f"{what} {path} is a folder; give the name of a file")
    if not folder.is_dir():
        raise UsageError(f"{what} {path}: the folder {folder} does not exist; make it first")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{what} {path}: the folder {folder} is not writable; save elsewhere")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside `path` for the block to write; it takes its place when the block ends without an error.

    At no moment is there half a file, and an older file at `path` stays as it is where anything fails. The new one has
    its permissions.

    Raises: OSError as the system does.
    """
    target = path.resolve()
    temporary = target.with_name(f".windlass-{uuid4().hex}.tmp")
    try:
        temporary.touch(exist_ok=False)
        mode = (target if target.exists() else temporary).stat().st_mode
        yield temporary
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
