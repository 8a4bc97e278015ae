"""Variable tracking: which names hold a value after assignments far apart."""

import random
from dataclasses import dataclass

from windlass.evals import texts
from windlass.evals.task import Question, Sample, Task
from windlass.evals.texts import NOISE_LINES, hide

BEFORE = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n"
QUESTION = "\nQuestion: Find all variables that are assigned the value {value} in the text above."
PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {value}, they are:"
)
LETTERS = 5  # of a name
EXAMPLE_UNITS = 2


@dataclass(frozen=True)
class Variables(Task):
    """One chain of assignments, in order at random places. A solved example comes first.

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
        prefix = PREFIX.format(value=value, count=len(names))
        return BEFORE + text, Question(QUESTION.format(value=value), prefix, tuple(names))
