"""`windlass calibrate --shares`: how much of a budget each layer and each kv head of a model gets.

Texts are read whole, and one ranking over the tokens of all kv heads of all layers decides which of them a budget would
hold. What each head keeps of it, on average over the texts, is its share: these hardly depend on the text (measured,
see docs/findings.md), so that a cache can have them from its first token on, while it evicts.
"""

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windlass.cache.options import CacheOptions
from windlass.cache.shares import Shares
from windlass.core.errors import UsageError
from windlass.engine.generate import prefill
from windlass.evals.budgets import Budget
from windlass.hf.fingerprint import fingerprint
from windlass.hf.kv_cache import KVCache
from windlass.policies import Policy
from windlass.policies.calls import scores_of

DIGITS: Final = 3  # of a share; equal numbers put heads into one group


def measured(
    model: PreTrainedModel,
    texts: Sequence[Sequence[int]],
    policy: Policy,
    budget: Budget,
    groups: int,
    progress: Callable[[int, int], None],
) -> Shares:
    """The shares of the heads of `model`, on average over `texts` of token ids, by the scores of `policy`.

    The heads of a layer are put into at most so many `groups` of one share each. `progress` is called with (texts
    read, texts). After an interrupt the shares are those of fewer texts.

    Raises: KeyboardInterrupt before a text was read; UsageError for texts that fit into the budget whole, or a policy
    that has no scores to compare.
    """
    found: list[list[Tensor | None]] = []  # per text and layer
    try:
        for number, ids in enumerate(texts):
            progress(number, len(texts))
            found.append(kept_shares(model, ids, policy, budget, is_by_head=groups > 1))
        progress(len(texts), len(texts))
    except KeyboardInterrupt:
        if not found:
            raise
    by_layer = [[each for each in own if each is not None] for own in zip(*found, strict=True)]
    means = [torch.stack(own).mean(0).tolist() if own else None for own in by_layer]
    layers = [None if mean is None else clustered(mean, groups) for mean in means]
    return Shares(
        layers, model=type(model).__name__, fingerprint=fingerprint(model), policy=repr(policy),
        budget=budget.asked, texts=len(found),
    )  # fmt: skip


@torch.no_grad()
def kept_shares(
    model: PreTrainedModel, ids: Sequence[int], policy: Policy, budget: Budget, is_by_head: bool
) -> list[Tensor | None]:
    """Per layer what each kv head keeps of one text, in multiples of the mean; None for a layer that has its own size.

    One ranking goes over the tokens of all heads, or over those of a rank in all heads of a layer, where not
    `is_by_head`.
    """
    cache = KVCache(model, policy=policy, chunk=512, rollback=0)
    prefill(model, cache, [list(ids)])
    limits = CacheOptions(budget.of(len(ids)), policy=policy).limits
    assert limits.budget is not None, "shares of no budget"
    free = limits.budget - limits.sinks - limits.window
    here = cache.rows.standstill(cache.device)
    found: list[Tensor | None] = [None] * len(cache.layers)
    scores: dict[int, Tensor] = {}
    for layer in cache.layers:
        if layer.rules.most_visible is not None:
            continue
        score = scores_of(policy, layer.index, layer.slots_at(here))[0].double()
        at = layer.positions[0]
        is_free = (at >= limits.sinks) & (at < len(ids) - limits.window)
        score = score.nan_to_num().masked_fill(~is_free, -torch.inf).expand(layer.store.layout[0], -1)
        if not is_by_head:
            score = score.sort(-1, descending=True).values.mean(0, keepdim=True).expand_as(score)
        scores[layer.index] = score
    if not scores:
        raise UsageError(
            "shares: all layers of this model attend to a window of their own, so there is nothing to share"
        )
    every = torch.cat([score.flatten() for score in scores.values()])
    wanted = free * sum(score.shape[0] for score in scores.values())
    if wanted >= int((every > -torch.inf).sum()):
        raise UsageError(f"shares: a text of {len(ids)} tokens fits into a budget of {limits.budget}; give longer ones")
    # Of equal scores those of the lower layer and head win.
    is_kept = torch.zeros_like(every, dtype=torch.bool)
    is_kept[every.sort(descending=True, stable=True).indices[:wanted]] = True
    parts = is_kept.split([score.numel() for score in scores.values()])
    for (index, score), kept in zip(scores.items(), parts, strict=True):
        found[index] = kept.view(score.shape).sum(-1).double() / free
    return found


def clustered(shares: Sequence[float], groups: int) -> list[float]:
    """The shares of heads in at most so many groups, each with the mean of its own, so that they differ least.

    Groups hold neighbours in the order of their shares; the sum of squared differences from the means is least.
    """
    order = sorted(range(len(shares)), key=lambda head: shares[head])
    values = [shares[head] for head in order]

    def cost(start: int, stop: int) -> float:
        mean = sum(values[start:stop]) / (stop - start)
        return sum((value - mean) ** 2 for value in values[start:stop])

    # The best cuts of the first n values into k groups: (cost, starts of the groups).
    best: list[tuple[float, tuple[int, ...]]] = [(cost(0, stop), (0,)) for stop in range(1, len(values) + 1)]
    for _ in range(1, min(groups, len(values))):
        best = [
            min(
                [
                    best[stop - 1],
                    *((best[cut - 1][0] + cost(cut, stop), (*best[cut - 1][1], cut)) for cut in range(1, stop)),
                ]
            )
            for stop in range(1, len(values) + 1)
        ]
    starts = best[-1][1]
    result = [0.0] * len(shares)
    for start, stop in zip(starts, (*starts[1:], len(values)), strict=True):
        for place in range(start, stop):
            result[order[place]] = round(sum(values[start:stop]) / (stop - start), DIGITS)
    return result
