"""Cut a cache that holds more tokens than its budget to that budget at once.

Usually a cache evicts as it reads and writes. It holds more than its budget after the budget is lowered, or when its
policy reads a first text whole (`OneShot`).
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from windlass.cache.head_groups import leaves_of
from windlass.cache.layer import SlotLayer
from windlass.cache.state import CacheState
from windlass.core.errors import UsageError, whole_number
from windlass.core.parse import MAX_NUMBER
from windlass.core.ranks import RankHeads
from windlass.core.step import Limits, Step, StepRecord, no_inference_mode
from windlass.core.types import Scores
from windlass.policies import Policy, Recent
from windlass.policies.base import OneShot
from windlass.policies.calls import UNKNOWN_STATE, scores_of
from windlass.policies.wrappers import find


@no_inference_mode
def compress(cache: CacheState, budget: int, window: int | None = None) -> None:
    """Keep `budget` tokens a layer from now on. The others are evicted at once and can't be rolled back.

    Their memory is freed. `window` defaults to that of the cache. A layer that held only its sliding window, now larger
    than the budget, keeps the newest tokens if the policy needs state, which it has not observed there.

    Raises: UsageError for a budget or window that cannot be honoured, or a higher budget. Then nothing is changed.
    """
    budget, was = whole_number("budget", budget, 1, MAX_NUMBER), cache.options
    options = replace(was, budget=budget, window=was.window if window is None else window)
    if was.budget is not None and budget > was.budget:
        raise UsageError(f"compress to {budget} tokens, but the cache keeps {was.budget}. A budget can only be lowered")
    kept, window = cache.rows.most_kept, options.limits.window
    if kept + window + 1 > budget:
        raise UsageError(
            f"compress to {budget} tokens, but a row never evicts its {kept} sinks and pins and the {window} newest. "
            f"Take a budget of at least {kept + window + 1}, or lower them with set_sinks"
        )
    for layer in cache.layers:
        table = layer.table
        if layer.policy.needs.statistics and table.occupancy_bound > budget and not table.statistics:
            raise UsageError(f"compress: {layer.policy!r} has seen no queries yet. Let the model read a token first")
    cache.options = options
    cut_to_budget(cache)


def budgets_apart(cache: CacheState) -> list[int | None]:
    """The budget that a cut gave each of the cache's `layers`. None: the layer still has the budget of its options."""
    planned = leaves_of(cache.options, len(cache.rotaries))
    pairs = [(layer.rules.limits.budget, leaf.limits.budget) for layer, leaf in zip(cache.layers, planned, strict=True)]
    return [None if budget == plan else budget for budget, plan in pairs]


def shared_budgets(
    scores: Sequence[Scores], limits: Limits, heads: RankHeads | None = None, sinks: int | None = None
) -> list[int]:
    """The budgets of layers where one ranking over all layers decides. Their mean is the cache's budget.

    `scores` are those of each layer's tokens that may be evicted, with -inf elsewhere. The tokens of a rank, one in
    each row and head, are kept or evicted together by their mean score. Where several processes have `heads` of the
    model, the mean is over all of them, with one all-reduce. `sinks` is the most of any row (default: those of the
    limits).
    """
    assert limits.budget is not None, "a share of no budget"
    protected = (limits.sinks if sinks is None else sinks) + limits.window
    deepest = max(score.shape[-1] for score in scores)
    if heads is not None:
        deepest = max(heads.ranks.all_gather(deepest))
    found = torch.zeros(2, deepest, len(scores), dtype=torch.float64)
    for layer, score in enumerate(scores):
        ordered = score.double().sort(dim=-1, descending=True).values.flatten(0, 1)
        is_there = ordered > -torch.inf
        found[0, : ordered.shape[1], layer] = ordered.where(is_there, 0.0).sum(0)
        found[1, : ordered.shape[1], layer] = is_there.sum(0)
    total, count = found if heads is None else heads.ranks.all_reduce(found)
    table = (total / count.clamp(min=1)).where(count > 0, -torch.inf)
    # Each layer keeps its best rank, however low its score.
    wanted = (limits.budget - protected - 1) * len(scores)
    rest = table[1:].flatten()
    if wanted >= int((rest > -torch.inf).sum()):
        return [limits.budget] * len(scores)
    # Among equal scores the earlier rank wins, then the lower layer.
    kept = rest.sort(descending=True, stable=True).indices[:wanted] % len(scores)
    return [protected + 1 + number for number in kept.bincount(minlength=len(scores)).tolist()]


@no_inference_mode
def cut_to_budget(cache: CacheState) -> None:
    """Cut every layer, and its memory, to its budget. Earlier steps can't be rolled back."""
    here = cache.rows.standstill(cache.device)
    blind = []
    for layer, leaf in zip(cache.layers, leaves_of(cache.options, len(cache.rotaries)), strict=True):
        limits = leaf.limits
        assert limits.budget is not None, "a cut to no budget"
        layer.forget_steps(0)
        was = layer.rules
        layer.rules = replace(was, limits=limits, budget=limits.budget)
        # A group of heads may have more slots than before if its protected window is smaller now.
        layer.use_sliding_window(was.sliding_window, was.attention_chunk)
        if was.is_whole_window and not layer.rules.is_whole_window:
            _restore_policy(layer)
            if layer.policy.needs.state or layer.policy.needs.statistics:
                blind.append(layer)
    one_shot = find(cache.policy, OneShot)
    if one_shot is not None and one_shot.shares_budget:
        sharing = [
            layer for layer in cache.layers if not (layer.is_empty or layer.rules.is_whole_window or layer in blind)
        ]
        sinks = None if here.sinks is None else cache.rows.most_kept
        budgets = (
            shared_budgets([_contested(layer, here) for layer in sharing], cache.limits, cache.heads, sinks)
            if sharing
            else []
        )
        for layer, budget in zip(sharing, budgets, strict=True):
            layer.rules = layer.rules.with_budget(budget)
    for layer in cache.layers:
        if not layer.is_empty:
            _cut_layer(layer, here, Recent() if layer in blind else layer.policy)
    for state in cache.recurrent:
        state.forget_steps()
    cache.rows = cache.rows.edited(None)


def _restore_policy(layer: SlotLayer) -> None:
    """Use the cache's own policy, which has observed nothing yet, in a layer that held just the sliding window."""
    layer.rules = replace(layer.rules, policy=layer.configured_policy, merge=layer.configured_merge)
    if layer.policy.needs.per_head:
        layer.table.split_heads()
    layer.table.keep_state(layer.rules.state, UNKNOWN_STATE)


def _cut_layer(layer: SlotLayer, here: Step, ranking: Policy) -> None:
    """Evict the tokens over the layer's budget by `ranking`, as at the end of a step, and free their memory."""
    rules, table = layer.rules, layer.table
    layer.rules = replace(rules, policy=ranking)
    try:
        nothing = layer.positions.new_empty(*layer.positions.shape[:2], 0, dtype=torch.long)
        none_yet = (0,) * len(here.lengths)
        record = StepRecord(here, none_yet, table.occupancy_bound, dict(table.statistics), nothing)
        layer.keep_record(layer.observe_and_evict(record))
    finally:
        layer.rules = rules
    assert rules.budget is not None, "a cut to no budget"
    layer.resize(rules.budget + rules.headroom + rules.recall_room)


def _contested(layer: SlotLayer, here: Step) -> Scores:
    """The scores of tokens that may be evicted, -inf elsewhere. NaN ranks lowest, as it does in a layer."""
    least, most = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
    # The cut itself scores once more, and state that scoring moves must move once.
    slots = replace(layer.slots_at(here), state=layer.table.copied_state())
    score = scores_of(layer.policy, layer.index, slots).float()
    ends, limits = here.next_positions[:, None, None], layer.rules.limits
    sinks = limits.sinks if here.sinks is None else here.sinks.per_slot
    is_free = (layer.positions >= sinks) & (layer.positions < ends - limits.window)
    if here.sinks is not None:
        is_free &= ~here.sinks.pinned(layer.positions)
    return score.nan_to_num(nan=least, posinf=most, neginf=least).masked_fill(~is_free, -torch.inf).cpu()
