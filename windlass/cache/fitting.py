"""New values for the tokens that a cut leaves, so that attention to them gives what attention to all tokens gave.

The values part of Attention Matching, Zweiger et al. 2026 (arXiv:2602.16284).
Differs: no keys are made and no biases are fitted. The queries are those of the text itself, read again behind its end;
their keys are the tokens that the policy keeps, read where the cache will read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from windlass.cache.second_pass import by_member, second_pass, written_beside
from windlass.cache.slot_layer import SlotLayer
from windlass.cache.table_view import TableView
from windlass.core.attention import Mass
from windlass.core.shapes import Attended, NewKeys, NewValues, Queries, SlotValues
from windlass.core.step import AttentionCall, Step
from windlass.positions.modes import PositionMode

RIDGE: Final = 1e-2  # of the mean square of a kept token's probabilities: what holds a value to what it was


@dataclass
class LayerSums:
    """What the queries of the second reading found in one layer, summed.

    `square` (batch, kv_heads, n, n) are products of the probabilities of the n slots of the layer that was cut, each
    with each; `missing` (batch, kv_heads, n, channels) products with what attention to them lacks of what it was.
    """

    kept: SlotLayer
    square: Tensor | None = None
    missing: Tensor | None = None

    def add(self, shares: Tensor, wanted: Tensor) -> None:
        """Queries (batch, kv_heads, queries, n) with what they read before the cut; zeros for a query that is none."""
        lacking = wanted - shares @ self.kept.store.values().float()
        square, missing = shares.mT @ shares, shares.mT @ lacking
        self.square = square if self.square is None else self.square.add_(square)
        self.missing = missing if self.missing is None else self.missing.add_(missing)

    def values(self) -> SlotValues:
        """The values nearest to what they were that make the sum of all squared errors, of outputs and values, least.

        So the outputs' error is never more than before, and slots that no query saw stay as they are.
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
    """A second reading of a text, beside what a cut of it would leave.

    `layers` are those of the cache that still holds the text, `ends` the length of each row's text. `sums` has None for
    a layer from which the cut takes nothing.
    """

    layers: Sequence[SlotLayer]
    ends: Tensor
    sums: Sequence[LayerSums | None]

    @classmethod
    def beside(cls, layers: Sequence[SlotLayer], cut: Sequence[SlotLayer], ends: Tensor) -> Fitting:
        """Before the text is read again; `cut` are copies of `layers`, after the cut."""
        pairs = zip(layers, cut, strict=True)
        return cls(layers, ends, [LayerSums(kept) if _is_cut(layer, kept) else None for layer, kept in pairs])

    def second_pass(
        self,
        layer: SlotLayer,
        queries: Queries,
        keys: NewKeys,
        values: NewValues,
        step: Step,
        mode: PositionMode,
        call: AttentionCall,
    ) -> Attended:
        """What the queries read, as in `windlass.cache.second_pass`; what they find in the cut layer is summed."""
        its = next(sums for own, sums in zip(self.layers, self.sums, strict=True) if own is layer)
        if its is None:
            return second_pass(layer, queries, keys, values, step, mode, call)
        outs, kept, new = [], its.kept, (queries, keys, values)
        with (
            written_beside(layer, *new, step, call) as (view, own),
            written_beside(kept, *new, step, call) as (kept_view, _),
        ):
            pairs = zip(
                by_member(layer, view, own, mode, call), by_member(kept, kept_view, own, mode, call), strict=True
            )
            for (out, mass), (_, kept_mass) in pairs:
                outs.append(out)
                text, found = self._shares(view, mass), self._shares(kept_view, kept_mass)
                is_seen = found.sum(-1, keepdim=True) > 0
                its.add(found, (text @ layer.store.values().float()).where(is_seen, 0.0))
        kept.commit()
        return torch.stack(outs, 2).flatten(1, 2)

    def _shares(self, view: TableView, mass: Mass) -> Tensor:
        """What each query gives the slots of the text, of all that it gives them; zeros where that is nothing."""
        is_text = (view.positions >= 0) & (view.positions < self.ends[:, None, None])
        rows = mass.rows * is_text[:, :, None]
        total = rows.sum(-1, keepdim=True)
        return rows / total.where(total > 0, 1.0)


def _is_cut(layer: SlotLayer, kept: SlotLayer) -> bool:
    return kept.table.occupancy_bound < layer.table.occupancy_bound
