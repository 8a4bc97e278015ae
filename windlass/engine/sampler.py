"""The next token of each row."""

from collections.abc import Callable, Sequence
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
from windlass.core.ranks import Ranks
from windlass.core.step import no_inference_mode
from windlass.engine.request import Logprob
from windlass.engine.sampling import Sampling

DRAWS: Final = 256  # random numbers made at a time


class Sampler:
    """Chooses tokens by a `Sampling`, with transformers' own logits processors.

    `texts` are the rows' tokens so far, which a repetition penalty counts. Row r of a batch draws from a
    generator of its own on the CPU, so that its draws are the same in any batch and on every device. All that
    `choose` reads lies in the same memory at every step and nothing waits for the device, so it may be captured
    in a graph. Call `prepare` before each step, captured or not.

    With several `ranks` each of them chooses, and all take the tokens of rank 0.
    """

    @no_inference_mode
    def __init__(
        self,
        sampling: Sampling,
        texts: Sequence[Sequence[int]],
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        self._ranks = ranks
        self._is_greedy = sampling.temperature == 0.0
        self._penalty, self._texts = sampling.repetition_penalty, texts
        self._generators = [torch.Generator().manual_seed(sampling.seed + row) for row in range(len(texts))]
        # A GPU of Apple's has no float64: of two tokens on the edge of a draw, it may take the other one.
        self._wide = torch.float32 if device.type == "mps" else torch.float64
        self._draws = torch.zeros(len(texts), DRAWS, dtype=self._wide, device=device)
        self._column = torch.full((1,), -1, device=device)  # column of the latest draws
        self._drawn = DRAWS  # the same number on the host
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
            rows = [torch.rand(DRAWS, generator=generator, dtype=self._wide) for generator in self._generators]
            self._draws.copy_(torch.stack(rows))
            self._column.fill_(-1)
            self._drawn = 0

    @no_inference_mode
    def choose(self, logits: Tensor) -> Tensor:
        """One token a row, (batch, 1), from `logits` (batch, vocabulary). The first call must not be captured."""
        if self._penalty != 1.0:
            logits = self._penalised(logits.float())
        if self._is_greedy:
            chosen = logits.argmax(-1, keepdim=True)
        else:
            # No processor here looks at the text.
            scores = self._warpers(cast(torch.LongTensor, None), cast(torch.FloatTensor, logits.float()))
            upto = scores.softmax(-1).to(self._wide).cumsum(-1)
            self._column += 1
            # The first token whose share reaches beyond the draw: never one without a share.
            drawn = self._draws.index_select(1, self._column) * upto[:, -1:]
            chosen = torch.searchsorted(upto, drawn, right=True).clamp(max=upto.shape[-1] - 1)
        if self._ranks is not None:
            chosen = self._ranks.of_first(chosen)
        if self._seen is not None:
            self._seen.scatter_(1, chosen, True)
        return chosen

    def next_token(self, logits: Tensor) -> int:
        """The next token of the only row, from its (vocabulary,) `logits`."""
        self.prepare()
        return int(self.choose(logits[None]))

    def _penalised(self, scores: Tensor) -> Tensor:
        if self._seen is None:
            self._seen = torch.zeros_like(scores, dtype=torch.bool)
            for row, text in enumerate(self._texts):
                self._seen[row, torch.tensor(list(text), device=scores.device, dtype=torch.long)] = True
        return weakened(scores, self._seen, self._penalty)


def weakened(scores: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits with a repetition penalty for the tokens that were `seen`.

    Source: Keskar et al. 2019 (arXiv:1909.05858), section 4.1. Differs: negative scores are multiplied.
    """
    return torch.where(seen, torch.where(scores < 0, scores * penalty, scores / penalty), scores)


# Sent instead of a token: rank 0 has none, by an error of the request or of its own.
REFUSED: Final = -1
BROKEN: Final = -2


def agreed_token(ranks: Ranks | None, choose: Callable[[], int]) -> int:
    """The token that `choose` gives on rank 0. Only rank 0 calls it. All ranks raise where it does."""
    if ranks is None:
        return choose()
    if not ranks.is_first:
        token = ranks.told_by_first(0)
        if token == REFUSED:
            raise UsageError("rank 0 found no token that the request allows")
        if token == BROKEN:
            raise RuntimeError("rank 0 failed to choose a token")
        return token
    token = BROKEN
    try:
        token = choose()
    except UsageError:
        token = REFUSED
        raise
    finally:
        ranks.told_by_first(token)
    return token


ROWS: Final = 64  # turned to float32 at once: a prompt's logits are large


def logprobs_of(logits: Tensor, tokens: Sequence[int], top: int) -> list[tuple[Logprob, ...]]:
    """The log probability of each of `tokens` by a row of `logits` (rows, vocabulary), then of the `top` likeliest."""
    found = []
    for start in range(0, len(tokens), ROWS):
        chosen = list(tokens[start : start + ROWS])
        values = logits[start : start + len(chosen)].float().log_softmax(-1)
        own = values.gather(1, torch.tensor(chosen, device=values.device)[:, None])[:, 0].tolist()
        best = values.topk(top)
        for token, value, *likeliest in zip(chosen, own, best.indices.tolist(), best.values.tolist(), strict=True):
            found.append((Logprob(token, value), *map(Logprob, *likeliest)))
    return found
