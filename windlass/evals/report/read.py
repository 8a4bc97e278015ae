"""Results files: their lines as headers and cases, each case once.

The first line is a header, then comes one case a line. A header may come again where a run went on later.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from windlass.core.errors import UsageError
from windlass.core.files import read_bytes
from windlass.evals.case import HINT, Case, Header, Line


@dataclass(frozen=True)
class LoadedResults:
    """All files together. `notes` tell what was left out, and why."""

    headers: tuple[Header, ...]
    cases: tuple[Case, ...]
    notes: tuple[str, ...]


def read_results(files: Sequence[Path]) -> LoadedResults:
    """The cases of `files`, in their order, each once; a last line that was cut is left out.

    Raises: UsageError when a file cannot be read, is no results file, is of another version or damaged, when no
    file has a case, or when two models were run.
    """
    headers: dict[Header, Path] = {}
    cases: dict[tuple[object, ...], Case] = {}
    notes: list[str] = []
    again = differing = 0
    for file in files:
        lines, is_cut = _lines(file)
        if is_cut:
            notes.append(f"{file.name}: the last line is cut in half, as of a run that was stopped; it is left out.")
        header = Header.from_json(lines[0])
        headers.setdefault(header, file)
        for line in lines[1:]:
            if line.text("kind") == "header":
                header = Header.from_json(line)
                headers.setdefault(header, file)
                continue
            case = Case.from_json(line, header.seed)
            first = cases.setdefault(case.key, case)
            if first is not case:
                again += 1
                differing += (first.score, first.nll, first.output) != (case.score, case.nll, case.output)
    _check_one_model(headers)
    if not cases:
        raise UsageError(f"{', '.join(map(str, files))}: there are no cases to report; let `windlass eval` run longer")
    if again:
        are = "1 case is" if again == 1 else f"{again:,} cases are"
        note = f"{are} there more than once, counting the full cache of every policy as one, and counted once."
        notes.append(note + (f" Of these {differing:,} differ: the first was taken." if differing else ""))
    return LoadedResults(tuple(headers), tuple(cases.values()), tuple(notes))


def _lines(file: Path) -> tuple[list[Line], bool]:
    """The lines of a file, and whether a last one was cut."""
    rows = read_bytes(file, f"results file {file}").split(b"\n")
    rows = [row.rstrip(b"\r") for row in rows]
    while rows and not rows[-1].strip():
        rows.pop()
    lines: list[Line] = []
    for index, row in enumerate(rows):
        try:
            data = json.loads(row)
        except (ValueError, RecursionError):
            data = None
        if isinstance(data, dict):
            lines.append(Line(data, f"results file {file}, line {index + 1}"))
        elif index and index == len(rows) - 1:
            return lines, True
        elif index:
            raise UsageError(f"results file {file}, line {index + 1}: it is no object of JSON; {HINT}")
        else:
            raise _not_results(file)
    if not lines or lines[0].or_none(lines[0].text, "kind") != "header":
        raise _not_results(file)
    return lines, False


def _not_results(file: Path) -> UsageError:
    return UsageError(f"{file} is not a results file: its first line is no header; give what `windlass eval -o` wrote")


def _check_one_model(headers: dict[Header, Path]) -> None:
    for (first, here), (other, there) in combinations(headers.items(), 2):
        if first.difference(other) is not None:
            weights = "; their weights differ" if first.run_model == other.run_model else ""
            raise UsageError(
                f"these are results of two models, {first.run_model} ({here}) and {other.run_model} ({there}), which "
                f"no table should mix{weights}; make a report of each"
            )
