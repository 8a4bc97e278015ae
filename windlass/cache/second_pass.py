"""A text shown to the policy for a second time: each layer attends, lets its policy observe, and keeps nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from windlass import kernels
from windlass.cache.attend import attend
from windlass.cache.slot_layer import SlotLayer
from windlass.cache.table_view import TableView
from windlass.core.attention import Mass
from windlass.core.shapes import Attended, NewKeys, NewValues, Queries
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
    with written_beside(layer, queries, keys, values, step, call) as (view, queries):
        outs, peaks = [], []
        for out, mass in by_member(layer, view, queries, mode, call):
            outs.append(out)
            peaks.append(mass.rows.amax(2))
        if scoring_chunk(layer.policy):
            seen = Observation(torch.stack(peaks).amax(0), queries.flip(2), step.positions.flip(1))
            observe(layer.policy, layer.index, layer.slots_at(step), seen)
    return torch.stack(outs, 2).flatten(1, 2)


@contextmanager
def written_beside(
    layer: SlotLayer, queries: Queries, keys: NewKeys, values: NewValues, step: Step, call: AttentionCall
) -> Iterator[tuple[TableView, Queries]]:
    """While it lasts, the layer holds the step's tokens beside its own: what queries find there, and the queries."""
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
    yield view, queries
    table.free(written)
    table.occupancy_bound, table.store.full_precision.tensors = held, ring


def by_member(
    layer: SlotLayer, view: TableView, queries: Queries, mode: PositionMode, call: AttentionCall
) -> Iterator[tuple[Attended, Mass]]:
    """What the queries of one head of each kv head read, and what each of them gave each slot; then the next.

    The query heads that share a kv head are taken one after the other: their mass comes as a sum.
    """
    members = queries.shape[1] // layer.store.layout[0]
    columns = torch.arange(queries.shape[2], device=queries.device).where(view.step.positions >= 0, -1)
    sinks = None if call.sink_logits is None else call.sink_logits.view(-1, members)
    for member in range(members):
        own = replace(call, sink_logits=None if sinks is None else sinks[:, member])
        member_queries = queries[:, member::members]
        out, mass = attend(view, layer.rules, layer.rotary, member_queries, mode, own, columns)
        assert mass is not None, "attention that nobody observed"
        yield out, mass
