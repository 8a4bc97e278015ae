"""A pass key in filler text: the test of llama.cpp pull request 5719."""

import random
import re
from dataclasses import dataclass, replace
from pathlib import Path

from windlass.evals import texts
from windlass.evals.task import Question, Sample, Task
from windlass.evals.texts import BEFORE, HIDDEN, NOISE, PREFIX, QUESTION, Filler, from_file, hide

MOST_KEY = 50_000


@dataclass(frozen=True)
class PassKey(Task):
    """One key, 1 to 50000 or three words, between the sentences: at `depth`, or anywhere.

    Source: Mohtashami and Jaggi 2023 (arXiv:2305.16300), with text, key and answer room of llama.cpp's example.
    Differs: the depth is sampled as a share of the text. The filler is the novel, and keys may be words.
    """

    filler: Filler = NOISE
    is_words: bool = False
    answer_tokens: int = 16
    depth: float | None = None

    @property
    def most_units(self) -> int | None:
        return self.filler.most

    def compose(self, draw: random.Random, length: int, units: int) -> Sample:
        key = texts.triple(draw) if self.is_words else str(draw.randint(1, MOST_KEY))
        drawn = draw.random()
        depth = drawn if self.depth is None else self.depth
        text, (stood,) = hide(self.filler.pieces(draw, units), [HIDDEN.format(key=key)], [depth])
        return Sample(BEFORE + text, (Question(QUESTION, PREFIX, (key,), stood),))

    def score(self, turn: Question, output: str) -> float:
        """1 where the first number of the output is the key, or the words of the key are in it."""
        if self.is_words:
            return super().score(turn, output)
        first = re.search("[0-9]+", output)
        return float(first is not None and first[0] == turn.expected[0])

    def reading(self, file: Path) -> Task | None:
        filler = from_file(self.filler, file)
        return None if filler is None else replace(self, filler=filler)

    def at(self, depth: float) -> Task | None:
        return replace(self, depth=depth)
