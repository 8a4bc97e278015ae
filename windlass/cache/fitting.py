"""New values for the tokens that a cut leaves, so that attention to them gives what attention to all tokens gave.

The values part of Attention Matching, Zweiger et al. 2026 (arXiv:2602.16284).
Differs: no keys are made and no biases are fitted. The queries are those of the text itself, read again behind its end;
their keys are the tokens that the policy keeps, read where the cache will read them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from windlass.cache.attend import attend
from windlass.cache.second_pass import by_member, written_beside
from windlass.cache.slot_layer import SlotLayer
from windlass.cache.table_view import TableView
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
        return (values.double() + torch.linalg.solve(square, missing)).to(values.dtype)


@dataclass(frozen=True)
class Fitting:
    """A second reading of a text, beside what a cut of it would leave.

    `layers` are those of the cache that still holds the text, `ends` the length of each row's text.
    """

    layers: Sequence[SlotLayer]
    ends: Tensor
    sums: list[LayerSums] = field(default_factory=list)

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
        outs = []
        with written_beside(layer, queries, keys, values, step, call) as (view, queries):
            is_text = ((view.positions >= 0) & (view.positions < self.ends[:, None, None]))[:, :, None]
            held = layer.store.values().float()
            beside = TableView.of(its.kept.table, its.kept.rules, step)
            kept_columns = torch.arange(queries.shape[2], device=queries.device).where(step.positions >= 0, -1)
            for own, out, mass in by_member(layer, view, queries, mode, call):
                outs.append(out)
                if is_uncut(layer, its.kept):
                    continue
                text = shares_of(mass.rows * is_text)
                _, kept = attend(beside, its.kept.rules, layer.rotary, own, mode, call, kept_columns)
                assert kept is not None, "attention that nobody observed"
                found = shares_of(kept.rows)
                is_seen = found.sum(-1, keepdim=True) > 0
                its.add(found, (text @ held).where(is_seen, 0.0))
        return torch.stack(outs, 2).flatten(1, 2)


def shares_of(mass: Tensor) -> Tensor:
    """Probabilities among some slots, of those among all; zeros where there is nothing."""
    total = mass.sum(-1, keepdim=True)
    return mass / total.where(total > 0, 1.0)


def is_uncut(layer: SlotLayer, kept: SlotLayer) -> bool:
    """Whether the cut took nothing from a layer."""
    return layer.table.is_empty or kept.table.occupancy_bound >= layer.table.occupancy_bound
