"""What a step reads beside its slots: tokens that were evicted, chosen by the step's own queries."""

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from windlass.cache.decode_kernel import LayerStep
from windlass.cache.observation import newest_columns, queries_at
from windlass.cache.recall import DECIDING, TOKEN_INDEX
from windlass.cache.table_view import TableView
from windlass.core.attention import Mass
from windlass.core.errors import UsageError
from windlass.core.limits import MAX_NUMBER
from windlass.core.rotate import rotate
from windlass.core.shapes import Queries

DISTANCE: Final = 128  # at which queries look for tokens, whatever their own distance


def with_recalled(view: TableView, asked: LayerStep, queries: Queries) -> TableView:
    """What the queries of a step find in its slots, which have the step's tokens, and beside them what they recall.

    Raises: UsageError in a text with pictures, and under a sparse attention that picks slots.
    """
    table, recall = asked.table, asked.table.recall
    if recall is None or recall.is_empty or max(recall.lengths) <= table.occupancy_bound:
        return view
    if view.places is not None or asked.call.picker is not None:
        what = "a text with pictures" if view.places is not None else "sparse attention that picks tokens"
        raise UsageError(f"recall={recall.tokens} is not known for {what}; use a KVCache with recall=0")
    is_token = asked.step.positions.shape[1] == 1
    columns = asked.step.first_columns if is_token else newest_columns(asked.step)[:, :DECIDING]
    is_query = columns >= 0
    kv_heads = view.keys.data.shape[1]
    held = table.state[TOKEN_INDEX].where(table.positions >= 0, -1.0)
    chosen = recall.choose(_turned(queries_at(queries, columns), asked).cpu(), is_query.cpu(), held.cpu())
    parts, positions = chosen.parts, chosen.positions.to(view.positions.device)
    if not table.store.is_alike(recall.codec):
        found = recall.codec.over(parts)
        parts = table.store.parts_of(found.keys(), found.values())
    parts = {name: part.to(positions.device) for name, part in parts.items()}
    keys, values = table.store.beside(parts, recall.room).packed()
    log_counts = view.log_counts
    if log_counts is not None:
        log_counts = torch.cat((log_counts.expand(-1, kv_heads, -1), log_counts.new_zeros(positions.shape)), -1)
    seen_until = view.seen_until
    if seen_until is not None:
        always = torch.full_like(positions, MAX_NUMBER, dtype=seen_until.dtype)
        seen_until = torch.cat((seen_until.expand(-1, kv_heads, -1), always), -1)
    both = torch.cat((view.positions.expand(-1, kv_heads, -1), positions), -1)
    occupancy = view.occupancy + positions.shape[-1]
    return replace(
        view,
        keys=keys,
        values=values,
        positions=both,
        log_counts=log_counts,
        seen_until=seen_until,
        occupancy=occupancy,
        is_joined=True,
    )


def of_slots(mass: Mass | None, slots: int) -> Mass | None:
    """The attention that the slots got, without what was recalled beside them."""
    if mass is None or mass.rows.shape[-1] == slots:
        return mass
    return Mass(mass.rows[..., :slots], None if mass.rest is None else mass.rest[..., :slots])


def _turned(queries: Queries, asked: LayerStep) -> Tensor:
    """Queries whose products with un-rotated keys are logits at `DISTANCE`."""
    rotary, turned = asked.rotary, queries.float()
    if rotary is not None:
        cos, sin = rotary.tables(max(asked.step.end, DISTANCE + 1), queries.device)
        gain, turned = rotary.query_gain(), rotate(turned, cos[DISTANCE], sin[DISTANCE])
        turned = turned if gain is None else turned * gain
    return turned * asked.call.scale
