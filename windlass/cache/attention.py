"""Attention of a step's queries over a layer's slots and recalled tokens, and the observation that a policy gets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from windlass import kernels
from windlass.cache.decode import LayerStep
from windlass.cache.history import History
from windlass.cache.layer_config import LayerConfig
from windlass.cache.merging import MERGED
from windlass.cache.recall import DECIDING, DISTANCE, TOKEN_INDEX
from windlass.cache.shares import Heads
from windlass.cache.slot_table import SlotTable, TableView
from windlass.core.errors import UsageError
from windlass.core.inputs import AttentionInput, Mass, PackedStates
from windlass.core.parse import MAX_NUMBER
from windlass.core.positions import EMPTY, RESERVED, rotate
from windlass.core.step import HEADROOM, AttentionCall, Limits, PolicyCheckpoint, Step, StepRecord
from windlass.core.types import (
    Attended,
    CosSin,
    IndexKeys,
    NewKeys,
    NewValues,
    ObservedColumns,
    Picker,
    Queries,
    QueryPositions,
    SlotIndex,
    SlotPositions,
)
from windlass.kernels.reference import visible
from windlass.policies.base import ACCUMULATES, Observation, Policy, Slots
from windlass.policies.calls import initial_state, observe, preprocess
from windlass.positions.modes import PositionMode, Reading
from windlass.positions.rotary import Rotary, Rotation
from windlass.stores.base import Parts


def observed_columns(step: Step, wanted: int | None) -> ObservedColumns | None:
    """The columns whose queries a step's record keeps, each row's newest first, padded with -1. None: no column.

    There are HEADROOM more of them than the `wanted` newest ones (None: HEADROOM), so that up to HEADROOM tokens of the
    step can be rolled back.
    """
    if wanted == 0:
        return None
    if step.positions.shape[1] == 1:  # at decode, in one operation
        return step.first_columns
    return newest_columns(step)[:, : (wanted or 0) + HEADROOM]


def newest_columns(step: Step) -> ObservedColumns:
    """Columns of each row's tokens, the newest first, padded with -1."""
    columns = torch.arange(step.positions.shape[1], device=step.positions.device)
    return columns.where(step.positions >= 0, -1).sort(-1, descending=True).values


def queries_at(queries: Queries, columns: ObservedColumns) -> Tensor:
    """The queries of these columns (batch, heads, observed, head_dim), copied so that no record holds a whole chunk."""
    if queries.shape[2] == 1:
        return queries.detach()
    rows = torch.arange(queries.shape[0], device=queries.device)[:, None]
    return queries.detach().transpose(1, 2)[rows, columns.clamp(min=0)].transpose(1, 2)


def settle(
    policy: Policy, layer: int, slots: Callable[[], Slots], queries: Queries, step: Step
) -> PolicyCheckpoint | None:
    """Let a policy that observes all queries, but not their mass, observe the queries that no record keeps.

    These queries are too old to be rolled back by themselves. Returns the policy's state and statistics after that, or
    None where nothing had to be observed. `slots` is called only if it is needed.
    """
    if policy.needs.mass or policy.observed_queries is not None or queries.shape[2] <= HEADROOM:
        return None
    columns, seen = newest_columns(step)[:, HEADROOM:], slots()
    positions = step.positions.gather(1, columns.clamp(min=0)).where(columns >= 0, EMPTY)
    observe(policy, layer, seen, Observation(_no_mass(queries), queries_at(queries, columns), positions))
    return PolicyCheckpoint({name: tensor.clone() for name, tensor in seen.state.items()}, dict(seen.statistics))


def _no_mass(queries: Queries) -> Tensor:
    return torch.zeros(queries.shape[0], queries.shape[1], 0, device=queries.device)


def observation(record: StepRecord, wanted: int | None) -> Observation:
    """The last `wanted` queries (None: all) of those of the step's tokens that still stand."""
    assert record.observed is not None, "a step that nobody observed"
    assert record.queries is not None, "a step whose queries were not kept"
    queries, mass = record.queries, _no_mass(record.queries)
    if record.step.positions.shape[1] == 1 and not any(record.rolled_back):  # at decode, with less to do
        if record.mass is not None:
            mass = record.mass.rows[:, :, 0]
        return Observation(mass, queries, record.step.positions)
    rolled_back = torch.tensor(record.rolled_back, device=queries.device)[:, None]
    age = torch.arange(queries.shape[2], device=queries.device)[None]
    is_seen = (age >= rolled_back) & (record.observed >= 0)
    if wanted is not None:
        is_seen &= age < rolled_back + wanted
    if record.mass is not None:
        mass = torch.einsum("bhos,bo->bhs", record.mass.rows, is_seen.to(record.mass.rows.dtype))
        if record.mass.rest is not None:
            mass = mass + record.mass.rest
    positions = record.step.positions.gather(1, record.observed.clamp(min=0))
    return Observation(mass, queries, positions.where(is_seen, EMPTY))


def slots_view(
    table: SlotTable, limits: Limits, rotation: Rotation, step: Step, layer: int, layers: int, heads: Heads | None
) -> Slots:
    """The kv `heads` of layer number `layer` of `layers`, as a policy sees them after `step`."""
    return Slots(
        store=table.store,
        positions=table.positions.clamp(min=EMPTY),
        state=table.state,
        next_positions=step.next_positions,
        prompt_ends=step.prompt_ends,
        rotate=rotation.rotate,
        step_angles=rotation.step_angles,
        query_gain=rotation.query_gain,
        statistics=table.statistics,
        sinks=limits.sinks,
        window=limits.window,
        layer=layer,
        layers=layers,
        heads=heads,
    )


DISTANCE_BYTES = 64 * 2**20  # most bytes of distances alive at once


@dataclass(frozen=True)
class IndexerState:
    """A layer's indexer, and its keys of all slots."""

    picker: Picker
    keys: IndexKeys

    @classmethod
    def of(cls, view: TableView, call: AttentionCall) -> IndexerState | None:
        """None where the indexer would pick all that any query sees.

        Raises: UsageError in a text with pictures.
        """
        picker = call.picker
        if picker is None or view.occupancy <= picker.limit:
            return None
        assert view.index_keys is not None, "an indexer in a layer that holds no keys of it"
        if view.places is not None:
            raise UsageError(
                f"in a text with pictures the model's indexer would pick {picker.limit} of {view.occupancy} tokens, "
                f"which a KVCache does not do. Give it a budget, so that it holds {picker.limit} at most in a pass"
            )
        return cls(picker, view.index_keys)

    def columns(self, start: int, stop: int) -> IndexerState:
        """The same for some of the step's columns."""
        return replace(self, picker=self.picker.columns(start, stop))


def picked(call: AttentionInput, picks: IndexerState) -> AttentionInput:
    """`call`, whose queries read no other slots than those picked for them.

    Raises: UsageError where far keys have another rotary position than near ones.
    """
    index, tables = call.rotary_index, call.tables
    keys_cos_sin = queries_cos_sin = None
    if index is not None and tables is not None:
        if index.far is not None:
            raise UsageError(
                "these positions read far tokens in groups, and the model's indexer scores each token once in a pass. "
                'Feed single tokens, or set cache.positions to "original" or "compact"'
            )
        queries_cos_sin, keys_cos_sin = (_cos_sin(tables, at[:, 0]) for at in (index.near.queries, index.near.keys))
    seen = _seen(call)
    return replace(call, picked=picks.picker.picked(picks.keys, seen, keys_cos_sin, queries_cos_sin))


def _cos_sin(tables: CosSin, at: Tensor) -> CosSin:
    return tables[0][at], tables[1][at]


def _seen(call: AttentionInput) -> Tensor:
    """A mask (batch, tokens, slots) of the slots that each query would read without an indexer."""
    slots, queries = call.slot_positions[:, :1], call.query_positions
    size = max(1, DISTANCE_BYTES // (slots.numel() * slots.itemsize))
    blocks = []
    for start in range(0, queries.shape[1], size):
        span = slice(start, start + size)
        sees_to = None if call.sees_to is None else call.sees_to[:, span]
        distance = queries[:, None, span, None] - slots[:, :, None, :]
        blocks.append(visible(distance, slots, call.visibility, sees_to)[:, 0])
    return torch.cat(blocks, 1)


class StepTokens(NamedTuple):
    """A step's tokens as they are written: keys, values, and the state that they start with."""

    keys: NewKeys
    values: NewValues
    initial: Parts


def join_tokens(table: SlotTable, rules: LayerConfig, step: Step, new: StepTokens) -> StepTokens:
    """The step's tokens, where a token that joins is the mean of its run so far. `initial` tells which tokens join.

    No token joins a sink, nor an evicted token: after either of them a new run begins.
    """
    merge, kv_heads = rules.merge, new.keys.shape[1]
    assert merge is not None, "tokens that join without a rule of merging"
    order, back = _text_order(step.positions)
    sinks = rules.limits.sinks if step.sinks is None else step.sinks.tensor[:, None]
    joins = (new.initial[ACCUMULATES] > 0) & (step.positions > sinks)[:, None]
    joins = _columns(joins, order)
    newest, is_held = _newest(table.positions, step.positions)
    joins[..., :1] &= is_held
    # In the order of the text. The held tokens come first, though they may belong to no run of this step.
    runs = _Runs(~pad(joins, (1, 0)))
    held = table.store.over(table.store.take_all(newest))
    counts = torch.cat((table.state[MERGED].gather(-1, newest) + 1, torch.ones_like(joins, dtype=torch.float32)), -1)
    totals, weights = {MERGED: runs.sums(counts[..., None])[..., 0] - 1}, counts
    if (name := merge.weighs_by) is not None:
        weights = torch.cat((table.state[name].gather(-1, newest), _columns(new.initial[name], order)), -1)
        totals[name] = runs.sums(weights[..., None])[..., 0]
    weights = weights.expand(-1, kv_heads, -1)[..., None]
    states = [
        runs.means(torch.cat((before, _columns(after, order)), 2), weights)
        for before, after in ((held.keys(), new.keys), (held.values(), new.values))
    ]
    keys, values = (_columns(each[:, :, 1:], back) for each in states)
    initial = {name: _columns(total[..., 1:], back).float() for name, total in totals.items()}
    return StepTokens(keys, values, new.initial | initial | {ACCUMULATES: _columns(joins, back).float()})


def view_joined(view: TableView, written: SlotIndex, initial: Parts) -> TableView:
    """The view of a step's queries: the last token of each run up to their own."""
    (newest, newest_at), (own, own_at) = _joined_slots(
        view.positions, written, view.step.positions, initial[ACCUMULATES]
    )
    positions = view.positions.scatter(-1, newest, view.positions.gather(-1, newest).where(newest_at < 0, EMPTY))
    if view.step.positions.shape[1] == 1:
        return replace(view, positions=positions)
    until = torch.full_like(positions, MAX_NUMBER)
    until.scatter_(-1, own, own_at.where(own_at >= 0, MAX_NUMBER))
    return replace(view, positions=positions, seen_until=until)


def reserve_joined(table: SlotTable, rules: LayerConfig, record: StepRecord) -> StepRecord:
    """Reserve the slots of tokens that newer tokens of the step joined. Returns the record with the reserved slots."""
    if not rules.joins or record.written.shape[-1] == 0:
        return record
    gone = _joined_slots(table.positions, record.written, record.step.positions, record.initial_state[ACCUMULATES])
    for index, positions in gone:
        now = table.positions.gather(-1, index)
        table.positions.scatter_(-1, index, now.masked_fill(positions >= 0, RESERVED))
    return replace(record, taken_in=gone)


def slots_wanted(
    table: SlotTable,
    rules: LayerConfig,
    history: History,
    tokens: int,
    reserve_hint: int,
    longest_decode: int,
    defer_eviction: bool,
) -> int:
    """The number of slots that a layer should have before `tokens` more are written. See `LayerConfig.slots_for`.

    Where tokens join and no budget limits them, the slots in use are counted on the device: once when decode begins,
    and then before the layer grows.
    """
    if not rules.joins or rules.budget is not None or table.is_empty:
        hint = 0 if rules.joins else reserve_hint
        return rules.slots_for(tokens, table.slots, table.occupancy_bound, hint, longest_decode, defer_eviction)
    begins = longest_decode > 0 and bool(history.records) and not history.records[-1].step.is_decode
    wanted = rules.slots_for(tokens, table.slots, table.occupancy_bound, 0, longest_decode, False)
    if wanted <= table.slots and not begins:
        return wanted
    table.occupancy_bound = int((table.positions != EMPTY).sum(-1).max())  # a reserved slot may be in use again
    return rules.slots_for(tokens, 0 if begins else table.slots, table.occupancy_bound, 0, longest_decode, False)


def _joined_slots(
    slots: SlotPositions, written: SlotIndex, positions: QueryPositions, joins: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The slots whose tokens were joined, with the tokens' positions or EMPTY: older slots, then those just written."""
    order, back = _text_order(positions)
    joins = _columns((joins > 0) & (positions >= 0)[:, None], order)  # a step that was cut has padding now
    newest, _ = _newest(slots, positions)
    before = slots.gather(-1, newest).where(joins[..., :1], EMPTY)
    own = positions[:, None].expand_as(written).to(slots.dtype)
    follows = _columns(pad(joins[..., 1:], (0, 1)), back)
    return (newest, before), (written, own.where(follows, EMPTY))


def _newest(slots: SlotPositions, positions: QueryPositions) -> tuple[SlotIndex, Tensor]:
    """The slot of the token before the first of `positions`, (batch, score_heads, 1), and whether it is held.

    A missing token gives slot 0. Among tokens that share a position, after an edit, the latest counts.
    """
    first = positions.where(positions >= 0, MAX_NUMBER).amin(1)[:, None, None]
    at = torch.arange(slots.shape[-1], device=slots.device)
    newest = at.where((slots == first - 1) & (slots >= 0), -1).amax(-1, keepdim=True)
    return newest.clamp(min=0), newest >= 0


def _text_order(positions: QueryPositions) -> tuple[Tensor, Tensor]:
    """The columns of a step in the order of the text, padding last, and the inverse order."""
    order = (positions < 0).to(torch.uint8).argsort(dim=1, stable=True)
    return order, order.argsort(dim=1)


def _columns(states: Tensor, order: Tensor) -> Tensor:
    """The columns of `states`, (batch, heads, tokens) or (batch, heads, tokens, channels), in `order`."""
    if order.shape[1] == 1:
        return states
    index = order[:, None] if states.dim() == 3 else order[:, None, :, None]
    return states.gather(2, index.expand_as(states))


class _Runs:
    """Runs of tokens in the order of the text. `is_first` (batch, score_heads, n) marks the tokens that begin one."""

    def __init__(self, is_first: Tensor) -> None:
        at = torch.arange(is_first.shape[-1], device=is_first.device)
        self._is_first, self._starts = is_first, at.where(is_first, 0).cummax(-1).values

    def sums(self, numbers: Tensor) -> Tensor:
        """Sums of (batch, heads, n, channels) over the run of each token up to it, in float64."""
        total = numbers.double().cumsum(2)
        starts = self._starts.expand(-1, numbers.shape[1], -1)[..., None].expand_as(total)
        return total - (total - numbers).gather(2, starts)

    def means(self, states: Tensor, weights: Tensor) -> Tensor:
        """The weighted means over the runs. The first token of a run stays as it is, bit for bit."""
        means = self.sums(states.double() * weights) / self.sums(weights).clamp(min=1e-30)
        return states.where(self._is_first[..., None], means.to(states.dtype))


def with_recalled(view: TableView, layer_step: LayerStep, queries: Queries) -> TableView:
    """The view of a step's queries: its slots, which have the step's tokens, and recalled tokens.

    Recalled tokens are put into free slots, which are free again for the next step.

    Raises: UsageError in a text with pictures, and under a sparse attention that picks slots.
    """
    table, recall = layer_step.table, layer_step.table.recall
    if recall is None or not layer_step.is_recalling:
        return view
    if view.places is not None or layer_step.call.picker is not None:
        what = "a text with pictures" if view.places is not None else "sparse attention that picks tokens"
        raise UsageError(f"recall={recall.tokens} is not known for {what}. Use a KVCache with recall=0")
    is_token = layer_step.step.positions.shape[1] == 1
    columns = layer_step.step.first_columns if is_token else newest_columns(layer_step.step)[:, :DECIDING]
    kv_heads, is_query = view.keys.data.shape[1], columns >= 0
    held = table.state[TOKEN_INDEX].where(table.positions >= 0, -1.0)
    occupancy = min(view.occupancy + recall.tokens, max(recall.lengths) + layer_step.step.graph_headroom)
    wanted = _rotated_queries(queries_at(queries, columns), layer_step, occupancy), is_query, held
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


def mass_of_held(mass: Mass | None, view: TableView, table: SlotTable) -> Mass | None:
    """The attention mass of the table's own tokens, without the tokens recalled into free slots."""
    if mass is None or not view.has_recalled:
        return mass
    is_held = table.positions >= 0
    rest = None if mass.rest is None else mass.rest.where(is_held, 0.0)
    return Mass(mass.rows.where(is_held[:, :, None], 0.0), rest)


def _as_put(states: PackedStates, index: SlotIndex) -> PackedStates:
    """Clear the references to full-precision tokens at these slots, left there by earlier tokens."""
    ring = states.ring_index
    return states if ring is None else replace(states, ring_index=ring.scatter(-1, index, -1))


def _rotated_queries(queries: Queries, layer_step: LayerStep, occupancy: int) -> Tensor:
    """Queries whose products with un-rotated keys are logits at `DISTANCE`, rotated by the table that attention uses.

    The table is chosen for the largest number of tokens that a row can have once some are recalled.
    """
    rotary, step, rotated = layer_step.rotary, layer_step.step, queries.float()
    if rotary is not None:
        mode = layer_step.mode.within(rotary.trained_length, layer_step.rules.budget is not None)
        cos, sin = rotary.cos_sin_at(DISTANCE, mode.bound(step.end, occupancy, 1), queries.device)
        gain, rotated = rotary.query_gain(), rotate(rotated, cos, sin)
        rotated = rotated if gain is None else rotated * gain
    return rotated * layer_step.call.scale


class WriteResult(NamedTuple):
    """The slots of a step's tokens, the attention output, the observed mass, and the tokens' initial state."""

    slots: SlotIndex
    out: Attended
    mass: Mass | None
    queries: Queries  # as attention read them
    initial_state: dict[str, Tensor]


def write_and_attend(
    layer_step: LayerStep, policy: Policy, weighed: ObservedColumns | None
) -> tuple[WriteResult, TableView]:
    """Write a step's tokens and attend. The table counts the tokens already. Returns the result and the view it read.

    `policy` is the one that the layer was configured with.
    """
    table, rules, rotary, (queries, keys, values), step, mode, call, layer, heads, _ = layer_step
    queries, keys, initial = preprocess(policy, layer, queries, keys, step.ids)
    initial |= initial_state(rules.policy, layer, heads, queries, keys)
    if rules.has_places:
        initial |= step.known_places.state
    initial |= table.remember(keys, values, step.positions, step.lengths)
    if rules.joins:
        keys, values, initial = join_tokens(table, rules, step, StepTokens(keys, values, initial))
    positions = step.positions[:, None].expand(-1, table.score_heads, -1)
    index = kernels.first_free(table.positions, keys.shape[2])
    table.write(index, keys, values, positions, initial, call.index_keys)
    view = TableView.of(table, rules, step)
    if rules.joins:
        view = view_joined(view, index, initial)
    elif rules.reach_differs(step) and not rules.reads_all(step) and call.sees_to is None:
        view = view.within_reach(rules)
    view = with_recalled(view, layer_step, queries)
    out, mass = attend(view, rules, rotary, queries, mode, call, weighed)
    return WriteResult(index, out, mass_of_held(mass, view, table), queries, initial), view


def attend(
    view: TableView,
    rules: LayerConfig,
    rotary: Rotary | None,
    queries: Queries,
    mode: PositionMode,
    call: AttentionCall,
    observed: ObservedColumns | None,
) -> tuple[Attended, Mass | None]:
    """Attention of the queries over the slots, and the mass that each slot got from the `observed` ones.

    Raises: UsageError where a picture's queries would see joined tokens, and where a position mode would move tokens of
    a model that applies norms with weights after RoPE.
    """
    tokens, step = queries.shape[2], view.step
    if view.seen_until is not None and call.sees_to is not None:
        raise UsageError(
            f"{rules.policy!r} joins new tokens, and in a picture queries see tokens that come later. Use "
            "merge=None for this text"
        )
    is_rest_wanted = rules.policy.observed_queries is None and observed is not None and observed.shape[1] < tokens
    whole = AttentionInput(
        queries=queries,
        keys=view.keys,
        values=view.values,
        slot_positions=view.positions,
        query_positions=step.positions,
        rotary_index=None,
        tables=None,
        scale=call.scale,
        visibility=rules.visible_in(step),
        softcap=call.softcap,
        sink_logits=call.sink_logits,
        log_counts=view.log_counts,
        observed=observed,
        is_rest_wanted=is_rest_wanted,
        sees_to=call.sees_to,
        query_gain=None if rotary is None else rotary.query_gain(),
        seen_until=view.seen_until,
    )
    picks = IndexerState.of(view, call)
    if rotary is None:
        return kernels.attend(whole if picks is None else picked(whole, picks))
    # The model was trained on all distances within a sliding window, so the text's length does not matter.
    trained_length = rotary.trained_length if rules.sliding_window is None else None
    mode, places = mode.within(trained_length, rules.budget is not None), view.places
    is_normed, occupancy = whole.query_gain is not None and places is None, view.occupancy
    if rotary.table_changes_at(mode.bound(step.end, occupancy, 1)) or (
        is_normed and not mode.keeps_places(step.end, occupancy)
    ):
        occupancy = view.counted  # the bound known without a device sync is too loose to choose a table
    if is_normed and not mode.keeps_places(step.end, occupancy):
        raise UsageError(
            f"positions={mode.name!r} would keep distances here, but not where tokens stand, and this model applies "
            'norms with weights after RoPE, so that its attention depends on both. Use "original", or "compact" with '
            "a budget below the trained length"
        )
    readings = (
        mode.readings(view.positions, step, occupancy)
        if places is None
        else [mode.reading_at(places, step.known_places)]
    )
    parts = [_read(whole, reading, rotary, picks) for reading in readings]
    if len(readings) == 1 and readings[0].is_read is None:
        return parts[0]
    return _combine_readings(
        whole, [each.start for each in readings], [out for out, _ in parts], [mass for _, mass in parts]
    )


def _read(
    whole: AttentionInput, reading: Reading, rotary: Rotary, picks: IndexerState | None
) -> tuple[Attended, Mass | None]:
    """Attention of one reading's queries, with zeros for the queries in its columns that it does not read."""
    dtype = kernels.table_dtype(whole.queries)
    tables = rotary.tables(reading.bound, whole.queries.device, dtype, reading.length)
    call = replace(whole, rotary_index=reading.index, tables=tables)
    if reading.is_read is None:
        return kernels.attend(call if picks is None else picked(call, picks))
    start, is_read = reading.start, reading.is_read
    stop = start + is_read.shape[1]
    observed = whole.observed
    if observed is not None:
        at = (observed - start).clamp(0, stop - start - 1)
        observed = at.where((at == observed - start) & is_read.gather(1, at), -1)
    sees_to = whole.sees_to
    call = replace(
        call,
        queries=whole.queries[:, :, start:stop],
        query_positions=whole.query_positions[:, start:stop].where(is_read, EMPTY),
        observed=observed,
        sees_to=None if sees_to is None else sees_to[:, start:stop].where(is_read, EMPTY),
    )
    return kernels.attend(call if picks is None else picked(call, picks.columns(start, stop)))


def _combine_readings(
    whole: AttentionInput, starts: Sequence[int], pieces: Sequence[Tensor], masses: Sequence[Mass | None]
) -> tuple[Attended, Mass | None]:
    """The attention of all queries of a step. Each query was read in one of the pieces, and is zero in the others."""
    batch, heads, tokens, _ = whole.queries.shape
    out = whole.queries.new_zeros(batch, heads, tokens, whole.values.channels)
    for start, piece in zip(starts, pieces, strict=True):
        out[:, :, start : start + piece.shape[2]] += piece
    if whole.observed is None:
        return out, None
    kv_heads, slots = whole.keys.data.shape[1:3]
    rows = out.new_zeros(batch, kv_heads, whole.observed.shape[1], slots, dtype=torch.float32)
    rest = torch.zeros_like(rows[:, :, 0]) if whole.is_rest_wanted else None
    for mass in masses:
        assert mass is not None, "observed queries without their mass"
        rows += mass.rows
        if rest is not None and mass.rest is not None:
            rest += mass.rest
    return out, Mass(rows, rest)
