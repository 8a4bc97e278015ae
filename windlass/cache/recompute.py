"""Recomputing tokens in place: rewrites, second passes, fitted values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, NoReturn, final

import torch
from torch import Tensor

from windlass import kernels
from windlass.cache.attention import attend
from windlass.cache.decode import LayerCall
from windlass.cache.layer import SlotLayer
from windlass.cache.slot_table import TableView
from windlass.core.inputs import Mass
from windlass.core.positions import EMPTY
from windlass.core.step import no_inference_mode
from windlass.core.types import (
    Attended,
    Queries,
    QueryPositions,
    SlotIndex,
    SlotPositions,
    SlotValues,
)
from windlass.policies.base import Observation
from windlass.policies.calls import initial_state, observe, preprocess
from windlass.policies.wrappers import scoring_chunk


class SlotLookup(NamedTuple):
    """The slots of some tokens in a layer, found by the tokens' positions."""

    columns: Tensor  # (batch, score_heads, slots): which of the tokens a slot holds, -1 for none
    is_held: Tensor  # (batch, score_heads, tokens): whether any slot holds it

    @classmethod
    def of(cls, slots: SlotPositions, tokens: QueryPositions) -> SlotLookup:
        """Look up the tokens at these positions, EMPTY for padding."""
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
        """(batch, score_heads, tokens): the slot of each held token, and 0 for others."""
        shape = *self.columns.shape[:2], self.is_held.shape[-1] + 1
        found = torch.zeros(shape, dtype=torch.long, device=self.columns.device)
        every = torch.arange(self.columns.shape[-1], device=found.device).expand_as(self.columns)
        return found.scatter_(-1, self.columns.where(self.columns >= 0, found.shape[-1] - 1), every)[..., :-1]


def rewrite(layer: SlotLayer, call: LayerCall) -> Attended:
    """Attention of tokens that the layer already has at their positions, after their keys and values are replaced.

    The policy observes nothing, and nothing is evicted. Until `commit`, `take_back` undoes it: the tokens are written
    to free slots and leave their old ones, whose bytes are not overwritten before then.
    """
    before, step = layer.protect(call.step), call.step
    layer.make_room(call.keys, call.values, is_decode=False, defer_eviction=True)
    table = layer.table
    before.table.copies.extend((tensor, tensor.clone()) for tensor in table.state.values())
    queries, standing, written = _put(layer, call)
    held = table.occupancy_bound
    table.occupancy_bound = held + int((~standing.is_held & (step.positions >= 0)[:, None]).sum(-1).max())
    view = TableView.of(table, layer.rules, step)
    if layer.is_shared:
        layer.views.append(view.kept())
    out, _ = attend(view, layer.rules, layer.rotary, queries, call.mode, call.attention, None)
    _free_evicted(layer, standing, written, held)
    return out


def write_over(layer: SlotLayer, call: LayerCall) -> None:
    """Replace the keys and values of those tokens of `step` that the layer holds, without a pass of the model."""
    layer.make_room(call.keys, call.values, is_decode=False, defer_eviction=True)
    held = layer.table.occupancy_bound
    _, standing, written = _put(layer, call)
    _free_evicted(layer, standing, written, held)


def _put(layer: SlotLayer, call: LayerCall) -> tuple[Queries, SlotLookup, SlotIndex]:
    """Write the tokens of `step` into free slots, and free their old slots. Returns the preprocessed queries."""
    table, step = layer.table, call.step
    queries, keys, state = preprocess(layer.configured_policy, layer.index, call.queries, call.keys, step.ids)
    state |= initial_state(layer.policy, layer.index, layer.heads, queries, keys)
    standing = SlotLookup.of(table.positions, step.positions)
    written = kernels.first_free(table.positions, keys.shape[2])
    positions = step.positions[:, None].expand(-1, table.score_heads, -1)
    table.write(written, keys, call.values, positions, state, call.attention.index_keys)
    table.positions.masked_fill_(standing.columns >= 0, EMPTY)
    return queries, standing, written


def _free_evicted(layer: SlotLayer, standing: SlotLookup, written: SlotIndex, held: int) -> None:
    """Free the new slots of tokens that the layer had evicted. Earlier steps can't be rolled back."""
    table = layer.table
    now = table.positions.gather(-1, written)
    table.positions.scatter_(-1, written, now.where(standing.is_held, EMPTY))
    table.occupancy_bound = held
    layer.forget_steps(0)


def second_pass(layer: SlotLayer, call: LayerCall) -> Attended:
    """Attention as in a step. Afterwards the layer holds the same tokens, and its policy has observed the queries."""
    step = call.step
    with written_beside(layer, call) as (view, queries):
        outs, peaks = [], []
        for out, mass in by_member(layer, view, queries, call):
            outs.append(out)
            peaks.append(mass.rows.amax(2))
        if scoring_chunk(layer.policy):
            seen = Observation(torch.stack(peaks).amax(0), queries.flip(2), step.positions.flip(1))
            observe(layer.policy, layer.index, layer.slots_at(step), seen)
    return torch.stack(outs, 2).flatten(1, 2)


@contextmanager
def written_beside(layer: SlotLayer, call: LayerCall) -> Iterator[tuple[TableView, Queries]]:
    """Hold the step's tokens beside the layer's own in this context. Yields the view of both, and the queries."""
    before, step = layer.protect(call.step), call.step
    layer.make_room(call.keys, call.values, step.is_decode, step.defer_eviction)
    table = layer.table
    before.table.copies.extend((tensor, tensor.clone()) for tensor in table.state.values())
    queries, keys, state = preprocess(layer.configured_policy, layer.index, call.queries, call.keys, step.ids)
    positions = step.positions[:, None].expand(-1, table.score_heads, -1)
    held, ring = table.occupancy_bound, table.store.full_precision.tensors
    written = kernels.first_free(table.positions, keys.shape[2])
    table.write(written, keys, call.values, positions, state, call.attention.index_keys)
    table.occupancy_bound += max(step.lengths)
    view = TableView.of(table, layer.rules, step)
    if layer.is_shared:
        layer.views.append(view.kept())
    yield view, queries
    table.free(written)
    table.occupancy_bound, table.store.full_precision.tensors = held, ring


def by_member(layer: SlotLayer, view: TableView, queries: Queries, call: LayerCall) -> Iterator[tuple[Attended, Mass]]:
    """Attention of one query head of each kv head, with the mass from each query to each slot, then of the next head.

    The query heads that share a kv head are taken one after the other, as their mass comes as a sum.
    """
    members = queries.shape[1] // layer.store.layout[0]
    columns = torch.arange(queries.shape[2], device=queries.device).where(view.step.positions >= 0, -1)
    attention = call.attention
    sinks = None if attention.sink_logits is None else attention.sink_logits.view(-1, members)
    for member in range(members):
        own = replace(attention, sink_logits=None if sinks is None else sinks[:, member])
        member_queries = queries[:, member::members]
        out, mass = attend(view, layer.rules, layer.rotary, member_queries, call.mode, own, columns)
        assert mass is not None, "attention that nobody observed"
        yield out, mass


RIDGE: Final = 1e-2  # ridge that ties a value to its old one, in mean squares of a kept token's probabilities


@dataclass
class LayerSums:
    """Sums over the queries of the second reading in one layer.

    `square` (batch, kv_heads, n, n) sums the products of the probabilities of each two of the n slots of the cut layer.
    `missing` (batch, kv_heads, n, channels) sums the products of the probabilities and the error of the cut layer's
    attention.
    """

    kept: SlotLayer
    square: Tensor | None = None
    missing: Tensor | None = None

    def add(self, shares: Tensor, wanted: Tensor) -> None:
        """Add the probabilities (batch, kv_heads, queries, n) of queries, and their attention before the cut.

        Both are 0 for padding.
        """
        lacking = wanted - shares @ self.kept.store.values().float()
        square, missing = shares.mT @ shares, shares.mT @ lacking
        self.square = square if self.square is None else self.square.add_(square)
        self.missing = missing if self.missing is None else self.missing.add_(missing)

    def values(self) -> SlotValues:
        """The values with the least sum of squared errors of the outputs and penalised squared changes of the values.

        So the outputs' error is never more than before, and slots that no query saw keep their values.
        """
        values = self.kept.store.values()
        if self.square is None or self.missing is None:
            return values
        square, missing = self.square.double(), self.missing.double()
        diagonal = square.diagonal(dim1=-2, dim2=-1)
        seen = (diagonal > 0).sum(-1).clamp(min=1)
        penalty = (RIDGE * diagonal.sum(-1) / seen).clamp(min=torch.finfo(torch.float32).tiny)
        square = square + torch.diag_embed(penalty[..., None].expand_as(diagonal))
        fitted: SlotValues = (values.double() + torch.linalg.solve(square, missing)).to(values.dtype)
        return fitted


@dataclass(frozen=True)
class Fitting:
    """A second reading of a text, beside a copy of the cache that is already cut.

    `layers` are those of the cache that still holds the text, `ends` the length of each row's text. `sums` has None for
    a layer from which the cut takes nothing.
    """

    layers: Sequence[SlotLayer]
    ends: Tensor
    sums: Sequence[LayerSums | None]

    @classmethod
    def beside(cls, layers: Sequence[SlotLayer], cut: Sequence[SlotLayer], ends: Tensor) -> Fitting:
        """A fitting for a text that is to be read again. `cut` are copies of `layers`, after the cut."""
        pairs = zip(layers, cut, strict=True)
        return cls(layers, ends, [LayerSums(kept) if _is_cut(layer, kept) else None for layer, kept in pairs])

    def second_pass(self, layer: SlotLayer, call: LayerCall) -> Attended:
        """Attention as in `windlass.cache.recompute.second_pass`, with sums over the cut layer."""
        its = next(sums for own, sums in zip(self.layers, self.sums, strict=True) if own is layer)
        if its is None:
            return second_pass(layer, call)
        outs, kept = [], its.kept
        with (
            written_beside(layer, call) as (view, own),
            written_beside(kept, call) as (kept_view, _),
        ):
            pairs = zip(by_member(layer, view, own, call), by_member(kept, kept_view, own, call), strict=True)
            for (out, mass), (_, kept_mass) in pairs:
                outs.append(out)
                text, found = self._shares(view, mass), self._shares(kept_view, kept_mass)
                is_seen = found.sum(-1, keepdim=True) > 0
                its.add(found, (text @ layer.store.values().float()).where(is_seen, 0.0))
        kept.commit()
        return torch.stack(outs, 2).flatten(1, 2)

    def _shares(self, view: TableView, mass: Mass) -> Tensor:
        """The probabilities that each query gives the slots of the text. All zeros where it sees none of them."""
        is_text = (view.positions >= 0) & (view.positions < self.ends[:, None, None])
        rows = mass.rows * is_text[:, :, None]
        total = rows.sum(-1, keepdim=True)
        return rows / total.where(total > 0, 1.0)


def _is_cut(layer: SlotLayer, kept: SlotLayer) -> bool:
    return kept.table.occupancy_bound < layer.table.occupancy_bound


class StopAtLayer(Exception):
    """Raised to end a pass at the layer whose new values are compared."""


@final
class Divergence:
    """Queries, keys and values of passes that end at attention layer `index` of the model. `layer` has its slots."""

    def __init__(self, index: int, layer: SlotLayer) -> None:
        self.index, self._layer = index, layer
        self._found: list[LayerCall] = []

    def reached(self, call: LayerCall) -> NoReturn:
        """Store the inputs of the layer. Raises: StopAtLayer, which takes the pass back."""
        queries, keys, values = (each.clone() for each in (call.queries, call.keys, call.values))
        self._found.append(call._replace(queries=queries, keys=keys, values=values))
        raise StopAtLayer

    def of_row(self, row: int) -> Tensor:
        """The squared distance of each token's new value from the held one, summed over heads, in order.

        A head that has evicted the token counts 0.
        """
        store, distances = self._layer.store, []
        held = store.values()
        for found in self._found:
            standing = SlotLookup.of(self._layer.positions, found.step.positions)
            before = kernels.read(held, standing.slots).float()
            after = found.keys[..., -store.latent :] if store.latent else found.values
            squares = (after.float() - before).square().sum(-1) * standing.is_held
            distances.append(squares.sum(1)[row, found.step.positions[row] >= 0])
        return torch.cat(distances)

    @no_inference_mode
    def keep(self) -> None:
        """Replace the layer's keys and values of all tokens by the new ones, which are those of a text read anew."""
        for found in self._found:
            write_over(self._layer, found)
