"""Facts hidden in filler text: a pass key, and a chain of assignments."""

import random
import re
from dataclasses import dataclass, replace
from pathlib import Path

from windlass.evals import texts
from windlass.evals.task import Question, Sample, Task
from windlass.evals.texts import BEFORE, HIDDEN, NOISE, NOISE_LINES, PREFIX, QUESTION, Filler, from_file, hide

MOST_KEY = 50_000
CHAIN_BEFORE = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n"
CHAIN_QUESTION = "\nQuestion: Find all variables that are assigned the value {value} in the text above."
CHAIN_PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {value}, they are:"
)
LETTERS = 5  # of a name
EXAMPLE_UNITS = 2


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


@dataclass(frozen=True)
class Variables(Task):
    """Variable tracking: one chain of assignments, in order at random places. A solved example comes first.

    Source: variable tracking of RULER, Hsieh et al. 2024 (arXiv:2404.06654).
    Differs: the example has two lines of noise at any length, and there is no space after the answer's colon.
    """

    hops: int = 4
    answer_tokens: int = 30

    def compose(self, draw: random.Random, length: int, units: int) -> Sample:
        example, solved = self._chain(draw, EXAMPLE_UNITS)
        text, turn = self._chain(draw, units)
        shown = f"{example}{solved.question}{solved.prefix} {' '.join(solved.expected)}\n\n"
        return Sample(shown + text, (turn,))

    def _chain(self, draw: random.Random, units: int) -> tuple[str, Question]:
        names = texts.distinct(draw, lambda draw: texts.letters(draw, LETTERS).upper(), self.hops + 1)
        value = str(draw.randrange(10_000, 100_000))
        given = [value, *(f"VAR {name}" for name in names)]
        lines = [f"\nVAR {name} = {source}" for name, source in zip(names, given, strict=False)]
        depths = sorted(draw.random() for _ in lines)
        text, _ = hide(NOISE_LINES.pieces(draw, units), lines, depths)
        prefix = CHAIN_PREFIX.format(value=value, count=len(names))
        return CHAIN_BEFORE + text, Question(CHAIN_QUESTION.format(value=value), prefix, tuple(names))
