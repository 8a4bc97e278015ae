"""`windlass calibrate`: which neighbouring tokens of a text can be merged at what cost.

Stretches of the text are read into many rows alike. In each row another pair of neighbours becomes one
merged token, by the rule of the cache, in all layers; then the tokens that follow are read. How far the model's
predictions move, against those of a row in which nothing was merged, is the cost of the pair.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.core.errors import UsageError
from windlass.core.shapes import Scores
from windlass.core.step import PROMPT
from windlass.engine.text import encode
from windlass.hf.fingerprint import fingerprint
from windlass.hf.forward import forward
from windlass.hf.kv_cache import KVCache
from windlass.policies import Needs, Policy, Slots
from windlass.policies.pair_table import PairTable

RULE: Final = "mean_count(next)"
SINKS: Final = 4  # first tokens of a stretch, which are in no pair
CONTEXT: Final = 128  # tokens of a stretch, in which pairs are merged
FOLLOWING: Final = 32  # tokens after it, whose predictions are compared
ROWS: Final = 32  # pairs that are measured side by side


def measured(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    tokens: int,
    seed: int,
    progress: Callable[[int, int], None],
) -> PairTable:
    """The costs of about `tokens` pairs, in stretches of the text that `seed` chooses.

    `progress` is called with (pairs measured, pairs to measure). After an interrupt the table is of fewer pairs.

    Raises: UsageError for a text too short for one stretch; KeyboardInterrupt before anything is measured.
    """
    ids = encode(tokenizer, text, is_start=False)
    start = encode(tokenizer, text, is_start=True)
    start = start[: len(start) - len(ids)]  # special tokens
    inner = CONTEXT - len(start)
    stretches = range(0, len(ids) - inner - FOLLOWING, inner)
    if not stretches:
        raise UsageError(f"the text has {len(ids)} tokens; give one of at least {inner + FOLLOWING + 1}")
    firsts = range(max(SINKS, len(start)), CONTEXT - 1)
    wanted = min(len(stretches), math.ceil(tokens / len(firsts)))
    done: list[tuple[list[int], list[float]]] = []
    try:
        for number, at in enumerate(sorted(random.Random(seed).sample(stretches, wanted))):
            progress(number * len(firsts), wanted * len(firsts))
            stretch = start + ids[at : at + inner + FOLLOWING + 1]
            done.append((stretch, pair_costs(model, stretch, firsts)))
        progress(wanted * len(firsts), wanted * len(firsts))
    except KeyboardInterrupt:
        if not done:
            raise
    costs: dict[tuple[int, int], list[float]] = {}
    for stretch, own in done:
        for pair, cost in zip(firsts, own, strict=True):
            costs.setdefault((stretch[pair], stretch[pair + 1]), []).append(cost)
    pairs = [(*pair, len(found), sum(found) / len(found)) for pair, found in costs.items()]
    return PairTable(
        model=type(model).__name__,
        fingerprint=fingerprint(model),
        merge=RULE,
        tokens=len(done) * len(firsts),
        seed=seed,
        pairs=sorted(pairs, key=lambda pair: (pair[3], pair)),
    )


@torch.inference_mode()
def pair_costs(model: PreTrainedModel, stretch: Sequence[int], firsts: Sequence[int]) -> list[float]:
    """The cost of merging the token at each of the indices `firsts`, which follow each other, into the next one.

    In nats: the mean KL over the predictions of the tokens that follow `CONTEXT` and one.
    """
    ids = torch.tensor([stretch], device=model.device)
    full = _predicted(model, KVCache(model), ids, 1)
    costs: list[float] = []
    for at in range(0, len(firsts), ROWS):
        rows = min(ROWS, len(firsts) - at)
        # The step of the token after `CONTEXT` is the first to be over budget, by one.
        cache = KVCache(model, CONTEXT, Successive(firsts[at]), SINKS, window=1, chunk=CONTEXT, rollback=0, merge=RULE)
        merged = _predicted(model, cache, ids, rows)
        costs += (full.exp() * (full - merged)).sum(-1).mean(-1).clamp(min=0).tolist()
    return costs


@dataclass(frozen=True)
class Successive(Policy):
    """Evicts position `first` in the first row, the next one in the second row, and so on.

    Source: none. Differs: none; it measures.
    """

    first: int

    needs = Needs(per_head=False)

    def score(self, slots: Slots) -> Scores:
        rows = torch.arange(slots.positions.shape[0], device=slots.positions.device)
        return (slots.positions != self.first + rows[:, None, None]).float()


def _predicted(model: PreTrainedModel, cache: KVCache, ids: Tensor, rows: int) -> Tensor:
    """Log-probabilities (rows, following, vocabulary) after the tokens that follow, of `rows` copies of the text."""
    forward(model, ids[:, :CONTEXT], None, cache, [])
    cache.select_rows(torch.zeros(rows, dtype=torch.long, device=ids.device))
    ids = ids.expand(rows, -1)
    forward(model, ids[:, CONTEXT : CONTEXT + 1], None, cache, [])
    following = ids[:, CONTEXT + 1 :]
    columns = list(range(following.shape[1]))
    return forward(model, following, None, cache, columns, how=PROMPT).float().log_softmax(-1)
