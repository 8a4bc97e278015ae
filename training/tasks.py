"""Tasks that are trained on and not measured with: their words are those of `windlass eval`."""

import random
from dataclasses import dataclass

from windlass.evals import Question, Sample, Task
from windlass.evals import texts as keys
from windlass.evals.tasks.niah import ABOVE, RULER, Needle, Needles
from windlass.evals.texts import BEFORE, HIDDEN, PREFIX, QUESTION, Filler, hide


@dataclass(frozen=True)
class AnyKey(Task):
    """The pass key of `windlass eval`, of 1 to 7 digits or of words; one text in five does not announce it."""

    filler: Filler
    is_words: bool = False
    answer_tokens = 16

    def compose(self, draw: random.Random, length: int, units: int) -> Sample:
        digits = draw.choice((1, 2, 3, 4, 5, 5, 5, 5, 6, 7))
        key = keys.triple(draw) if self.is_words else "".join(draw.choices("0123456789", k=digits))
        text, (stood,) = hide(self.filler.pieces(draw, units), [HIDDEN.format(key=key)], [draw.random()])
        before = BEFORE if draw.random() < 0.8 else ""
        return Sample(before + text, (Question(QUESTION, PREFIX, (key,), stood),))


@dataclass(frozen=True)
class Again(Task):
    """Needles among each other, then the same sentences in another order: the densest way to ask for them."""

    needles: Needles
    answer_tokens = 16

    def compose(self, draw: random.Random, length: int, units: int) -> Sample:
        context, found = self.needles.hidden(draw, units, self.needles.keys)
        joint = "\n" if self.needles.wording is RULER else " "
        start = self.needles.wording.needle.partition(" {value}")[0]
        many = self.needles.value_kind
        draw.shuffle(found)
        turns = (Question("", joint + start.format(many=many, key=each.key), each.values, each.depth) for each in found)
        return Sample(context, tuple(turns))


@dataclass(frozen=True)
class Mixed(Task):
    """A pass key and `needles` of numbers and of words in one text, asked for in any order."""

    filler: Filler
    needles: int
    answer_tokens = 16

    def compose(self, draw: random.Random, length: int, units: int) -> Sample:
        kinds = {kind: Needles(value_kind=kind, wording=ABOVE) for kind in ("numbers", "words")}
        turns, lines = [], []
        for name in keys.distinct(draw, keys.pair, self.needles):
            kind = draw.choice(("numbers", "numbers", "words"))
            needle = Needle(name, ((keys.number if kind == "numbers" else keys.pair)(draw),), None)
            lines.append(" " + kinds[kind].told(needle.key, needle.values[0]))
            turns.append(kinds[kind].ask([needle]))
        key = "".join(draw.choices("0123456789", k=draw.choice((3, 4, 5, 5, 6))))
        lines.append(HIDDEN.format(key=key))
        turns.append(Question(QUESTION, PREFIX, (key,), None))
        draw.shuffle(turns)
        depths = [draw.random() for _ in lines]
        before = BEFORE if draw.random() < 0.5 else ""
        text, _ = hide(self.filler.pieces(draw, units), lines, depths)
        return Sample((before + text).lstrip(), tuple(turns))
