"""Another policy's rank times the norm of the token's value."""

from dataclasses import dataclass

import torch

from windlass import kernels
from windlass.core.types import Scores
from windlass.policies.base import Slots, scatter_sorted
from windlass.policies.wrapper import Wrapper


@dataclass(frozen=True)
class ByValueNorm(Wrapper):
    """Ranks by another policy, times the norm of the token's value: what it can add to the output.

    Source: VATP, Guo et al. 2024 (arXiv:2406.12335).
    Differs: any policy in place of attention. A score may be negative and of any scale, so the rank among the
    tokens held, as a share of them, is taken in its place. The L2 norm, as in Expected Attention, not
    L1; its mean over the heads where all of them rank alike.
    """

    def score(self, slots: Slots) -> Scores:
        order = kernels.argsort_positions(slots.positions)
        held = (slots.positions >= 0).sum(-1, keepdim=True)
        ranks = torch.arange(order.shape[-1], device=order.device)
        score = self.policy.score(slots).float().nan_to_num(nan=-torch.inf).gather(-1, order)
        rank = score.masked_fill(ranks >= held, -torch.inf).argsort(dim=-1, stable=True).argsort(dim=-1)
        free = order.shape[-1] - held
        share = (rank + 1 - free).clamp(min=0) / held.clamp(min=1)
        norms = slots.values().float().norm(dim=-1)
        weighed: Scores = scatter_sorted(share, order) * (norms if self.needs.per_head else norms.mean(1, keepdim=True))
        return weighed
