"""Log probabilities of tokens, out of logits."""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from windlass.engine.request import Logprob

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
