"""Tokens that join the one before them as they come, where the policy says so: memory grows by fewer than are read.

A token that joins is written as the weighted mean of its run up to it. A query so finds its own run as far as it has
come, and of every earlier run its last token alone. The others are let go when the step ends.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from windlass.cache.history import History
from windlass.cache.rules import LayerRules
from windlass.cache.slot_table import SlotTable
from windlass.cache.table_view import TableView
from windlass.core.limits import MAX_NUMBER
from windlass.core.record import StepRecord
from windlass.core.rotary_index import EMPTY, RESERVED
from windlass.core.shapes import NewKeys, NewValues, QueryPositions, SlotIndex, SlotPositions
from windlass.core.step import Step
from windlass.merge import MERGED
from windlass.policies.base import ACCUMULATES
from windlass.stores.base import Parts


class NewTokens(NamedTuple):
    """A step's tokens as they are written: keys, values, and the state that they start with."""

    keys: NewKeys
    values: NewValues
    initial: Parts


def joined(table: SlotTable, rules: LayerRules, step: Step, new: NewTokens) -> NewTokens:
    """The step's tokens, those that join as the mean of their run up to them; `initial` says which did.

    Sinks are joined by none, nor is a token that is gone: the next one begins a run.
    """
    merge, kv_heads = rules.merge, new.keys.shape[1]
    assert merge is not None, "tokens that join without a rule of merging"
    order, back = _text_order(step.positions)
    sinks = rules.limits.sinks if step.sinks is None else step.sinks.tensor[:, None]
    joins = (new.initial[ACCUMULATES] > 0) & (step.positions > sinks)[:, None]
    joins = _columns(joins, order)
    newest, is_held = _newest(table.positions, step.positions)
    joins[..., :1] &= is_held
    # In the order of the text; what the layer holds comes first, though it may belong to no run of this step.
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
    return NewTokens(keys, values, new.initial | initial | {ACCUMULATES: _columns(joins, back).float()})


def view_joined(view: TableView, written: SlotIndex, initial: Parts) -> TableView:
    """What the queries of a step find: of each run the last token up to their own."""
    (newest, newest_at), (own, own_at) = _let_go(view.positions, written, view.step.positions, initial[ACCUMULATES])
    positions = view.positions.scatter(-1, newest, view.positions.gather(-1, newest).where(newest_at < 0, EMPTY))
    if view.step.positions.shape[1] == 1:
        return replace(view, positions=positions)
    until = torch.full_like(positions, MAX_NUMBER)
    until.scatter_(-1, own, own_at.where(own_at >= 0, MAX_NUMBER))
    return replace(view, positions=positions, seen_until=until)


def let_go(table: SlotTable, rules: LayerRules, record: StepRecord) -> StepRecord:
    """Reserve the slots of tokens that newer ones of the step took in; returns the record with what was there."""
    if not rules.joins or record.written.shape[-1] == 0:
        return record
    gone = _let_go(table.positions, record.written, record.step.positions, record.initial_state[ACCUMULATES])
    for index, positions in gone:
        now = table.positions.gather(-1, index)
        table.positions.scatter_(-1, index, now.masked_fill(positions >= 0, RESERVED))
    return replace(record, taken_in=gone)


def slots_wanted(
    table: SlotTable,
    rules: LayerRules,
    history: History,
    tokens: int,
    reserve_hint: int,
    longest_decode: int,
    defer_eviction: bool,
) -> int:
    """Slots that a layer should have before `tokens` more come; see `LayerRules.slots_for`.

    Where tokens join and no budget limits them, the device is asked how many slots are in use, once when decode
    begins, and then before the layer grows.
    """
    if not rules.joins or rules.budget is not None or table.is_empty:
        hint = 0 if rules.joins else reserve_hint
        return rules.slots_for(tokens, table.slots, table.occupancy_bound, hint, longest_decode, defer_eviction)
    begins = longest_decode > 0 and bool(history.records) and not history.records[-1].step.is_decode
    wanted = rules.slots_for(tokens, table.slots, table.occupancy_bound, 0, longest_decode, False)
    if wanted <= table.slots and not begins:
        return wanted
    table.occupancy_bound = int((table.positions != EMPTY).sum(-1).max())  # what is reserved may be in use again
    return rules.slots_for(tokens, 0 if begins else table.slots, table.occupancy_bound, 0, longest_decode, False)


def _let_go(
    slots: SlotPositions, written: SlotIndex, positions: QueryPositions, joins: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """The slots whose tokens were taken in, with their positions, EMPTY where none was: held before, then written."""
    order, back = _text_order(positions)
    joins = _columns((joins > 0) & (positions >= 0)[:, None], order)  # of a step that was cut, some are padding now
    newest, _ = _newest(slots, positions)
    before = slots.gather(-1, newest).where(joins[..., :1], EMPTY)
    own = positions[:, None].expand_as(written).to(slots.dtype)
    follows = _columns(pad(joins[..., 1:], (0, 1)), back)
    return (newest, before), (written, own.where(follows, EMPTY))


def _newest(slots: SlotPositions, positions: QueryPositions) -> tuple[SlotIndex, Tensor]:
    """The slot of the token before the first of `positions`, (batch, score_heads, 1), and whether there is one.

    Where it is gone, slot 0. Of tokens that share a position, after an edit, the latest.
    """
    first = positions.where(positions >= 0, MAX_NUMBER).amin(1)[:, None, None]
    at = torch.arange(slots.shape[-1], device=slots.device)
    newest = at.where((slots == first - 1) & (slots >= 0), -1).amax(-1, keepdim=True)
    return newest.clamp(min=0), newest >= 0


def _text_order(positions: QueryPositions) -> tuple[Tensor, Tensor]:
    """The columns of a step in the order of the text, padding last; and the way back."""
    order = (positions < 0).to(torch.uint8).argsort(dim=1, stable=True)
    return order, order.argsort(dim=1)


def _columns(states: Tensor, order: Tensor) -> Tensor:
    """The columns of `states`, (batch, heads, tokens) or (batch, heads, tokens, channels), in `order`."""
    if order.shape[1] == 1:
        return states
    index = order[:, None] if states.dim() == 3 else order[:, None, :, None]
    return states.gather(2, index.expand_as(states))


class _Runs:
    """Tokens in the order of the text, each of which begins a run, (batch, score_heads, n), or goes on with one."""

    def __init__(self, is_first: Tensor) -> None:
        at = torch.arange(is_first.shape[-1], device=is_first.device)
        self._is_first, self._starts = is_first, at.where(is_first, 0).cummax(-1).values

    def sums(self, numbers: Tensor) -> Tensor:
        """Of each token the sum of (batch, heads, n, channels) over its run up to it, in float64."""
        total = numbers.double().cumsum(2)
        starts = self._starts.expand(-1, numbers.shape[1], -1)[..., None].expand_as(total)
        return total - (total - numbers).gather(2, starts)

    def means(self, states: Tensor, weights: Tensor) -> Tensor:
        """The weighted means over the runs; a token that begins one stays as it is, bit for bit."""
        means = self.sums(states.double() * weights) / self.sums(weights).clamp(min=1e-30)
        return states.where(self._is_first[..., None], means.to(states.dtype))
