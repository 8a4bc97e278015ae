"""Sampling: the options of a choice of tokens, and the result of writing. Nothing here needs torch."""

from dataclasses import dataclass
from typing import Literal

from windlass.core.fields import Option, check_fields, declared


@dataclass(frozen=True)
class Sampling:
    """Settings by which a token is sampled. Temperature 0 takes the likeliest, and no other number then matters
    but `repetition_penalty`.

    `seed`: row r of a batch draws from its own generator, seeded with `seed + r`, so that a row
    gives the same text alone (under that seed) as in any batch.

    Raises: UsageError for a value that is no number or is out of range.
    """

    temperature: float = declared(
        Option(0.0, "Temperature of sampling. 0 takes the likeliest token", float, least=0, most=100)
    )
    top_k: int = declared(Option(0, "Sample from the k likeliest tokens", int, least=0, most=2**62, off=0))
    top_p: float = declared(
        Option(
            1.0,
            "Sample from the likeliest tokens whose probabilities sum to p",
            float,
            least=0,
            most=1,
            is_above=True,
            off=1,
        )
    )
    min_p: float = declared(
        Option(0.0, "Leave out tokens less likely than this share of the likeliest", float, least=0, most=1, off=0)
    )
    repetition_penalty: float = declared(
        Option(
            1.0, "Above 1, discourage tokens that the text has already", float, least=0, most=100, is_above=True, off=1
        )
    )
    seed: int = declared(Option(0, "Same seed, same text", int, least=0, most=2**62 - 1))

    def __post_init__(self) -> None:
        check_fields(self)  # plain numbers of Python: transformers refuses numbers of numpy


FinishReason = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True)
class Result:
    """One row's text and its cost.

    `finish_reason`: `stop` at an end-of-text token or a stop string (part of `tokens`, not of `text`), `length` at
    `max_tokens`, `interrupted` when the caller ended it. An interrupted `text` lacks the end that a stream held back.
    Speeds count this row's tokens. `bytes_held` is that of the whole cache.
    """

    tokens: list[int]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    bytes_held: int
