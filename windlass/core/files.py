"""Files that a user names: texts that are read, and files that are written whole or not at all."""

import errno
import os
import select
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final
from uuid import uuid4

from windlass.core.errors import UsageError

MAX_BYTES: Final = 2**28  # limit of a text, a file of results or a policy, all read into memory
BYTE_ORDER_MARK: Final = "\ufeff"  # some editors put it before a UTF-8 text, of which it is no part
WRITER_SECONDS: Final = 2.0  # timeout for a writer of a named pipe


def read_text(file: Path, what: str) -> str:
    """Read a text file. Errors name it by the given label. See `read_bytes` and `decoded`.

    Raises: UsageError when it cannot be read, is empty, or is not UTF-8.
    """
    return decoded(read_bytes(file, what), what)


def read_bytes(path: Path, what: str) -> bytes:
    """Read a regular file or a pipe of at most `MAX_BYTES`. Errors name it by the given label.

    Raises: UsageError when it cannot be read, is of another kind (a device has no end), or is larger.
    """
    mode = check_readable(path, what)
    try:
        # Without O_NONBLOCK, opening a pipe waits for a writer, perhaps for ever.
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            if stat.S_ISFIFO(mode):
                select.select([file], [], [], WRITER_SECONDS)
            os.set_blocking(file.fileno(), True)
            return read_limited(file.read, what)
    except OSError as error:
        raise UsageError(f"{what} cannot be read: {error.strerror}") from None


def check_readable(path: Path, what: str) -> int:
    """Return the mode of a regular file or a pipe, without opening it. Errors name it by the given label.

    Raises: UsageError when it is missing, may not be read, or is of another kind: a device has no end.
    """
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not os.access(path, os.R_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UsageError(f"{what} cannot be read: {error.strerror}") from None
    except ValueError as error:  # a name with a zero byte
        raise UsageError(f"{what} cannot be read: {error}") from None
    if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode)):
        raise UsageError(f"{what} is not a regular file, nor a pipe. Give one of these")
    return mode


def check_text(file: Path, what: str) -> None:
    """Read a regular file to check it. Raises: UsageError, with the given label, when that fails."""
    if stat.S_ISREG(check_readable(file, what)):
        read_text(file, what)


def check_folder(path: Path, what: str) -> Path:
    """Return a writable folder `path`. Raises: UsageError, with the given label, for any other path."""
    if not path.is_dir():
        raise UsageError(f"{what} {str(path)!r} is no folder. Make it first, or leave it out")
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"{what} {str(path)!r} may not be written into. Give another folder")
    return path


def read_limited(read: Callable[[int], bytes], what: str) -> bytes:
    """Return the whole output of `read`. Raises: UsageError, with the given label, for more than `MAX_BYTES`."""
    data = read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise UsageError(f"{what} has more than {MAX_BYTES:,} bytes, which is the most that is read. Give a part of it")
    return data


def decoded(data: bytes, what: str) -> str:
    """UTF-8 bytes as text, with `\\n` at the ends of lines and without one line end at the end of the text.

    Raises: UsageError when it is empty, binary, or not UTF-8.
    """
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{what} is not UTF-8 text: byte {data[error.start]:#04x} at offset {error.start}. Convert it first"
        ) from None
    if "\0" in text:
        raise UsageError(f"{what} is binary: it has a zero byte at offset {data.index(0)}. Give a text")
    text = text.replace("\r\n", "\n").removesuffix("\n")
    if not text:
        raise UsageError(f"{what} is empty. Give some text")
    return text


def check_writable(path: Path, what: str, read: Iterable[Path | None] = ()) -> None:
    """Check that `path` can be written, before a long run. Errors name it by the given label.

    Raises: UsageError when the path is a folder, a device or a pipe, or one of the files that are `read`, or its folder
    is missing or not writable.
    """
    if any(each is not None and each.exists() and path.exists() and each.samefile(path) for each in read):
        raise UsageError(f"{what} {path} is also a file that is read, and would replace it. Give another name")
    folder = path.expanduser().resolve().parent
    if path.is_dir():
        raise UsageError(f"{what} {path} is a folder. Give the name of a file")
    check_regular(path, what)
    if not folder.is_dir():
        raise UsageError(f"{what} {path}: the folder {folder} does not exist. Make it first")
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{what} {path}: the folder {folder} is not writable. Save elsewhere")


def check_regular(path: Path, what: str) -> None:
    """Check `path`. Raises: UsageError, with the given label, if it exists and is no regular file."""
    if path.exists() and not path.is_file():
        raise UsageError(f"{what} {path} is not a regular file. Give the name of a file")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new file beside `path` for the block to write. It replaces `path` when the block ends without an error.

    At no moment is there half a file, and an older file at `path` stays as it is where anything fails. The new file has
    the permissions of the older one.

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


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A new folder beside `path` for the block to fill. It becomes `path` when the block ends without an error.

    Where there is a folder at `path`, the new files take the places of those of their names in it. At no moment is
    there half a file, and a new folder has all of its files or is not there.

    Raises: OSError as the system does.
    """
    target = path.resolve()
    temporary = target.with_name(f".windlass-{uuid4().hex}.tmp")
    try:
        temporary.mkdir()
        yield temporary
        if target.exists():
            for file in sorted(temporary.iterdir()):
                file.replace(target / file.name)
        else:
            temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
