"""Texts of evaluations: filler, novels, and the lines hidden in them."""

import lzma
import random
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import resources
from pathlib import Path

from windlass.core.files import read_text

NOVEL_FILE = "three_men_in_a_boat.txt.xz"
BEFORE = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize them. "
    "I will quiz you about the important information there."
)
HIDDEN = " The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = " What is the pass key?"
PREFIX = " The pass key is"
ASKED = QUESTION + PREFIX
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
SENTENCE_END = re.compile(r"[.!?][\"')]*(?=\s)")


def novel() -> str:
    """The novel that is shipped, *Three Men in a Boat*."""
    packed = (resources.files("windlass") / "assets" / NOVEL_FILE).read_bytes()
    return lzma.decompress(packed).decode()


def in_words(text: str) -> str:
    """`text` with its numerals spelled out digit by digit: 1889 becomes one-eight-eight-nine."""
    return re.sub(r"[0-9]+", lambda numeral: "-".join(DIGITS[int(digit)] for digit in numeral[0]), text)


def hide_pass_key(text: str, key: str, depth: float) -> str:
    """`text` with the pass key after the first sentence that ends at `depth` (0 to 1) of it or later."""
    whole = f"{BEFORE} {text}"
    end = SENTENCE_END.search(whole, len(BEFORE) - 1 + int(depth * len(text)))
    at = len(whole) if end is None else end.end()
    return whole[:at] + HIDDEN.format(key=key) + whole[at:]


SENTENCES = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


class Filler(ABC):
    """Makes text in pieces, which begin with the space or line end before them."""

    joint: str
    """Separator before a line that is hidden in the text."""

    @abstractmethod
    def pieces(self, draw: random.Random, count: int) -> list[str]:
        """`count` pieces, the first of which are the same for any count with the same `draw`."""

    @property
    def most(self) -> int | None:
        """The most pieces there are, or None without a limit."""
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
    """The words of the shipped novel or of a `file`, from the start of any sentence on, and then from the beginning.

    `has_numerals` leaves numerals as they are. Otherwise they are spelled out, digit by digit, because a small model
    takes any number for the one that it is to remember.

    Raises: UsageError when the file cannot be read.
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
    """The same filler with a file's text, or None where the filler reads no text.

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
    """The numbers of pieces after which a sentence has ended."""
    return [place for place, piece in enumerate(pieces, 1) if piece.rstrip("\"')").endswith((".", "!", "?"))]


_ADJECTIVES = (
    "amber ancient bitter bold brave brisk broken calm chewy clever copper curious distant dusty eager early "
    "elegant famous fierce gentle gloomy golden happy hidden hollow honest humble icy jolly keen kind lively loyal "
    "mellow merry misty modest narrow noble odd patient polite proud quiet rapid restless rusty scarlet sharp shy "
    "silent silver sleepy solid spicy sturdy tender tidy velvet vivid warm wild wise young"
)
_NOUNS = (
    "acorn amazon anchor apple badger barrel basket bottle bridge button cactus camera candle canyon carpet castle "
    "cherry cottage desert dragon eagle engine falcon feather forest garden guitar hammer harbor helmet island jacket "
    "kettle ladder lantern letter magnet market meadow mirror needle orchard otter paddle pebble pencil pepper pillow "
    "quarry ribbon river saddle shovel teapot temple ticket tiger tunnel turnip valley violin wagon walnut window"
)
ADJECTIVES, NOUNS = _ADJECTIVES.split(), _NOUNS.split()
PAIRS = len(ADJECTIVES) * len(NOUNS)
LOWER = "abcdefghijklmnopqrstuvwxyz"


def pair(draw: random.Random) -> str:
    """Two words: `"quiet-river"`."""
    return f"{draw.choice(ADJECTIVES)}-{draw.choice(NOUNS)}"


def triple(draw: random.Random) -> str:
    """Three words with capitals: `"Chewy-Tiger-Amazon"`."""
    return "-".join((draw.choice(ADJECTIVES), *draw.sample(NOUNS, 2))).title()


def number(draw: random.Random) -> str:
    """Seven digits, the first not 0."""
    return str(draw.randrange(10**6, 10**7))


def uuid4(draw: random.Random) -> str:
    """A random UUID."""
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def letters(draw: random.Random, count: int) -> str:
    """A string of `count` random small letters."""
    return "".join(draw.choices(LOWER, k=count))


def distinct(draw: random.Random, make: Callable[[random.Random], str], count: int) -> list[str]:
    """`count` different names, the first of which are the same for any count."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[make(draw)] = None
    return list(found)
