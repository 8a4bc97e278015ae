"""Filler text, and hiding lines in it."""

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from windlass.core.files import read_text
from windlass.evals.texts import in_words, novel

SENTENCES = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


class Filler(ABC):
    """Makes text in pieces; each brings the space or line end before it."""

    joint: str
    """What a line that is hidden here has before it."""

    @abstractmethod
    def pieces(self, draw: random.Random, count: int) -> list[str]:
        """So many pieces; the same `draw` gives the same first ones at any count."""

    @property
    def most(self) -> int | None:
        """The most pieces there are; None where they never end."""
        return None


@dataclass(frozen=True)
class Noise(Filler):
    """The same five sentences, over and over, each time after `joint`.

    Source: Mohtashami and Jaggi 2023 (arXiv:2305.16300), and llama.cpp's pass key example.
    """

    joint: str = " "

    def pieces(self, draw: random.Random, count: int) -> list[str]:
        return [self.joint + SENTENCES] * count


@dataclass(frozen=True)
class Novel(Filler):
    """The words of the shipped novel or of a `file`, from the start of any sentence on, then round to it.

    `has_numerals` leaves numerals as they are; else they are spelled out, digit by digit, because a
    small model takes any number for the one that it is to remember.

    Raises: UsageError when a file that is asked for cannot be read.
    """

    file: Path | None = None
    has_numerals: bool = False
    joint = " "

    def pieces(self, draw: random.Random, count: int) -> list[str]:
        start = draw.choice(self._starts)
        taken = self._words[start : start + count]
        taken += self._words[: count - len(taken)]
        return [" " + taken[0].lstrip(), *taken[1:]] if taken else []

    @property
    def most(self) -> int:
        return len(self._words)

    @cached_property
    def vocabulary(self) -> list[str]:
        """The different words of four small letters or more that stand between spaces."""
        words = (word.strip() for word in self._words)
        return sorted({word for word in words if re.fullmatch("[a-z]{4,}", word)})

    @cached_property
    def _words(self) -> list[str]:
        text = novel() if self.file is None else read_text(self.file, f"text file {self.file}")
        return re.findall(r"\s+\S+", "\n\n" + (text if self.has_numerals else in_words(text))) or [text]

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *(place for place in _ends(self._words) if place < len(self._words))]


NOISE, NOISE_LINES, NOVEL = Noise(), Noise("\n"), Novel()


def from_file(filler: Filler | None, file: Path) -> Novel | None:
    """The same filler with a file's text; None where it isn't read out of a text.

    Raises: UsageError when the file cannot be read.
    """
    if not isinstance(filler, Novel):
        return None
    made = replace(filler, file=file)
    assert made.most
    return made


def hide(pieces: Sequence[str], lines: Sequence[str], depths: Sequence[float]) -> tuple[str, list[float]]:
    """The pieces as one text, each line at the end of a sentence, or the start, that is nearest to its depth (0 to 1).

    Returns the depths, too, that the lines came to stand at. Of lines at one place, the first comes first.
    """
    ends = [0, *_ends(pieces), len(pieces)]
    places = [min(ends, key=lambda end: abs(end - depth * len(pieces))) for depth in depths]
    parts: list[str] = []
    done = 0
    for place, line in sorted(zip(places, lines, strict=True), key=lambda pair: pair[0]):
        parts += [*pieces[done:place], line]
        done = place
    return "".join([*parts, *pieces[done:]]), [round(place / max(len(pieces), 1), 4) for place in places]


def _ends(pieces: Sequence[str]) -> list[int]:
    """After how many pieces a sentence has ended."""
    return [place for place, piece in enumerate(pieces, 1) if piece.rstrip("\"')").endswith((".", "!", "?"))]
