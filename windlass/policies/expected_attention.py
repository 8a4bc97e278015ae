"""Expected Attention: the attention of later queries, predicted from the queries so far."""

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.linalg import vector_norm

from windlass import kernels
from windlass.core.errors import PolicyError
from windlass.core.positions import rotate
from windlass.core.types import Scores, SlotKeys
from windlass.policies.base import LayersAsRows, Needs, Observation, Policy, Slots

COUNT: Final = "count"  # statistics: number of queries in the means of each row


def is_from(observation: Observation, start: int) -> Tensor:
    """Which of the observed queries have position `start` or a later one: (batch, 1, tokens, 1)."""
    return (observation.positions >= start)[:, None, :, None]


def update_means(statistics: dict[str, Tensor], is_counted: Tensor, new: dict[str, Tensor]) -> None:
    """Update the running means named in `new` by these states (batch, heads, tokens, channels), and `COUNT`.

    A mean is (batch, heads, channels), and 0 before anything was counted.
    """
    added = is_counted.sum(2).float()
    before = statistics[COUNT] if statistics else torch.zeros_like(added)
    count = before + added
    for name, states in new.items():
        total = states.masked_fill(~is_counted, 0.0).sum(2)
        mean = statistics[name] if statistics else torch.zeros_like(total)
        new[name] = mean + (total - added * mean) / count.clamp(min=1)
    statistics.update({**new, COUNT: count})


def rotate_ahead(slots: Slots, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """States (batch, heads, n, head_dim) rotated to each row's newest position, and from there by cos and sin.

    With means of several cosines and sines, the mean of the states rotated by as many angles.
    """
    newest = (slots.next_positions - 1).clamp(min=0)[:, None, None]
    return slots.rotate(rotate(states, cos, sin), newest)


def head_products(states: Tensor, keys: SlotKeys) -> Tensor:
    """Every head's state (batch, heads, 1, channels) times the keys of its kv head: (batch, kv_heads, group, slots).

    In one product for a kv head: one for each of its heads would copy the keys as often.
    """
    found: Tensor = states.squeeze(2).unflatten(1, (keys.shape[1], -1)) @ keys.mT
    return found


@dataclass(frozen=True)
class ExpectedAttention(Policy, LayersAsRows):
    """Keeps the tokens that queries at the next `future` positions are expected to attend to.

    Queries are taken to be normally distributed. Their mean and covariance are measured before rotation, over the whole
    text so far, per query head, then rotated to the mean of the next positions. The expected attention, plus `epsilon`,
    is multiplied by the norm of the value: with a larger `epsilon` the norm counts for more. Without `has_covariance`
    the mean query alone decides, for a fraction of the work.

    Source: Devoto et al. 2025 (arXiv:2510.00636).
    Differs: works at decode too, as queries come. With a number, the last `observed_queries` of a step stand for all of
    it. As in the authors' code the first `skipped` positions neither count as queries nor share in the softmax, but are
    kept. Logits are divided by the square root of head_dim, whatever the model does, and distances are those of the
    text, whatever the cache reads at. The score is a logarithm.
    """

    future: int = 512
    observed_queries: int | None = None
    skipped: int = 4
    has_covariance: bool = True
    epsilon: float = 0.0

    needs = Needs(statistics=("count", "mean", "covariance"), mass=False)

    def __post_init__(self) -> None:
        for name, value in (("future", self.future), ("observed_queries", self.observed_queries)):
            if value is not None and value < 1:
                raise PolicyError(f"ExpectedAttention: {name} must be at least 1, got {value}")
        for name, least in (("skipped", self.skipped), ("epsilon", self.epsilon)):
            if not least >= 0:
                raise PolicyError(f"ExpectedAttention: {name} must be at least 0, got {least}")

    def observe(self, slots: Slots, observation: Observation) -> None:
        queries, is_counted = observation.queries.float(), is_from(observation, self.skipped)
        mean = slots.statistics.get("mean", torch.zeros_like(queries[:, :, 0]))
        covariance = slots.statistics.get("covariance")
        update_means(slots.statistics, is_counted, {"mean": queries})
        if not self.has_covariance:
            return
        # Welford's update: the difference from the old mean times the difference from the new mean.
        old = (queries - mean[:, :, None]).masked_fill(~is_counted, 0.0)
        new = (queries - slots.statistics["mean"][:, :, None]).masked_fill(~is_counted, 0.0)
        if covariance is None:
            covariance = torch.zeros(*mean.shape, mean.shape[-1], device=mean.device)
        count = slots.statistics["count"][..., None].clamp(min=1)
        covariance = covariance * (1 - is_counted.sum(2, keepdim=True) / count)
        covariance.flatten(0, 1).baddbmm_((old / count).flatten(0, 1).mT, new.flatten(0, 1))
        slots.statistics["covariance"] = covariance

    def score(self, slots: Slots) -> Scores:
        keys, mean = slots.rotated_keys().float(), slots.statistics["mean"]
        cos, sin = self._turn(slots, keys.shape[-1])
        logits = None
        if self.has_covariance:
            logits = kernels.expected_logits(keys, mean, slots.statistics["covariance"], cos, sin)
        if logits is None:
            covariance = slots.statistics["covariance"] if self.has_covariance else None
            logits = expected_logits(keys, mean, covariance, cos, sin)
        least, takes_part = torch.finfo(torch.float32).min, slots.positions >= self.skipped
        shares = logits.masked_fill(~takes_part[:, :, None], least).log_softmax(-1)
        expected = shares.logsumexp(2) - math.log(shares.shape[2])
        if self.epsilon:
            expected = torch.logaddexp(expected, torch.full_like(expected, math.log(self.epsilon)))
        score = expected + vector_norm(slots.values(), dim=-1, dtype=torch.float32).log()
        top = score.masked_fill(~takes_part, least).amax(-1, keepdim=True)
        return torch.where(takes_part, score, top + 1)

    def _turn(self, slots: Slots, channels: int) -> tuple[Tensor, Tensor]:
        """Mean cos and sin (batch, pairs) of the rotations of each row to its next positions."""
        rotation, batch = slots.step_angles(), len(slots.next_positions)
        if rotation is None:
            nothing = torch.zeros(batch, 0, device=slots.next_positions.device)
            return nothing, nothing
        pairs = len(rotation[0])
        units = torch.zeros(batch, 1, 1, channels, device=slots.next_positions.device)
        units[..., :pairs] = 1
        ahead = rotate_ahead(slots, units, *self._mean_rotation(*rotation))[:, 0, 0]
        return ahead[:, :pairs].contiguous(), ahead[:, pairs : 2 * pairs].contiguous()

    def _mean_rotation(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cos and sin of the rotations by 1, 2, ... `future` positions, from those of one position."""
        half = torch.atan2(sin, cos).double() / 2
        sines = half.sin()
        size = torch.where(sines == 0, 1.0, (self.future * half).sin() / (self.future * sines))
        angle = (self.future + 1) * half
        return (size * angle.cos()).float(), (size * angle.sin()).float()


def expected_logits(keys: SlotKeys, mean: Tensor, covariance: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
    """See `kernels.expected_logits`, in plain PyTorch. Without a covariance (None) the mean query decides."""
    cos, sin, head_dim = cos[:, None, None], sin[:, None, None], keys.shape[-1]
    logits: Tensor = head_products(rotate(mean[:, :, None], cos, sin), keys) / head_dim**0.5
    if covariance is None:
        return logits
    for _ in range(2):  # rows, then columns
        covariance = rotate(covariance, cos, sin).mT
    # As in `head_products`, the heads of a kv head side by side.
    side_by_side = covariance.unflatten(1, (keys.shape[1], -1)).transpose(2, 3).flatten(3)
    spread = (keys @ side_by_side).unflatten(-1, (-1, head_dim)).mul_(keys.unsqueeze(3)).sum(-1)
    found: Tensor = logits + spread.mT / (2 * head_dim)
    return found
