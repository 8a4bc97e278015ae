"""The contract of a task: a text made to measure, questions on it, and how an answer is scored.

A task of your own is one file: subclass `Task`, write `compose`, and name it `path/to/file.py:Class`. The text is read
first. The questions come when the cache has been compressed, or (aware) the first of them is part of the text.
"""

import random
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from windlass.core.errors import UsageError
from windlass.core.parse import MAX_NUMBER, PluginKind, int_parser


@dataclass(frozen=True)
class Question:
    """One question, and the strings that a right answer holds.

    `prefix` is the start of the answer, which the model goes on from. It is never empty. Both include the space or line
    end that joins them to the text before. `depth` tells where in the text (0 to 1) the answer stands, or None when it
    stands nowhere or in several places.
    """

    question: str
    prefix: str
    expected: tuple[str, ...]
    depth: float | None = None


@dataclass(frozen=True)
class Sample:
    """A text and the questions on it. Without questions, the text itself is to be predicted."""

    context: str
    turns: tuple[Question, ...] = ()


class Task(ABC):
    """Makes samples. One object makes them all, so it remembers nothing."""

    answer_tokens: int
    """Maximum number of tokens in an answer."""

    turns: int = 1
    """Number of result lines per sample: one per question, or one for a text without questions."""

    least_units: int = 0
    """Smallest size of a sample, in units."""

    @property
    def most_units(self) -> int | None:
        """The largest size that there is material for, or None without a limit."""
        return None

    @abstractmethod
    def compose(self, draw: random.Random, length: int, units: int) -> Sample:
        """A sample with so many units of filler: lines, sentences or words, whatever the task counts.

        The same `draw` must ask for the same answer at any number of units, and more of them must make
        a longer text: the number is found that just fits into `length` tokens.
        """

    def score(self, turn: Question, output: str) -> float:
        """0 to 1: the share of the expected strings that the output holds, in whatever case.

        Source: `string_match_all` of RULER, Hsieh et al. 2024 (arXiv:2404.06654).
        """
        lowered = output.lower()
        return sum(each.lower() in lowered for each in turn.expected) / len(turn.expected)

    def reading(self, file: Path) -> "Task | None":
        """This task on the text of a file, or None where it reads none.

        Raises: UsageError when the file cannot be read.
        """
        return None

    def at(self, depth: float) -> "Task | None":
        """This task with its answer at `depth` (0 to 1) of every text, or None where answers have no single place."""
        return None


TASKS: Final = PluginKind("task", "tasks", Task, "windlass.evals.Task", UsageError)


ALL: Final = "all"


@dataclass(frozen=True)
class Budget:
    """A number of slots, a part of the text (`4x`: a quarter), or all of it."""

    asked: str
    slots: int | None = None
    divisor: float | None = None

    def of(self, context_tokens: int) -> int | None:
        """Number of slots for a text of so many tokens, or None to keep them all."""
        return self.slots if self.divisor is None else int(context_tokens / self.divisor)


def budget_of(flag: str, part: str) -> Budget:
    """The budget that `64`, `4x` or `all` names. Raises: UsageError, beginning with `flag`, for all else."""
    if part == ALL:
        return Budget(part)
    if part.endswith("x"):
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?x", part) or float(part[:-1]) < 1:
            raise UsageError(f"{flag} {part!r} is not a part of the text. Write 4x for a quarter of it")
        return Budget(part, divisor=float(part[:-1]))
    return Budget(part, slots=int_parser(flag, 1, MAX_NUMBER)(part))


def depth_of(part: str) -> float:
    """The depth that `0`, `0.25` or `1` names. Raises: UsageError, which begins with `--depth`, for all else."""
    if not re.fullmatch(r"[01](\.[0-9]{1,6})?", part) or float(part) > 1:
        raise UsageError(f"--depth {part!r} is not a part of the text. Write 0 for its start, 0.5 for its middle, 1")
    return float(part)
