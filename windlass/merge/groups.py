"""Evicted tokens, grouped by the slot that takes them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.core.shapes import SlotIndex


@dataclass(frozen=True)
class TokenGroups:
    """The evicted tokens of a layer, grouped by target slot; tensors are (batch, score_heads or kv_heads, evicted).

    `targets[i]`: the slot that takes token i; its own slot where the token is dropped.
    `is_merged[i]`: whether token i is merged, not dropped.
    `representative[i]`: index of an arbitrary but fixed evicted token with the same target; group sums are
    scattered there.
    """

    targets: SlotIndex
    is_merged: Tensor
    representative: Tensor

    def expand(self, heads: int) -> "TokenGroups":
        """The same groups in all `heads`, where the policy ranks them alike."""
        return TokenGroups(
            *(each.expand(-1, heads, -1) for each in (self.targets, self.is_merged, self.representative))
        )

    def add(self, base: Tensor, states: Tensor) -> Tensor:
        """For each token, its `base` plus the sum of `states` over its group; both (batch, heads, evicted, channels).

        `base` must be the same for all tokens of a group, and `states` 0 where a token is dropped.
        """
        batch, heads, tokens, channels = base.shape
        starts = torch.arange(0, batch * heads * tokens, tokens, device=base.device).view(batch, heads, 1)
        rows = (self.representative + starts).flatten()
        total = base.reshape(-1, channels).index_add(0, rows, states.reshape(-1, channels))
        return total.index_select(0, rows).view(base.shape)

    def sum(self, numbers: Tensor) -> Tensor:
        """For each token, the sum of `numbers` (batch, heads, evicted) over the merged tokens of its group."""
        numbers = numbers * self.is_merged
        return self.add(torch.zeros_like(numbers)[..., None], numbers[..., None])[..., 0]

    def max(self, numbers: Tensor) -> Tensor:
        """For each token, the largest of `numbers` over the merged tokens of its group, or -inf."""
        largest = torch.full_like(numbers, -torch.inf)
        largest.scatter_reduce_(2, self.representative, numbers.masked_fill(~self.is_merged, -torch.inf), "amax")
        return largest.gather(2, self.representative)


def group_by_target(targets: SlotIndex, is_merged: Tensor, slots: int) -> TokenGroups:
    """The groups of evicted tokens that go to `targets`, in a layer of `slots` slots."""
    tokens = torch.arange(targets.shape[-1], device=targets.device).expand_as(targets)
    last = torch.zeros(*targets.shape[:2], slots, dtype=tokens.dtype, device=targets.device)
    return TokenGroups(targets, is_merged, last.scatter_(2, targets, tokens).gather(2, targets))
