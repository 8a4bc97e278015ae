"""A text shown to the policy for a second time: each layer attends, lets its policy observe, and keeps nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from windlass import kernels
from windlass.cache.layer import LayerCache
from windlass.core.shapes import Attended, NewKeys, NewValues, PerSlot, Queries
from windlass.core.step import AttentionCall, Step
from windlass.policies.base import Observation, arrived, policy_errors
from windlass.positions.modes import PositionMode

if TYPE_CHECKING:
    from windlass.hf.kv_cache import KVCache


@contextmanager
def rereading(cache: KVCache) -> Iterator[None]:
    """What the model is fed meanwhile is shown to the policy alone; the cache stays as it is."""
    cache.is_rereading = True
    try:
        yield
    finally:
        cache.is_rereading = False


def reread(
    layer: LayerCache,
    queries: Queries,
    keys: NewKeys,
    values: NewValues,
    step: Step,
    mode: PositionMode,
    call: AttentionCall,
) -> Attended:
    """What the queries read, as in a step; afterwards the layer holds what it held, but for what its policy noted."""
    layer.make_room(keys, values)
    queries, keys, born = arrived(layer.own[0], layer.index, queries, keys, step.ids)
    positions = step.positions[:, None].expand(-1, layer.positions.shape[1], -1)
    most_held, copies = layer.most_held, layer.store.exact.copies
    written = kernels.first_free(layer.positions, keys.shape[2])
    try:
        layer.write(written, keys, values, positions, born)
        layer.most_held += max(step.lengths)
        out, peak = _attended(layer, queries, step, mode, call)
        if layer.policy.repeat:
            with policy_errors(layer.policy, layer.index):
                layer.policy.observe(layer.slots_at(step), Observation(peak, queries.flip(2), step.positions.flip(1)))
    finally:
        layer.unwrite(written, {}, layer.statistics, most_held)
        layer.store.exact.copies = copies
    return out


def _attended(
    layer: LayerCache, queries: Queries, step: Step, mode: PositionMode, call: AttentionCall
) -> tuple[Attended, PerSlot]:
    """What the queries read, and the largest probability that any of them gave each slot.

    The query heads that share a kv head are taken one after the other: their mass comes as a sum.
    """
    heads = queries.shape[1]
    columns = torch.arange(queries.shape[2], device=queries.device).where(step.positions >= 0, -1)
    kv_heads = layer.store.layout[0]
    sinks = None if call.sink_logits is None else call.sink_logits.view(kv_heads, -1)
    outs, peaks = [], []
    for member in range(heads // kv_heads):
        own = replace(call, sink_logits=None if sinks is None else sinks[:, member])
        out, mass = layer.attend(queries[:, member :: heads // kv_heads], step, mode, own, columns)
        assert mass is not None, "attention that nobody observed"
        outs.append(out)
        peaks.append(mass.rows.amax(2))
    return torch.stack(outs, 2).flatten(1, 2), torch.stack(peaks).amax(0)
