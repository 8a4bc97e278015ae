"""What there is to learn: novels, copies, and the tasks of `windlass eval`, with many questions on every text.

A lesson makes text in pieces, each with the weight that its tokens have in the loss: most for answers, which
can be known, none for what could only be guessed, such as the numbers that are hidden.
"""

import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from training.books import Books
from training.false_numbers import with_false_numbers
from training.tasks import Again, AnyKey, Mixed
from windlass.evals import Task
from windlass.evals import texts as keys
from windlass.evals.tasks import hidden
from windlass.evals.tasks.niah import ABOVE, RULER, Multiturn, Needles, Wording
from windlass.evals.tasks.words import CommonWords, FrequentWords
from windlass.evals.texts import NOISE, NOISE_LINES, Filler

ANSWER, COPY, PROSE, QUESTION, HAYSTACK, GUESS = 4.0, 1.5, 1.0, 0.3, 0.3, 0.0
SOLVED = re.compile(r"(?<=are:) [^\n]+(?=\n)")  # the answer of an example within a text
MOST_QUESTIONS = 8
QUESTION_TOKENS = 65  # of a needle, and the question for it with its answer
MOST_AGAIN, AGAIN_TOKENS = 20, 48
SPOILED = 0.67  # share of the texts that may have false numbers
MOST_FALSE, FALSE_TOKENS = 20, 25  # false numbers in a text, and tokens of text for each
MOST_PAIRS = 60
PAIRED = (" {key}", " {key}:", " {key} is:", " for {key} is:", " magic numbers for {key} is:")


@dataclass(frozen=True)
class Piece:
    """Text, the weight of each of its tokens, and whether it answers a question."""

    text: str
    weight: float
    is_answer: bool = False


class Lesson(ABC):
    """Makes texts of any length."""

    @abstractmethod
    def pieces(self, draw: random.Random, length: int, units: int) -> list[Piece]:
        """A text with so many units of filler, that is to take about `length` tokens.

        More units make a longer text; the same `draw` asks the same at any number of units.
        """


@dataclass(frozen=True)
class Reading(Lesson):
    """A stretch of a novel."""

    books: Books

    def pieces(self, draw: random.Random, length: int, units: int) -> list[Piece]:
        return [Piece("".join(self.books.pieces(draw, units)).lstrip(), PROSE)]


@dataclass(frozen=True)
class Copying(Lesson):
    """Words that come again after others: spans of a novel, or of random letters and digits."""

    books: Books

    def pieces(self, draw: random.Random, length: int, units: int) -> list[Piece]:
        made = []
        for _ in range(units + 1):
            words = draw.randint(3, 40)
            if draw.random() < 0.5:
                span = "".join(self.books.pieces(draw, words))
            else:
                span = " " + " ".join(keys.letters(draw, 4) + keys.number(draw) for _ in range(words // 4 + 1))
            between = "".join(self.books.pieces(draw, draw.randint(0, 60)))
            made += [Piece(span, HAYSTACK), Piece(between, HAYSTACK), Piece(span, COPY)]
        return made


@dataclass(frozen=True)
class Pairing(Lesson):
    """Names and numbers, then the same pairs in another order: a number is to be found by its name alone.

    From a name and a digit to the sentences of the needles; in these alone, a small model goes on copying
    any of the numbers for long.
    """

    def pieces(self, draw: random.Random, length: int, units: int) -> list[Piece]:
        words = draw.choice(PAIRED)
        digits = draw.choice((1, 1, 2, 3, 7))
        make = keys.pair if draw.random() < 0.5 else _noun
        names = keys.distinct(draw, make, min(2 + units, MOST_PAIRS))
        pairs = [(words.format(key=name), f" {keys.number(draw)[-digits:]}.") for name in names]
        made = [Piece("".join(key + number for key, number in pairs), GUESS)]
        for key, number in draw.sample(pairs, len(pairs)):
            made += [Piece(key, GUESS), Piece(number, ANSWER, True)]
        return made


def _noun(draw: random.Random) -> str:
    return draw.choice(keys.NOUNS)


def listed(context: str, expected: tuple[str, ...]) -> str:
    """The answers in the order in which they stand in the text."""
    return f" {', '.join(sorted(expected, key=context.index))}."


def in_a_row(_: str, expected: tuple[str, ...]) -> str:
    """As in the solved example of variable tracking."""
    return f" {' '.join(expected)}\n"


def numbered(_: str, expected: tuple[str, ...]) -> str:
    """As in the solved example of common words."""
    return " " + " ".join(f"{number}. {word}" for number, word in enumerate(expected, 1)) + "\n"


@dataclass(frozen=True)
class Exam(Lesson):
    """All the questions of a task on one text, one after the other, each with its answer.

    `task` draws a task for a text of so many tokens, `weight` is that of the text, `answer` writes what is
    expected of a question on the text, `start` is how the text that is wanted begins: what comes before its
    last occurrence is left out. `has_false_numbers` puts up to 20 of them between its words, in two texts of three.
    """

    task: Callable[[random.Random, int], Task]
    weight: float = GUESS
    answer: Callable[[str, tuple[str, ...]], str] = listed
    start: str = ""
    has_false_numbers: bool = False

    def pieces(self, draw: random.Random, length: int, units: int) -> list[Piece]:
        task = self.task(draw, length)
        spoil = random.Random(draw.random()) if self.has_false_numbers else None
        sample = task.compose(draw, length, task.least_units + units)
        context = sample.context[sample.context.rindex(self.start) if self.start else 0 :]
        made, done = [], 0
        for solved in SOLVED.finditer(context):
            made += [Piece(context[done : solved.start()], self.weight), Piece(solved[0], ANSWER, True)]
            done = solved.end()
        if spoil is not None and spoil.random() < SPOILED:
            count = spoil.randint(1, max(1, min(MOST_FALSE, length // FALSE_TOKENS)))
            values = [value for turn in sample.turns for value in turn.expected]
            parts = with_false_numbers(spoil, context[done:], values, count)
            made += [Piece(text, GUESS if is_false else self.weight) for text, is_false in parts]
        else:
            made.append(Piece(context[done:], self.weight))
        for turn in sample.turns:
            made.append(Piece(turn.question + turn.prefix, QUESTION))
            made.append(Piece(self.answer(sample.context, turn.expected), ANSWER, True))
        return made


@dataclass(frozen=True)
class Hidden:
    """Draws needles of one kind in one of the haystacks: as many as there is room to ask for, mostly."""

    haystacks: Sequence[Filler | None]
    wording: Wording
    key_kind: str = "words"
    value_kind: str = "numbers"

    def __call__(self, draw: random.Random, length: int) -> Task:
        most = max(1, min(MOST_QUESTIONS, length // QUESTION_TOKENS))
        count = max(draw.randint(1, most), draw.randint(1, most))
        haystack = draw.choice(self.haystacks)
        return Multiturn(Needles(count, 1, 1, self.key_kind, self.value_kind, haystack, self.wording))


def lessons(books: Books) -> dict[str, Lesson]:
    """All of them, by the names that `--mix` knows."""

    def several(draw: random.Random, _: int) -> Task:
        count, wording = draw.randint(2, 4), draw.choice((ABOVE, RULER))
        if draw.random() < 0.5:
            return Needles(values=count, haystack=books, wording=wording)
        return Needles(keys=count, asked=count, haystack=books, wording=wording)

    def again(draw: random.Random, length: int) -> Task:
        most = max(2, min(MOST_AGAIN, length // AGAIN_TOKENS))
        count, kind = max(draw.randint(2, most), draw.randint(2, most)), draw.choice(("numbers",) * 4 + ("words",))
        return Again(Needles(count, value_kind=kind, haystack=None, wording=draw.choice((ABOVE, ABOVE, RULER))))

    def mixed(draw: random.Random, length: int) -> Task:
        return Mixed(books, draw.randint(1, max(1, min(MOST_QUESTIONS, length // QUESTION_TOKENS))))

    def chain_after_example(_: random.Random, length: int) -> Task:
        return hidden.Variables(hops=max(1, min(4, (length - 260) // 75)))  # what there is room for

    return {
        "novel": Reading(books),
        "copy": Copying(books),
        "passkey": Exam(lambda *_: AnyKey(books), HAYSTACK, has_false_numbers=True),
        "passkey_noise": Exam(lambda *_: AnyKey(NOISE), has_false_numbers=True),
        "words": Exam(lambda draw, _: AnyKey(draw.choice((NOISE, books)), is_words=True), has_false_numbers=True),
        "magic": Exam(Hidden([books], ABOVE), HAYSTACK, has_false_numbers=True),
        "mixed": Exam(mixed, HAYSTACK, has_false_numbers=True),
        "magic_noise": Exam(Hidden([NOISE], ABOVE)),
        "among": Exam(Hidden([None], ABOVE)),
        "ruler": Exam(Hidden([books, NOISE_LINES], RULER), has_false_numbers=True),
        "ruler_among": Exam(Hidden([None], RULER)),
        "word_values": Exam(Hidden([None, books], ABOVE, value_kind="words")),
        "again": Exam(again),
        "pairs": Pairing(),
        "uuids": Exam(Hidden([None, books], RULER, "uuids", "uuids")),
        "several": Exam(several, HAYSTACK),
        "vt": Exam(
            lambda draw, _: hidden.Variables(hops=draw.randint(1, 4)), answer=in_a_row, start=hidden.CHAIN_BEFORE
        ),
        "vt_example": Exam(chain_after_example, answer=in_a_row),
        "cwe": Exam(lambda *_: CommonWords(), answer=numbered),
        "fwe": Exam(lambda *_: FrequentWords(), answer=in_a_row),
    }
