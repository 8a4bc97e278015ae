"""Prediction of the text itself, streamed through a cache of fixed size."""

import random
from dataclasses import dataclass, replace
from pathlib import Path

from windlass.evals.task import Sample, Task
from windlass.evals.texts import Novel, from_file


@dataclass(frozen=True)
class Perplexity(Task):
    """A stretch of the text from the start of any sentence on, without questions."""

    text: Novel
    answer_tokens: int = 0
    least_units: int = 2

    @property
    def most_units(self) -> int:
        return self.text.most

    def compose(self, draw: random.Random, length: int, units: int) -> Sample:
        return Sample("".join(self.text.pieces(draw, units)).lstrip())

    def reading(self, file: Path) -> Task | None:
        text = from_file(self.text, file)
        return None if text is None else replace(self, text=text)
