"""What a step reads beside its slots: tokens that were evicted, chosen by the step's own queries."""

from dataclasses import replace

from torch import Tensor

from windlass import kernels
from windlass.cache.layer_step import LayerStep
from windlass.cache.observation import newest_columns, queries_at
from windlass.cache.recall import DECIDING, DISTANCE, TOKEN_INDEX
from windlass.cache.slot_table import SlotTable
from windlass.cache.table_view import TableView
from windlass.core.attention import Mass
from windlass.core.errors import UsageError
from windlass.core.limits import MAX_NUMBER
from windlass.core.packed import PackedStates
from windlass.core.rotate import rotate
from windlass.core.shapes import Queries, SlotIndex


def with_recalled(view: TableView, asked: LayerStep, queries: Queries) -> TableView:
    """What the queries of a step find in its slots, which have the step's tokens, and what they recall.

    What is recalled stands in free slots, which are free again for the next step.

    Raises: UsageError in a text with pictures, and under a sparse attention that picks slots.
    """
    table, recall = asked.table, asked.table.recall
    if recall is None or not asked.is_recalling:
        return view
    if view.places is not None or asked.call.picker is not None:
        what = "a text with pictures" if view.places is not None else "sparse attention that picks tokens"
        raise UsageError(f"recall={recall.tokens} is not known for {what}; use a KVCache with recall=0")
    is_token = asked.step.positions.shape[1] == 1
    columns = asked.step.first_columns if is_token else newest_columns(asked.step)[:, :DECIDING]
    kv_heads, is_query = view.keys.data.shape[1], columns >= 0
    held = table.state[TOKEN_INDEX].where(table.positions >= 0, -1.0)
    occupancy = min(view.occupancy + recall.tokens, max(recall.lengths) + asked.step.graph_headroom)
    wanted = _turned(queries_at(queries, columns), asked, occupancy), is_query, held
    chosen = recall.choose(*(each.to(recall.device) for each in wanted))
    parts, positions = chosen.parts, chosen.positions.to(view.positions.device)
    if not table.store.is_alike(recall.codec):
        found = recall.codec.over(parts)
        parts = table.store.parts_of(*(each.to(positions.device) for each in (found.keys(), found.values())))
    count = positions.shape[-1]
    index = kernels.first_free(table.positions, count)
    table.store.put(index, {name: part.to(positions.device) for name, part in parts.items()})
    index = index.expand(-1, kv_heads, -1)
    log_counts, (keys, values) = view.log_counts, table.store.packed()
    if log_counts is not None:
        log_counts = log_counts.expand(-1, kv_heads, -1).scatter(-1, index, 0.0)
    seen_until = view.seen_until
    if seen_until is not None:
        seen_until = seen_until.expand(-1, kv_heads, -1).scatter(-1, index, MAX_NUMBER)
    return replace(
        view,
        keys=_as_put(keys, index),
        values=_as_put(values, index),
        positions=view.positions.expand(-1, kv_heads, -1).scatter(-1, index, positions),
        log_counts=log_counts,
        seen_until=seen_until,
        occupancy=occupancy,
        has_recalled=True,
    )


def of_tokens(mass: Mass | None, view: TableView, table: SlotTable) -> Mass | None:
    """The attention that the table's own tokens got, without what was recalled into free slots."""
    if mass is None or not view.has_recalled:
        return mass
    is_held = table.positions >= 0
    rest = None if mass.rest is None else mass.rest.where(is_held, 0.0)
    return Mass(mass.rows.where(is_held[:, :, None], 0.0), rest)


def _as_put(states: PackedStates, index: SlotIndex) -> PackedStates:
    """With no token in full precision in these slots, which others may have left there."""
    ring = states.ring_index
    return states if ring is None else replace(states, ring_index=ring.scatter(-1, index, -1))


def _turned(queries: Queries, asked: LayerStep, occupancy: int) -> Tensor:
    """Queries whose products with un-rotated keys are logits at `DISTANCE`, by the table that they will be read with.

    That is known for as many tokens as a row has at most once some are recalled.
    """
    rotary, step, turned = asked.rotary, asked.step, queries.float()
    if rotary is not None:
        mode = asked.mode.within(rotary.trained_length, asked.rules.budget is not None)
        cos, sin = rotary.turn_at(DISTANCE, mode.bound(step.end, occupancy, 1), queries.device)
        gain, turned = rotary.query_gain(), rotate(turned, cos, sin)
        turned = turned if gain is None else turned * gain
    return turned * asked.call.scale
