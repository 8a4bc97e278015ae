"""A text to learn from."""

import random


def novel() -> str:
    draw = random.Random(3)
    names, verbs, things = ("Ann", "Tom", "The old man"), ("sold", "saw", "lost 7 of"), ("the boats", "his hats")
    parts = (names, verbs, things)
    return " ".join(" ".join(draw.choice(words) for words in parts) + "." for _ in range(1200)) + "\n"
