"""What the engine gives back."""

from dataclasses import dataclass
from typing import Literal

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
