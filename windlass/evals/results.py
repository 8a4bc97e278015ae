"""The results file: one line of JSON for the run, then one per question. A run that was stopped goes on from it."""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

from windlass.core.errors import UsageError
from windlass.core.files import check_regular, read_bytes
from windlass.core.parse import NO_RECALL, NO_SHARES

VERSION: Final = 2
FULL: Final = "full cache"
HINT: Final = "the line is damaged, take it out or run the evaluation again"
VARIED: Final = (
    "merge",
    "positions",
    "store",
    "shares",
    "recalled",
)  # options of the cache beside its policy and budget
IDENTITY: Final = ("task", "policy", "asked_budget", *VARIED, "is_aware", "length", "sample")
MAX_NUMBER: Final = 2**63  # that a line may hold: sums and quotients of such numbers are numbers, too
SHOWN: Final = 60  # signs of a wrong value in an error
JsonObject = dict[str, Any]
Identity = tuple[str | int | bool | None, ...]
Value = TypeVar("Value")


@dataclass(frozen=True)
class Header:
    """With what cases were run. `model` is the name of a folder or on the hub; `fingerprint` says which model it is.

    `dtype`, `trained_length` and `fingerprint` are None where they are not known: in files of before, `model` is
    whatever was typed.
    """

    windlass: str
    torch: str
    transformers: str
    model: str
    parameters: int
    dtype: str | None
    trained_length: int | None
    seed: int
    date: str
    fingerprint: str | None = None

    @property
    def name(self) -> str:
        """The model as it is shown; of a path that was typed, the last folder."""
        is_hub_name = self.model.count("/") < 2 and not self.model.startswith((".", "~", "/"))
        return self.model if is_hub_name else _last(self.model)

    @property
    def run_model(self) -> str:
        """The model, and the type of its numbers where that was told: `"finder-3m in float32"`."""
        return self.name if self.dtype is None else f"{self.name} in {self.dtype}"

    def difference(self, other: "Header") -> tuple[str, object, object] | None:
        """The first thing that tells this model from that of `other`, as name and both values; None: it is the same.

        Where both have a fingerprint, names do not count.
        """
        names = ("parameters", "dtype", "fingerprint")
        ours, theirs = ([getattr(each, name) for name in names] for each in (self, other))
        if None in (self.fingerprint, other.fingerprint):
            names = ("model", "parameters", "dtype")
            ours, theirs = ([each.model, each.parameters, each.dtype] for each in (self, other))
            if _last(self.model) == _last(other.model):
                ours[0] = theirs[0]
        differing = [pair for pair in zip(names, ours, theirs, strict=True) if pair[1] != pair[2]]
        return differing[0] if differing else None

    def to_json(self) -> JsonObject:
        """The line of the file."""
        return {"kind": "header", "version": VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, line: "Line") -> "Header":
        """The header that a line holds. Raises: UsageError for another version, or a field that is damaged."""
        version = line.whole("version")
        if version != VERSION:
            raise UsageError(
                f"{line.where}: the version is {version}, and this windlass reads version {VERSION}; "
                f"{'update windlass' if version > VERSION else 'run the evaluation again'}"
            )
        return cls(
            windlass=line.text("windlass"),
            torch=line.text("torch"),
            transformers=line.text("transformers"),
            model=line.text("model"),
            parameters=line.whole("parameters"),
            dtype=line.or_none(line.text, "dtype"),
            trained_length=line.or_none(line.whole, "trained_length"),
            seed=line.whole("seed"),
            date=line.text("date"),
            fingerprint=line.or_none(line.text, "fingerprint"),
        )


@dataclass(frozen=True)
class Case:
    """One question, or one text for `nll` and `kl`, under one setting of the cache.

    `asked_budget` is as it was typed, `budget` the slots that came of it, None where nothing was evicted. `slots_held`
    counts the slots in use per layer once the text was read, `bytes_held` all that is allocated afterwards, at rest, of
    which a text has an equal part where several were read side by side.
    `score` is from 0 to 1; a case has a score, an `nll`, or both. `seed` is that of its run, which the header tells.
    `context_tokens` and `seconds` are None where a file does not have them.
    """

    task: str
    policy: str
    budget: int | None
    asked_budget: str
    merge: str
    positions: str
    store: str
    shares: str
    recalled: str
    is_aware: bool
    length: int
    sample: int
    turn: int | None
    depth: float | None
    context_tokens: int | None
    slots_held: int | float
    bytes_held: int
    bytes_full: int
    expected: tuple[str, ...]
    output: str | None
    score: float | None
    nll: float | None
    kl: float | None
    seconds: float | None
    seed: int

    @property
    def identity(self) -> Identity:
        """What tells it from every other case of its file."""
        return (*(getattr(self, name) for name in IDENTITY), self.turn)

    @property
    def label(self) -> str:
        """The row or line that it belongs to: the policy, and what else is not the default.

        Where nothing is evicted a policy makes no difference, and none is named.
        """
        from windlass.policies.registry import spelled  # needs torch, and a file of results can be refused without

        name = FULL if self.budget is None else spelled(self.policy)
        unusual = [self.merge] if self.merge != "none" else []
        unusual += [self.positions] if self.positions != "original" else []
        unusual += [self.store] if self.store != "plain" else []
        unusual += [self.shares] if self.shares != NO_SHARES else []
        unusual += [f"recall {self.recalled}"] if self.recalled != NO_RECALL else []
        return ", ".join([name, *unusual])

    @property
    def asked(self) -> str:
        """The budget as it was typed: `"64"`, `"4x"` or `"all"`."""
        return "all" if self.budget is None else self.asked_budget

    @property
    def key(self) -> tuple[object, ...]:
        """What no two cases of a report share."""
        question = (self.task, self.is_aware, self.length, self.sample, self.turn, self.depth, self.seed)
        return (self.label, self.asked, *question)

    @property
    def share(self) -> float:
        """Bytes held, of the full cache's."""
        return self.bytes_held / self.bytes_full

    def to_json(self) -> JsonObject:
        """The line of the file."""
        line: JsonObject = {each.name: getattr(self, each.name) for each in fields(self)}
        seconds, nll, kl = (line.pop(name) for name in ("seconds", "nll", "kl"))
        del line["seed"]
        if self.shares == NO_SHARES:  # as files were before there were any
            del line["shares"]
        if self.recalled == NO_RECALL:
            del line["recalled"]
        measures = {} if nll is None else {"nll": nll, "kl": kl}
        return {"kind": "case", **line, "expected": list(self.expected), "measures": measures, "seconds": seconds}

    @classmethod
    def from_json(cls, line: "Line", seed: int) -> "Case":
        """The case that a line holds. Raises: UsageError for a field that is missing or damaged."""
        if line.text("kind") != "case":
            raise UsageError(f"{line.where}: kind must be header or case, got {_shown(line.text('kind'))}; {HINT}")
        measures = line.inner("measures")
        case = cls(
            task=line.text("task"),
            policy=line.text("policy"),
            budget=line.or_none(line.whole, "budget"),
            asked_budget=line.text("asked_budget"),
            merge=line.text("merge"),
            positions=line.text("positions"),
            store=line.text("store"),
            shares=line.or_none(line.text, "shares") or NO_SHARES,
            recalled=line.or_none(line.text, "recalled") or NO_RECALL,
            is_aware=line.flag("is_aware"),
            length=line.whole("length"),
            sample=line.whole("sample"),
            turn=line.or_none(line.whole, "turn"),
            depth=line.or_none(line.part, "depth"),
            context_tokens=line.or_none(line.whole, "context_tokens"),
            slots_held=line.number("slots_held"),
            bytes_held=line.whole("bytes_held", 1),
            bytes_full=line.whole("bytes_full", 1),
            expected=line.or_none(line.texts, "expected") or (),
            output=line.or_none(line.text, "output"),
            score=line.or_none(line.part, "score"),
            nll=measures.or_none(measures.real, "nll"),
            kl=measures.or_none(measures.real, "kl"),
            seconds=line.or_none(line.real, "seconds"),
            seed=seed,
        )
        if case.score is None and case.nll is None:
            raise UsageError(f"{line.where}: there is neither a score nor an nll; {HINT}")
        return case


class Line:
    """The fields of one line, each checked when it is taken; errors begin with `where` and name the field."""

    def __init__(self, data: JsonObject, where: str) -> None:
        self._data = data
        self.where = where

    def text(self, name: str) -> str:
        value = self._value(name)
        return value if isinstance(value, str) else self._refuse(name, "a text")

    def texts(self, name: str) -> tuple[str, ...]:
        value = self._value(name)
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            return tuple(value)
        return self._refuse(name, "a list of texts")

    def whole(self, name: str, least: int = 0) -> int:
        value = self._value(name)
        if isinstance(value, int) and not isinstance(value, bool) and least <= value <= MAX_NUMBER:
            return value
        return self._refuse(name, f"a whole number from {least}")

    def number(self, name: str) -> int | float:
        value = self._value(name)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return self._refuse(name, "a number")
        # A model that is broken may have said "not a number", or a loss without end.
        if abs(value) <= MAX_NUMBER or value == math.inf or value != value:
            return value
        return self._refuse(name, "a number of at most 2^63")

    def real(self, name: str) -> float:
        return float(self.number(name))

    def part(self, name: str) -> float:
        value = self.real(name)
        return value if 0 <= value <= 1 else self._refuse(name, "from 0 to 1")

    def flag(self, name: str) -> bool:
        value = self._value(name)
        return value if isinstance(value, bool) else self._refuse(name, "true or false")

    def or_none(self, take: Callable[[str], Value], name: str) -> Value | None:
        """What `take` gives; None where the line says null, or does not have the field."""
        return None if self._data.get(name) is None else take(name)

    def inner(self, name: str) -> "Line":
        value = self._data.get(name)
        if value is None:
            return Line({}, self.where)
        return Line(value, self.where) if isinstance(value, dict) else self._refuse(name, "an object")

    def _value(self, name: str) -> object:
        if name not in self._data:
            raise UsageError(f"{self.where}: there is no field {name!r}; {HINT}")
        return self._data[name]

    def _refuse(self, name: str, wanted: str) -> NoReturn:
        raise UsageError(f"{self.where}: {name} must be {wanted}, got {_shown(self._data[name])}; {HINT}")


def _last(model: str) -> str:
    """The last part of a path or of a name on the hub."""
    return model.rstrip("/").rpartition("/")[2]


def _shown(value: object) -> str:
    """A wrong value, cut where it is long; what is deep is not looked into."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        return "a huge number"
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


START = b'{"kind": "'  # of every line
SHOWN_HASH = 12  # signs of a fingerprint in an error


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
            in_file, wanted = (f"{each.fingerprint:.{SHOWN_HASH}} of a {each.name}" for each in (found, header))
        raise UsageError(f"-o {path} was made with {name} {in_file}, and this run has {wanted}; give another file")
