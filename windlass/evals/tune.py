"""`windlass tune`: which policy, store and positions serve a model and a text best in so many bytes."""

import hashlib
import itertools
import math
import shlex
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import fmean

import torch
from transformers import PreTrainedModel

from windlass.cache.options import CacheOptions
from windlass.core.errors import UsageError
from windlass.core.files import read_text
from windlass.core.parse import MAX_NUMBER, in_units, parse_list
from windlass.core.step import HEADROOM
from windlass.engine import generate
from windlass.engine.text import encode
from windlass.evals.grid import Cell, Grid, SampleSpec, Settings, axes_of, load_task
from windlass.evals.report import sentence_of
from windlass.evals.report.summaries import (
    SURE,
    Texts,
    compared,
    interval,
    perplexity,
    sign_test,
    text_means,
    texts_counted,
)
from windlass.evals.results import Case
from windlass.evals.run import CHUNK, FULL_TOKENS, EvalOptions, Executor, Plan, Runner, Sweep, header_of
from windlass.evals.task import ALL, Budget, Task
from windlass.hf.forward import LayerShape, forward, layer_shapes
from windlass.hf.kv_cache import KVCache
from windlass.hf.model_facts import trained_length
from windlass.policies import Recent
from windlass.policies.registry import spelled
from windlass.positions.modes import Compact, Original, PositionMode, SelfExtend

NUMBER_BYTES = 4  # of a position, and of a number that a policy or a rule of merging keeps, per slot
PROBES = (48, 80)  # budgets, too small to take time
ASKED = 8  # tokens of a question after it
STEPS = HEADROOM + 8  # of decode in a probe: more than the cache keeps records of


@dataclass(frozen=True)
class LayerCost:
    """Bytes of the slots of a layer: a `fixed` part, and `per_slot` for each of at most `most_tokens`."""

    fixed: int
    per_slot: int
    most_tokens: int | None

    def of(self, budget: int, rollback: int) -> int:
        """Bytes with this budget: room for the next tokens and for those that may come back included."""
        tokens = budget if self.most_tokens is None else min(budget, self.most_tokens)
        return self.fixed + self.per_slot * (tokens + HEADROOM + rollback)


@dataclass(frozen=True)
class Records:
    """Bytes that a cache holds beside its slots: statistics of layers, and records of the latest steps."""

    fixed: float = 0.0
    per_token: float = 0.0

    def of(self, budget: int) -> float:
        """Bytes of the records with this budget."""
        return self.fixed + self.per_token * budget


def layer_bytes(shape: LayerShape, options: CacheOptions) -> LayerCost:
    """Bytes of one layer of one text, by store, policy and merge rule.

    Raises: UsageError where the store cannot hold such keys or values.
    """
    _, keys, values = shape.states(torch.device("cpu"))
    sizes = []
    for slots in (1, 2):
        store = shape.empty_store(options.store)
        store.allocate(keys, values, slots, options.rollback)
        sizes.append(sum(tensor.nbytes for tensor in store.tensors().values()))
    needs = options.policy.needs
    numbers = 1 + len({*needs.state, *(options.merge.state if options.merge is not None else ())})
    heads = shape.kv_heads if needs.per_head else 1
    one, two = sizes
    return LayerCost(2 * one - two, two - one + NUMBER_BYTES * heads * numbers, shape.most_visible)


def bytes_of(layers: Sequence[LayerCost], options: CacheOptions, budget: int, records: Records = Records()) -> float:
    """Bytes of a cache of one text at rest, once it holds `budget` tokens a layer."""
    return sum(layer.of(budget, options.rollback) for layer in layers) + records.of(budget)


def records_of(
    model: PreTrainedModel, ids: Sequence[int], options: CacheOptions, layers: Sequence[LayerCost]
) -> Records:
    """Measure the records on two small caches that read `ids` repeatedly. They may grow with the budget."""
    low, high = ((budget, _most_held(model, ids, replace(options, budget=budget))) for budget in PROBES)
    beside = [max(0.0, held - bytes_of(layers, options, budget)) for budget, held in (low, high)]
    per_token = max(0.0, (beside[1] - beside[0]) / (PROBES[1] - PROBES[0]))
    return Records(max(0.0, beside[1] - per_token * PROBES[1]), per_token)


@torch.no_grad()
def _most_held(model: PreTrainedModel, ids: Sequence[int], options: CacheOptions) -> int:
    """The most bytes that a cache held after any step of decode."""
    assert options.budget is not None, "a probe without budget"
    cache = KVCache.from_options(model, options)
    tokens = options.budget + options.chunk
    generate.prefill(model, cache, [(list(ids) * (1 + tokens // len(ids)))[:tokens]])
    generate.prefill(model, cache, [list(ids[:ASKED])])
    most = cache.bytes_held
    for token in (list(ids) * STEPS)[:STEPS]:
        forward(model, torch.tensor([[token]], device=model.device), None, cache, [0])
        most = max(most, cache.bytes_held)
    return most


def budget_within(layers: Sequence[LayerCost], options: CacheOptions, size: int, records: Records = Records()) -> int:
    """The largest budget with which `bytes_of` is at most `size`.

    Raises: UsageError where even the smallest cache is larger.
    """
    least = options.limits.sinks + (options.window or 1) + 1
    smallest = bytes_of(layers, options, least, records)
    if smallest > size:
        raise UsageError(
            f"--bytes {in_units(size)} are too few for policy {options.policy!r} in store {options.store.name}: "
            f"{least} tokens a layer, the fewest, take {in_units(round(smallest))}. Raise --bytes"
        )
    budgets = range(least, MAX_NUMBER + 1)
    return budgets[
        bisect_right(budgets, float(size), key=lambda budget: bytes_of(layers, options, budget, records)) - 1
    ]


DEFAULT_LENGTH = 2048  # tokens of a sample, or twice the smallest budget
SHARE = 0.9  # of the user's text in a sample, at most: samples begin at different sentences
LEAST = 256  # tokens of a text to try anything on
MOST_GROUP = 16  # limit of the group of self_extend
NEAR = 64  # tokens that self_extend reads at their own distance
FULL_CACHE = Settings(Budget(ALL), CacheOptions(policy=Recent(), positions=Original()))


def tasks_on(file: Path, tasks: str) -> dict[str, Task]:
    """The chosen tasks, by label, with the text of `file` for those that read one.

    The label names the file without its folder and its contents, so that another text is another task.

    Raises: UsageError when the file or a task cannot be read.
    """
    text = read_text(file, f"text file {file}")
    mark = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    found: dict[str, Task] = {}
    for label, task in parse_list("--tasks", tasks, load_task):
        reading = task.reading(file)
        found[label if reading is None else f"{label}({file.name} {mark})"] = task if reading is None else reading
    return found


def placed(tokens: int, budget: int, trained: int | None) -> tuple[int, PositionMode]:
    """The budget and the positions with which a model reads a text of `tokens`, of which `budget` could be kept.

    Within the trained length they are unchanged. Past it, kept tokens are numbered anew if they fit, beside a chunk,
    into the trained length or half of it. If they do not fit, distances are divided by the factor that the text needs.
    If that factor is above `MOST_GROUP`, fewer tokens are kept, so that they fit.
    """
    if trained is None or tokens <= trained:
        return budget, Original()
    fitting = max(trained - CHUNK, trained // 2)
    group = -(-tokens // max(1, trained - NEAR))
    if budget > fitting and group <= MOST_GROUP:
        return budget, SelfExtend(group, NEAR)
    return min(budget, fitting), Compact()


@dataclass(frozen=True)
class CandidateResult:
    """Result of one candidate: per text, the share of hidden answers found (0 to 1) and the nll.

    `bytes_held` is the most of any case.
    """

    settings: Settings
    found: Texts
    losses: Texts
    bytes_held: int

    @property
    def samples(self) -> int:
        """Texts that it was tried on."""
        return max(len({text[2:] for text in texts}) for texts in (self.found, self.losses))

    @property
    def share_found(self) -> float | None:
        """The mean share of hidden answers found, or None where nothing was hidden."""
        return fmean(self.found.values()) if self.found else None

    @property
    def nll(self) -> float | None:
        """The mean, in nats per token, or None where no text was predicted."""
        return fmean(self.losses.values()) if self.losses else None

    @property
    def interval(self) -> str:
        """The 95 % interval of the share found."""
        return interval(self.share_found or 0.0, len(self.found))

    @property
    def perplexity(self) -> str:
        """The perplexity of the text."""
        return perplexity(self.nll or 0.0)

    @property
    def order(self) -> tuple[float, float, float]:
        """The key to sort by: most texts first, then most found, then the lowest nll."""
        nll = self.nll
        is_known = nll is not None and math.isfinite(nll)
        return -float(self.samples), -(self.share_found or 0.0), nll if nll is not None and is_known else math.inf

    @property
    def policy(self) -> str:
        """The policy as the command line spells it."""
        return spelled(self.settings.labels["policy"])

    @property
    def name(self) -> str:
        """The name in a sentence: `"key_diff in int8"`."""
        labels = self.settings.labels
        unusual = [labels["positions"]] if labels["positions"] != "original" else []
        unusual += [labels["merge"]] if labels["merge"] != "none" else []
        return ", ".join([f"{self.policy} in {labels['store']}", *unusual])


def ranked(settings: Sequence[Settings], cases: Sequence[Case], samples: int | None = None) -> list[CandidateResult]:
    """Results of the `settings` that have cases, the best first. Only the first `samples` texts of each count."""
    found = []
    counted = [case for case in cases if samples is None or case.sample < samples]
    for each in settings:
        own = [case for case in counted if all(getattr(case, name) == label for name, label in each.labels.items())]
        if own:
            result = CandidateResult(
                settings=each,
                found=text_means(own, lambda case: case.score),
                losses=text_means(own, lambda case: case.nll),
                bytes_held=max(case.bytes_held for case in own),
            )
            found.append(result)
    return sorted(found, key=lambda each: each.order)


def sentence(results: Sequence[CandidateResult], full: CandidateResult | None, size: int) -> str:
    """The verdict on `results`, the best first, none of which takes more than `size` bytes. `full` evicts nothing."""
    best, *others = results
    finalists = [each for each in others if each.samples == best.samples]
    facts = {
        "best": best,
        "others": others,
        "finalists": finalists,
        "close": [each.name for each in finalists if not is_surely_better(best, each)],
        "full": full,
        "size": in_units(size),
        "texts": texts_counted(best.samples),
    }
    return sentence_of("tune.txt", facts)


def is_surely_better(one: CandidateResult, other: CandidateResult) -> bool:
    """Return True if a sign test tells that `one` finds more, or predicts better where both find the same."""
    wins, losses = compared(one.found, other.found)
    if wins != losses:
        return wins > losses and sign_test(wins, losses) < SURE
    higher, lower = compared(one.losses, other.losses)
    return lower > higher and sign_test(lower, higher) < SURE


def command(model: str, text: str, best: CandidateResult, loading: Sequence[str]) -> str:
    """The command that reads a text in the best cache. `loading` are the options of the model, as typed."""
    labels, options = best.settings.labels, best.settings.options
    words = ["windlass", "generate", model, "--budget", labels["asked_budget"], "--policy", best.policy]
    words += ["--store", labels["store"], "--positions", labels["positions"]]
    words += ["--merge", labels["merge"]] if options.merge is not None else []
    return shlex.join([*words, "--chunk", str(options.chunk), *loading, "--file", text])


MINUTES = 10.0
TIMED = 512  # tokens of the texts on which the speed is measured
LEAST_LEFT = 2  # least candidates of the last round
SHARES = (4, 2, 1)  # of the samples, after which half of the candidates leave


@dataclass(frozen=True, kw_only=True)
class TuneOptions(EvalOptions):
    """Options of the command: a cache of `size` bytes for texts like `text`.

    A `length` of None is chosen automatically. The options of the cache are lists to combine. An empty list of
    positions is chosen by the trained length. There are fewer than `samples` texts where these would take more than
    `minutes`.
    """

    text: Path
    size: int
    length: int | None = None
    minutes: float = MINUTES

    def grid(self) -> Grid:
        """The tasks on the text. Only the model decides the length and the candidates."""
        return Grid(tasks_on(self.text, self.lists.tasks), [], [], self.samples, self.seed)

    def runner(self) -> "TuneRunner":
        return TuneRunner(self)


@dataclass(frozen=True)
class TunePlan(Plan):
    """A plan, and the seconds that a cell takes, about."""

    cell_s: float = 0.0


class TuneRunner(Runner):
    """Runs candidates on one model. Candidates are the settings of its grid, after the full cache."""

    options: TuneOptions

    @cached_property
    def plan(self) -> TunePlan:
        grid = super().plan.grid
        return TunePlan(self.proposal.header, grid, self.proposal.notes, 0.0 if is_whole(grid) else self._cell_s(grid))

    def _cell_s(self, grid: Grid) -> float:
        """Seconds of a cell, by a short text of each task in the cache of the first candidate."""
        length, total = grid.lengths[0], 0.0
        for label, task in grid.tasks.items():
            spec = SampleSpec(task, label, min(length, TIMED), grid.seed, 0)
            try:
                self._fitted(spec)
            except UsageError:  # the task takes a longer text
                spec = replace(spec, length=length)
            started = time.perf_counter()
            self.measured([Cell(spec, candidates_of(grid)[0])])
            total += (time.perf_counter() - started) * length / spec.length
        return total / len(grid.tasks)

    def _beside(self, tokens: int, chunk: int) -> None:
        """None: the full cache is a row of its own."""

    @cached_property
    def proposal(self) -> Plan:
        """The candidates: every combination of the lists, in at most so many bytes.

        A combination that cannot be made for this model, or not in so few bytes, is left out. Where the text fits
        whole, one policy stands for all. Without a list of positions they are read as they are within the trained
        length, and beyond it as `placed` says. The full cache is run where the model was trained on texts as long.

        Raises: WindlassError for a list that cannot be read, a text that is too short, or when nothing is left.
        """
        options = self.options
        ids = encode(self.tokenizer, read_text(options.text, f"text file {options.text}"), is_start=True)
        trained = trained_length(self.model.config.get_text_config())
        self._check_length(len(ids))
        made, left_out = self._fitting(ids)
        length = options.length or min(
            max(DEFAULT_LENGTH, 2 * min(budget for _, budget in made)), int(SHARE * len(ids))
        )
        found: dict[tuple[str, ...], Settings] = {}
        for each, budget in made:
            if not options.lists.options.get("positions"):
                budget, mode = placed(len(ids), budget, trained)
                each = replace(each, positions=mode)
            settings = Settings(Budget(str(budget), budget), each)
            labels = settings.labels | ({"policy": "any"} if budget >= length else {}) | {"asked_budget": "any"}
            found.setdefault(tuple(labels.values()), settings)
        # Beyond its trained length a model without help is no reference.
        full = [FULL_CACHE] if length <= (trained or FULL_TOKENS) else []
        grid = replace(self.typed, lengths=[length], settings=[*full, *found.values()])
        notes = tuple(f"windlass: note: left out: {line}" for line in left_out)
        return Plan(header_of(options.model, options.seed, self.model), grid, notes)

    def check(self, grid: Grid) -> None:
        if not is_whole(grid):
            super().check(grid)

    def _fitting(self, ids: Sequence[int]) -> tuple[list[tuple[CacheOptions, int]], list[str]]:
        """Each combination that fits, with its largest budget, and the reasons for those that do not."""
        size, shapes = self.options.size, layer_shapes(self.model)
        made, left_out = [], []
        axes = {"positions": [Original()], **axes_of(self.options.lists.options)}
        for values in itertools.product(*axes.values()):
            options = CacheOptions(chunk=CHUNK, **dict(zip(axes, values, strict=True)))
            try:
                layers = [layer_bytes(shape, options) for shape in shapes]
                budget_within(layers, options, size)  # rejects far too large caches without a probe
                records = records_of(self.model, ids, options, layers)
                made.append((options, budget_within(layers, options, size, records)))
            except UsageError as error:
                left_out.append(str(error))
        if not made:
            raise UsageError(left_out[0])
        return made, left_out

    def _check_length(self, tokens: int) -> None:
        asked = self.options.length
        if asked is not None and asked > tokens:
            raise UsageError(
                f"--length {asked} is more than the {tokens:,} tokens of the text. Lower it, or give a longer one"
            )
        if tokens < LEAST:
            raise UsageError(f"the text has {tokens} tokens of this model's. Give one of {LEAST} or more")


def candidates_of(grid: Grid) -> list[Settings]:
    """The settings that compete: all but the full cache."""
    return [each for each in grid.settings if each.budget.asked != ALL]


def is_whole(grid: Grid) -> bool:
    """Return True if every candidate holds the whole text, so that there is nothing to choose."""
    return all((each.budget.slots or 0) >= max(grid.lengths) for each in candidates_of(grid))


class Tuning(Sweep):
    """A sweep over the candidates in rounds: after each the worse half leaves."""

    def __init__(self, options: TuneOptions, note: Callable[[str], None], executor: Executor | None = None) -> None:
        """As `Sweep`, with as many texts as the time allows. Raises: UsageError where it allows none."""
        self._started, self._minutes = time.perf_counter(), options.minutes
        executor = executor or options.runner()
        plan = executor.plan
        assert isinstance(plan, TunePlan)
        count, self._cell_s = len(candidates_of(plan.grid)), plan.cell_s
        has_full = count < len(plan.grid.settings)

        def seconds(samples: int) -> float:
            return self._cell_s * len(plan.grid.tasks) * cells_of(rounds_of(count, samples), has_full)

        samples = bisect_right(range(1, options.samples + 1), 60 * options.minutes, key=seconds)
        if not samples:
            raise UsageError(
                f"{count} candidates on one text of {plan.grid.lengths[0]:,} tokens take {duration(seconds(1))}, more "
                f"than --minutes {options.minutes:g}. Raise it, or lower --bytes, --length or the number of candidates"
            )
        super().__init__(options, note, executor)
        self.grid, self._texts = replace(self.grid, samples=samples), samples
        self._cells = self.grid.cells

    @property
    def seconds_left(self) -> float:
        """The time for the cells that the file lacks, about."""
        return self._cell_s * max(0, self._total() - self.counts[0])

    def _rounds(self) -> Iterator[Sequence[Cell]]:
        left: Sequence[Settings] = candidates_of(self.grid)
        done, number = self.counts[0], 0
        while number < len(self._sizes()):
            before, count, size = self._sizes()[number]
            if before:
                left = [each.settings for each in ranked(left, self.cases, before)][:size]
            yield [
                cell
                for cell in self._cells
                if before <= cell.spec.number < count and (cell.settings in left or cell.settings == self._full)
            ]
            self._shorten(self.counts[0] - done, count)
            number += 1

    def _shorten(self, measured: int, least: int) -> None:
        """Leave out the last texts, down to `least`, that the time does not allow, by the cells measured so far."""
        spent = time.perf_counter() - self._started
        while self._texts > least and measured:
            left = self._total() - self.counts[0]
            if spent + left * spent / measured <= 60 * self._minutes:
                return
            self._texts -= 1

    def _total(self) -> int:
        return cells_of(self._sizes(), self._full is not None) * len(self.grid.tasks)

    def _name(self, cell: Cell) -> str:
        return f"{cell.settings.labels['policy'].partition('(')[0]} {cell.spec.label}"

    def _sizes(self) -> list[tuple[int, int, int]]:
        rounds = rounds_of(len(candidates_of(self.grid)), self.grid.samples)
        return [(before, min(count, self._texts), size) for before, count, size in rounds if before < self._texts]

    @property
    def _full(self) -> Settings | None:
        return next((each for each in self.grid.settings if each.budget.asked == ALL), None)

    @property
    def ranking(self) -> list[CandidateResult]:
        """The candidates that have cases, the best first."""
        return ranked(candidates_of(self.grid), self.cases)

    @property
    def full(self) -> CandidateResult | None:
        """The full cache on the same texts, or None where it was not run."""
        return next(iter(ranked([self._full], self.cases)), None) if self._full else None


def cells_of(rounds: Sequence[tuple[int, int, int]], has_full: bool) -> int:
    """The cells of all rounds in one task, the full cache beside the candidates."""
    return sum((count - before) * (size + has_full) for before, count, size in rounds)


def duration(seconds: float) -> str:
    """About how long something takes: `"about 8 minutes"`."""
    minutes = round(seconds / 60)
    if minutes < 1:
        return "less than a minute"
    if minutes >= 120:
        return f"about {round(minutes / 60)} hours"
    return f"about {minutes} minute{'s' * (minutes > 1)}"


def rounds_of(candidates: int, samples: int) -> list[tuple[int, int, int]]:
    """Per round: texts done before it, texts done after it, and how many candidates take part."""
    counts = sorted({-(-samples // share) for share in SHARES})
    sizes = [max(min(LEAST_LEFT, candidates), -(-candidates // 2**number)) for number in range(len(counts))]
    return list(zip([0, *counts], counts, sizes, strict=False))
