"""Rounds of measuring: all candidates on a few texts, then the better half on more, and the best quarter on all."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from windlass.cache.options import CacheOptions
from windlass.core.files import read_text
from windlass.engine.text import encode
from windlass.evals.budgets import ALL, Budget
from windlass.evals.case import Case
from windlass.evals.grid import Grid, Settings
from windlass.evals.results import open_results
from windlass.evals.sweep import FULL_TOKENS, PlannedCase, Runner, header_of, planned
from windlass.evals.tune.candidates import candidates_of, tasks_on
from windlass.evals.tune.ranking import Ranked, ranked
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


class Tuning:
    """The candidates, and the file that their cases go to.

    `is_whole`: every candidate holds the whole text, so there is nothing to measure.
    """

    def __init__(self, options: TuneOptions, note: Callable[[str], None]) -> None:
        """Load the model, work out the candidates, and open the file; `note` is told what was left out or amended.

        Raises: WindlassError for what cannot be honoured, before anything is run.
        """
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        tasks = tasks_on(options.text, options.tasks)
        model, tokenizer = load(options.model, options.dtype, options.device, options.weights)
        ids = encode(tokenizer, read_text(options.text, f"text file {options.text}"), is_start=True)
        trained = trained_length(model.config.get_text_config())
        shapes = layer_shapes(model)
        found = candidates_of(model, shapes, ids, options.lists, options.size, options.length, trained)
        for line in found.left_out:
            note(f"windlass: note: left out: {line}")
        self.length, self.settings, self.is_whole = found.length, found.settings, found.is_whole
        self.output = options.output or Path(f"tune-{shown_name(options.model).replace('/', '-')}.jsonl")
        # A model reads no further than it was trained to without help, so beyond that it is no measure.
        fits = found.length <= (trained or FULL_TOKENS)
        self._full = Settings(Budget(ALL), CacheOptions(policy=Recent(), positions="original")) if fits else None
        self._seed, self._samples, self._tasks = options.seed, options.samples, tasks
        self._runner = Runner(model, tokenizer, options.seed)
        everything = [*self.settings, *([self._full] if self._full else [])]
        if not self.is_whole:
            self._runner.check(Grid(tasks, [self.length], everything), options.samples, is_aware=False)
            self._results = open_results(self.output, header_of(options.model, options.seed, model), note)

    def run(self, progress: Callable[[int, int, str], None]) -> bool:
        """Run what the file lacks, and write it there; whether that was done before an interrupt.

        `progress` is called with (cases done, cases in all, what comes next). A further run goes on from there.
        """
        rounds = rounds_of(len(self.settings), self._samples)
        each_text = [(count - before) * (size + (self._full is not None)) for before, count, size in rounds]
        total, done = sum(each_text) * len(self._tasks), 0
        left: Sequence[Settings] = self.settings
        try:
            for before, count, size in rounds:
                if before:
                    left = [each.settings for each in ranked(left, self.cases, before)][:size]
                for (case,) in self._runner.batches(self._planned(left, before, count), 1):
                    progress(done, total, f"{case.settings.labels['policy'].partition('(')[0]} {case.spec.label}")
                    if not all(each in self._results.cases for each in case.identities):
                        self._results.add(self._runner.measured([case]))
                    done += 1
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
        return [case for case in planned(grid, count, self._seed, is_aware=False) if case.spec.number >= before]


def rounds_of(candidates: int, samples: int) -> list[tuple[int, int, int]]:
    """Per round: texts done before it, texts done after it, and how many candidates take part."""
    counts = sorted({-(-samples // share) for share in SHARES})
    sizes = [max(min(LEAST_LEFT, candidates), -(-candidates // 2**number)) for number in range(len(counts))]
    return list(zip([0, *counts], counts, sizes, strict=False))
