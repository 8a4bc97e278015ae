"""Rows of tokens to train on: a text of one lesson each, with a weight per token.

A row depends on the seed, its step and its place there, and on nothing else: training that is taken up again
sees what it would have seen, and so does any number of worker processes.
"""

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerBase

from training.lessons import Lesson, Piece

FULL = 0.7  # share of rows that their text may fill; others end in their second half, and prose follows
SMALLER = (1, 2, 4)  # parts of the room that a lesson is told it has, until its questions fit in the whole
TRIES = 6  # lessons to draw until one is short enough, and sizes of a text to try
FIRST_UNITS = 16


@dataclass
class Row:
    """Tokens, their weights in the loss, and the (first, last + 1) of every answer, as it is put together."""

    lesson: str
    tokens: list[int]
    weights: list[float] = field(default_factory=list)
    answers: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.weights = [0.0] * len(self.tokens)

    def add(self, piece: Piece, tokens: list[int]) -> None:
        """Put a piece at the end."""
        if piece.is_answer:
            self.answers.append((len(self.tokens), len(self.tokens) + len(tokens)))
        self.tokens += tokens
        self.weights += [piece.weight] * len(tokens)

    def cut(self, length: int) -> None:
        """Keep the first tokens, and the answers that are whole in them."""
        del self.tokens[length:], self.weights[length:]
        self.answers = [answer for answer in self.answers if answer[1] <= length]


@dataclass(frozen=True)
class Rows:
    """Draws rows of `lessons`, each as often as `mix` says."""

    tokenizer: PreTrainedTokenizerBase
    lessons: dict[str, Lesson]
    mix: dict[str, float]
    seed: int

    def row(self, place: str, length: int, name: str | None = None) -> Row:
        """The row of a place, of a lesson that is drawn or named; of prose alone where the lesson is too long."""
        draw = random.Random(f"{self.seed} {place}")
        room = length if draw.random() < FULL else draw.randint(length // 2, length)
        names = [name] if name else draw.choices(list(self.mix), list(self.mix.values()), k=TRIES)
        for drawn in names:
            pieces = self._fitted(drawn, f"{self.seed} {place} {drawn}", room - 1)
            if pieces is not None:
                break
        made = Row(drawn, list(self.tokenizer("")["input_ids"]))
        for piece in pieces or []:
            made.add(piece, self._ids(piece))
        left = length - len(made.tokens)
        if left > 0:
            for piece in self.lessons["novel"].pieces(draw, left, left):
                made.add(piece, self._ids(piece))
        made.cut(length)
        return made

    def _fitted(self, name: str, seed: str, room: int) -> list[Piece] | None:
        """The pieces with about as many units as fit; None where even no units of few questions do."""
        lesson = self.lessons[name]

        def made(told: int, units: int) -> tuple[list[Piece], int]:
            pieces = lesson.pieces(random.Random(seed), told, units)
            return pieces, sum(len(self._ids(piece)) for piece in pieces)

        for part in SMALLER:
            fits, size = made(room // part, 0)
            if size <= room:
                break
        else:
            return None
        units, more, over = 0, FIRST_UNITS, None
        for _ in range(TRIES):
            tried = units + more if over is None else min(units + more, over - 1)
            if tried == units:
                break
            pieces, total = made(room // part, tried)
            per_unit = max((total - size) / (tried - units), 0.1)
            if total > room:
                over = tried
            else:
                units, fits, size = tried, pieces, total
            more = max(1, int((room - size) / per_unit))
        return fits

    def _ids(self, piece: Piece) -> list[int]:
        return list(self.tokenizer(piece.text, add_special_tokens=False)["input_ids"])


@dataclass(frozen=True)
class Batches(Dataset[tuple[Tensor, Tensor]]):
    """By step: token ids and weights, (rows, context + 1) each, of about `batch_tokens`."""

    rows: list[Rows]
    """What every step is drawn from."""
    contexts: list[int]
    """Of every step."""
    batch_tokens: int

    def __len__(self) -> int:
        return len(self.contexts)

    def __getitem__(self, step: int) -> tuple[Tensor, Tensor]:
        context = self.contexts[step]
        made = [self.rows[step].row(f"{step} {place}", context + 1) for place in range(self.batch_tokens // context)]
        return torch.tensor([row.tokens for row in made]), torch.tensor([row.weights for row in made])
