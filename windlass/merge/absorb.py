"""One merge of a layer's evicted tokens into kept slots: first a plan, then the writes."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from windlass import kernels
from windlass.core.shapes import RowCounts, SlotIndex, SlotPositions
from windlass.merge.base import Merge, MergeBatch, TokenStates
from windlass.merge.groups import TokenGroups, group_by_target
from windlass.merge.state import MERGED
from windlass.merge.targets import COSINE_STEPS, TARGETS, Candidates, cosine_with_target
from windlass.stores.base import Parts, Store

MIN_WEIGHT: Final = 1e-30  # weights are divided by, and that of a free slot is 0


@dataclass(frozen=True)
class LayerView:
    """One layer after an eviction, as merging reads it."""

    store: Store
    positions: SlotPositions  # after the eviction
    state: dict[str, Tensor]
    next_positions: RowCounts
    sinks: int | Tensor  # (batch, 1, 1) where rows differ
    window: int
    sliding_window: int | None
    attention_chunk: int | None = None


@dataclass(frozen=True)
class SlotContent:
    """What some slots hold: the parts of their keys and values in the store, and state, both by name."""

    parts: Parts
    state: dict[str, Tensor]


@dataclass(frozen=True)
class MergePlan:
    """What a merge will write, and what is there before. It holds copies: making it changes nothing.

    `targets` names for each evicted token the slot that takes it. A token that is dropped has its own slot there:
    the eviction emptied it, so that what is written to it is never read.
    """

    targets: SlotIndex
    before: SlotContent
    after: SlotContent

    def apply(self, store: Store, state: dict[str, Tensor]) -> None:
        """Write the merged tokens into the layer's `store` and `state`, in place."""
        _write(store, state, self.targets, self.after)

    def revert(self, store: Store, state: dict[str, Tensor]) -> None:
        """Write back what the slots held before, whether `apply` was done, done in part, or not at all."""
        _write(store, state, self.targets, self.before)


def plan_merge(merge: Merge, layer: LayerView, evicted: SlotIndex, evicted_positions: SlotIndex) -> MergePlan:
    """How `merge` takes in the tokens of the slots `evicted`, which stood at `evicted_positions` (below 0: no token).

    A kept slot may take tokens unless it is a sink, in the window, or past what the model's sliding window or chunk
    shows to the next query. A token is dropped where a row and head has no such slot, where its key is too unlike its
    target's, or where it is past that itself. Changes nothing.
    """
    ends = layer.next_positions[:, None, None]
    oldest = torch.zeros_like(ends) if layer.sliding_window is None else ends - layer.sliding_window + 1
    if layer.attention_chunk is not None:
        oldest = oldest.maximum(ends - ends % layer.attention_chunk)
    is_target = (layer.positions >= layer.sinks) & (layer.positions >= oldest)
    is_target &= layer.positions < ends - layer.window
    is_merged = (evicted_positions >= 0) & (evicted_positions >= oldest) & is_target.any(-1, keepdim=True)
    positions = layer.positions.scatter(-1, evicted, evicted_positions)
    candidates = Candidates(layer.store.keys(), positions, is_target, evicted)
    targets = TARGETS[merge.target](candidates)
    if merge.threshold > -1:
        is_merged &= cosine_with_target(candidates.keys, evicted, targets) >= merge.threshold - 1 / COSINE_STEPS
    groups = group_by_target(targets.where(is_merged, evicted), is_merged, is_target.shape[-1])
    return _plan_of(merge, layer, candidates, groups)


def _plan_of(merge: Merge, layer: LayerView, candidates: Candidates, groups: TokenGroups) -> MergePlan:
    keys, values, evicted, targets = candidates.keys, layer.store.values(), candidates.evicted, groups.targets
    heads, head_dim = keys.shape[1], keys.shape[3]
    adds = {MERGED: layer.state[MERGED] + 1}
    if merge.weighs_by is not None:
        adds[merge.weighs_by] = layer.state[merge.weighs_by].clamp(min=MIN_WEIGHT)
    weights = adds[merge.weighs_by or MERGED]

    def states_at(index: SlotIndex, scale: Tensor | float) -> TokenStates:
        states = torch.cat((kernels.read(keys, index), kernels.read(values, index)), -1).float()
        slot_weights = (weights.gather(-1, index) * scale).expand(-1, heads, -1)[..., None]
        return TokenStates(states, slot_weights, candidates.positions.gather(-1, index).expand(-1, heads, -1))

    batch = MergeBatch(states_at(targets, 1.0), states_at(evicted, groups.is_merged), groups.expand(heads))
    merged = merge.combine(batch)
    parts = layer.store.parts_of(merged[..., :head_dim].to(keys.dtype), merged[..., head_dim:].to(values.dtype))
    state = {name: layer.state[name].gather(-1, targets) for name in adds}
    grown = {name: state[name] + groups.sum(adds[name].gather(-1, evicted)) for name in adds}
    return MergePlan(targets, SlotContent(layer.store.take_all(targets), state), SlotContent(parts, grown))


def _write(store: Store, state: dict[str, Tensor], targets: SlotIndex, content: SlotContent) -> None:
    # Tokens of one group write the same numbers to the same slot, so the order does not matter.
    store.put(targets, content.parts, [(state[name], new) for name, new in content.state.items()])
