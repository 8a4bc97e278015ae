"""A text shown to the policy for a second time: each layer attends, lets its policy observe, and keeps nothing."""

from dataclasses import replace

import torch

from windlass import kernels
from windlass.cache.attend import attend
from windlass.cache.slot_layer import SlotLayer
from windlass.cache.table_view import TableView
from windlass.core.shapes import Attended, NewKeys, NewValues, PerSlot, Queries
from windlass.core.step import AttentionCall, Step
from windlass.policies.base import Observation
from windlass.policies.calls import observe, preprocess
from windlass.policies.wrapper import scoring_chunk
from windlass.positions.modes import PositionMode


def second_pass(
    layer: SlotLayer,
    queries: Queries,
    keys: NewKeys,
    values: NewValues,
    step: Step,
    mode: PositionMode,
    call: AttentionCall,
) -> Attended:
    """What the queries read, as in a step; afterwards the layer holds what it held, but for what its policy noted."""
    before = layer.protect(step)
    layer.make_room(keys, values, step.is_decode, step.defer_eviction)
    table = layer.table
    before.table.copies.extend((tensor, tensor.clone()) for tensor in table.state.values())
    queries, keys, initial_state = preprocess(layer.configured_policy, layer.index, queries, keys, step.ids)
    positions = step.positions[:, None].expand(-1, table.score_heads, -1)
    held, ring = table.occupancy_bound, table.store.full_precision.tensors
    written = kernels.first_free(table.positions, keys.shape[2])
    table.write(written, keys, values, positions, initial_state, call.index_keys)
    table.occupancy_bound += max(step.lengths)
    view = TableView.of(table, layer.rules, step)
    if layer.is_shared:
        layer.views.append(view.kept())
    out, peak = _attended(layer, view, queries, mode, call)
    if scoring_chunk(layer.policy):
        seen = Observation(peak, queries.flip(2), step.positions.flip(1))
        observe(layer.policy, layer.index, layer.slots_at(step), seen)
    table.free(written)
    table.occupancy_bound, table.store.full_precision.tensors = held, ring
    return out


def _attended(
    layer: SlotLayer, view: TableView, queries: Queries, mode: PositionMode, call: AttentionCall
) -> tuple[Attended, PerSlot]:
    """What the queries read, and the largest probability that any of them gave each slot.

    The query heads that share a kv head are taken one after the other: their mass comes as a sum.
    """
    heads = queries.shape[1]
    columns = torch.arange(queries.shape[2], device=queries.device).where(view.step.positions >= 0, -1)
    kv_heads = layer.store.layout[0]
    sinks = None if call.sink_logits is None else call.sink_logits.view(kv_heads, -1)
    outs, peaks = [], []
    for member in range(heads // kv_heads):
        own = replace(call, sink_logits=None if sinks is None else sinks[:, member])
        member_queries = queries[:, member :: heads // kv_heads]
        out, mass = attend(view, layer.rules, layer.rotary, member_queries, mode, own, columns)
        assert mass is not None, "attention that nobody observed"
        outs.append(out)
        peaks.append(mass.rows.amax(2))
    return torch.stack(outs, 2).flatten(1, 2), torch.stack(peaks).amax(0)
