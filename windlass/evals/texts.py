"""The texts that evaluations and the demo share: the shipped novel, numerals in words, and a pass key to hide."""

import lzma
import re
from importlib import resources

NOVEL = "three_men_in_a_boat.txt.xz"
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
    packed = (resources.files("windlass") / "assets" / NOVEL).read_bytes()
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
