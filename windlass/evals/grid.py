"""The grid of an evaluation: every combination of the values in the lists that a user typed."""

import hashlib
import inspect
import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from windlass.cache.merging import checked_merge, merge_of
from windlass.cache.options import CacheOptions, half_of, policy_of, recall_store_of
from windlass.cache.shares import Shares, shares_of
from windlass.core.errors import UsageError, WindlassError
from windlass.core.parse import HALF, MAX_NUMBER, NO_MERGE, NO_SHARES, int_parser, parse_list, parse_spec
from windlass.engine.text import encode
from windlass.evals.results import IDENTITY, VARIED, Identity
from windlass.evals.task import ALL, TASKS, Budget, Sample, Task, budget_of, depth_of
from windlass.evals.tasks import NAMES
from windlass.policies import Policy, Recent
from windlass.positions.modes import Original, position_mode
from windlass.stores.formats import store_of


@dataclass(frozen=True)
class SampleSpec:
    """A sample by its `number` among those that the task makes with this seed, up to `length` tokens.

    `label` names the task, in errors and in random samples. The same specification gives the same sample.
    """

    task: Task
    label: str
    length: int
    seed: int
    number: int
    digest: str | None = None
    """Digest of the file that the task was read from, for lines of results."""

    @property
    def key(self) -> tuple[str, int, int, int]:
        """The key of the sample: tasks of users need not be hashable."""
        return self.label, self.length, self.seed, self.number


@dataclass(frozen=True)
class SizedSample:
    """A sample and its size.

    `context_tokens` are those of the text alone, `total_tokens` with the longest question and room for its answer.
    """

    sample: Sample
    units: int
    context_tokens: int
    total_tokens: int


def fit(spec: SampleSpec, tokenizer: PreTrainedTokenizerBase) -> SizedSample:
    """The sample with as many units as fit: text, question and answer take up to `spec.length` tokens.

    Raises: UsageError as `shortest` does, and for a length that there is not enough filler for.
    Source: length and search as in RULER, Hsieh et al. 2024 (arXiv:2404.06654).
    """
    fits = shortest(spec, tokenizer)
    over: SizedSample | None = None
    while over is None or over.units - fits.units > 1:
        if over is None:
            units = _more(fits.units, spec.task.most_units)
            if units == fits.units:
                return _all_of_it(fits, spec)
        else:
            gap = over.units - fits.units
            share = (spec.length - fits.total_tokens) / (over.total_tokens - fits.total_tokens)
            units = fits.units + min(max(int(share * gap), 1), gap - 1)
        tried = _sample(spec, tokenizer, units)
        if tried.total_tokens <= spec.length:
            fits = tried
        else:
            over = tried
    return fits


def shortest(spec: SampleSpec, tokenizer: PreTrainedTokenizerBase) -> SizedSample:
    """The same sample with as few units as the task allows.

    Raises: UsageError when even that is longer than `spec.length`, or for a task that fails.
    """
    made = _sample(spec, tokenizer, spec.task.least_units)
    if made.total_tokens > spec.length:
        raise UsageError(
            f"length {spec.length} is too short for task {spec.label}, which takes {made.total_tokens} tokens of this "
            f"model's at the least in text {spec.number}, question and answer included. Raise --lengths"
        )
    return made


def _sample(spec: SampleSpec, tokenizer: PreTrainedTokenizerBase, units: int) -> SizedSample:
    with task_errors(spec.label):
        draw = random.Random(f"{spec.seed} {spec.label} {spec.length} {spec.number}")
        sample = spec.task.compose(draw, spec.length, units)
    context = len(encode(tokenizer, sample.context, is_start=True))
    asking = [len(encode(tokenizer, turn.question + turn.prefix, is_start=False)) for turn in sample.turns]
    return SizedSample(sample, units, context, context + max(asking, default=0) + spec.task.answer_tokens)


@contextmanager
def task_errors(label: str) -> Iterator[None]:
    """Re-raise whatever a task raises as a UsageError that names it."""
    try:
        yield
    except WindlassError:
        raise
    except Exception as error:
        raise UsageError(f"task {label}: {type(error).__name__}: {error}") from error


def _more(units: int, most: int | None) -> int:
    return 2 * units + 1 if most is None else min(2 * units + 1, most)


def _all_of_it(fits: SizedSample, spec: SampleSpec) -> SizedSample:
    """The sample of all the material, where that is just enough."""
    if fits.total_tokens < spec.length:
        raise UsageError(
            f"length {spec.length} is more than task {spec.label} can fill: all it has makes {fits.total_tokens} "
            "tokens of this model's. Lower --lengths"
        )
    return fits


def load_task(spec: str) -> tuple[str, Task]:
    """The task that `spec` names, and its label: `"vt"`, `"perplexity(text.txt)"` or `"path/to/file.py:Class"`.

    Names ignore case, `_` and `-`. Code of a file is run, once.

    Raises: UsageError for a task that cannot be found, read or made.
    """
    typed = parse_spec(spec)
    if typed is not None and typed.inside:
        name = TASKS.name_of(typed.name, NAMES)
        made = NAMES[name].reading(Path(typed.inside).expanduser())
        if made is None:
            raise UsageError(f"task {name} reads no text, so it takes no file. Use {name}")
        return f"{name}({typed.inside})", made
    path, name = TASKS.split(spec)
    if path is not None:
        return spec, _from_file(path, name)
    name = TASKS.name_of(name, NAMES)
    return name, NAMES[name]


def _from_file(path: Path, name: str) -> Task:
    kind: type[Task] = TASKS.class_in(path, name)
    if inspect.isabstract(kind) or "answer_tokens" not in {field for each in kind.__mro__ for field in vars(each)}:
        raise UsageError(f"task {name} of {path} is not whole. It needs a method compose and a number answer_tokens")
    with task_errors(f"{path}:{name}"):
        return kind()


OPTIONS = {"budgets": "budget", "policies": "policy"}  # of flags that are not called like their option


@dataclass(frozen=True)
class ListOptions:
    """Lists as they were typed, with values separated by commas.

    `options` holds lists of values of the cache's options by the name of their flag, such as `policies`. An option
    without a list has its default. Without `depths`, answers stand at random depths.
    """

    tasks: str
    lengths: str
    options: Mapping[str, str]
    depths: str | None = None


@dataclass(frozen=True)
class Settings:
    """Settings of the cache that reads a sample: `options` but for the budget, which may depend on the text."""

    budget: Budget
    options: CacheOptions

    @cached_property
    def labels(self) -> dict[str, str]:
        """Each setting that a list may vary as text, as in a line of results."""
        labels = self.options.labels() | {"recalled": self.options.recalled}
        varied = {name: str(labels[name]) for name in VARIED}
        return {"policy": str(labels["policy"]), "asked_budget": self.budget.asked, **varied}

    @cached_property
    def files(self) -> dict[str, str]:
        """Digests of the files that its policy and its shares were read from."""
        found, shares = {}, self.options.shares
        if contents := [path.read_bytes() for path in _policy_files(self.options.policy)]:
            found["policy"] = _digest(*contents)
        if isinstance(shares, Shares):
            found["shares"] = _digest(json.dumps(shares.document()).encode())
        return found


@dataclass(frozen=True)
class Cell:
    """One sample under one setting. A run makes a `Case` of each question."""

    spec: SampleSpec
    settings: Settings
    is_aware: bool = False

    @property
    def turns(self) -> list[int | None]:
        """The number of each question, or none for a single question."""
        return [*range(self.spec.task.turns)] if self.spec.task.turns > 1 else [None]

    @property
    def identities(self) -> list[Identity]:
        """The identities of its cases."""
        labels = self.labels
        return [(*(labels[name] for name in IDENTITY), turn) for turn in self.turns]

    @property
    def labels(self) -> dict[str, Any]:
        """The fields of a `Case` that are known before it is run."""
        return {
            **self.settings.labels,
            "task": self.spec.label,
            "is_aware": self.is_aware,
            "length": self.spec.length,
            "sample": self.spec.number,
            "seed": self.spec.seed,
            "files": self.settings.files | ({} if self.spec.digest is None else {"task": self.spec.digest}),
        }


@dataclass(frozen=True)
class Grid:
    """All combined values, with tasks by label. Each of the `samples` texts is made with the same `seed`."""

    tasks: dict[str, Task]
    lengths: list[int]
    settings: list[Settings]
    samples: int = 1
    seed: int = 0
    is_aware: bool = False

    @property
    def cells(self) -> list[Cell]:
        """Every combination. Cells with the same text are neighbours."""
        digests = {label: _task_digest(label) for label in self.tasks}
        return [
            Cell(SampleSpec(task, label, length, self.seed, number, digests[label]), settings, self.is_aware)
            for number in range(self.samples)
            for label, task in self.tasks.items()
            for length in self.lengths
            for settings in self.settings
        ]


def files_of(cells: Iterable[Cell]) -> dict[tuple[str, str], str]:
    """Digests of all files that `cells` were read from, by the field of a line of results and its value."""
    labels = [cell.labels for cell in cells]
    return {(name, str(each[name])): digest for each in labels for name, digest in each["files"].items()}


def _digest(*contents: bytes) -> str:
    return hashlib.sha256(b"\0".join(contents)).hexdigest()[:16]


def _policy_files(policy: Policy) -> Iterator[Path]:
    """The files of a policy and of those that it wraps: their code, tables and weights."""
    kind = type(policy)
    if not kind.__module__.startswith("windlass."):
        with suppress(TypeError, OSError):  # of a class that was typed in
            yield Path(inspect.getfile(kind)).resolve(strict=True)
    for value in (getattr(policy, each.name) for each in fields(policy)):  # type: ignore[arg-type]  # a dataclass
        if isinstance(value, Policy):
            yield from _policy_files(value)
        elif isinstance(value, str) and Path(value).expanduser().is_file():
            yield Path(value).expanduser()


def _task_digest(label: str) -> str | None:
    """The digest of the file in a task's label, or None where there is none."""
    for spec in filter(None, (label, label.rpartition("@")[0])):  # with a depth behind it
        typed = parse_spec(spec)
        path = Path(typed.inside) if typed is not None and typed.inside else TASKS.split(spec)[0]
        if path is not None and path.expanduser().is_file():
            return _digest(path.expanduser().read_bytes())
    return None


def grid_of(lists: ListOptions) -> Grid:
    """The product of all lists, without duplicates.

    A budget of `all` evicts nothing under any policy or rule, so it is run once, under the default ones.

    Raises: WindlassError for invalid options.
    """
    axes = axes_of(lists.options)
    usual: dict[str, Any] = {"policy": Recent(), "positions": Original()}  # named in results, so never "auto"
    settings = []
    for values in itertools.product(*axes.values()):
        options = dict(zip(axes, values, strict=True))
        budget = options.pop("budget", Budget(ALL))
        if budget.asked == ALL:
            options |= {"policy": Recent(), "merge": None, "shares": None, "recall": 0}
        if options.get("recall") == HALF:
            if budget.slots is None:
                raise UsageError(
                    f"--recall {HALF} is half of a number, and --budgets has {budget.asked}. Give a number"
                )
            options["recall"] = half_of(budget.slots)
        if not options.get("recall"):
            options.pop("recall_store", None)
        made = CacheOptions(**usual | options)
        checked_merge(made.merge, 1, made.store, made.policy)  # whatever the budget comes to
        settings.append(Settings(budget, made))
    return Grid(
        tasks_of(lists),
        list(dict.fromkeys(parse_list("--lengths", lists.lengths, int_parser("--lengths", 1, MAX_NUMBER)))),
        list({tuple(each.labels.values()): each for each in settings}.values()),
    )


def tasks_of(lists: ListOptions) -> dict[str, Task]:
    """Each task at each depth, by label: `passkey`, or `passkey@0.5` where depths were typed.

    Raises: UsageError for a task that cannot be found, read or made, or that has no one place for an answer.
    """
    tasks = dict(parse_list("--tasks", lists.tasks, load_task))
    if lists.depths is None:
        return tasks
    placed = {}
    for label, task in tasks.items():
        for depth in parse_list("--depth", lists.depths, depth_of):
            made = task.at(depth)
            if made is None:
                raise UsageError(f"task {label} has no single place for its answer. Leave out --depth")
            placed[f"{label}@{depth:g}"] = made
    return placed


def axes_of(lists: Mapping[str, str]) -> dict[str, list[Any]]:
    """The values of each list by the name of its option, in the order of the lists. Budgets are `Budget`s.

    Raises: WindlassError for invalid options.
    """
    axes: dict[str, list[Any]] = {}
    for flag, typed in lists.items():
        option = OPTIONS.get(flag, flag)
        if option == "budget":
            axes[option] = [budget_of(f"--{flag}", part) for part in parse_list(f"--{flag}", typed, str)]
        else:
            axes[option] = parse_list(f"--{flag}", typed, PARSERS[option])
    return axes


PARSERS: Mapping[str, Callable[[str], Any]] = {
    "policy": policy_of,
    "merge": lambda part: None if part == NO_MERGE else merge_of(part),
    "positions": position_mode,
    "store": store_of,
    "shares": lambda part: None if part == NO_SHARES else shares_of(part),
    "recall": lambda part: part if part == HALF else int_parser("--recall", 0, MAX_NUMBER)(part),
    "recall_store": recall_store_of,
}
