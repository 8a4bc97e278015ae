"""Needles in a haystack: magic numbers and the like, each asked for by its key, among filler or other needles."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from windlass.evals import texts
from windlass.evals.task import Question, Sample, Task
from windlass.evals.texts import NOISE_LINES, Filler, from_file, hide

DEPTHS = 40  # places in a text, evenly from its start to its end
MAKERS: dict[str, Callable[[random.Random], str]] = {"words": texts.pair, "numbers": texts.number, "uuids": texts.uuid4}


@dataclass(frozen=True)
class Wording:
    """Sentences around `{key}`, `{value}` and `{query}`, for one answer or for several.

    `{many}` is the kind of value (numbers), `{one}` one of it (number).
    """

    intro_one: str
    intro_many: str
    needle: str
    question_one: str
    question_many: str
    prefix_one: str
    prefix_many: str


RULER = Wording(
    "A special magic {one} is hidden within the following text. Make sure to memorize it. I will quiz you about the "
    "{one} afterwards.",
    "Some special magic {many} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {many} afterwards.",
    "One of the special magic {many} for {key} is: {value}.",
    "\nWhat is the special magic {one} for {query} mentioned in the provided text?",
    "\nWhat are all the special magic {many} for {query} mentioned in the provided text?",
    " The special magic {one} for {query} mentioned in the provided text is",
    " The special magic {many} for {query} mentioned in the provided text are",
)
ABOVE = replace(  # the training task of the shipped model
    RULER,
    intro_one="",
    intro_many="",
    question_one=" What is the special magic {one} for {query} mentioned above?",
    question_many=" What are all the special magic {many} for {query} mentioned above?",
    prefix_one=" The special magic {one} for {query} is:",
    prefix_many=" The special magic {many} for {query} are:",
)


@dataclass(frozen=True)
class Needle:
    """Values hidden under one key. `depth` is None for several values."""

    key: str
    values: tuple[str, ...]
    depth: float | None


@dataclass(frozen=True)
class Needles(Task):
    """Hides `keys` of so many `values` each, and asks for the first `asked` of them in one question.

    The first value stands at `depth`, or at a random place as the rest do. Without a `haystack`, the text is made of
    needles with other keys.

    Source: NIAH of RULER, Hsieh et al. 2024 (arXiv:2404.06654).
    Differs: a novel in place of the essays, from any sentence on. Depths are sampled from 40 in every haystack. Words
    are of our own lists.
    """

    keys: int = 1
    values: int = 1
    asked: int = 1
    key_kind: str = "words"
    value_kind: str = "numbers"
    haystack: Filler | None = NOISE_LINES
    wording: Wording = RULER
    answer_tokens: int = 128
    depth: float | None = None

    @property
    def most_units(self) -> int | None:
        if self.haystack is not None:
            return self.haystack.most
        return texts.PAIRS - self.keys if self.key_kind == "words" else None

    def compose(self, draw: random.Random, length: int, units: int) -> Sample:
        context, needles = self.hidden(draw, units, self.asked * self.values)
        return Sample(context, (self.ask(needles[: self.asked]),))

    def hidden(self, draw: random.Random, units: int, answers: int) -> tuple[str, list[Needle]]:
        """The text and its hidden answers. Its first sentence announces one answer or several."""
        make = MAKERS[self.value_kind]
        depths = [place / (DEPTHS - 1) for place in draw.sample(range(DEPTHS), self.keys * self.values)]
        if self.depth is not None:
            depths[0] = self.depth
        values = [tuple(make(draw) for _ in range(self.values)) for _ in range(self.keys)]
        is_among = self.haystack is None
        names = texts.distinct(draw, MAKERS[self.key_kind], self.keys + (units if is_among else 0))
        if self.haystack is None:
            joint = "\n" if self.wording is RULER else " "
            pieces = [joint + self.told(name, make(draw)) for name in names[self.keys :]]
        else:
            joint, pieces = self.haystack.joint, self.haystack.pieces(draw, units)
        pairs = [(name, value) for name, own in zip(names, values, strict=False) for value in own]
        text, stood = hide(pieces, [joint + self.told(name, value) for name, value in pairs], depths)
        intro = self._said(self.wording.intro_one if answers == 1 else self.wording.intro_many)
        needles = [
            Needle(name, own, stood[place] if self.values == 1 else None)
            for place, (name, own) in enumerate(zip(names, values, strict=False))
        ]
        return f"{intro}\n{text.lstrip()}" if intro else text.lstrip(), needles

    def ask(self, needles: list[Needle]) -> Question:
        """One question for all the values of these."""
        expected = tuple(value for needle in needles for value in needle.values)
        *names, last = (needle.key for needle in needles)
        query = f"{', '.join(names)}, and {last}" if names else last
        is_one = len(expected) == 1
        question = self.wording.question_one if is_one else self.wording.question_many
        prefix = self.wording.prefix_one if is_one else self.wording.prefix_many
        return Question(
            self._said(question, query), self._said(prefix, query), expected, needles[0].depth if is_one else None
        )

    def reading(self, file: Path) -> Task | None:
        haystack = from_file(self.haystack, file)
        return None if haystack is None else replace(self, haystack=haystack)

    def at(self, depth: float) -> Task | None:
        return replace(self, depth=depth) if self.asked * self.values == 1 else None

    def told(self, key: str, value: str) -> str:
        """The sentence that is hidden."""
        return self.wording.needle.format(many=self.value_kind, key=key, value=value)

    def _said(self, words: str, query: str = "") -> str:
        return words.format(many=self.value_kind, one=self.value_kind.removesuffix("s"), query=query)


@dataclass(frozen=True)
class Multiturn(Task):
    """Every key of the needles is asked for in a question of its own, each on the cache as the text left it.

    Aware, the text was read with the first question. The score of later questions shows the worth of a cache that was
    compressed for another one.

    Source: SCBench, Li et al. 2024 (arXiv:2412.10319), its requests on one shared context.
    """

    needles: Needles

    @property
    def turns(self) -> int:  # type: ignore[override]  # a number of the class in most tasks
        return self.needles.keys

    @property
    def answer_tokens(self) -> int:  # type: ignore[override]
        return self.needles.answer_tokens

    @property
    def most_units(self) -> int | None:
        return self.needles.most_units

    def compose(self, draw: random.Random, length: int, units: int) -> Sample:
        context, needles = self.needles.hidden(draw, units, self.needles.keys * self.needles.values)
        return Sample(context, tuple(self.needles.ask([needle]) for needle in needles))

    def reading(self, file: Path) -> Task | None:
        needles = self.needles.reading(file)
        return replace(self, needles=needles) if isinstance(needles, Needles) else None
