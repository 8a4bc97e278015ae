"""A run of an evaluation: planned cases, measured one after the other or by workers."""

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Generic, TypeVar

import torch
from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.core.errors import UsageError
from windlass.core.parse import in_units
from windlass.core.step import PROMPT
from windlass.engine import generate
from windlass.engine.text import encode
from windlass.evals.grid import (
    CasePlan,
    Grid,
    ListOptions,
    SampleSpec,
    Settings,
    SizedSample,
    fit,
    grid_of,
    planned,
    shortest,
    task_errors,
)
from windlass.evals.report.summaries import wilson
from windlass.evals.results import Case, Header, Identity, Measures, open_results
from windlass.evals.task import Question, Task
from windlass.hf.forward import forward
from windlass.hf.kv_cache import KVCache, LayerShape, layer_shapes
from windlass.hf.load import load
from windlass.hf.model_facts import shown_name, trained_length
from windlass.hf.weights import fingerprint, labelled, parameter_count
from windlass.policies.base import OneShot
from windlass.policies.registry import spelled
from windlass.policies.wrapper import find

CHUNK = 128  # tokens of a text with questions per step, or the budget where that is less
STRIDE = 16  # tokens per step of a text that is predicted: what a token sees beyond the budget


@dataclass(frozen=True)
class Outcome:
    """What came of one question, or of a text without questions (`turn` and `score` None).

    `slots_held` counts the slots in use per layer once the text was read, `bytes_held` all that is
    allocated afterwards, at rest.
    """

    turn: Question | None
    output: str
    score: float | None
    measures: dict[str, float | None]
    slots_held: int
    bytes_held: int
    seconds: float


def cache_of(
    model: PreTrainedModel, settings: Settings, budget: int | None, has_questions: bool, batch: int = 1
) -> KVCache:
    """An empty cache of `budget` slots for each of `batch` texts.

    Raises: UsageError for a budget that leaves no room beside sinks and window.
    """
    chunk = (CHUNK if budget is None else min(CHUNK, budget)) if has_questions else STRIDE
    options = replace(settings.options, budget=budget, chunk=chunk, batch=batch, rollback=0)
    return KVCache.from_options(model, options)


def answered(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    cache: KVCache,
    label: str,
    task: Task,
    fitted: Sequence[SizedSample],
    is_aware: bool,
) -> list[list[Outcome]]:
    """The model's answers, greedy, to every question on each text; one text per row of the cache.

    Aware, the first question is read with the text. Each question finds the cache as the text left it.
    Bytes and seconds are those of all rows, divided by their number.
    """
    started = time.perf_counter()
    prompts = [encode(tokenizer, each.sample.context, is_start=True) for each in fitted]
    if is_aware:
        for each, prompt in zip(fitted, prompts, strict=True):
            prompt += encode(tokenizer, each.sample.turns[0].question, is_start=False)
    generate.prefill(model, cache, prompts)
    slots_held = _slots_held(cache)
    outcomes: list[list[Outcome]] = [[] for _ in fitted]
    for number, turns in enumerate(zip(*(each.sample.turns for each in fitted), strict=True)):
        asked = copy.deepcopy(cache) if len(fitted[0].sample.turns) > 1 else cache
        asking = [turn.prefix if is_aware and number == 0 else turn.question + turn.prefix for turn in turns]
        results = generate.generate(model, tokenizer, asking, asked, task.answer_tokens)
        with task_errors(label):
            scores = [float(task.score(turn, result.text)) for turn, result in zip(turns, results, strict=True)]
        now = time.perf_counter()
        bytes_held, seconds = round(asked.bytes_held / len(fitted)), (now - started) / len(fitted)
        for row, (turn, result, score) in enumerate(zip(turns, results, scores, strict=True)):
            outcomes[row].append(Outcome(turn, result.text, score, {}, slots_held[row], bytes_held, seconds))
        started = now
    return outcomes


def _slots_held(cache: KVCache) -> list[int]:
    """Per row, the slots in use in the layer and head that has most."""
    held = [(layer.positions >= 0).sum(-1).amax(-1) for layer in cache.layers]
    counts: list[int] = torch.stack(held).amax(0).tolist()
    return counts


@torch.no_grad()
def predicted(model: PreTrainedModel, cache: KVCache, ids: list[int], full: KVCache | None) -> Outcome:
    """How well every token but the first is predicted from those before it, as far as the cache has kept them.

    `nll` is the mean negative log-likelihood, `kl` the mean divergence of what `full` (a cache without
    budget) predicts from what `cache` does; both in nats per token.
    """
    started = time.perf_counter()
    nll = kl = 0.0
    tokens = len(ids) - 1
    for each in (cache,) if full is None else (cache, full):
        each.reserve(tokens)
    for start in range(0, tokens, STRIDE):
        piece = torch.tensor([ids[start : min(start + STRIDE, tokens)]], device=model.device)
        targets = torch.tensor(ids[start + 1 : start + 1 + piece.shape[1]], device=model.device)
        ours = _log_probabilities(model, cache, piece)
        nll -= float(ours.gather(-1, targets[:, None]).sum())
        if full is not None:
            wanted = _log_probabilities(model, full, piece)
            kl += float((wanted.exp() * (wanted - ours)).sum())
    measures = {"nll": nll / tokens, "kl": None if full is None else kl / tokens}
    slots_held = max(layer.table.occupancy_bound for layer in cache.layers)
    return Outcome(None, "", None, measures, slots_held, cache.bytes_held, time.perf_counter() - started)


def _log_probabilities(model: PreTrainedModel, cache: KVCache, piece: Tensor) -> Tensor:
    """(tokens, vocabulary) of the token after each one of the piece, which is read."""
    logits = forward(model, piece, None, cache, list(range(piece.shape[1])), how=PROMPT)
    return logits[0].double().log_softmax(-1)


FULL_TOKENS = 4096  # of texts that a full cache reads too, if a model does not tell how long those of its training were
POOL = 8  # texts per row of a batch, among which those of one budget are found


class Runner:
    """A model to ask, and the samples that were made last."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self._model, self._tokenizer, self._seed = model, tokenizer, seed
        self._shapes = layer_shapes(model)
        self._made: dict[tuple[str, int, int], SizedSample] = {}
        self._pool: tuple[int, int] | None = None  # which texts those are

    def check(self, grid: Grid, samples: int, is_aware: bool) -> None:
        """Check every length on all texts, and every budget on the first of each task and length.

        Raises: UsageError for what cannot be honoured.
        """
        for label, task in grid.tasks.items():
            for length in grid.lengths:
                specs = [SampleSpec(task, label, length, self._seed, sample) for sample in range(samples)]
                for spec in specs:
                    shortest(spec, self._tokenizer)
                fitted = self._fitted(specs[0])
                if is_aware and not fitted.sample.turns:
                    raise UsageError(f"task {label} asks nothing, so it cannot be run --aware of a question")
                for settings in grid.settings:
                    self._check(settings, fitted, f"task {label} at length {length}")

    def batches(self, cases: Iterable[CasePlan], batch: int) -> Iterator[list[CasePlan]]:
        """`cases` in their order, but up to `batch` of them together, which can share a cache.

        Those have the same task, length and setting, and a budget that comes to as many slots, so that each is read
        as it would be alone. They are looked for among `POOL` times as many texts.
        """
        pool = 1 if batch == 1 else batch * POOL
        for number, texts in groupby(cases, lambda case: case.spec.number // pool):
            if (pool, number) != self._pool:
                self._made.clear()
                self._pool = pool, number
            groups: dict[tuple[object, ...], list[CasePlan]] = {}
            for case in texts:
                key = case.spec.label, case.spec.length, *case.settings.labels.values(), *self._apart(case)
                groups.setdefault(key, []).append(case)
            for group in groups.values():
                yield from (group[start : start + batch] for start in range(0, len(group), batch))

    def measured(self, batch: Sequence[CasePlan]) -> list[Case]:
        """Run cases that can share a cache; returns a case per question, text by text."""
        planned, fitted = batch[0], [self._fitted(case.spec) for case in batch]
        has_questions = bool(fitted[0].sample.turns)
        budget = planned.settings.budget.of(fitted[0].context_tokens)
        cache = cache_of(self._model, planned.settings, budget, has_questions, len(batch))
        if has_questions:
            task, label = planned.spec.task, planned.spec.label
            outcomes = answered(self._model, self._tokenizer, cache, label, task, fitted, planned.is_aware)
        else:
            outcomes = [[self._predicted(cache, each)] for each in fitted]
        return [
            self._case(case, text, budget, turn, outcome)
            for case, text, of_case in zip(batch, fitted, outcomes, strict=True)
            for turn, outcome in zip(case.turns, of_case, strict=True)
        ]

    def _case(
        self, planned: CasePlan, fitted: SizedSample, budget: int | None, number: int | None, outcome: Outcome
    ) -> Case:
        turn = outcome.turn
        return Case(
            **planned.settings.labels,
            task=planned.spec.label,
            is_aware=planned.is_aware,
            length=planned.spec.length,
            sample=planned.spec.number,
            budget=budget,
            context_tokens=fitted.context_tokens,
            bytes_full=bytes_full(self._shapes, fitted.context_tokens),
            turn=number,
            depth=None if turn is None else turn.depth,
            slots_held=outcome.slots_held,
            bytes_held=outcome.bytes_held,
            expected=() if turn is None else turn.expected,
            output=outcome.output,
            score=outcome.score,
            measures=Measures(**outcome.measures),
            seconds=outcome.seconds,
            seed=planned.spec.seed,
        )

    def _apart(self, case: CasePlan) -> tuple[object, ...]:
        """What cases of one batch must share beside their task, length and setting."""
        fitted, settings = self._fitted(case.spec), case.settings
        budget = settings.budget.of(fitted.context_tokens)
        # A text without questions is read alone; and where layers share a budget, all rows of a cache decide on it.
        one_shot = find(settings.options.policy, OneShot)
        is_shared = budget is not None and one_shot is not None and one_shot.shares_budget
        is_alone = not fitted.sample.turns or is_shared
        return budget, case.spec.number if is_alone else None

    def _predicted(self, cache: KVCache, fitted: SizedSample) -> Outcome:
        """A text that is predicted, with a full cache beside it while the model was trained on texts as long."""
        ids = encode(self._tokenizer, fitted.sample.context, is_start=True)
        is_long = len(ids) > (trained_length(self._model.config.get_text_config()) or FULL_TOKENS)
        full = None if is_long else KVCache(self._model, chunk=cache.chunk)
        return predicted(self._model, cache, ids, full)

    def _fitted(self, spec: SampleSpec) -> SizedSample:
        key = spec.label, spec.length, spec.number
        if key not in self._made:
            self._made[key] = fit(spec, self._tokenizer)
        return self._made[key]

    def _check(self, settings: Settings, fitted: SizedSample, where: str) -> None:
        """Raises: UsageError, as the cache does, for a budget that it cannot have."""
        budget = settings.budget
        try:
            cache_of(self._model, settings, budget.of(fitted.context_tokens), True)
        except UsageError as error:
            of = f" of the {fitted.context_tokens} tokens of {where}" if budget.divisor is not None else ""
            raise UsageError(f"--budgets {budget.asked}{of}: {error}") from None


def bytes_full(shapes: Sequence[LayerShape], tokens: int) -> int:
    """Bytes of the keys and values of a text in a plain cache without budget."""
    per_token = ((shape, shape.kv_heads * shape.channels) for shape in shapes)
    return sum(min(tokens, shape.most_visible or tokens) * count * shape.dtype.itemsize for shape, count in per_token)


def header_of(name: str, seed: int, model: PreTrainedModel) -> Header:
    """What a file of results says of a run with this model, which was asked for by `name`."""
    return Header(
        windlass=version("windlass"),
        torch=version("torch"),
        transformers=version("transformers"),
        model=labelled(shown_name(name), model),
        parameters=parameter_count(model),
        dtype=str(model.dtype).removeprefix("torch."),
        trained_length=trained_length(model.config.get_text_config()),
        seed=seed,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        fingerprint=fingerprint(model),
    )


Facts = TypeVar("Facts")
Started = Callable[[CasePlan], None]


class EvalSession(ABC, Generic[Facts]):
    """A model that is loaded, and every case that may be asked of it."""

    def __init__(self, runner: Runner, cases: Sequence[CasePlan]) -> None:
        self.runner = runner
        self.cases = cases
        self._by_name = {case.identities[0]: case for case in cases}

    @abstractmethod
    def facts(self) -> Facts:
        """What only a model can tell of the work; checks all that was asked for.

        Raises: WindlassError for what cannot be honoured.
        """

    def measured(self, identities: Sequence[Identity], batch: int) -> list[Case]:
        """Run the planned cases that begin with these identities, up to `batch` texts side by side."""
        cases = [self._by_name[each] for each in identities]
        return [case for texts in self.runner.batches(cases, batch) for case in self.runner.measured(texts)]


class Executor(ABC, Generic[Facts]):
    """Runs cases somewhere, in any order."""

    @property
    @abstractmethod
    def facts(self) -> Facts:
        """What the work tells once its model is loaded. Raises: WindlassError for what cannot be honoured."""

    @abstractmethod
    def measure(
        self, cases: Sequence[CasePlan], batch: int, started: Started
    ) -> Iterator[tuple[Sequence[CasePlan], list[Case]]]:
        """Run planned cases, up to `batch` texts side by side; each result comes once, as soon as it is there.

        `started` is called with a case when it begins. A case that could not be run does not come.

        Raises: WindlassError where a case fails, as it would for any other executor.
        """


class InProcess(Executor[Facts]):
    """Runs cases here, one after another, in their order."""

    def __init__(self, work: EvalSession[Facts]) -> None:
        self._work = work

    @property
    def facts(self) -> Facts:
        return self._work.facts()

    def measure(
        self, cases: Sequence[CasePlan], batch: int, started: Started
    ) -> Iterator[tuple[Sequence[CasePlan], list[Case]]]:
        for texts in self._work.runner.batches(cases, batch):
            started(texts[0])
            yield texts, self._work.runner.measured(texts)


@dataclass(frozen=True)
class EvalOptions:
    """What the user asked for; `batch` is the most texts that are read side by side."""

    model: str
    lists: ListOptions
    samples: int
    seed: int
    is_aware: bool
    output: Path
    dtype: str
    threads: int | None
    device: str = "cpu"
    batch: int = 1
    weights: str = "auto"

    def planned(self, grid: Grid) -> list[CasePlan]:
        """Every case of it."""
        return planned(grid, self.samples, self.seed, self.is_aware)


class EvalWork(EvalSession[Header]):
    """The model of an evaluation, and its cases."""

    def __init__(self, options: EvalOptions, grid: Grid | None = None) -> None:
        """Load the model; `grid` is that of the options, where it has been made.

        Raises: WindlassError for what cannot be honoured.
        """
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        self._options, self._grid = options, grid or grid_of(options.lists)
        model, tokenizer = load(options.model, options.dtype, options.device, options.weights)
        self._header = header_of(options.model, options.seed, model)
        super().__init__(Runner(model, tokenizer, options.seed), options.planned(self._grid))

    def facts(self) -> Header:
        self.runner.check(self._grid, self._options.samples, self._options.is_aware)
        return self._header


class Sweep:
    """Everything that was asked for, and the file that its cases go to."""

    def __init__(
        self, options: EvalOptions, note: Callable[[str], None], executor: Executor[Header] | None = None
    ) -> None:
        """Check what was asked for, and open the file; `note` is told what was amended in it.

        Without an `executor` the model is loaded, and asked, in this process.

        Raises: WindlassError for what cannot be honoured, before anything is run.
        """
        grid = grid_of(options.lists)
        self._executor = executor or InProcess(EvalWork(options, grid))
        self._results = open_results(options.output, self._executor.facts, note)
        self._batch = options.batch
        self._planned = options.planned(grid)

    def run(self, progress: Callable[[int, int, str], None]) -> bool:
        """Run what the file lacks, and write it there; whether that was done before an interrupt.

        `progress` is called with (cases done, cases to run, what comes next). Ctrl-C leaves whole lines; a further
        run goes on from there.
        """
        left = [case for case in self._planned if not self._is_done(case)]
        done = 0

        def started(case: CasePlan) -> None:
            progress(done, len(left), f"{case.spec.label} {case.settings.labels['asked_budget']}")

        try:
            for batch, cases in self._executor.measure(left, self._batch, started):
                self._results.add(cases)
                done += len(batch)
        except KeyboardInterrupt:
            return False
        return True

    @property
    def cases(self) -> list[Case]:
        """Those of the file that were asked for, in the order of the lists."""
        wanted = [each for case in self._planned for each in case.identities]
        return [self._results.cases[each] for each in wanted if each in self._results.cases]

    @property
    def counts(self) -> tuple[int, int]:
        """How many cases are done, and of how many."""
        return sum(map(self._is_done, self._planned)), len(self._planned)

    def _is_done(self, case: CasePlan) -> bool:
        return all(each in self._results.cases for each in case.identities)


ALWAYS = ("task", "policy", "asked_budget")
VARIED = ("length", "merge", "positions", "store", "shares", "recalled", "is_aware")  # shown where they differ


def summary(cases: Sequence[Case]) -> Table:
    """One row per combination, in the order of their first cases."""
    shown = [*ALWAYS, *(name for name in VARIED if len({getattr(case, name) for case in cases}) > 1)]
    groups: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        groups.setdefault(tuple(getattr(case, name) for name in (*ALWAYS, *VARIED)), []).append(case)
    has_scores = any(case.score is not None for case in cases)
    has_losses = any(case.nll is not None for case in cases)
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for name in shown:
        table.add_column(name.removeprefix("asked_"), overflow="fold")
    numbers = ["samples", "bytes"]
    numbers += ["score", "95 %"] if has_scores else []
    numbers += ["nll", "kl"] if has_losses else []
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for group in groups.values():
        held = fmean(case.bytes_held for case in group)
        cells = [str(len({case.sample for case in group})), in_units(round(held))]
        cells += _scores(group) if has_scores else []
        cells += [_mean([case.nll for case in group]), _mean([case.kl for case in group])] if has_losses else []
        table.add_row(*(Text(_label(group[0], name)) for name in shown), *cells)
    return table


def _label(case: Case, name: str) -> str:
    return spelled(case.policy) if name == "policy" else str(getattr(case, name))


def _scores(group: Sequence[Case]) -> list[str]:
    """The mean and its interval; the questions on one text are one sample."""
    texts: dict[int, list[float]] = {}
    for case in group:
        if case.score is not None:
            texts.setdefault(case.sample, []).append(case.score)
    if not texts:
        return ["-", "-"]
    mean = fmean(fmean(scores) for scores in texts.values())
    low, high = wilson(mean, len(texts))
    return [f"{100 * mean:.1f} %", f"{100 * low:.1f} to {100 * high:.1f}"]


def _mean(measured: Sequence[float | None]) -> str:
    known = [number for number in measured if number is not None]
    return f"{fmean(known):.4f}" if known else "-"
