"""Tokens that are written into a layer without a pass of the model."""

from torch import Tensor

from windlass import kernels
from windlass.cache.slot_layer import SlotLayer
from windlass.core.shapes import NewKeys, NewValues, SlotIndex
from windlass.core.step import HEADROOM
from windlass.stores.base import Parts


def append(
    layer: SlotLayer, keys: NewKeys, values: NewValues, positions: Tensor, state: Parts | None = None
) -> SlotIndex:
    """Write tokens that attend to nothing, at (batch, score_heads, tokens) `positions`; returns the slots they got.

    `state` is what they start with; None: what a step gives them. What exceeds the budget is evicted at the next step.
    """
    layer.make_room(keys, values, is_decode=keys.shape[2] <= HEADROOM, defer_eviction=False)
    positions = positions.expand(-1, layer.table.score_heads, -1)
    written = kernels.first_free(layer.positions, keys.shape[2])
    if state is None:
        state = layer.table.remember(keys, values, positions[:, 0], (positions[:, 0] >= 0).sum(-1).tolist())
    layer.table.write(written, keys, values, positions, state)
    layer.table.occupancy_bound += int((positions >= 0).sum(-1).max())
    layer.forget_steps(0)
    return written
