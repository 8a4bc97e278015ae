"""Sampling: the options of a choice of tokens, and the result of writing. Nothing here needs torch."""

from dataclasses import dataclass
from typing import Final, Literal

from windlass.core.errors import UsageError, real_number, whole_number

REAL: Final = ("temperature", "top_p", "min_p", "repetition_penalty")  # of the numbers of a `Sampling`


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen; temperature 0 takes the likeliest, and no other number then matters
    but `repetition_penalty`.

    `seed`: row r of a batch draws from its own generator, seeded with `seed + r`, so that a row
    gives the same text alone (under that seed) as in any batch.

    Raises: UsageError for what is no number, or one out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        numbers = {name: real_number(name, getattr(self, name)) for name in REAL}
        numbers["top_k"] = whole_number("top_k", self.top_k, 0, 2**62)
        numbers["seed"] = whole_number("seed", self.seed, 0, 2**62 - 1)
        vars(self).update(numbers)  # plain numbers of Python: transformers refuses those of numpy
        ranges = {
            "temperature": (0.0 <= self.temperature <= 100.0, "from 0 to 100"),
            "top_p": (0.0 < self.top_p <= 1.0, "above 0 and at most 1 (1: off)"),
            "min_p": (0.0 <= self.min_p <= 1.0, "from 0 to 1 (0: off)"),
            "repetition_penalty": (0.0 < self.repetition_penalty <= 100.0, "above 0 and at most 100 (1: off)"),
        }
        for name, (is_right, wanted) in ranges.items():
            if not is_right:
                raise UsageError(f"{name} must be {wanted}, got {getattr(self, name)}")


FinishReason = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True)
class Result:
    """One row's text and what it took.

    `finish_reason`: `stop` at an end-of-text token or a stop string (part of `tokens`, not of `text`), `length` at
    `max_tokens`, `interrupted` when the caller ended it; `text` then lacks what a stream held back. Speeds count this
    row's tokens; `bytes_held` is that of the whole cache.
    """

    tokens: list[int]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    bytes_held: int
