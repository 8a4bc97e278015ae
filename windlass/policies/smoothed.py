"""A running mean of another policy's scores."""

from dataclasses import dataclass, replace

from windlass.core.errors import PolicyError
from windlass.core.types import Scores
from windlass.policies.base import Needs, Slots
from windlass.policies.wrapper import Wrapper


@dataclass(frozen=True)
class Smoothed(Wrapper):
    """Ranks by a mean over the steps of another policy's scores, older ones fading by `decay` a step.

    A token's first score counts in full. Steps that evict nothing are not scored.

    Source: G-KV, 2025 (arXiv:2512.00504): scores that survive from one eviction to the next.
    Differs: a mean that forgets, of any policy's scores, at every step.
    Chunks: scores fade by the step that evicts, so that they last for more tokens in longer chunks
    (SmolLM2, 256 slots, nats: 4.107 in steps of 64, 4.112 in steps of 8, around `KeyDiff`).
    """

    decay: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.decay < 1:
            raise PolicyError(f"Smoothed: decay must be at least 0 and below 1, got {self.decay}")
        if "smoothed" in self.policy.needs.state:
            raise PolicyError(f"Smoothed: {self.policy!r} is smoothed already; wrap the policy inside")

    @property
    def needs(self) -> Needs:  # type: ignore[override]  # what is wrapped decides
        inner = self.policy.needs
        return replace(inner, state=(*inner.state, "smoothed", "weight"))

    def score(self, slots: Slots) -> Scores:
        smoothed, weight = slots.state["smoothed"], slots.state["weight"]
        smoothed.mul_(self.decay).add_(self.policy.score(slots).float(), alpha=1 - self.decay)
        weight.mul_(self.decay).add_(1 - self.decay)
        return smoothed / weight
