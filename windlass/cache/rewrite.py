"""Tokens that are read a second time where they stand: their keys and values are written over those that they had.

A pass reads them at their own positions, in layers that hold tokens before and behind them. What each of them sees is
decided by position: all that stands up to it, whatever was written first. In a layer that has evicted a token it is
written for the pass only, as a new token would be, and let go at its end.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from windlass import kernels
from windlass.cache.attend import attend
from windlass.cache.slot_layer import SlotLayer
from windlass.cache.table_view import TableView
from windlass.core.rotary_index import EMPTY
from windlass.core.shapes import Attended, NewKeys, NewValues, Queries, QueryPositions, SlotIndex, SlotPositions
from windlass.core.step import AttentionCall, Step
from windlass.policies.calls import initial_state, preprocess
from windlass.positions.modes import PositionMode


class Standing(NamedTuple):
    """Where some tokens stand in a layer's slots, found by their positions."""

    columns: Tensor  # (batch, score_heads, slots): which of the tokens a slot holds, -1 for none
    is_held: Tensor  # (batch, score_heads, tokens): whether any slot holds it

    @classmethod
    def of(cls, slots: SlotPositions, tokens: QueryPositions) -> "Standing":
        """Of the tokens at these positions, EMPTY for padding."""
        ordered, order = tokens.long().sort(1)
        rows, heads = slots.shape[:2]
        ordered, order = (each[:, None].expand(-1, heads, -1).contiguous() for each in (ordered, order))
        at = slots.long().contiguous()
        found = torch.searchsorted(ordered, at).clamp(max=tokens.shape[1] - 1)
        columns = order.gather(-1, found).where((ordered.gather(-1, found) == at) & (at >= 0), -1)
        is_held = torch.zeros(rows, heads, tokens.shape[1] + 1, dtype=torch.bool, device=slots.device)
        is_held.scatter_(-1, columns.where(columns >= 0, tokens.shape[1]), True)
        return cls(columns, is_held[..., :-1])

    @property
    def slots(self) -> SlotIndex:
        """(batch, score_heads, tokens): the slot of each token that is held; 0 for another."""
        found = torch.zeros(*self.columns.shape[:2], self.is_held.shape[-1] + 1, dtype=torch.long)
        found = found.to(self.columns.device)
        every = torch.arange(self.columns.shape[-1], device=found.device).expand_as(self.columns)
        return found.scatter_(-1, self.columns.where(self.columns >= 0, found.shape[-1] - 1), every)[..., :-1]


def rewrite(
    layer: SlotLayer,
    queries: Queries,
    keys: NewKeys,
    values: NewValues,
    step: Step,
    mode: PositionMode,
    call: AttentionCall,
) -> Attended:
    """What the queries of tokens read that stand in the layer already, and now have these keys and values there.

    Its policy observes nothing, and nothing is evicted. Until `commit`, `take_back` undoes it: no byte of what the
    layer held is overwritten before then, for the tokens get free slots and leave those that they had.
    """
    before = layer.protect(step)
    layer.make_room(keys, values, is_decode=False, defer_eviction=True)
    table = layer.table
    before.table.copies.extend((tensor, tensor.clone()) for tensor in table.state.values())
    queries, standing, written = _put(layer, queries, keys, values, step, call)
    held = table.occupancy_bound
    table.occupancy_bound = held + int((~standing.is_held & (step.positions >= 0)[:, None]).sum(-1).max())
    view = TableView.of(table, layer.rules, step)
    if layer.is_shared:
        layer.views.append(view.kept())
    out, _ = attend(view, layer.rules, layer.rotary, queries, mode, call, None)
    _let_go(layer, standing, written, held)
    return out


def write_over(
    layer: SlotLayer, queries: Queries, keys: NewKeys, values: NewValues, step: Step, call: AttentionCall
) -> None:
    """Let the tokens of `step` that the layer holds have these keys and values, without a pass of the model."""
    layer.make_room(keys, values, is_decode=False, defer_eviction=True)
    held = layer.table.occupancy_bound
    _, standing, written = _put(layer, queries, keys, values, step, call)
    _let_go(layer, standing, written, held)


def _put(
    layer: SlotLayer, queries: Queries, keys: NewKeys, values: NewValues, step: Step, call: AttentionCall
) -> tuple[Queries, Standing, SlotIndex]:
    """Write the tokens of `step` into free slots, and free those that they had; returns the queries as they read."""
    table = layer.table
    queries, keys, state = preprocess(layer.configured_policy, layer.index, queries, keys, step.ids)
    state |= initial_state(layer.policy, layer.index, layer.heads, queries, keys)
    standing = Standing.of(table.positions, step.positions)
    written = kernels.first_free(table.positions, keys.shape[2])
    positions = step.positions[:, None].expand(-1, table.score_heads, -1)
    table.write(written, keys, values, positions, state, call.index_keys)
    table.positions.masked_fill_(standing.columns >= 0, EMPTY)
    return queries, standing, written


def _let_go(layer: SlotLayer, standing: Standing, written: SlotIndex, held: int) -> None:
    """Free what was written of tokens that the layer had evicted; earlier steps can't be rolled back."""
    table = layer.table
    now = table.positions.gather(-1, written)
    table.positions.scatter_(-1, written, now.where(standing.is_held, EMPTY))
    table.occupancy_bound = held
    layer.forget_steps(0)
