"""LagKV: how far keys and values spread, relative to the block of tokens that follows."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import vector_norm

from windlass import kernels
from windlass.core.errors import PolicyError
from windlass.core.shapes import Scores
from windlass.policies.base import Policy, Slots
from windlass.policies.by_position import gather_sorted, scatter_sorted

MIN_RANGE = 1e-6  # of a channel over a block: where tokens are repeated it is 0


@dataclass(frozen=True)
class LagKV(Policy):
    """Keeps the tokens whose keys and values spread most, measured by the ranges of the block that follows.

    The tokens held are cut, in the order of the text, into blocks of `lag`. The last whole block, and the tokens
    after it, have no following block: they are kept, the newest first, so give a `lag` well below the budget.
    Needs no attention weights.

    Source: LagKV, Liang et al. 2025 (arXiv:2504.04704).
    Differs: compares un-rotated keys. The paper thins each block once, by a fixed share; here the
    blocks are cut anew whenever tokens are evicted, whatever was evicted before, and of equal ranks in
    their blocks the token with the lower score goes first. The first block holds the sinks.
    """

    lag: int = 32

    def __post_init__(self) -> None:
        if self.lag < 2:
            raise PolicyError(f"LagKV: lag must be at least 2, got {self.lag}")

    def score(self, slots: Slots) -> Scores:
        order = kernels.argsort_positions(slots.positions)
        held = (slots.positions >= 0).sum(-1, keepdim=True)
        kept = torch.full(order.shape, self.lag + 1.0, device=order.device)
        measured = order.shape[-1] // self.lag - 1
        if measured < 1:
            return kept
        score = (self._spread(slots.keys(), order) + self._spread(slots.values(), order)) / 2
        rank = score.argsort(dim=-1, stable=True).argsort(dim=-1)
        # The score is below 1, so it decides between equal ranks only.
        ends = (torch.arange(measured, device=order.device) + 2) * self.lag
        lags = torch.where((ends <= held)[..., None], rank + score, self.lag + 1.0)
        kept[..., : measured * self.lag] = lags.flatten(2)
        return scatter_sorted(kept, order)

    def _spread(self, states: Tensor, order: Tensor) -> Tensor:
        """Shares of each whole block but the last: (batch, kv_heads, blocks - 1, lag)."""
        blocks = order.shape[-1] // self.lag
        x = gather_sorted(states, order[..., : blocks * self.lag]).float().unflatten(2, (blocks, self.lag))
        low, high = x[:, :, 1:].amin(3, keepdim=True), x[:, :, 1:].amax(3, keepdim=True)
        relative = (x[:, :, :-1] - low).div_((high - low).clamp(min=MIN_RANGE))
        # torch's own `std` takes longer than all the rest.
        relative -= relative.mean(-1, keepdim=True)
        deviations: Tensor = vector_norm(relative, dim=-1) / (relative.shape[-1] - 1) ** 0.5
        return deviations.softmax(-1)
