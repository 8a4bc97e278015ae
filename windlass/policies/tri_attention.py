"""At which distances a head attends, channel pair by channel pair."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from windlass.core.errors import PolicyError
from windlass.core.shapes import Scores
from windlass.policies.base import Observation, Policy, Slots
from windlass.policies.query_means import carried, counted, products, take_in


@dataclass(frozen=True)
class TriAttention(Policy):
    """Keeps the tokens that the mean query attends to most, over distances that grow up to `reach`.

    Each channel pair turns with the distance at a speed of its own, so the mean query and a key say how
    much is attended to at every distance; that is averaged over the next 1, 2, 4, 8 ... positions. Where
    queries scatter around their mean, the length of the key counts as well.

    Source: Mao et al. 2026 (arXiv:2604.04921).
    Differs: the means are those of the text itself, as queries come, not of another text beforehand; the
    last `observed_queries` of a step stand for all of it. Each layer and kv head ranks alone: scores of its
    query heads are standardised over the tokens held, and the highest counts. Prompts are thinned too.
    Channels that do not turn add the product of their means. Distances are those of the text.
    """

    reach: int = 65536
    observed_queries: int = 256

    statistics: ClassVar[tuple[str, ...]] = ("count", "mean", "lengths")

    def __post_init__(self) -> None:
        for name, value in (("reach", self.reach), ("observed_queries", self.observed_queries)):
            if value < 1:
                raise PolicyError(f"TriAttention: {name} must be at least 1, got {value}")

    def observe(self, slots: Slots, seen: Observation) -> None:
        queries = seen.queries.float()
        new = {"mean": queries, "lengths": _lengths(queries, _angles(slots, queries))}
        take_in(slots.statistics, counted(seen, 0), new)

    def score(self, slots: Slots) -> Scores:
        keys, mean = slots.keys().float(), slots.statistics["mean"][:, :, None]
        turn, angles = slots.one_turn(), _angles(slots, keys)
        # Of both the query and the key, as the model scales what it rotates.
        scale: float | Tensor = 1.0 if turn is None else turn[0].square() + turn[1].square()
        scatter = scale * (slots.statistics["lengths"][:, :, None] - _lengths(mean, angles))
        logits = products(scatter, _lengths(keys, angles))
        ahead = mean if turn is None else carried(slots, mean, *self._mean_turn(angles))
        logits = logits + products(ahead, slots.rotated_keys().float())
        return _standardised(logits, (slots.positions >= 0)[:, :, None]).amax(2)

    def _mean_turn(self, angles: Tensor) -> tuple[Tensor, Tensor]:
        """The mean of the turns by 1, 2, 4, 8 ... positions, up to `reach`."""
        offsets = 2 ** torch.arange(self.reach.bit_length(), device=angles.device)
        turns = offsets[:, None] * angles.double()
        return turns.cos().mean(0).float(), turns.sin().mean(0).float()


def _angles(slots: Slots, states: Tensor) -> Tensor:
    """How far each channel pair turns from one position to the next."""
    turn = slots.one_turn()
    if turn is None:
        return torch.zeros(states.shape[-1] // 2, device=states.device)
    return torch.atan2(turn[1], turn[0])


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
