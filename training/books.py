"""The novels to train on: one long text, read from the end of any of its sentences on."""

import lzma
import random
import re
from dataclasses import dataclass
from pathlib import Path

from windlass.core.errors import UsageError
from windlass.evals.texts import Filler

LEAST = 20_000  # characters; fewer would be learnt by heart
SEARCHED = 2_000  # characters in which a sentence ends
WORD = 20  # characters that a word and the space before it seldom exceed
PLAIN = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "—": "-", "–": "-", "\r": None, "\ufeff": None})  # noqa: RUF001
SENTENCE_END = re.compile(r"[.!?][\"')]*(?=\s)")


@dataclass(frozen=True)
class Books(Filler):
    """The words of a text, which goes on at its start where it ends."""

    text: str
    joint = " "

    def pieces(self, draw: random.Random, count: int) -> list[str]:
        at = draw.randrange(len(self.text))
        end = SENTENCE_END.search(self._from(at, SEARCHED))
        at += end.end() if end else 0
        size = WORD * (count + 1)
        while len(words := re.findall(r"\s+\S+(?=\s)", self._from(at, size))) < count:
            size *= 2
        return words[:count]

    def _from(self, start: int, size: int) -> str:
        start %= len(self.text)
        stretch = self.text[start : start + size]
        while len(stretch) < size:
            stretch += self.text[: size - len(stretch)]
        return stretch


def open_books(path: Path) -> Books:
    """The text of a file, unpacked where its name ends in `.xz`, with plain quotes and dashes.

    Raises: UsageError for a file that cannot be read or is too short.
    """
    try:
        data = path.read_bytes()
        text = (lzma.decompress(data) if path.suffix == ".xz" else data).decode().translate(PLAIN)
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise UsageError(f"books {path} cannot be read: {error}") from error
    if len(text) < LEAST:
        raise UsageError(f"books {path} have {len(text)} characters, the least is {LEAST}; give a longer text")
    return Books("\n" + text.strip() + "\n")
