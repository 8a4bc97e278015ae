"""What is to be run: every sample under every setting, known before a model is loaded."""

from dataclasses import dataclass

from windlass.evals.case import IDENTITY, Identity
from windlass.evals.fit import SampleSpec
from windlass.evals.grid import Grid, Settings


@dataclass(frozen=True)
class PlannedCase:
    """One sample under one setting, before it is run. It gives a `Case` for each of its questions."""

    spec: SampleSpec
    settings: Settings
    is_aware: bool

    @property
    def turns(self) -> list[int | None]:
        """The number of each question; a single question has none."""
        return [*range(self.spec.task.turns)] if self.spec.task.turns > 1 else [None]

    @property
    def identities(self) -> list[Identity]:
        """Of its cases."""
        labels: dict[str, str | int] = {
            **self.settings.labels,
            "task": self.spec.label,
            "is_aware": self.is_aware,
            "length": self.spec.length,
            "sample": self.spec.number,
        }
        return [(*(labels[name] for name in IDENTITY), turn) for turn in self.turns]


def planned(grid: Grid, samples: int, seed: int, is_aware: bool = False) -> list[PlannedCase]:
    """Every combination; cases with the same text are neighbours."""
    return [
        PlannedCase(SampleSpec(task, label, length, seed, sample), settings, is_aware)
        for sample in range(samples)
        for label, task in grid.tasks.items()
        for length in grid.lengths
        for settings in grid.settings
    ]
