"""Several questions on one text, whose cache is compressed once."""

import random
from dataclasses import dataclass, replace
from pathlib import Path

from windlass.evals.task import Sample, Task
from windlass.evals.tasks.niah import Needles


@dataclass(frozen=True)
class Multiturn(Task):
    """Every key of the needles is asked for in a question of its own, each on the cache as the text left it.

    Aware, the text was read with the first question: what the others then find is what a cache
    compressed for one question is worth to the next.

    Source: SCBench, Li et al. 2024 (arXiv:2412.10319), its requests on one shared context.
    """

    needles: Needles

    @property
    def turns(self) -> int:  # type: ignore[override]  # a number of the class in most tasks
        return self.needles.keys

    @property
    def answer_tokens(self) -> int:  # type: ignore[override]
        return self.needles.answer_tokens

    @property
    def most_units(self) -> int | None:
        return self.needles.most_units

    def compose(self, draw: random.Random, length: int, units: int) -> Sample:
        context, needles = self.needles.hidden(draw, units, self.needles.keys * self.needles.values)
        return Sample(context, tuple(self.needles.ask([needle]) for needle in needles))

    def reading(self, file: Path) -> Task | None:
        needles = self.needles.reading(file)
        return replace(self, needles=needles) if isinstance(needles, Needles) else None
