"""TriAttention: the attention of the mean query to each key, averaged over growing distances."""

from dataclasses import dataclass

import torch
from torch import Tensor

from windlass.core.errors import PolicyError
from windlass.core.types import Scores
from windlass.policies.base import LayersAsRows, Needs, Observation, Policy, Slots
from windlass.policies.expected_attention import head_products, is_from, rotate_ahead, update_means


@dataclass(frozen=True)
class TriAttention(Policy, LayersAsRows):
    """Keeps the tokens that the mean query attends to most, over distances that grow up to `reach`.

    Each channel pair rotates with the distance at its own speed, so the mean query and a key give the attention
    at every distance. It is averaged over the next 1, 2, 4, 8 ... positions. Where queries scatter around their
    mean, the length of the key counts as well.

    Source: Mao et al. 2026 (arXiv:2604.04921).
    Differs: the means are those of the text itself, as queries come, not of another text beforehand. With a number, the
    last `observed_queries` of a step stand for all of it. Each layer and kv head ranks alone: scores of its
    query heads are standardised over the tokens held, and the highest counts. Prompts are thinned too.
    Channels that do not rotate add the product of their means. Distances are those of the text.
    """

    reach: int = 65536
    observed_queries: int | None = None

    needs = Needs(statistics=("count", "mean", "lengths"), mass=False)

    def __post_init__(self) -> None:
        for name, value in (("reach", self.reach), ("observed_queries", self.observed_queries)):
            if value is not None and value < 1:
                raise PolicyError(f"TriAttention: {name} must be at least 1, got {value}")

    def observe(self, slots: Slots, observation: Observation) -> None:
        queries = observation.queries.float()
        new = {"mean": queries, "lengths": _lengths(queries, _angles(slots, queries))}
        update_means(slots.statistics, is_from(observation, 0), new)

    def score(self, slots: Slots) -> Scores:
        keys, mean = slots.keys().float(), slots.statistics["mean"][:, :, None]
        rotation, angles = slots.step_angles(), _angles(slots, keys)
        # The model scales both the query and the key when it rotates them.
        scale: float | Tensor = 1.0 if rotation is None else rotation[0].square() + rotation[1].square()
        if (gain := slots.query_gain()) is not None:
            # Of a pair's two gains, over all angles only the mean counts.
            scale = scale * gain[: 2 * len(angles)].unflatten(0, (2, -1)).mean(0)
        scatter = scale * (slots.statistics["lengths"][:, :, None] - _lengths(mean, angles))
        logits = head_products(scatter, _lengths(keys, angles))
        ahead = mean if rotation is None else rotate_ahead(slots, mean, *self._mean_rotation(angles))
        logits = logits + head_products(ahead, slots.rotated_keys().float())
        return _standardised(logits, (slots.positions >= 0)[:, :, None]).amax(2)

    def _mean_rotation(self, angles: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cos and sin of the rotations by 1, 2, 4, 8 ... positions, up to `reach`."""
        offsets = 2 ** torch.arange(self.reach.bit_length(), device=angles.device)
        rotations = offsets[:, None] * angles.double()
        return rotations.cos().mean(0).float(), rotations.sin().mean(0).float()


def _angles(slots: Slots, states: Tensor) -> Tensor:
    """The angle by which each channel pair rotates from one position to the next."""
    rotation = slots.step_angles()
    if rotation is None:
        return torch.zeros(states.shape[-1] // 2, device=states.device)
    return torch.atan2(rotation[1], rotation[0])


def _lengths(states: Tensor, angles: Tensor) -> Tensor:
    """The length of each channel pair, of which there are as many as angles."""
    pairs = angles.shape[0]
    return torch.hypot(states[..., :pairs], states[..., pairs : 2 * pairs])


def _standardised(scores: Tensor, is_counted: Tensor) -> Tensor:
    """Scores of mean 0 and variance 1 over the slots that count."""
    count = is_counted.sum(-1, keepdim=True).clamp(min=1)
    left = scores - (scores * is_counted).sum(-1, keepdim=True) / count
    variance = (left.square() * is_counted).sum(-1, keepdim=True) / count
    return left / variance.sqrt().clamp(min=1e-6)
