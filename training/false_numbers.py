"""False numbers: years, prices, chapters and the like between the words of a text, none of them what is asked for.

Without them a small model learns that any number in a novel is the one to remember.
"""

import random
import re
from collections.abc import Callable, Sequence

SENTENCE = re.compile(r"\s*[^.!?]*(?:[.!?]+[\"')]*(?=\s|$)|[.!?]+(?=\S)|$)")
GAP = re.compile(r"\s+(?=\S)")
TELLS = ("pass key", "magic", "important info", "memorize", "Remember it", "quiz")  # in sentences that stay whole


def year(draw: random.Random) -> str:
    """Of the last centuries, as novels write it."""
    return draw.choice((" {}", " {}.", " in {}", " in {},", " ({})", " of {}")).format(draw.randint(1500, 2030))


def part(draw: random.Random) -> str:
    """A small number of a chapter, a page, a list, an hour or an age."""
    words = (
        " {}",
        " {}.",
        " chapter {}",
        " CHAPTER {}.",
        " No. {}",
        " page {}",
        " {} o'clock",
        " aged {}",
        " {} miles",
    )
    return draw.choice(words).format(draw.choice((draw.randint(1, 12), draw.randint(1, 999))))


def price(draw: random.Random) -> str:
    """In pounds, shillings or dollars."""
    whole, rest = draw.randint(1, 9999), draw.randint(0, 99)
    return draw.choice((" ${}", " ${}.{:02}", " {}.{:02}", " {}l.", " {}s. {}d.", " {},{:02}0")).format(whole, rest)


def telephone(draw: random.Random) -> str:
    """Groups of digits."""
    groups = draw.choice(((3, 4), (4, 3, 3), (5, 6), (3, 3, 4), (2, 2, 2)))
    return " " + draw.choice((" ", "-", "/")).join(digits(draw, size) for size in groups)


def digits(draw: random.Random, count: int) -> str:
    """So many of them."""
    return "".join(draw.choices("0123456789", k=count))


def unnamed(draw: random.Random, number: str) -> str:
    """A number by itself, or in words that do not name what is asked for."""
    words = (
        " {}",
        " {}.",
        " {},",
        " the number {}",
        " No. {}",
        " The number is {}.",
        " The room is {}.",
        " It was {}.",
    )
    return draw.choice(words).format(number)


def changed(draw: random.Random, number: str) -> str:
    """The number with another digit in one place, or with another end."""
    place = draw.randrange(len(number))
    if draw.random() < 0.3:
        return number[:place] + digits(draw, len(number) - place)
    other = draw.choice([digit for digit in "0123456789" if digit != number[place]])
    return number[:place] + other + number[place + 1 :]


def false_number(draw: random.Random, values: Sequence[str]) -> str:
    """One of any kind; a third of them look like one of `values`, as far as these are numbers."""
    numbers = [value for value in values if value.isdigit()]
    if numbers and draw.random() < 0.35:
        like = draw.choice(numbers)
        made = changed(draw, like) if draw.random() < 0.5 else digits(draw, len(like))
        if made not in values:
            return unnamed(draw, made)
    kinds: tuple[Callable[[random.Random], str], ...] = (year, part, part, price, telephone)
    return draw.choice(kinds)(draw)


def with_false_numbers(draw: random.Random, text: str, values: Sequence[str], count: int) -> list[tuple[str, bool]]:
    """The text in parts, with up to `count` false numbers between its words, each a part of its own that is True.

    Sentences that tell one of `values`, or what is asked for, stay whole.
    """
    gaps = []
    for sentence in SENTENCE.finditer(text):
        if not any(value in sentence[0] for value in (*values, *TELLS)):
            gaps += [sentence.start() + gap.start() for gap in GAP.finditer(sentence[0])]
    parts, done = [], 0
    for gap in sorted(draw.sample(gaps, min(count, len(gaps)))):
        parts += [(text[done:gap], False), (false_number(draw, values), True)]
        done = gap
    return [*parts, (text[done:], False)]
