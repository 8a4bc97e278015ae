"""What later queries will attend to, if they are like those seen so far."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from windlass.core.errors import PolicyError
from windlass.core.shapes import Scores
from windlass.policies.base import Observation, Policy, Slots
from windlass.policies.query_means import carried, counted, products, take_in


@dataclass(frozen=True)
class ExpectedAttention(Policy):
    """Keeps the tokens that queries at the next `future` positions are expected to attend to.

    Queries are taken to be normally distributed. Their mean and covariance are measured before rotation,
    over the whole text so far, per query head, then turned to the mean of the next positions. What a token
    is expected to get is weighed by the norm of its value, `epsilon` added first: more of it, and the norm
    counts for more. Without `has_covariance` the mean query alone decides, for a fraction of the work.

    Source: Devoto et al. 2025 (arXiv:2510.00636).
    Differs: works at decode too, as queries come. The last `observed_queries` of a step stand for all of
    it. As in the authors' code the first `skipped` positions neither count as queries nor share in the
    softmax; they are kept. Logits are divided by the square root of head_dim, whatever the model does, and
    distances are those of the text, whatever the cache reads at. The score is a logarithm.
    """

    future: int = 512
    observed_queries: int = 256
    skipped: int = 4
    has_covariance: bool = True
    epsilon: float = 0.0

    statistics: ClassVar[tuple[str, ...]] = ("count", "mean", "covariance")

    def __post_init__(self) -> None:
        for name, value in (("future", self.future), ("observed_queries", self.observed_queries)):
            if value < 1:
                raise PolicyError(f"ExpectedAttention: {name} must be at least 1, got {value}")
        for name, least in (("skipped", self.skipped), ("epsilon", self.epsilon)):
            if not least >= 0:
                raise PolicyError(f"ExpectedAttention: {name} must be at least 0, got {least}")

    def observe(self, slots: Slots, seen: Observation) -> None:
        queries, is_counted = seen.queries.float(), counted(seen, self.skipped)
        mean = slots.statistics.get("mean", torch.zeros_like(queries[:, :, 0]))
        covariance = slots.statistics.get("covariance")
        take_in(slots.statistics, is_counted, {"mean": queries})
        if not self.has_covariance:
            return
        # Welford's: what the old mean leaves, times what the new one leaves.
        old = (queries - mean[:, :, None]).masked_fill(~is_counted, 0.0)
        new = (queries - slots.statistics["mean"][:, :, None]).masked_fill(~is_counted, 0.0)
        products, added = old.mT @ new, is_counted.sum(2, keepdim=True)
        if covariance is None:
            covariance = torch.zeros_like(products)
        change = (products - added * covariance) / slots.statistics["count"][..., None].clamp(min=1)
        slots.statistics["covariance"] = covariance + change

    def score(self, slots: Slots) -> Scores:
        keys = slots.rotated_keys().float()
        head_dim = keys.shape[-1]
        mean = slots.statistics["mean"][:, :, None]
        turn = slots.one_turn()
        if turn is not None:
            mean = carried(slots, mean, *self._mean_turn(*turn))
        logits = products(mean, keys) / head_dim**0.5
        if self.has_covariance:
            covariance = slots.statistics["covariance"]
            if turn is not None:
                for _ in range(2):  # rows, then columns
                    covariance = carried(slots, covariance, *self._mean_turn(*turn)).mT
            # As in `products`, the heads of a kv head side by side.
            side_by_side = covariance.unflatten(1, (keys.shape[1], -1)).transpose(2, 3).flatten(3)
            spread = (keys @ side_by_side).unflatten(-1, (-1, head_dim)).mul_(keys.unsqueeze(3)).sum(-1)
            logits = logits + spread.mT / (2 * head_dim)
        least, takes_part = torch.finfo(torch.float32).min, slots.positions >= self.skipped
        shares = logits.masked_fill(~takes_part[:, :, None], least).log_softmax(-1)
        expected = shares.logsumexp(2) - math.log(shares.shape[2])
        if self.epsilon:
            expected = torch.logaddexp(expected, torch.full_like(expected, math.log(self.epsilon)))
        score = expected + slots.values().float().norm(dim=-1).log()
        top = score.masked_fill(~takes_part, least).amax(-1, keepdim=True)
        return torch.where(takes_part, score, top + 1)

    def _mean_turn(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The mean of the turns by 1, 2, ... `future` positions, out of that by one."""
        half = torch.atan2(sin, cos).double() / 2
        sines = half.sin()
        size = torch.where(sines == 0, 1.0, (self.future * half).sin() / (self.future * sines))
        angle = (self.future + 1) * half
        return (size * angle.cos()).float(), (size * angle.sin()).float()
