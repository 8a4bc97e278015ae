"""The next token of each row."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from windlass.errors import UsageError


@dataclass(frozen=True)
class Sampling:
    """How a token is chosen; temperature 0 takes the likeliest, and no other number then matters
    but `repetition_penalty`.

    `seed`: row r of a batch draws from its own generator, seeded with `seed + r`, so that a row
    gives the same text alone (under that seed) as in any batch.

    Raises: UsageError for numbers out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        ranges = {
            "temperature": (0.0 <= self.temperature <= 100.0, "from 0 to 100"),
            "top_k": (self.top_k >= 0, "at least 0 (0: off)"),
            "top_p": (0.0 < self.top_p <= 1.0, "above 0 and at most 1 (1: off)"),
            "min_p": (0.0 <= self.min_p <= 1.0, "from 0 to 1 (0: off)"),
            "seed": (0 <= self.seed < 2**62, "from 0 to 2**62 - 1"),
            "repetition_penalty": (0.0 < self.repetition_penalty <= 100.0, "above 0 and at most 100 (1: off)"),
        }
        for name, (is_right, wanted) in ranges.items():
            if not is_right:
                raise UsageError(f"{name} must be {wanted}, got {getattr(self, name)}")


class Sampler:
    """Chooses tokens by a `Sampling`, through transformers' own logits processors."""

    def __init__(self, sampling: Sampling, batch: int) -> None:
        self._is_greedy = sampling.temperature == 0.0
        # Each row's draws are its own, made on the CPU so that they are the same on every device.
        self._generators = [torch.Generator().manual_seed(sampling.seed + row) for row in range(batch)]
        self._processors = LogitsProcessorList()
        self._has_penalty = sampling.repetition_penalty != 1.0
        if self._has_penalty:
            self._processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if self._is_greedy:
            return
        if sampling.temperature != 1.0:
            self._processors.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            self._processors.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            self._processors.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            self._processors.append(MinPLogitsWarper(sampling.min_p))

    def __call__(self, logits: Tensor, texts: list[list[int]]) -> list[int]:
        """One token a row from `logits` (batch, vocabulary); `texts` are the rows' tokens so far."""
        if self._is_greedy and not self._processors:
            chosen: list[int] = logits.argmax(-1).tolist()
            return chosen
        rows = zip(logits.float().split(1), texts, self._generators, strict=True)
        return [self._one(scores, text, generator) for scores, text, generator in rows]

    def _one(self, scores: Tensor, text: list[int], generator: torch.Generator) -> int:
        # Only a repetition penalty looks at the text, which may be long.
        ids = torch.tensor([text if self._has_penalty else text[:0]], device=scores.device, dtype=torch.long)
        scores = self._processors(cast(torch.LongTensor, ids), cast(torch.FloatTensor, scores))[0]
        if self._is_greedy:
            return int(scores.argmax())
        return int(torch.multinomial(scores.softmax(-1).cpu(), 1, generator=generator))
