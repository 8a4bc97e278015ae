"""Compactor: key leverage plus attention without a causal mask, within blocks of the text."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import avg_pool1d

from windlass import kernels
from windlass.core.errors import PolicyError
from windlass.core.types import PerSlot, Scores
from windlass.policies.base import LayersAsRows, Needs, Observation, Policy, Slots, gather_sorted, scatter_sorted
from windlass.policies.leverage import Leverage

BLOCK = 256  # positions of a text that look at one another


@dataclass(frozen=True)
class Compactor(Policy, LayersAsRows):
    """Keeps keys of high leverage, and tokens that all queries around them attend to, later or earlier ones.

    The second part is attention without a causal mask among the tokens of a block of 256, summed over its queries,
    times the norm of the value, and averaged over three neighbours. `blend` is the weight of leverage. Both parts are
    in standard deviations. Sinks and window take no part in them: blocks begin after the sinks.

    Source: Compactor, Chari and Van Durme 2025 (arXiv:2507.08143).
    Differs: works at decode too. A query sees the tokens that its block holds when it comes, and `observed_queries` of
    each step are asked: a text that came in one `chunk`, and no more queries than that, is ranked as the authors' code
    does. Tokens of the window are not scored in this way. They are attended to by one another and by those before them,
    so that they have a rank when they leave the window. The paper's blend is the share of the tokens that it evicts,
    which a policy does not know here: 0.75 is that of a cut to a quarter. Its first 8 and last 4 tokens are the cache's
    `sinks` and `window`. Logits are divided by the square root of head_dim.
    Chunks: a query sees no token of a later chunk, though it is of the same block (SmolLM2, 256 slots, nats: 4.110 in
    steps of 64, 4.117 in steps of 8).
    """

    blend: float = 0.75
    observed_queries: int = 512
    sketch: int = 48

    needs = Needs(state=("attended",), mass=False)

    def __post_init__(self) -> None:
        if not 0 <= self.blend <= 1:
            raise PolicyError(f"Compactor: blend must be from 0 to 1, got {self.blend}")
        for name, value in (("observed_queries", self.observed_queries), ("sketch", self.sketch)):
            if value < 1:
                raise PolicyError(f"Compactor: {name} must be at least 1, got {value}")

    def observe(self, slots: Slots, observation: Observation) -> None:
        order = kernels.argsort_positions(slots.positions)
        held = (slots.positions >= 0).sum(-1, keepdim=True)
        # The observed queries are the newest tokens, so tokens that share a block with them are new as well.
        newest = min(order.shape[-1], observation.positions.shape[1] + BLOCK)
        ranks = (held - newest).clamp(min=0) + torch.arange(newest, device=order.device)
        is_key = ranks < held
        index = order.gather(-1, ranks.clamp(max=order.shape[-1] - 1))
        at = slots.positions.gather(-1, index)
        keys = slots.rotate(gather_sorted(slots.keys(), index), at.clamp(min=0)).float()
        queries, gain = (
            slots.rotate(observation.queries, observation.positions.clamp(min=0)[:, None]),
            slots.query_gain(),
        )
        queries = (queries if gain is None else queries * gain).float()
        logits = queries.unflatten(1, (keys.shape[1], -1)) @ keys.mT[:, :, None] / keys.shape[-1] ** 0.5
        asking = observation.positions[:, None]
        blocks = [(positions - slots.sinks).div(BLOCK, rounding_mode="floor") for positions in (asking, at)]
        is_seen = (blocks[0][..., None] == blocks[1][:, :, None]) & (is_key & (at >= slots.sinks))[:, :, None]
        is_seen &= (asking >= slots.sinks)[..., None]
        window_starts = (slots.next_positions - slots.window)[:, None, None]
        is_older, is_older_query = at < window_starts, asking < window_starts
        is_older_seen = is_seen & is_older[:, :, None] & is_older_query[..., None]
        votes = _votes(logits, is_seen).where(~is_older, _votes(logits, is_older_seen))
        slots.state["attended"].scatter_add_(-1, index, votes)

    def score(self, slots: Slots) -> Scores:
        window_starts = (slots.next_positions - slots.window)[:, None, None]
        # Free slots have negative positions.
        is_ranked = (slots.positions >= slots.sinks) & (slots.positions < window_starts)
        order = kernels.argsort_positions(slots.positions)
        leverage = Leverage(self.sketch).score_among(slots, is_ranked).gather(-1, order)
        weighed = (slots.state["attended"] * slots.values().float().norm(dim=-1)).where(is_ranked, 0.0)
        is_ranked = is_ranked.gather(-1, order)
        near = avg_pool1d(is_ranked.float(), 3, stride=1, padding=1)
        evened = avg_pool1d(weighed.gather(-1, order), 3, stride=1, padding=1) / near.clamp(min=1 / 3)
        return scatter_sorted(self.blend * _deviation(leverage, is_ranked) + _deviation(evened, is_ranked), order)


def _votes(logits: Tensor, is_seen: Tensor) -> PerSlot:
    """Attention of the queries (batch, kv_heads, group, queries, keys) to each key that they see."""
    shares = logits.masked_fill(~is_seen[:, :, None], -torch.inf).softmax(-1).nan_to_num(nan=0.0)
    return shares.sum((2, 3))


def _deviation(score: Tensor, is_ranked: Tensor) -> Tensor:
    """Each ranked score less the mean, in standard deviations: 0 where all are equal, and for unranked entries."""
    ranked = is_ranked.sum(-1, keepdim=True)
    apart = (score.double() - (score.double() * is_ranked).sum(-1, keepdim=True) / ranked.clamp(min=1)) * is_ranked
    deviation = (apart.square().sum(-1, keepdim=True) / (ranked - 1).clamp(min=1)).sqrt()
    found: Tensor = (apart / deviation.where(deviation > 0, 1.0)).float()
    return found
