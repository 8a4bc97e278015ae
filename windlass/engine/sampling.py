"""The next token of each row."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from windlass.core.errors import UsageError
from windlass.core.step import no_inference_mode

DRAWS: Final = 256  # made at a time


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
    """Chooses tokens by a `Sampling`, with transformers' own logits processors.

    `texts` are the rows' tokens so far, which a repetition penalty counts. Row r of a batch draws from a
    generator of its own on the CPU, so that its draws are the same in any batch and on every device. All that
    `choose` reads lies in the same memory at every step and nothing waits for the device, so it may be captured
    in a graph; `prepare` comes before each step, captured or not.
    """

    @no_inference_mode
    def __init__(self, sampling: Sampling, texts: Sequence[Sequence[int]], device: torch.device) -> None:
        self._is_greedy = sampling.temperature == 0.0
        self._penalty, self._texts = sampling.repetition_penalty, texts
        self._generators = [torch.Generator().manual_seed(sampling.seed + row) for row in range(len(texts))]
        self._draws = torch.zeros(len(texts), DRAWS, dtype=torch.float64, device=device)
        self._column = torch.full((1,), -1, device=device)  # of the latest draws
        self._drawn = DRAWS  # the same, as the host counts it
        self._seen: Tensor | None = None  # (batch, vocabulary): whether a row has the token
        self._warpers = LogitsProcessorList()
        if self._is_greedy:
            return
        if sampling.temperature != 1.0:
            self._warpers.append(TemperatureLogitsWarper(sampling.temperature))
        if sampling.top_k:
            self._warpers.append(TopKLogitsWarper(sampling.top_k))
        if sampling.top_p < 1.0:
            self._warpers.append(TopPLogitsWarper(sampling.top_p))
        if sampling.min_p:
            self._warpers.append(MinPLogitsWarper(sampling.min_p))

    @no_inference_mode
    def prepare(self) -> None:
        """Make draws for the next step, where there are none left."""
        self._drawn += 1
        if not self._is_greedy and self._drawn >= DRAWS:
            rows = [torch.rand(DRAWS, generator=generator, dtype=torch.float64) for generator in self._generators]
            self._draws.copy_(torch.stack(rows))
            self._column.fill_(-1)
            self._drawn = 0

    @no_inference_mode
    def choose(self, logits: Tensor) -> Tensor:
        """One token a row, (batch, 1), from `logits` (batch, vocabulary); the first call must not be captured."""
        if self._penalty != 1.0:
            logits = self._penalised(logits.float())
        if self._is_greedy:
            chosen = logits.argmax(-1, keepdim=True)
        else:
            # No processor here looks at the text.
            scores = self._warpers(cast(torch.LongTensor, None), cast(torch.FloatTensor, logits.float()))
            upto = scores.softmax(-1).double().cumsum(-1)
            self._column += 1
            # The first token whose share reaches beyond the draw: never one without a share.
            drawn = self._draws.index_select(1, self._column) * upto[:, -1:]
            chosen = torch.searchsorted(upto, drawn, right=True).clamp(max=upto.shape[-1] - 1)
        if self._seen is not None:
            self._seen.scatter_(1, chosen, True)
        return chosen

    def _penalised(self, scores: Tensor) -> Tensor:
        """Source: Keskar et al. 2019 (arXiv:1909.05858), section 4.1. Differs: negative scores are multiplied."""
        if self._seen is None:
            self._seen = torch.zeros_like(scores, dtype=torch.bool)
            for row, text in enumerate(self._texts):
                self._seen[row, torch.tensor(list(text), device=scores.device, dtype=torch.long)] = True
        weakened = torch.where(scores < 0, scores * self._penalty, scores / self._penalty)
        return torch.where(self._seen, weakened, scores)
