"""Counting: which words of a long list are the common ones. No place in the text holds the answer."""

import math
import random
from collections import Counter
from dataclasses import dataclass

from windlass.evals import texts
from windlass.evals.task import Question, Sample, Task
from windlass.evals.texts import NOVEL

COMMON = 10  # words that are asked for in `CommonWords`
LONG = 4096  # tokens from which on words repeat more often
FREQUENT = 3  # words that are asked for in `FrequentWords`
ZETA_2 = math.pi**2 / 6

LIST_BEFORE = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n"
)
LIST_QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
LIST_PREFIX = " Answer: The top 10 words that appear most often in the list are:"

CODED_BEFORE = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared "
    "coded words. "
)
CODED_QUESTION = (
    "\nQuestion: Do not provide any explanation. Please ignore the dots '...'. What are the three most frequently "
    "appeared words in the above coded text?"
)
CODED_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"


@dataclass(frozen=True)
class CommonWords(Task):
    """Ten words 30 times each among others three times each (6 and 1 below 4096 tokens), after a solved example.

    Source: common words extraction of RULER, Hsieh et al. 2024 (arXiv:2404.06654).
    Differs: the words are the novel's.
    """

    answer_tokens: int = 120

    @property
    def most_units(self) -> int:
        return len(NOVEL.vocabulary) - COMMON - self._example(LONG)[0]

    def compose(self, draw: random.Random, length: int, units: int) -> Sample:
        words = draw.sample(NOVEL.vocabulary, len(NOVEL.vocabulary))
        size, often, seldom = self._example(length)
        shown = words[:size]
        example = (
            f"{_numbered_list(draw, shown, often, seldom)}{LIST_QUESTION}{LIST_PREFIX} {_numbered(shown[:COMMON])}\n"
        )
        asked = words[size : size + COMMON + units]
        often, seldom = (6, 1) if length < LONG else (30, 3)
        text = _numbered_list(draw, asked, often, seldom)
        return Sample(example + text, (Question(LIST_QUESTION, LIST_PREFIX, tuple(asked[:COMMON])),))

    def _example(self, length: int) -> tuple[int, int, int]:
        """The number of words, then the counts of each common and each other one."""
        return (20, 3, 1) if length < LONG else (40, 10, 3)


@dataclass(frozen=True)
class FrequentWords(Task):
    """Words of six letters whose frequency falls with the square of their rank. The first are dots.

    Source: frequent words extraction of RULER, Hsieh et al. 2024 (arXiv:2404.06654), exponent 2.
    """

    answer_tokens: int = 50
    least_units: int = 53  # from here on the words of rank 4 and 5 differ in number

    def compose(self, draw: random.Random, length: int, units: int) -> Sample:
        vocabulary = ["...", *texts.distinct(draw, lambda draw: texts.letters(draw, 6), max(length // 50, 5) - 1)]
        counts = {word: int(units * rank**-2 / ZETA_2) for rank, word in enumerate(vocabulary, 1)}
        words = list(Counter(counts).elements())
        draw.shuffle(words)
        expected = tuple(vocabulary[1 : 1 + FREQUENT])
        return Sample(CODED_BEFORE + " ".join(words), (Question(CODED_QUESTION, CODED_PREFIX, expected),))


def _numbered_list(draw: random.Random, words: list[str], often: int, seldom: int) -> str:
    """The first ten words so often, the others so seldom, in any order."""
    entries = words[:COMMON] * often + words[COMMON:] * seldom
    draw.shuffle(entries)
    return LIST_BEFORE + _numbered(entries)


def _numbered(words: list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, 1))
