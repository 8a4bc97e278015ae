"""The results file: one line of JSON for the run, then one per question. A run that was stopped goes on from it."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from windlass.core.errors import UsageError
from windlass.core.files import check_regular, read_bytes
from windlass.evals.case import VERSION, Case, Header, Identity, JsonObject, Line

START = b'{"kind": "'  # of every line
SHOWN = 12  # signs of a fingerprint in an error


class ResultsFile:
    """A results file that is open for more: the `cases` that it holds, each once, by identity."""

    def __init__(self, path: Path, cases: Sequence[Case]) -> None:
        self._path = path
        self.cases = {case.identity: case for case in cases}

    def __contains__(self, identity: Identity) -> bool:
        return identity in self.cases

    def add(self, cases: Sequence[Case]) -> None:
        """Write those cases that the file lacks, whole and at once.

        Raises: UsageError when they cannot be written.
        """
        new = [case for case in cases if case.identity not in self.cases]
        _append(self._path, [case.to_json() for case in new])
        self.cases |= {case.identity: case for case in new}


def open_results(path: Path, header: Header, note: Callable[[str], None]) -> ResultsFile:
    """The file at `path`, made with this header where there is none.

    A last line that was cut in half is taken off, and `note` told so. A file that cannot be gone on with
    stays as it is.

    Raises: UsageError for such a file: not one of results, or of another version, model or seed.
    """
    is_new = not path.exists()
    data = _read(path)
    end = data.rfind(b"\n") + 1
    cut = data[end:]
    if not (cut.startswith(START) or START.startswith(cut)):
        raise UsageError(f"-o {path} is not a file of results; give another name")
    rows = data[:end].splitlines()
    if rows:
        # A file of another version may look like anything after its header.
        _check_header(path, _line(path, 1, rows[0], "header"), header)
    lines = [_line(path, number, row, "case") for number, row in enumerate(rows[1:], 2)]
    cases = [Case.from_json(line, header.seed) for line in lines]
    if cut:
        note(f"the last line of {path} was cut in half; it is taken off, and its case run again")
        with path.open("r+b") as file:
            file.truncate(end)
    if not rows:
        try:
            _append(path, [header.to_json()])
        except UsageError:
            if is_new:  # a file without a line is of no use to anybody
                path.unlink(missing_ok=True)
            raise
    return ResultsFile(path, cases)


def _read(path: Path) -> bytes:
    """What the file holds; it is made where there is none, because now is better than after the first case."""
    check_regular(path, "-o")
    _append(path, [])
    return read_bytes(path, f"-o {path}")


def _append(path: Path, lines: Sequence[JsonObject]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    try:
        with path.open("ab") as file:
            file.write(text.encode("utf-8", "replace"))
    except OSError as error:
        raise UsageError(f"-o {path} cannot be written: {error.strerror}") from None


def _line(path: Path, number: int, data: bytes, kind: str) -> Line:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        found = None
    where = f"-o {path}, line {number}: not a {kind} line of results"
    if not isinstance(found, dict) or found.get("kind") != kind:
        raise UsageError(f"{where}; give another file")
    return Line(found, where)


def _check_header(path: Path, line: Line, header: Header) -> None:
    version = line.whole("version")
    if version == VERSION:
        found = Header.from_json(line)
        seeds = None if found.seed == header.seed else ("seed", found.seed, header.seed)
        differing = found.difference(header) or seeds
    else:
        differing = "version", version, VERSION
    if differing is not None:
        name, in_file, wanted = differing
        if name == "fingerprint":
            in_file, wanted = (f"{each.fingerprint:.{SHOWN}} of a {each.name}" for each in (found, header))
        raise UsageError(f"-o {path} was made with {name} {in_file}, and this run has {wanted}; give another file")
