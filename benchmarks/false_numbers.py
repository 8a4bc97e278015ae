"""A task for `windlass eval --tasks benchmarks/false_numbers.py:AmongFalseNumbers`.

A pass key in a novel whose own numerals are left in, and with a number of up to five digits after every 40 words.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path

from windlass.evals.tasks.passkey import MOST_KEY, PassKey
from windlass.evals.texts import Filler, Novel

EVERY = 40
FILE = Path("agent.txt")


@dataclass(frozen=True)
class Numbered(Filler):
    """The words of the novel `agent.txt` of the current folder, with numbers that nobody asks for."""

    novel: Novel = field(default_factory=lambda: Novel(FILE, has_numerals=True))
    joint = " "

    def pieces(self, draw: random.Random, count: int) -> list[str]:
        """Words; each 40th has a number behind it."""
        words = self.novel.pieces(draw, count)
        return [
            f"{word} {draw.randint(1, MOST_KEY)}" if place % EVERY == 0 else word for place, word in enumerate(words, 1)
        ]

    @property
    def most(self) -> int:
        """The words of the novel."""
        return self.novel.most


@dataclass(frozen=True)
class AmongFalseNumbers(PassKey):
    """One pass key among the false numbers."""

    filler: Filler = field(default_factory=Numbered)
