"""Who measures planned cases: this process, or whatever else is an `Executor`.

A `Work` is what one process needs for it: the model, loaded once, and the cases by identity, made of what was typed. So
processes that know nothing of each other agree on what a case is, and nothing but names and numbers goes between them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

from windlass.evals.case import Case, Identity
from windlass.evals.planned import PlannedCase
from windlass.evals.runner import Runner

Facts = TypeVar("Facts")
Started = Callable[[PlannedCase], None]


class Work(ABC, Generic[Facts]):
    """A model that is loaded, and every case that may be asked of it."""

    def __init__(self, runner: Runner, cases: Sequence[PlannedCase]) -> None:
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
        self, cases: Sequence[PlannedCase], batch: int, started: Started
    ) -> Iterator[tuple[Sequence[PlannedCase], list[Case]]]:
        """Run planned cases, up to `batch` texts side by side; each result comes once, as soon as it is there.

        `started` is called with a case when it begins. A case that could not be run does not come.

        Raises: WindlassError where a case fails, as it would for any other executor.
        """


class InProcess(Executor[Facts]):
    """Runs cases here, one after another, in their order."""

    def __init__(self, work: Work[Facts]) -> None:
        self._work = work

    @property
    def facts(self) -> Facts:
        return self._work.facts()

    def measure(
        self, cases: Sequence[PlannedCase], batch: int, started: Started
    ) -> Iterator[tuple[Sequence[PlannedCase], list[Case]]]:
        for texts in self._work.runner.batches(cases, batch):
            started(texts[0])
            yield texts, self._work.runner.measured(texts)
