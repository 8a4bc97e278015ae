"""Results files: their lines as headers and cases, each case once.

The first line is a header, then comes one case a line. A header may come again where a run went on later.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn, TypeVar

from windlass.core.errors import UsageError

VERSION: Final = 2
FULL: Final = "full cache"
MEND: Final = "the line is damaged, take it out or run the evaluation again"
Value = TypeVar("Value")


@dataclass(frozen=True)
class Header:
    """With what cases were run."""

    windlass: str
    torch: str
    transformers: str
    model: str
    dtype: str | None
    parameters: int
    trained_length: int | None
    seed: int
    date: str

    @property
    def run_model(self) -> str:
        """The model, and the type of its numbers where that was told: `"passkey-3m in float32"`."""
        return self.model if self.dtype is None else f"{self.model} in {self.dtype}"


@dataclass(frozen=True)
class Case:
    """One question, or one text for `nll` and `kl`, under one setting of the cache.

    `asked_budget` is as it was typed, `budget` the slots that came of it, None where nothing was evicted.
    `score` is from 0 to 1; a case has a score, an `nll`, or both. `seed` is that of its run.
    """

    task: str
    policy: str
    budget: int | None
    asked_budget: str
    merge: str
    positions: str
    store: str
    is_aware: bool
    length: int
    sample: int
    turn: int | None
    depth: float | None
    slots_held: float
    bytes_held: int
    bytes_full: int
    output: str | None
    score: float | None
    nll: float | None
    kl: float | None
    seed: int

    @property
    def label(self) -> str:
        """The row or line that it belongs to: the policy, and what else is not the default.

        Where nothing is evicted a policy makes no difference, and none is named.
        """
        name = FULL if self.budget is None else self.policy.removesuffix("()")
        unusual = [self.merge] if self.merge != "none" else []
        unusual += [self.positions] if self.positions != "original" else []
        unusual += [self.store] if self.store != "plain" else []
        return ", ".join([name, *unusual])

    @property
    def asked(self) -> str:
        """The budget as it was typed: `"64"`, `"4x"` or `"all"`."""
        return "all" if self.budget is None else self.asked_budget

    @property
    def key(self) -> tuple[object, ...]:
        """What no two cases share."""
        question = (self.task, self.is_aware, self.length, self.sample, self.turn, self.depth, self.seed)
        return (self.label, self.asked, *question)

    @property
    def share(self) -> float:
        """Bytes held, of the full cache's."""
        return self.bytes_held / self.bytes_full


@dataclass(frozen=True)
class Results:
    """All files together. `notes` tell what was left out, and why."""

    headers: tuple[Header, ...]
    cases: tuple[Case, ...]
    notes: tuple[str, ...]


def read_results(files: Sequence[Path]) -> Results:
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
            notes.append(f"{file}: the last line is cut in half, as of a run that was stopped; it is left out.")
        header = _header(lines[0])
        headers.setdefault(header, file)
        for line in lines[1:]:
            if line.text("kind") == "header":
                header = _header(line)
                headers.setdefault(header, file)
                continue
            case = _case(line, header.seed)
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
    return Results(tuple(headers), tuple(cases.values()), tuple(notes))


class _Line:
    """The fields of one line, each checked when it is taken; errors name the file, the line and the field."""

    def __init__(self, data: dict[str, object], where: str) -> None:
        self._data = data
        self.where = where

    def text(self, name: str) -> str:
        value = self._value(name)
        return value if isinstance(value, str) else self._refuse(name, "a text")

    def whole(self, name: str, least: int = 0) -> int:
        value = self._value(name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= least:
            return value
        return self._refuse(name, f"a whole number from {least}")

    def number(self, name: str) -> float:
        value = self._value(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        return self._refuse(name, "a number")

    def part(self, name: str) -> float:
        value = self.number(name)
        return value if 0 <= value <= 1 else self._refuse(name, "from 0 to 1")

    def flag(self, name: str) -> bool:
        value = self._value(name)
        return value if isinstance(value, bool) else self._refuse(name, "true or false")

    def or_none(self, take: Callable[[str], Value], name: str) -> Value | None:
        """What `take` gives; None where the line says null, or does not have the field."""
        return None if self._data.get(name) is None else take(name)

    def inner(self, name: str) -> "_Line":
        value = self._data.get(name)
        if value is None:
            return _Line({}, self.where)
        return _Line(value, self.where) if isinstance(value, dict) else self._refuse(name, "an object")

    def _value(self, name: str) -> object:
        if name not in self._data:
            raise UsageError(f"{self.where}: there is no field {name!r}; {MEND}")
        return self._data[name]

    def _refuse(self, name: str, wanted: str) -> NoReturn:
        raise UsageError(f"{self.where}: {name} must be {wanted}, got {self._data[name]!r}; {MEND}")


def _lines(file: Path) -> tuple[list[_Line], bool]:
    """The lines of a file, and whether a last one was cut."""
    try:
        rows = file.read_bytes().split(b"\n")
    except OSError as error:
        raise UsageError(f"results file {file} cannot be read: {error.strerror}") from None
    rows = [row.rstrip(b"\r") for row in rows]
    while rows and not rows[-1].strip():
        rows.pop()
    lines: list[_Line] = []
    for index, row in enumerate(rows):
        try:
            data = json.loads(row)
        except ValueError:
            data = None
        if isinstance(data, dict):
            lines.append(_Line(data, f"results file {file}, line {index + 1}"))
        elif index and index == len(rows) - 1:
            return lines, True
        elif index:
            raise UsageError(f"results file {file}, line {index + 1}: it is no object of JSON; {MEND}")
        else:
            raise _not_results(file)
    if not lines or lines[0].or_none(lines[0].text, "kind") != "header":
        raise _not_results(file)
    return lines, False


def _not_results(file: Path) -> UsageError:
    return UsageError(f"{file} is not a results file: its first line is no header; give what `windlass eval -o` wrote")


def _header(line: _Line) -> Header:
    version = line.whole("version")
    if version != VERSION:
        raise UsageError(
            f"{line.where}: the version is {version}, and this windlass reads version {VERSION}; "
            f"{'update windlass' if version > VERSION else 'run the evaluation again'}"
        )
    return Header(
        windlass=line.text("windlass"),
        torch=line.text("torch"),
        transformers=line.text("transformers"),
        model=line.text("model"),
        dtype=line.or_none(line.text, "dtype"),
        parameters=line.whole("parameters"),
        trained_length=line.or_none(line.whole, "trained_length"),
        seed=line.whole("seed"),
        date=line.text("date"),
    )


def _case(line: _Line, seed: int) -> Case:
    if line.text("kind") != "case":
        raise UsageError(f"{line.where}: kind must be header or case, got {line.text('kind')!r}; {MEND}")
    measures = line.inner("measures")
    case = Case(
        task=line.text("task"),
        policy=line.text("policy"),
        budget=line.or_none(line.whole, "budget"),
        asked_budget=line.text("asked_budget"),
        merge=line.text("merge"),
        positions=line.text("positions"),
        store=line.text("store"),
        is_aware=line.flag("is_aware"),
        length=line.whole("length"),
        sample=line.whole("sample"),
        turn=line.or_none(line.whole, "turn"),
        depth=line.or_none(line.part, "depth"),
        slots_held=line.number("slots_held"),
        bytes_held=line.whole("bytes_held", 1),
        bytes_full=line.whole("bytes_full", 1),
        output=line.or_none(line.text, "output"),
        score=line.or_none(line.part, "score"),
        nll=measures.or_none(measures.number, "nll"),
        kl=measures.or_none(measures.number, "kl"),
        seed=seed,
    )
    if case.score is None and case.nll is None:
        raise UsageError(f"{line.where}: there is neither a score nor an nll; {MEND}")
    return case


def _check_one_model(headers: dict[Header, Path]) -> None:
    models = {header.run_model: file for header, file in headers.items()}
    if len(models) > 1:
        (one, here), (other, there), *_ = models.items()
        raise UsageError(
            f"these are results of two models, {one} ({here}) and {other} ({there}), which no table should mix; "
            "make a report of each"
        )
