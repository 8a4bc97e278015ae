"""The results file: one line of JSON for the run, then one per question. A run that was stopped continues from it."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    model_serializer,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError, from_json

from windlass.core.errors import UsageError
from windlass.core.files import check_regular, read_bytes
from windlass.core.parse import NO_MERGE, NO_RECALL, NO_SHARES

VERSION: Final = 2
FULL: Final = "full cache"
DAMAGED: Final = "the line is damaged, take it out or run the evaluation again"
FOREIGN: Final = "Give another file"
# Options of the cache beside its policy and budget, with their defaults.
DEFAULTS: Final = {
    "merge": NO_MERGE,
    "positions": "original",
    "store": "plain",
    "shares": NO_SHARES,
    "recalled": NO_RECALL,
}
VARIED: Final = tuple(DEFAULTS)
IDENTITY: Final = ("task", "policy", "asked_budget", *VARIED, "is_aware", "length", "sample")
MAX_NUMBER: Final = 2**63  # limit of numbers in a line: their sums and quotients stay finite
SHOWN: Final = 60  # characters of a wrong value in an error
SHOWN_HASH: Final = 12  # characters of a fingerprint in an error
START: Final = b'{"kind": "'  # of every line
OTHER_VERSION: Final = "other_version"
JsonObject = dict[str, Any]
Identity = tuple[str | int | bool | None, ...]
Record = TypeVar("Record", bound="_Line")


def _bounded(value: float) -> float:
    """Check that a number is at most 2^63. Infinity and "not a number" pass, because a broken model may give them."""
    if abs(value) <= MAX_NUMBER or value == math.inf or math.isnan(value):
        return value
    raise ValueError("must be a number of at most 2^63")


Count = Annotated[int, Field(ge=0, le=MAX_NUMBER)]
Size = Annotated[int, Field(ge=1, le=MAX_NUMBER)]
Share = Annotated[float, Field(ge=0, le=1)]
Real = Annotated[float, AfterValidator(_bounded)]


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class Header(_Line):
    """The conditions of cases. `model` is the name of a folder or on the hub, `fingerprint` identifies it.

    `dtype`, `trained_length` and `fingerprint` are None where they are unknown. In older files, `model` is the typed
    text.
    """

    kind: Literal["header"] = "header"
    version: Literal[2] = VERSION
    windlass: str
    torch: str
    transformers: str
    model: str
    parameters: Count
    dtype: str | None = None
    trained_length: Count | None = None
    seed: Count
    date: str
    fingerprint: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_version(cls, line: JsonObject) -> JsonObject:
        """Check the version first, because a header of another one may have other fields."""
        version = line.get("version", VERSION)
        if isinstance(version, int) and version != VERSION:
            way_out = "Update windlass" if version > VERSION else "Run the evaluation again"
            raise PydanticCustomError(
                OTHER_VERSION, f"the version is {version}, and this windlass reads version {VERSION}. {way_out}"
            )
        return line

    @property
    def name(self) -> str:
        """The model as it is shown. A typed path is shown as its last folder."""
        is_hub_name = self.model.count("/") < 2 and not self.model.startswith((".", "~", "/"))
        return self.model if is_hub_name else _last(self.model)

    @property
    def run_model(self) -> str:
        """The model, and the type of its numbers where that was told: `"finder-3m in float32"`."""
        return self.name if self.dtype is None else f"{self.name} in {self.dtype}"

    def difference(self, other: "Header") -> tuple[str, object, object] | None:
        """The first difference to the model of `other`, as name and both values, or None if it is the same.

        Where both have a fingerprint, names do not count.
        """
        if None in (self.fingerprint, other.fingerprint):
            if _last(self.model) != _last(other.model):
                return "model", self.model, other.model
            names = ["parameters", "dtype"]
        else:
            names = ["parameters", "dtype", "fingerprint"]
        pairs = [(name, getattr(self, name), getattr(other, name)) for name in names]
        return next((pair for pair in pairs if pair[1] != pair[2]), None)


class Measures(_Line):
    """Mean negative log-likelihood of a predicted text, and divergence from a full cache, in nats per token."""

    nll: Real | None = None
    kl: Real | None = None


class Case(_Line):
    """One question, or one text that was predicted, under one setting of the cache.

    `asked_budget` is as it was typed, `budget` the slots that came of it, None where nothing was evicted. `slots_held`
    counts the slots in use in the layer and head that has most, once the text was read. `bytes_held` are all that is
    allocated afterwards, at rest, and `recall_bytes` those of evicted tokens, in the host's memory. A text has an equal
    part of both where several were read side by side. `files`: digests of the files that its task,
    policy and shares were read from.
    A case has a score, an `nll`, or both. `seed` is that of its run, which the header tells.
    `context_tokens` and `seconds` are None where a file does not have them.
    """

    kind: Literal["case"] = "case"
    task: str
    policy: str
    budget: Count | None = None
    asked_budget: str
    merge: str
    positions: str
    store: str
    shares: str = NO_SHARES
    recalled: str = NO_RECALL
    is_aware: bool
    length: Count
    sample: Count
    turn: Count | None = None
    depth: Share | None = None
    context_tokens: Count | None = None
    slots_held: Count | Real
    bytes_held: Size
    bytes_full: Size
    recall_bytes: Count = 0
    files: dict[str, str] = Field(default_factory=dict)
    expected: tuple[str, ...] = ()
    output: str | None = None
    score: Share | None = None
    measures: Measures = Measures()
    seconds: Real | None = None
    seed: int = Field(default=0, exclude=True)

    @model_validator(mode="after")
    def _check_measured(self) -> "Case":
        if self.score is None and self.nll is None:
            raise ValueError("there is neither a score nor an nll")
        return self

    @model_serializer(mode="wrap")
    def _as_before(self, handler: SerializerFunctionWrapHandler) -> JsonObject:
        """Remove the fields that older files lack where the value is their implicit one."""
        line: JsonObject = handler(self)
        line["expected"] = list(self.expected)
        if self.nll is None:
            line["measures"] = {}
        usual: JsonObject = {**DEFAULTS, "recall_bytes": 0, "files": {}}
        for name in ("shares", "recalled", "recall_bytes", "files"):
            if line[name] == usual[name]:
                del line[name]
        return line

    @property
    def nll(self) -> float | None:
        """The mean negative log-likelihood, or None where the text was not predicted."""
        return self.measures.nll

    @property
    def kl(self) -> float | None:
        """The mean divergence from a full cache, or None where none was read beside."""
        return self.measures.kl

    @property
    def identity(self) -> Identity:
        """The key that no two cases of a file share."""
        return (*(getattr(self, name) for name in IDENTITY), self.turn)

    @property
    def label(self) -> str:
        """Label of the row or line: the policy, and every option that is not the default.

        Where nothing is evicted a policy makes no difference, and none is named.
        """
        from windlass.policies.registry import spelled  # needs torch, and a file of results can be refused without

        name = FULL if self.budget is None else spelled(self.policy)
        labels = [(option, getattr(self, option)) for option in VARIED]
        unusual = [(option, label) for option, label in labels if label != DEFAULTS[option]]
        return ", ".join([name, *(f"recall {label}" if option == "recalled" else label for option, label in unusual)])

    @property
    def asked(self) -> str:
        """The budget as it was typed: `"64"`, `"4x"` or `"all"`."""
        return "all" if self.budget is None else self.asked_budget

    @property
    def key(self) -> tuple[object, ...]:
        """The key that no two cases of a report share."""
        question = (self.task, self.is_aware, self.length, self.sample, self.turn, self.depth, self.seed)
        return (self.label, self.asked, *question)

    @property
    def share(self) -> float:
        """The share of the full cache's bytes that are held."""
        return self.bytes_held / self.bytes_full


LINE: Final[TypeAdapter[Header | Case]] = TypeAdapter(Annotated[Header | Case, Field(discriminator="kind")])


def parse_line(row: bytes, where: str, way_out: str = DAMAGED) -> Header | Case:
    """The record of a line. Raises: UsageError for another version, or the first field that is damaged."""
    try:
        return LINE.validate_json(row)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    if first["type"] == OTHER_VERSION:
        raise UsageError(f"{where}: {first['msg']}")
    raise UsageError(f"{where}: {_problem(first)}. {way_out}")


def _problem(error: ErrorDetails) -> str:
    """An error of pydantic's in a sentence: `"score must be less than or equal to 1, got 1.5"`."""
    message, value = error["msg"].removeprefix("Value error, "), error["input"]
    path = error["loc"][1:]  # after the kind of line
    name = str(path[1] if path[:1] == ("measures",) and len(path) > 1 else path[0]) if path else ""
    match error["type"]:
        case "missing":
            return f"there is no field {name!r}"
        case "extra_forbidden":
            return f"there is an unknown field {name!r}"
        case "json_invalid" | "dict_type":
            return "it is no object of JSON"
        case "union_tag_invalid" | "union_tag_not_found":
            return f"kind must be header or case, got {_shown(value.get('kind'))}"
        case "value_error" if not name:
            return message
    return f"{name} {message.replace('Input should', 'must')}, got {_shown(value)}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _last(model: str) -> str:
    """The last part of a path or of a name on the hub."""
    return model.rstrip("/").rpartition("/")[2]


class ResultsFile:
    """A results file that is open for more: the `cases` that it holds, each once, by identity."""

    def __init__(self, path: Path, cases: Sequence[Case]) -> None:
        self._path = path
        self.cases = {case.identity: case for case in cases}

    def __contains__(self, identity: Identity) -> bool:
        return identity in self.cases

    def check_files(self, files: Mapping[tuple[str, str], str]) -> None:
        """Raises: UsageError where cases were run with another file of a name. `files`: digests, by field and name."""
        for case in self.cases.values():
            for name, digest in case.files.items():
                label = str(getattr(case, name))
                if files.get((name, label), digest) != digest:
                    raise UsageError(
                        f"-o {self._path} has cases of {name} {label}, whose file has changed since. {FOREIGN}, or put "
                        "the old file back"
                    )

    def add(self, cases: Sequence[Case]) -> None:
        """Write those cases that the file lacks, whole and at once.

        Raises: UsageError when they cannot be written.
        """
        new = [case for case in cases if case.identity not in self.cases]
        _append(self._path, new)
        self.cases |= {case.identity: case for case in new}


def open_results(path: Path, header: Header, note: Callable[[str], None]) -> ResultsFile:
    """The file at `path`, made with this header where there is none.

    A last line that was cut is taken off, and `note` told so. A file that cannot be continued stays as it is.

    Raises: UsageError for such a file: not one of results, or of another version, model or seed.
    """
    is_new = not path.exists()
    check_regular(path, "-o")
    _append(path, [])  # checked now rather than after the first case
    data = read_bytes(path, f"-o {path}")
    end = data.rfind(b"\n") + 1
    cut = data[end:]
    if not (cut.startswith(START) or START.startswith(cut)):
        raise UsageError(f"-o {path} is not a file of results. {FOREIGN}")
    rows = data[:end].splitlines()
    if rows:
        # A file of another version may look like anything after its header.
        _check_same_run(path, _line_of(path, 1, rows[0], Header), header)
    lines = [_line_of(path, number, row, Case) for number, row in enumerate(rows[1:], 2)]
    cases = [line.model_copy(update={"seed": header.seed}) for line in lines]
    if cut:
        note(f"the last line of {path} was cut in half. It is taken off, and its case run again")
        with path.open("r+b") as file:
            file.truncate(end)
    if not rows:
        try:
            _append(path, [header])
        except UsageError:
            if is_new:  # a file without lines is removed
                path.unlink(missing_ok=True)
            raise
    return ResultsFile(path, cases)


def _append(path: Path, records: Sequence[Header | Case]) -> None:
    text = "".join(json.dumps(record.model_dump(), ensure_ascii=False) + "\n" for record in records)
    try:
        with path.open("ab") as file:
            file.write(text.encode("utf-8", "replace"))
    except OSError as error:
        raise UsageError(f"-o {path} cannot be written: {error.strerror}") from None


def _line_of(path: Path, number: int, row: bytes, kind: type[Record]) -> Record:
    """The line of a file that is continued. Raises: UsageError where it is of another kind, or damaged."""
    where = f"-o {path}, line {number}: not a {kind.__name__.lower()} line of results"
    found = parse_line(row, where, FOREIGN)
    if not isinstance(found, kind):
        raise UsageError(f"{where}. {FOREIGN}")
    return found


def _check_same_run(path: Path, found: Header, header: Header) -> None:
    seeds = None if found.seed == header.seed else ("seed", found.seed, header.seed)
    differing = found.difference(header) or seeds
    if differing is not None:
        name, in_file, wanted = differing
        if name == "fingerprint":
            in_file, wanted = (f"{each.fingerprint:.{SHOWN_HASH}} of a {each.name}" for each in (found, header))
        raise UsageError(f"-o {path} was made with {name} {in_file}, and this run has {wanted}. {FOREIGN}")


@dataclass(frozen=True)
class LoadedResults:
    """All files together. `notes` list the cases left out, with reasons."""

    headers: tuple[Header, ...]
    cases: tuple[Case, ...]
    notes: tuple[str, ...]


def read_results(files: Sequence[Path]) -> LoadedResults:
    """The cases of `files`, in their order, without duplicates and without a last line that was cut.

    Raises: UsageError when a file cannot be read, is no results file, is of another version or damaged, when no file
    has a case, or when two models were run.
    """
    headers: dict[Header, Path] = {}
    cases: dict[tuple[object, ...], Case] = {}
    notes: list[str] = []
    again = differing = 0
    for file in files:
        lines, is_cut = _lines(file)
        if is_cut:
            notes.append(f"{file.name}: the last line is cut in half, as of a run that was stopped. It is left out.")
        seed = 0
        for line in lines:
            if isinstance(line, Header):
                headers.setdefault(line, file)
                seed = line.seed
                continue
            case = line.model_copy(update={"seed": seed})
            first = cases.setdefault(case.key, case)
            if first is not case:
                again += 1
                differing += (first.score, first.nll, first.output) != (case.score, case.nll, case.output)
    _check_one_model(headers)
    if not cases:
        raise UsageError(f"{', '.join(map(str, files))}: there are no cases to report. Let `windlass eval` run longer")
    if again:
        are = "1 case is" if again == 1 else f"{again:,} cases are"
        note = f"{are} there more than once, counting the full cache of every policy as one, and counted once."
        notes.append(note + (f" Of these {differing:,} differ: the first was taken." if differing else ""))
    return LoadedResults(tuple(headers), tuple(cases.values()), tuple(notes))


def _lines(file: Path) -> tuple[list[Header | Case], bool]:
    """The lines of a file, and whether a last one was cut."""
    rows = read_bytes(file, f"results file {file}").rstrip().split(b"\n")
    if (_object(rows[0]) or {}).get("kind") != "header":
        raise UsageError(
            f"{file} is not a results file: its first line is no header. Give a file of `windlass eval -o`"
        )
    is_cut = len(rows) > 1 and _object(rows[-1]) is None
    whole = rows[:-1] if is_cut else rows
    return [parse_line(row, f"results file {file}, line {number}") for number, row in enumerate(whole, 1)], is_cut


def _object(row: bytes) -> JsonObject | None:
    """The object of a line, or None where it is none."""
    try:
        found = from_json(row)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _check_one_model(headers: dict[Header, Path]) -> None:
    for (first, here), (other, there) in combinations(headers.items(), 2):
        if first.difference(other) is not None:
            weights = ". Their weights differ" if first.run_model == other.run_model else ""
            raise UsageError(
                f"these are results of two models, {first.run_model} ({here}) and {other.run_model} ({there}), which "
                f"no table should mix{weights}. Make a report of each"
            )
