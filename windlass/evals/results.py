"""The results file: one line of JSON for the run, then one per question. A run that was stopped goes on from it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from windlass.cli.terminal import note
from windlass.core.errors import UsageError

VERSION = 2
START = b'{"kind": "'  # of every line
HEADER = ("version", "model", "parameters", "dtype", "seed")  # that a run must share with the file that it goes on with
IDENTITY = ("task", "policy", "asked_budget", "merge", "positions", "store", "is_aware", "length", "sample", "turn")
MEASURED = (
    "budget",
    "depth",
    "context_tokens",
    "slots_held",
    "bytes_held",
    "bytes_full",
    "expected",
    "output",
    "score",
    "measures",
    "seconds",
)
Line = dict[str, Any]
Identity = tuple[str | int | bool | None, ...]


def identity(line: Line) -> Identity:
    """What tells a line from every other of its file."""
    return tuple(line[name] for name in IDENTITY)


class Results:
    """A results file that is open for more: the `lines` that it holds, each once, by identity."""

    def __init__(self, path: Path, lines: Sequence[Line]) -> None:
        self._path = path
        self.lines = {identity(line): line for line in lines}

    def add(self, lines: Sequence[Line]) -> None:
        """Write those lines that the file lacks, whole and at once.

        Raises: UsageError when they cannot be written.
        """
        new = [line for line in lines if identity(line) not in self.lines]
        _append(self._path, new)
        self.lines |= {identity(line): line for line in new}


def open_results(path: Path, header: Line) -> Results:
    """The file at `path`, made with this header where there is none.

    A last line that was cut in half is taken off, with a note. A file that cannot be gone on with
    stays as it is.

    Raises: UsageError for such a file: not one of results, or of another version, model or seed.
    """
    data = _read(path)
    end = data.rfind(b"\n") + 1
    cut = data[end:]
    if not (cut.startswith(START) or START.startswith(cut)):
        raise UsageError(f"-o {path} is not a file of results; give another name")
    rows = data[:end].splitlines()
    if rows:
        # A file of another version may look like anything after its header.
        _check_header(path, _parsed(path, 1, rows[0], "header"), header)
    lines = [_parsed(path, number, row, "case") for number, row in enumerate(rows[1:], 2)]
    if cut:
        note(f"the last line of {path} was cut in half; it is taken off, and its case run again")
        with path.open("r+b") as file:
            file.truncate(end)
    if not rows:
        _append(path, [header])
    return Results(path, lines)


def _read(path: Path) -> bytes:
    """What the file holds; it is made where there is none, because now is better than after the first case."""
    _append(path, [])
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"-o {path} cannot be read: {error.strerror}") from None


def _append(path: Path, lines: Sequence[Line]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    try:
        with path.open("ab") as file:
            file.write(text.encode("utf-8", "replace"))
    except OSError as error:
        raise UsageError(f"-o {path} cannot be written: {error.strerror}") from None


def _parsed(path: Path, number: int, data: bytes, kind: str) -> Line:
    try:
        line = json.loads(data)
    except ValueError:
        line = None
    wanted = HEADER if kind == "header" else IDENTITY + MEASURED
    if not isinstance(line, dict) or line.get("kind") != kind or set(wanted) - set(line):
        raise UsageError(f"-o {path}, line {number}: not a {kind} line of results; give another file")
    return line


def _check_header(path: Path, found: Line, header: Line) -> None:
    for name in HEADER:
        if found[name] != header[name]:
            raise UsageError(
                f"-o {path} was made with {name} {found[name]}, and this run has {header[name]}; give another file"
            )
