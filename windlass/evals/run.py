"""A run of an evaluation: cells, measured one after the other or by workers."""

import copy
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from statistics import fmean

import torch
from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.core import __version__
from windlass.core.errors import UsageError
from windlass.core.parse import in_units
from windlass.core.step import PROMPT
from windlass.engine import generate
from windlass.engine.text import encode
from windlass.evals.grid import (
    Cell,
    Grid,
    ListOptions,
    SampleSpec,
    Settings,
    SizedSample,
    files_of,
    fit,
    grid_of,
    shortest,
    task_errors,
)
from windlass.evals.report.summaries import grouped, score_row
from windlass.evals.results import Case, Header, Measures, open_results
from windlass.hf.forward import LayerShape, forward, layer_shapes
from windlass.hf.kv_cache import KVCache
from windlass.hf.load import load
from windlass.hf.model_facts import shown_name, trained_length
from windlass.hf.weights import fingerprint, labelled, parameter_count
from windlass.policies.base import OneShot
from windlass.policies.registry import spelled
from windlass.policies.wrappers import find

CHUNK = 128  # tokens of a text with questions per step, or the budget where that is less
STRIDE = 16  # tokens per step of a predicted text: a token sees at most so many beyond the budget


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
    cells: Sequence[Cell],
    texts: Sequence[SizedSample],
) -> list[list[Case]]:
    """The model's greedy answers to every question on each text, with one cell and its text per row of the cache.

    Aware, the first question is read with the text. Each question finds the cache as the text left it. Bytes and
    seconds are those of all rows, divided by their number.

    Raises: UsageError for a task that fails.
    """
    started = time.perf_counter()
    task, label, is_aware = cells[0].spec.task, cells[0].spec.label, cells[0].is_aware
    with task_errors(label):
        rounds = list(zip(cells[0].turns, zip(*(text.sample.turns for text in texts), strict=True), strict=True))
    prompts = [encode(tokenizer, text.sample.context, is_start=True) for text in texts]
    if is_aware:
        for text, prompt in zip(texts, prompts, strict=True):
            prompt += encode(tokenizer, text.sample.turns[0].question, is_start=False)
    generate.prefill(model, cache, prompts)
    slots_held, shapes = _slots_held(cache), layer_shapes(model)
    found: list[list[Case]] = [[] for _ in cells]
    for number, questions in rounds:
        asked = copy.deepcopy(cache) if len(rounds) > 1 else cache
        is_read = is_aware and not number
        asking = [each.prefix if is_read else each.question + each.prefix for each in questions]
        results = generate.generate(model, tokenizer, asking, asked, task.answer_tokens)
        with task_errors(label):
            scores = [float(task.score(each, result.text)) for each, result in zip(questions, results, strict=True)]
        now = time.perf_counter()
        for row, question in enumerate(questions):
            found[row].append(
                Case(
                    **cells[row].labels,
                    budget=cache.budget,
                    turn=number,
                    depth=question.depth,
                    context_tokens=texts[row].context_tokens,
                    slots_held=slots_held[row],
                    bytes_held=round(asked.bytes_held / len(texts)),
                    bytes_full=bytes_full(shapes, texts[row].context_tokens),
                    recall_bytes=round(asked.recall_bytes / len(texts)),
                    expected=question.expected,
                    output=results[row].text,
                    score=scores[row],
                    seconds=(now - started) / len(texts),
                )
            )
        started = now
    return found


def _slots_held(cache: KVCache) -> list[int]:
    """Per row, the slots in use in the layer and head that has most."""
    held = [(layer.positions >= 0).sum(-1).amax(-1) for layer in cache.layers]
    counts: list[int] = torch.stack(held).amax(0).tolist()
    return counts


@torch.no_grad()
def predicted(model: PreTrainedModel, cache: KVCache, ids: list[int], full: KVCache | None) -> Measures:
    """Measures of the prediction of every token but the first from the kept tokens before it.

    `nll` is the mean negative log-likelihood, in nats per token. `kl` is the mean divergence of the predictions with
    `full` (a cache without budget) from those with `cache`, in nats per token.
    """
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
    return Measures(nll=nll / tokens, kl=None if full is None else kl / tokens)


def _log_probabilities(model: PreTrainedModel, cache: KVCache, piece: Tensor) -> Tensor:
    """(tokens, vocabulary) of the token after each one of the piece, which is read."""
    logits = forward(model, piece, None, cache, list(range(piece.shape[1])), how=PROMPT)
    return logits[0].double().log_softmax(-1)


FULL_TOKENS = 4096  # longest text for a full cache, if the model does not tell its trained length
POOL = 8  # texts per row of a batch: texts of one budget are picked from them


@dataclass(frozen=True)
class EvalOptions:
    """Options of the command. `batch` is the most texts that are read side by side."""

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

    def grid(self) -> Grid:
        """Every combination of the lists. Raises: WindlassError for invalid options."""
        return replace(grid_of(self.lists), samples=self.samples, seed=self.seed, is_aware=self.is_aware)

    def runner(self) -> "Runner":
        """The runner in this process. Raises: WindlassError for invalid options."""
        return Runner(self)


@dataclass(frozen=True)
class Plan:
    """The header of the results, and the grid, once the model is known. `notes` list the excluded combinations."""

    header: Header
    grid: Grid
    notes: tuple[str, ...] = ()


Started = Callable[[Cell], None]
Measured = Iterator[tuple[Sequence[Cell], list[Case]]]


class Executor(ABC):
    """Runs cells somewhere, in any order."""

    @property
    @abstractmethod
    def plan(self) -> Plan:
        """The work, checked by a loaded model. Raises: WindlassError for invalid options."""

    @abstractmethod
    def measure(self, cells: Sequence[Cell], batch: int, started: Started) -> Measured:
        """Run cells of the plan, up to `batch` texts side by side. Each result comes once, as soon as it is there.

        `started` is called with a cell when it begins. A cell that could not be run does not come.

        Raises: WindlassError where a cell fails, as it would for any other executor.
        """


class Runner(Executor):
    """Runs cells here, one after another, in their order: a loaded model, and the samples that were made last."""

    def __init__(self, options: EvalOptions) -> None:
        """Load the model. Raises: WindlassError for invalid options."""
        self.options, self.typed = options, options.grid()  # refused before a model is loaded
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        self.model, self.tokenizer = load(options.model, options.dtype, options.device, options.weights)
        self._made: dict[tuple[str, int, int, int], SizedSample] = {}
        self._pool: tuple[int, int] | None = None  # key of the texts in the pool

    @cached_property
    def plan(self) -> Plan:
        self.check(self.proposal.grid)
        return self.proposal

    @cached_property
    def proposal(self) -> Plan:
        """The plan before it is checked. Raises: WindlassError for invalid options."""
        return Plan(header_of(self.options.model, self.options.seed, self.model), self.typed)

    def measure(self, cells: Sequence[Cell], batch: int, started: Started) -> Measured:
        for texts in self.batches(cells, batch):
            started(texts[0])
            yield texts, self.measured(texts)

    def check(self, grid: Grid) -> None:
        """Check every length on all texts, and every budget on the first of each task and length.

        Raises: UsageError for lengths or budgets that do not fit.
        """
        for label, task in grid.tasks.items():
            for length in grid.lengths:
                specs = [SampleSpec(task, label, length, grid.seed, number) for number in range(grid.samples)]
                for spec in specs:
                    shortest(spec, self.tokenizer)
                fitted = self._fitted(specs[0])
                if grid.is_aware and not fitted.sample.turns:
                    raise UsageError(f"task {label} asks nothing, so it cannot be run --aware of a question")
                for settings in grid.settings:
                    self._check(settings, fitted, f"task {label} at length {length}")

    def batches(self, cells: Iterable[Cell], batch: int) -> Iterator[list[Cell]]:
        """`cells` in their order, but up to `batch` of them together, which can share a cache.

        Those have the same task, length and setting, and a budget that comes to as many slots, so that each is read
        as it would be alone. They are looked for among `POOL` times as many texts.
        """
        pool = 1 if batch == 1 else batch * POOL
        for number, texts in groupby(cells, lambda cell: cell.spec.number // pool):
            if (pool, number) != self._pool:
                self._made.clear()
                self._pool = pool, number
            for group in grouped(texts, self._shared).values():
                yield from (group[start : start + batch] for start in range(0, len(group), batch))

    def measured(self, batch: Sequence[Cell]) -> list[Case]:
        """Run cells that can share a cache. Returns a case per question, text by text."""
        settings, texts = batch[0].settings, [self._fitted(cell.spec) for cell in batch]
        has_questions = bool(texts[0].sample.turns)
        budget = settings.budget.of(texts[0].context_tokens)
        cache = cache_of(self.model, settings, budget, has_questions, len(batch))
        if has_questions:
            found = answered(self.model, self.tokenizer, cache, batch, texts)
            return [case for of_text in found for case in of_text]
        return [self._predicted(cell, text, cache) for cell, text in zip(batch, texts, strict=True)]

    def _shared(self, cell: Cell) -> tuple[object, ...]:
        """The key that the cells of one batch have in common."""
        fitted, settings = self._fitted(cell.spec), cell.settings
        budget = settings.budget.of(fitted.context_tokens)
        # A text without questions is read alone. If layers share a budget, it depends on all rows of a cache.
        one_shot = find(settings.options.policy, OneShot)
        is_shared = budget is not None and one_shot is not None and one_shot.shares_budget
        is_alone = not fitted.sample.turns or is_shared
        number = cell.spec.number if is_alone else None
        return cell.spec.label, cell.spec.length, tuple(settings.labels.values()), budget, number

    def _predicted(self, cell: Cell, text: SizedSample, cache: KVCache) -> Case:
        """A text that is predicted."""
        started = time.perf_counter()
        ids = encode(self.tokenizer, text.sample.context, is_start=True)
        measures = predicted(self.model, cache, ids, self._beside(len(ids), cache.chunk))
        return Case(
            **cell.labels,
            budget=cache.budget,
            context_tokens=text.context_tokens,
            slots_held=max(layer.table.occupancy_bound for layer in cache.layers),
            bytes_held=cache.bytes_held,
            bytes_full=bytes_full(layer_shapes(self.model), text.context_tokens),
            recall_bytes=cache.recall_bytes,
            output="",
            measures=measures,
            seconds=time.perf_counter() - started,
        )

    def _beside(self, tokens: int, chunk: int) -> KVCache | None:
        """A full cache to compare with, while the model was trained on texts as long."""
        is_long = tokens > (trained_length(self.model.config.get_text_config()) or FULL_TOKENS)
        return None if is_long else KVCache(self.model, chunk=chunk)

    def _fitted(self, spec: SampleSpec) -> SizedSample:
        if spec.key not in self._made:
            self._made[spec.key] = fit(spec, self.tokenizer)
        return self._made[spec.key]

    def _check(self, settings: Settings, fitted: SizedSample, where: str) -> None:
        """Raises: UsageError, as the cache does, for a budget that it cannot have."""
        budget = settings.budget
        try:
            cache_of(self.model, settings, budget.of(fitted.context_tokens), True)
        except UsageError as error:
            of = f" of the {fitted.context_tokens} tokens of {where}" if budget.divisor is not None else ""
            raise UsageError(f"--budgets {budget.asked}{of}: {error}") from None


def bytes_full(shapes: Sequence[LayerShape], tokens: int) -> int:
    """Bytes of the keys and values of a text in a plain cache without budget."""
    per_token = ((shape, shape.kv_heads * shape.channels) for shape in shapes)
    return sum(min(tokens, shape.most_visible or tokens) * count * shape.dtype.itemsize for shape, count in per_token)


def header_of(name: str, seed: int, model: PreTrainedModel) -> Header:
    """The header of a run with this model, which was asked for by `name`."""
    return Header(
        windlass=__version__,
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


class Sweep:
    """A whole evaluation, and the file that its cases go to."""

    def __init__(self, options: EvalOptions, note: Callable[[str], None], executor: Executor | None = None) -> None:
        """Check the options, and open the file. `note` is called with each amendment of the file.

        Without an `executor` the model is loaded in this process.

        Raises: WindlassError for invalid options, before anything is run.
        """
        self._executor = executor or options.runner()
        self._batch = options.batch
        plan = self._executor.plan
        self.grid, self._cells = plan.grid, plan.grid.cells
        self._results = open_results(options.output, plan.header, note)
        self._results.check_files(files_of(self._cells))

    def run(self, progress: Callable[[int, int, str], None]) -> bool:
        """Run the cells that the file lacks, and write them there. Returns True unless interrupted.

        `progress` is called with (cells done, cells in all, next cell). Ctrl-C leaves whole lines, and a further run
        continues from there.
        """
        done, total = 0, self._total()

        def started(cell: Cell) -> None:
            progress(done, total, self._name(cell))

        try:
            for cells in self._rounds():
                missing = [cell for cell in cells if not self._is_done(cell)]
                done += len(cells) - len(missing)
                for batch, cases in self._executor.measure(missing, self._batch, started):
                    self._results.add(cases)
                    done += len(batch)
        except KeyboardInterrupt:
            return False
        return True

    @property
    def cases(self) -> list[Case]:
        """Cases of the file that were asked for, in the order of the lists."""
        wanted = [each for cell in self._cells for each in cell.identities]
        return [self._results.cases[each] for each in wanted if each in self._results.cases]

    @property
    def counts(self) -> tuple[int, int]:
        """The number of cells that are done, and of all cells."""
        return sum(map(self._is_done, self._cells)), len(self._cells)

    def _rounds(self) -> Iterator[Sequence[Cell]]:
        """The cells to run, round by round. A round may depend on the cases of those before it."""
        yield self._cells

    def _total(self) -> int:
        """The cells of all rounds."""
        return len(self._cells)

    def _name(self, cell: Cell) -> str:
        """A cell, as the progress shows it."""
        return f"{cell.spec.label} {cell.settings.budget.asked}"

    def _is_done(self, cell: Cell) -> bool:
        return all(each in self._results for each in cell.identities)


ALWAYS = ("task", "policy", "asked_budget")
VARIED = ("length", "merge", "positions", "store", "shares", "recalled", "is_aware")  # shown where they differ


def summary(cases: Sequence[Case]) -> Table:
    """One row per combination, in the order of their first cases."""
    shown = [*ALWAYS, *(name for name in VARIED if len({getattr(case, name) for case in cases}) > 1)]
    has_scores = any(case.score is not None for case in cases)
    has_losses = any(case.nll is not None for case in cases)
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for name in shown:
        table.add_column(name.removeprefix("asked_"), overflow="fold")
    has_recall = any(case.recall_bytes for case in cases)
    numbers = ["samples", "bytes", *(["recall bytes"] if has_recall else [])]
    numbers += ["score", "95 %"] if has_scores else []
    numbers += ["nll", "kl"] if has_losses else []
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for group in grouped(cases, lambda case: tuple(getattr(case, name) for name in (*ALWAYS, *VARIED))).values():
        held = fmean(case.bytes_held for case in group)
        cells = [str(len({case.sample for case in group})), in_units(round(held))]
        cells += [in_units(round(fmean(case.recall_bytes for case in group)))] if has_recall else []
        cells += _scores([case for case in group if case.score is not None]) if has_scores else []
        cells += [_mean([case.nll for case in group]), _mean([case.kl for case in group])] if has_losses else []
        table.add_row(*(Text(_label(group[0], name)) for name in shown), *cells)
    return table


def _label(case: Case, name: str) -> str:
    return spelled(case.policy) if name == "policy" else str(getattr(case, name))


def _scores(scored: Sequence[Case]) -> list[str]:
    """The mean and its interval. Questions on one text are one sample."""
    if not scored:
        return ["-", "-"]
    row = score_row(scored)
    return [f"{100 * row.value:.1f} %", f"{100 * (row.low or 0.0):.1f} to {100 * (row.high or 0.0):.1f}"]


def _mean(measured: Sequence[float | None]) -> str:
    known = [number for number in measured if number is not None]
    return f"{fmean(known):.4f}" if known else "-"
