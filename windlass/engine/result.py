"""What the engine gives back."""

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "interrupted"]


@dataclass(frozen=True)
class Result:
    """One row's text and what it took.

    `finish_reason`: `stop` at an end-of-text token (part of `tokens`, not of `text`), `length` at
    `max_tokens`, `interrupted` when the caller ended it. Speeds count this row's tokens; `bytes_held`
    is what the whole cache has allocated.
    """

    tokens: list[int]
    text: str
    finish_reason: FinishReason
    prompt_tokens: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    bytes_held: int
