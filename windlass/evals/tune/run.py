"""Rounds of measuring: all candidates on a few texts, then the better half on more, and the best quarter on all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from windlass.cache.options import CacheOptions
from windlass.core.files import read_text
from windlass.engine.text import encode
from windlass.evals.budgets import ALL, Budget
from windlass.evals.case import Case, Header
from windlass.evals.grid import Grid, Settings
from windlass.evals.planned import PlannedCase, planned
from windlass.evals.results import open_results
from windlass.evals.runner import FULL_TOKENS, Runner, header_of
from windlass.evals.task import Task
from windlass.evals.tune.candidates import Candidates, candidates_of, tasks_on
from windlass.evals.tune.ranking import Ranked, ranked
from windlass.evals.work import Executor, InProcess, Work
from windlass.hf.layer_shapes import layer_shapes
from windlass.hf.load import load
from windlass.hf.model_name import shown_name
from windlass.hf.trained_length import trained_length
from windlass.policies import Recent

LEAST_LEFT = 2  # candidates in the last round, so that there is something to compare
SHARES = (4, 2, 1)  # of the samples, after which half of the candidates leave


@dataclass(frozen=True)
class TuneOptions:
    """What the user asked for: `size` in bytes; `length` and `output` None choose by themselves."""

    model: str
    text: Path
    size: int
    tasks: str
    lists: dict[str, str]
    samples: int
    length: int | None
    seed: int
    output: Path | None
    dtype: str
    threads: int | None
    device: str = "cpu"
    weights: str = "auto"


@dataclass(frozen=True)
class TuneFacts:
    """What only the model can tell: the candidates, and `full`, the full cache where that is a measure."""

    header: Header
    candidates: Candidates
    full: Settings | None


class TuneWork(Work[TuneFacts]):
    """The model that is tuned for, and every case that a round may ask for."""

    def __init__(self, options: TuneOptions, tasks: dict[str, Task] | None = None) -> None:
        """Load the model, and work out the candidates; `tasks` are those of the options, where they have been made.

        Raises: WindlassError for what cannot be honoured.
        """
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        tasks = tasks or tasks_on(options.text, options.tasks)
        model, tokenizer = load(options.model, options.dtype, options.device, options.weights)
        ids = encode(tokenizer, read_text(options.text, f"text file {options.text}"), is_start=True)
        trained = trained_length(model.config.get_text_config())
        shapes = layer_shapes(model)
        found = candidates_of(model, shapes, ids, options.lists, options.size, options.length, trained)
        # A model reads no further than it was trained to without help, so beyond that it is no measure.
        fits = found.length <= (trained or FULL_TOKENS)
        full = Settings(Budget(ALL), CacheOptions(policy=Recent(), positions="original")) if fits else None
        self._grid = Grid(tasks, [found.length], [*([full] if full else []), *found.settings])
        self._facts = TuneFacts(header_of(options.model, options.seed, model), found, full)
        self._samples = options.samples
        super().__init__(Runner(model, tokenizer, options.seed), planned(self._grid, options.samples, options.seed))

    def facts(self) -> TuneFacts:
        if not self._facts.candidates.is_whole:
            self.runner.check(self._grid, self._samples, is_aware=False)
        return self._facts


class Tuning:
    """The candidates, and the file that their cases go to.

    `is_whole`: every candidate holds the whole text, so there is nothing to measure.
    """

    def __init__(
        self, options: TuneOptions, note: Callable[[str], None], executor: Executor[TuneFacts] | None = None
    ) -> None:
        """Work out the candidates, and open the file; `note` is told what was left out or amended.

        Without an `executor` the model is loaded, and asked, in this process.

        Raises: WindlassError for what cannot be honoured, before anything is run.
        """
        self._tasks = tasks_on(options.text, options.tasks)
        self._executor = executor or InProcess(TuneWork(options, self._tasks))
        facts = self._executor.facts
        found, self._full = facts.candidates, facts.full
        for line in found.left_out:
            note(f"windlass: note: left out: {line}")
        self.length, self.settings, self.is_whole = found.length, found.settings, found.is_whole
        self.output = options.output or Path(f"tune-{shown_name(options.model).replace('/', '-')}.jsonl")
        self._seed, self._samples = options.seed, options.samples
        if not self.is_whole:
            self._results = open_results(self.output, facts.header, note)

    def run(self, progress: Callable[[int, int, str], None]) -> bool:
        """Run what the file lacks, and write it there; whether that was done before an interrupt.

        `progress` is called with (cases done, cases in all, what comes next). A further run goes on from there.
        """
        rounds = rounds_of(len(self.settings), self._samples)
        each_text = [(count - before) * (size + (self._full is not None)) for before, count, size in rounds]
        total, done = sum(each_text) * len(self._tasks), 0
        left: Sequence[Settings] = self.settings

        def started(case: PlannedCase) -> None:
            progress(done, total, f"{case.settings.labels['policy'].partition('(')[0]} {case.spec.label}")

        try:
            for before, count, size in rounds:
                if before:
                    left = [each.settings for each in ranked(left, self.cases, before)][:size]
                asked = self._planned(left, before, count)
                missing = [case for case in asked if not self._is_done(case)]
                done += len(asked) - len(missing)
                for batch, cases in self._executor.measure(missing, 1, started):
                    self._results.add(cases)
                    done += len(batch)
        except KeyboardInterrupt:
            return False
        return True

    @property
    def cases(self) -> list[Case]:
        """Those of the file that this run asks for, or a round of it may."""
        wanted = {each for case in self._planned(self.settings, 0, self._samples) for each in case.identities}
        return [case for identity, case in self._results.cases.items() if identity in wanted]

    @property
    def ranking(self) -> list[Ranked]:
        """The candidates that have cases, the best first."""
        return ranked(self.settings, self.cases)

    @property
    def full(self) -> Ranked | None:
        """The full cache on the same texts; None where it was not run."""
        return next(iter(ranked([self._full], self.cases)), None) if self._full else None

    def _planned(self, settings: Sequence[Settings], before: int, count: int) -> list[PlannedCase]:
        """The cases of texts number `before` up to `count`, those of the full cache first."""
        grid = Grid(self._tasks, [self.length], [*([self._full] if self._full else []), *settings])
        return [case for case in planned(grid, count, self._seed) if case.spec.number >= before]

    def _is_done(self, case: PlannedCase) -> bool:
        return all(each in self._results.cases for each in case.identities)


def rounds_of(candidates: int, samples: int) -> list[tuple[int, int, int]]:
    """Per round: texts done before it, texts done after it, and how many candidates take part."""
    counts = sorted({-(-samples // share) for share in SHARES})
    sizes = [max(min(LEAST_LEFT, candidates), -(-candidates // 2**number)) for number in range(len(counts))]
    return list(zip([0, *counts], counts, sizes, strict=False))
