"""From more tokens to a budget at once: what each layer may keep, and the cut.

A cache that reads and writes evicts as it goes. Here it holds more than it is to keep, because its
budget is lowered, or because its policy wants a first text whole (`Policy.is_one_shot`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from windlass.cache.layer import LayerCache
from windlass.core.errors import UsageError
from windlass.core.shapes import Scores
from windlass.core.step import Limits, Record, Step, checked_limits, outlasting
from windlass.policies import Policy, Recent
from windlass.policies.base import scores_of

if TYPE_CHECKING:
    from windlass.hf.kv_cache import KVCache


@outlasting
def compress(cache: KVCache, budget: int, window: int | None = None) -> None:
    """See `KVCache.compress`."""
    was = cache.limits
    window = window if window is not None else cache.given_window
    limits = checked_limits(budget, was.sinks, window, was.chunk, cache.batch_size, was.rollback)
    if was.budget is not None and budget > was.budget:
        raise UsageError(f"compress to {budget} tokens, but the cache keeps {was.budget}; a budget can only be lowered")
    for layer in cache.layers:
        if layer.policy.statistics and layer.most_held > budget and not layer.statistics:
            raise UsageError(f"compress: {layer.policy!r} has seen no queries yet; let the model read a token first")
    cache.limits, cache.given_window = limits, window
    _cut(cache)
    cache.standing.edited()


@contextmanager
def held_whole(cache: KVCache) -> Iterator[None]:
    """Hold all that is read meanwhile, whatever the budget, and cut to it at the end, even after an error."""
    for layer in cache.layers:
        layer.is_whole = True
    try:
        yield
    finally:
        for layer in cache.layers:
            layer.is_whole = False
        _cut(cache)
        cache.standing.edited()


def layer_limits(policy: Policy, limits: Limits, layers: int) -> list[Limits]:
    """The limits of each layer: those of the cache, but for what the policy lets it keep."""
    if limits.budget is None:
        return [limits] * layers
    budgets = policy.budgets(limits.budget, layers, limits.sinks + limits.window + 1)
    return [replace(limits, budget=budget) for budget in budgets]


def budgets_apart(cache: KVCache) -> list[int | None]:
    """Per layer the budget that a cut gave it, or None where it is the one that it began with."""
    planned = layer_limits(cache.policy, cache.limits, len(cache.layers))
    pairs = zip(cache.layers, planned, strict=True)
    return [None if layer.limits.budget == limits.budget else layer.limits.budget for layer, limits in pairs]


def shared_budgets(scores: Sequence[Scores], limits: Limits) -> list[int]:
    """What layers keep where one ranking over all of them decides, of the budget on average.

    `scores` are those of each layer's tokens that may be evicted, -inf where there is none. The tokens
    of a rank, one in each row and head, stand or fall together: their mean score counts.
    """
    assert limits.budget is not None, "a share of no budget"
    protected = limits.sinks + limits.window
    table = torch.full((max(score.shape[-1] for score in scores), len(scores)), -torch.inf, dtype=torch.float64)
    for layer, score in enumerate(scores):
        ranked = score.double().sort(dim=-1, descending=True).values.flatten(0, 1)
        means = ranked.masked_fill(ranked == -torch.inf, torch.nan).nanmean(0)
        table[: len(means), layer] = means.nan_to_num(nan=-torch.inf)
    # The best rank of each layer is kept, whatever it is worth.
    wanted = (limits.budget - protected - 1) * len(scores)
    rest = table[1:].flatten()
    if wanted >= int((rest > -torch.inf).sum()):
        return [limits.budget] * len(scores)
    # Of equal ones the earlier rank wins, then the lower layer.
    kept = rest.sort(descending=True, stable=True).indices[:wanted] % len(scores)
    return [protected + 1 + number for number in kept.bincount(minlength=len(scores)).tolist()]


@outlasting
def _cut(cache: KVCache) -> None:
    """Bring every layer to its budget, and its memory to what that takes."""
    nothing = torch.empty(cache.batch_size, 0, dtype=torch.long, device=cache.device)
    here = cache.standing.step(nothing, [0] * cache.batch_size)
    blind = []
    for layer, limits in zip(cache.layers, layer_limits(cache.policy, cache.limits, len(cache.layers)), strict=True):
        assert limits.budget is not None, "a cut to no budget"
        layer.forget_records(0)
        is_window, window = layer.is_whole_window, layer.budget
        layer.limits, layer.budget = limits, limits.budget
        if is_window and window is not None and window <= limits.budget:
            layer.budget = window
        elif is_window:
            layer.leave_window()
            if layer.policy.state or layer.policy.statistics:
                blind.append(layer)
    if cache.policy.shares_budget:
        sharing = [layer for layer in cache.layers if not (layer.is_empty or layer.is_whole_window or layer in blind)]
        budgets = shared_budgets([_contested(layer, here) for layer in sharing], cache.limits) if sharing else []
        for layer, budget in zip(sharing, budgets, strict=True):
            layer.limit_to(budget)
    for layer in cache.layers:
        if not layer.is_empty:
            _cut_layer(layer, here, Recent() if layer in blind else layer.policy)


def _cut_layer(layer: LayerCache, here: Step, ranking: Policy) -> None:
    """Evict by `ranking` what is over the layer's budget, as if at the end of a step, and give its memory back."""
    policy, layer.policy = layer.policy, ranking
    try:
        nothing, batch = layer.positions.new_empty(*layer.positions.shape[:2], 0, dtype=torch.long), len(here.lengths)
        layer.settle(Record(here, (0,) * batch, layer.most_held, nothing, {}, {}, {}, None, None, None))
    finally:
        layer.policy = policy
    assert layer.budget is not None, "a cut to no budget"
    layer.resize(layer.budget + layer.spare)


def _contested(layer: LayerCache, here: Step) -> Scores:
    """The scores of tokens that may be evicted, -inf elsewhere; NaN ranks lowest, as it does in a layer."""
    least, most = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
    score = scores_of(layer.policy, layer.index, layer.slots_at(here)).float()
    ends = here.next_positions[:, None, None]
    is_free = (layer.positions >= layer.limits.sinks) & (layer.positions < ends - layer.limits.window)
    return score.nan_to_num(nan=least, posinf=most, neginf=least).masked_fill(~is_free, -torch.inf).cpu()
