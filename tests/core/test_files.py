"""Names in place of a file: read whole, or refused in one line. Never read without end."""

import os
import socket
import threading
from pathlib import Path

import pytest

from windlass.core import files
from windlass.core.errors import UsageError
from windlass.core.files import check_writable, read_bytes, read_text


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "WRITER_SECONDS", 0.05)
    monkeypatch.setattr(files, "MAX_BYTES", 1000)


@pytest.mark.parametrize("device", ["/dev/zero", "/dev/null", "/dev/urandom"])
def test_a_device_is_not_read(device: str) -> None:
    with pytest.raises(UsageError, match=rf"^file {device} is not a regular file, nor a pipe. Give one of these$"):
        read_text(Path(device), f"file {device}")


def test_a_socket_and_a_folder_are_not_read(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(tmp_path / "socket"))
        with pytest.raises(UsageError, match="socket is not a regular file"):
            read_bytes(tmp_path / "socket", "socket")
    with pytest.raises(UsageError, match="folder cannot be read: Is a directory"):
        read_bytes(tmp_path, "folder")


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match=r"pipe is empty\. Give some text"):
        read_text(tmp_path / "pipe", "pipe")


@pytest.mark.parametrize("wait_s", [0.0, 0.2])
def test_what_a_shell_substitutes_for_a_command_is_read(wait_s: float) -> None:
    """`<(command)` is the name of a pipe that the shell has opened. The command may think before it writes."""
    reader, writer = os.pipe()

    def write() -> None:
        os.write(writer, b"It was a dark ")
        os.write(writer, b"and stormy night.\n")
        os.close(writer)

    timer = threading.Timer(wait_s, write)
    timer.start()
    assert read_text(Path(f"/dev/fd/{reader}"), "text") == "It was a dark and stormy night."
    timer.join()
    os.close(reader)


def test_the_limit_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"a" * 1000)
    assert read_bytes(file, "file") == b"a" * 1000
    file.write_bytes(b"a" * 1001)
    with pytest.raises(UsageError, match=r"^file has more than 1,000 bytes, which is the most that is read"):
        read_bytes(file, "file")


@pytest.mark.parametrize("name", ["/dev/null", "/dev/full"])
def test_a_device_is_not_replaced_by_a_file(name: str) -> None:
    with pytest.raises(UsageError, match=f"-o {name} is not a regular file. Give the name of a file"):
        check_writable(Path(name), "-o")
