"""`windlass eval`: the grid of tasks, policies and budgets, a case for every question.

Samples are the outermost loop, so that a run that is stopped has about as many of each combination.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from windlass.evals.case import Case, Header
from windlass.evals.grid import Grid, Lists, grid_of
from windlass.evals.planned import PlannedCase, planned
from windlass.evals.results import open_results
from windlass.evals.runner import Runner, header_of
from windlass.evals.work import Executor, InProcess, Work
from windlass.hf.load import load


@dataclass(frozen=True)
class EvalOptions:
    """What the user asked for; `batch` is the most texts that are read side by side."""

    model: str
    lists: Lists
    samples: int
    seed: int
    is_aware: bool
    output: Path
    dtype: str
    threads: int | None
    device: str = "cpu"
    batch: int = 1
    weights: str = "auto"

    def planned(self, grid: Grid) -> list[PlannedCase]:
        """Every case of it."""
        return planned(grid, self.samples, self.seed, self.is_aware)


class EvalWork(Work[Header]):
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

        def started(case: PlannedCase) -> None:
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

    def _is_done(self, case: PlannedCase) -> bool:
        return all(each in self._results.cases for each in case.identities)
