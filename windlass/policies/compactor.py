"""Compactor: key leverage plus attention without a causal mask, within blocks of the text."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from windlass import kernels
from windlass.core.errors import PolicyError
from windlass.core.shapes import Scores
from windlass.policies.base import Needs, Observation, Policy, Slots
from windlass.policies.by_position import gather_sorted, scatter_sorted
from windlass.policies.leverage import Leverage

BLOCK = 256  # positions of a text that look at one another


@dataclass(frozen=True)
class Compactor(Policy):
    """Keeps keys of high leverage, and tokens that all queries around them attend to, later or earlier ones.

    The second part is attention without a causal mask among the tokens of a block of 256, summed over its queries,
    times the norm of the value, and averaged over three neighbours. `blend` is the weight of leverage. Both parts
    are in standard deviations.

    Source: Compactor, Chari and Van Durme 2025 (arXiv:2507.08143).
    Differs: works at decode too. A query sees what its block holds when it comes: give a `chunk` that is a
    multiple of 256, and no longer than `observed_queries`, for all of it. The paper's blend is the share of the
    tokens that it evicts, which a policy does not know here: 0.75 is that of a cut to a quarter. Its first 8 and
    last 4 tokens are the cache's `sinks` and `window`. Logits are divided by the square root of head_dim.
    """

    blend: float = 0.75
    observed_queries: int = 512
    sketch: int = 48

    needs = Needs(state=("attended",))

    def __post_init__(self) -> None:
        if not 0 <= self.blend <= 1:
            raise PolicyError(f"Compactor: blend must be from 0 to 1, got {self.blend}")
        for name, value in (("observed_queries", self.observed_queries), ("sketch", self.sketch)):
            if value < 1:
                raise PolicyError(f"Compactor: {name} must be at least 1, got {value}")

    def observe(self, slots: Slots, observation: Observation) -> None:
        order = kernels.argsort_positions(slots.positions)
        held = (slots.positions >= 0).sum(-1, keepdim=True)
        # The observed queries are the newest tokens, so that what shares a block with them is new, too.
        newest = min(order.shape[-1], observation.positions.shape[1] + BLOCK)
        ranks = (held - newest).clamp(min=0) + torch.arange(newest, device=order.device)
        is_key = ranks < held
        index = order.gather(-1, ranks.clamp(max=order.shape[-1] - 1))
        at = slots.positions.gather(-1, index)
        keys = slots.rotate(gather_sorted(slots.keys(), index), at.clamp(min=0)).float()
        queries = slots.rotate(observation.queries, observation.positions.clamp(min=0)[:, None]).float()
        logits = queries.unflatten(1, (keys.shape[1], -1)) @ keys.mT[:, :, None] / keys.shape[-1] ** 0.5
        blocks = [positions.div(BLOCK, rounding_mode="floor") for positions in (observation.positions, at)]
        is_seen = (blocks[0][:, None, :, None] == blocks[1][:, :, None]) & is_key[:, :, None]
        is_seen &= (observation.positions >= 0)[:, None, :, None]
        shares = logits.masked_fill(~is_seen[:, :, None], -torch.inf).softmax(-1).nan_to_num(nan=0.0)
        slots.state["attended"].scatter_add_(-1, index, shares.sum((2, 3)))

    def score(self, slots: Slots) -> Scores:
        order = kernels.argsort_positions(slots.positions)
        is_held = (slots.positions >= 0).gather(-1, order)
        weighed = (slots.state["attended"] * slots.values().float().norm(dim=-1)).gather(-1, order) * is_held
        near = avg_pool1d(is_held.float(), 3, stride=1, padding=1)
        evened = avg_pool1d(weighed, 3, stride=1, padding=1) / near.clamp(min=1 / 3)
        leverage = Leverage(self.sketch).score(slots).gather(-1, order)
        return scatter_sorted(self.blend * _deviation(leverage, is_held) + _deviation(evened, is_held), order)


def _deviation(score: Tensor, is_held: Tensor) -> Tensor:
    """Each score less their mean, in standard deviations; 0 where all are equal."""
    held = is_held.sum(-1, keepdim=True)
    apart = (score.double() - (score.double() * is_held).sum(-1, keepdim=True) / held.clamp(min=1)) * is_held
    deviation = (apart.square().sum(-1, keepdim=True) / (held - 1).clamp(min=1)).sqrt()
    found: Tensor = (apart / deviation.where(deviation > 0, 1.0)).float()
    return found
