"""`windlass eval`: runs the grid of tasks, policies and budgets, and writes a line for every question.

Samples are the outermost loop, so that a run that is stopped has about as many of each combination.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.cli.terminal import INTERRUPTED, note, progress
from windlass.core.errors import UsageError
from windlass.engine.text import encode
from windlass.evals.fit import Fitted, fit, shortest
from windlass.evals.grid import Grid, Lists, Settings, grid_of
from windlass.evals.measure import Outcome, answered, cache_of, predicted
from windlass.evals.results import VERSION, Identity, Line, Results, identity, open_results
from windlass.evals.speed.depth import LayerShape, layer_shapes
from windlass.evals.summary import summary
from windlass.evals.task import Task
from windlass.hf.kv_cache import KVCache
from windlass.hf.load import open_model

FULL_TOKENS = 4096  # of texts that a full cache reads too, if a model does not tell how long those of its training were
PIPE_WIDTH = 240
SPEED_S = 3600.0  # of the newest cases, whose speed tells the time that is left


@dataclass(frozen=True)
class Options:
    """What the user asked for."""

    model: str
    lists: Lists
    samples: int
    seed: int
    is_aware: bool
    output: Path
    dtype: str
    threads: int | None
    device: str = "cpu"


@dataclass(frozen=True)
class Case:
    """One sample under one setting."""

    label: str
    task: Task
    length: int
    sample: int
    settings: Settings
    is_aware: bool

    @property
    def labels(self) -> Line:
        """What its lines have in common."""
        return {
            "kind": "case",
            "task": self.label,
            **self.settings.labels,
            "is_aware": self.is_aware,
            "length": self.length,
            "sample": self.sample,
        }

    @property
    def turns(self) -> list[int | None]:
        """Of its lines; a single question has no number."""
        return [*range(self.task.turns)] if self.task.turns > 1 else [None]

    @property
    def identities(self) -> list[Identity]:
        """Of its lines."""
        return [identity({**self.labels, "turn": turn}) for turn in self.turns]


def evaluate(options: Options) -> int:
    """Run every case that the output lacks and show the means of all; returns the exit code.

    Ctrl-C leaves whole lines; the same command goes on from there.

    Raises: WindlassError for what cannot be honoured, before anything is run.
    """
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    grid = grid_of(options.lists)
    model, tokenizer = open_model(options.model, options.dtype, options.device)
    runner = Runner(model, tokenizer, options.seed)
    runner.check(grid, options.samples, options.is_aware)
    results = open_results(options.output, _header(options, model))
    cases = cases_of(grid, options.samples, options.is_aware)
    is_whole = run(runner, cases, results)
    wanted = {each for case in cases for each in case.identities}
    lines = [line for key, line in results.lines.items() if key in wanted]
    if lines:
        # A pipe gets whole lines, whatever the width of a terminal.
        Console(width=None if Console().is_terminal else PIPE_WIDTH).print(summary(lines))
    if not is_whole:
        missing = sum(any(each not in results.lines for each in case.identities) for case in cases)
        note(f"interrupted; {len(cases) - missing} of {len(cases)} cases are done; the same command goes on from here")
    return 0 if is_whole else INTERRUPTED


def cases_of(grid: Grid, samples: int, is_aware: bool) -> list[Case]:
    """Every combination; cases with the same text are neighbours."""
    return [
        Case(label, task, length, sample, settings, is_aware)
        for sample in range(samples)
        for label, task in grid.tasks.items()
        for length in grid.lengths
        for settings in grid.settings
    ]


def run(runner: "Runner", cases: Sequence[Case], results: Results) -> bool:
    """Add the lines of all cases that are not there; whether it was done before an interrupt."""
    left = [case for case in cases if any(each not in results.lines for each in case.identities)]
    try:
        with progress("cases", speed_s=SPEED_S) as bars:
            bar = bars.add_task("", total=len(left))
            for case in left:
                bars.update(bar, description=f"{case.label} {case.settings.labels['asked_budget']}")
                results.add(runner.lines(case))
                bars.advance(bar)
    except KeyboardInterrupt:
        return False
    return True


class Runner:
    """A model to ask, and the sample that was made last."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self._model, self._tokenizer, self._seed = model, tokenizer, seed
        self._shapes = layer_shapes(model)
        self._latest: tuple[tuple[str, int, int], Fitted] | None = None

    def check(self, grid: Grid, samples: int, is_aware: bool) -> None:
        """Check every length on all texts, and every budget on the first of each task and length.

        Raises: UsageError for what cannot be honoured.
        """
        for label, task in grid.tasks.items():
            for length in grid.lengths:
                for sample in range(samples):
                    shortest(task, label, self._tokenizer, length, self._seed, sample)
                fitted = self._fitted(label, task, length, 0)
                if is_aware and not fitted.sample.turns:
                    raise UsageError(f"task {label} asks nothing, so it cannot be run --aware of a question")
                for settings in grid.settings:
                    self._check(settings, fitted, f"task {label} at length {length}")

    def lines(self, case: Case) -> list[Line]:
        """Run the case; returns a line per question."""
        fitted = self._fitted(case.label, case.task, case.length, case.sample)
        budget = case.settings.budget.of(fitted.context_tokens)
        cache = cache_of(self._model, case.settings, budget, bool(fitted.sample.turns))
        if fitted.sample.turns:
            outcomes = answered(self._model, self._tokenizer, cache, case.label, case.task, fitted, case.is_aware)
        else:
            outcomes = [self._predicted(cache, case.settings, fitted)]
        shared = {
            **case.labels,
            "budget": budget,
            "context_tokens": fitted.context_tokens,
            "bytes_full": bytes_full(self._shapes, fitted.context_tokens),
        }
        return [
            {**shared, "turn": turn, **_measured(outcome)} for turn, outcome in zip(case.turns, outcomes, strict=True)
        ]

    def _predicted(self, cache: KVCache, settings: Settings, fitted: Fitted) -> Outcome:
        """A text that is predicted, with a full cache beside it while the model was trained on texts as long."""
        ids = encode(self._tokenizer, fitted.sample.context, is_start=True)
        is_long = len(ids) > (trained_length(self._model) or FULL_TOKENS)
        full = None if is_long else KVCache(self._model, chunk=cache.chunk)
        return predicted(self._model, cache, ids, full)

    def _fitted(self, label: str, task: Task, length: int, sample: int) -> Fitted:
        key = (label, length, sample)
        if self._latest is None or self._latest[0] != key:
            self._latest = key, fit(task, label, self._tokenizer, length, self._seed, sample)
        return self._latest[1]

    def _check(self, settings: Settings, fitted: Fitted, where: str) -> None:
        """Raises: UsageError, as the cache does, for a budget that it cannot have."""
        budget = settings.budget
        try:
            cache_of(self._model, settings, budget.of(fitted.context_tokens), True)
        except UsageError as error:
            of = f" of the {fitted.context_tokens} tokens of {where}" if budget.divisor is not None else ""
            raise UsageError(f"--budgets {budget.asked}{of}: {error}") from None


def trained_length(model: PreTrainedModel) -> int | None:
    """The longest text that the model was trained on, in tokens; None where its config does not tell."""
    told = model.config.get_text_config().to_dict().get("max_position_embeddings")
    return told if isinstance(told, int) else None


def bytes_full(shapes: Sequence[LayerShape], tokens: int) -> int:
    """Bytes of the keys and values of a text in a plain cache without budget."""
    per_token = ((shape, shape.kv_heads * (shape.head_dim + shape.value_dim)) for shape in shapes)
    return sum(min(tokens, shape.sliding_window or tokens) * count * shape.dtype.itemsize for shape, count in per_token)


def _measured(outcome: Outcome) -> Line:
    turn = outcome.turn
    return {
        "depth": None if turn is None else turn.depth,
        "slots_held": outcome.slots_held,
        "bytes_held": outcome.bytes_held,
        "expected": [] if turn is None else list(turn.expected),
        "output": outcome.output,
        "score": outcome.score,
        "measures": outcome.measures,
        "seconds": outcome.seconds,
    }


def _header(options: Options, model: PreTrainedModel) -> Line:
    return {
        "kind": "header",
        "version": VERSION,
        **{name: version(name) for name in ("windlass", "torch", "transformers")},
        "model": options.model,
        "parameters": sum(each.numel() for each in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "trained_length": trained_length(model),
        "seed": options.seed,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
