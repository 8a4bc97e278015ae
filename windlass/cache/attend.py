"""What the queries of a step read of one layer's slots."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from windlass import kernels
from windlass.cache.joins import NewTokens, joined, view_joined
from windlass.cache.layer_step import LayerStep
from windlass.cache.picks import Picks, picked
from windlass.cache.recalled import of_tokens, with_recalled
from windlass.cache.rules import LayerRules
from windlass.cache.table_view import TableView
from windlass.core.attention import AttentionInput, Mass
from windlass.core.errors import UsageError
from windlass.core.rotary_index import EMPTY
from windlass.core.shapes import Attended, ObservedColumns, Queries, SlotIndex
from windlass.core.step import AttentionCall
from windlass.policies.base import Policy
from windlass.policies.calls import initial_state, preprocess
from windlass.positions.base import PositionMode, Reading
from windlass.positions.rotary import Rotary


class Written(NamedTuple):
    """The slots that got a step's tokens, what its queries read, and what is to be known of both."""

    slots: SlotIndex
    out: Attended
    mass: Mass | None
    queries: Queries  # as attention read them
    initial_state: dict[str, Tensor]


def write_and_attend(asked: LayerStep, policy: Policy, weighed: ObservedColumns | None) -> tuple[Written, TableView]:
    """Write and attend, in whatever step; the table counts the tokens already. Returns what was found in it, too.

    `policy` is the one that the layer was configured with.
    """
    table, rules, rotary, (queries, keys, values), step, mode, call, layer, heads, _ = asked
    queries, keys, initial = preprocess(policy, layer, queries, keys, step.ids)
    initial |= initial_state(rules.policy, layer, heads, queries, keys)
    if rules.has_places:
        initial |= step.known_places.state
    initial |= table.remember(keys, values, step.positions, step.lengths)
    if rules.joins:
        keys, values, initial = joined(table, rules, step, NewTokens(keys, values, initial))
    positions = step.positions[:, None].expand(-1, table.score_heads, -1)
    index = kernels.first_free(table.positions, keys.shape[2])
    table.write(index, keys, values, positions, initial, call.index_keys)
    view = TableView.of(table, rules, step)
    if rules.joins:
        view = view_joined(view, index, initial)
    elif rules.visibility.reach is not None and rules.visible_in(step).reach is None and call.sees_to is None:
        view = view.within_reach(rules)
    view = with_recalled(view, asked, queries)
    out, mass = attend(view, rules, rotary, queries, mode, call, weighed)
    return Written(index, out, of_tokens(mass, view, table), queries, initial), view


def attend(
    view: TableView,
    rules: LayerRules,
    rotary: Rotary | None,
    queries: Queries,
    mode: PositionMode,
    call: AttentionCall,
    observed: ObservedColumns | None,
) -> tuple[Attended, Mass | None]:
    """What the queries read of the slots, and the attention that each slot got from the `observed` ones."""
    tokens, step = queries.shape[2], view.step
    if view.seen_until is not None and call.sees_to is not None:
        raise UsageError(
            f"{rules.policy!r} joins tokens as they come, and in a picture queries see tokens that come later; use "
            "merge=None for this text"
        )
    is_rest_wanted = rules.policy.observed_queries is None and observed is not None and observed.shape[1] < tokens
    whole = AttentionInput(
        queries,
        view.keys,
        view.values,
        view.positions,
        step.positions,
        None,
        None,
        call.scale,
        rules.visible_in(step),
        softcap=call.softcap,
        sink_logits=call.sink_logits,
        log_counts=view.log_counts,
        observed=observed,
        is_rest_wanted=is_rest_wanted,
        sees_to=call.sees_to,
        query_gain=None if rotary is None else rotary.query_gain(),
        seen_until=view.seen_until,
    )
    picks = Picks.of(view, call)
    if rotary is None:
        return kernels.attend(whole if picks is None else picked(whole, picks))
    # Distances within a sliding window are those that the model was trained on, however long the text.
    trained_length = rotary.trained_length if rules.sliding_window is None else None
    mode, places = mode.within(trained_length, rules.budget is not None), view.places
    is_normed, occupancy = whole.query_gain is not None and places is None, view.occupancy
    if rotary.table_changes_at(mode.bound(step.end, occupancy, 1)) or (
        is_normed and not mode.keeps_places(step.end, occupancy)
    ):
        occupancy = view.counted  # what is known without asking the device is too much to choose a table by
    if is_normed and not mode.keeps_places(step.end, occupancy):
        raise UsageError(
            f"positions={mode.name!r} would keep distances here, but not where tokens stand, and this model applies "
            'norms with weights after RoPE, so that its attention depends on both; use "original", or "compact" with '
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
    return _joined(whole, [each.start for each in readings], [out for out, _ in parts], [mass for _, mass in parts])


def _read(whole: AttentionInput, reading: Reading, rotary: Rotary, picks: Picks | None) -> tuple[Attended, Mass | None]:
    """What the queries of one reading read; zeros for the others of its columns."""
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


def _joined(
    whole: AttentionInput, starts: Sequence[int], pieces: Sequence[Tensor], masses: Sequence[Mass | None]
) -> tuple[Attended, Mass | None]:
    """All queries of a step: each was read in one of the pieces, and is zero in the others."""
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
