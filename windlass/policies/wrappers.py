"""Policies that change how another policy ranks; it keeps its state and observes what it observed."""

from abc import ABC
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from windlass import kernels
from windlass.core.errors import PolicyError
from windlass.core.shapes import NewKeys, Queries, Scores
from windlass.policies.along_text import to_slots
from windlass.policies.base import Arrival, Observation, Policy, Slots


@dataclass(frozen=True)
class Wrapper(Policy, ABC):
    """A policy around another one, with what that one declares."""

    policy: Policy

    def __post_init__(self) -> None:
        if not isinstance(self.policy, Policy):
            raise PolicyError(f"{type(self).__name__}: policy must be another policy, got {self.policy!r}")
        for name in ("state", "statistics", "per_head", "observed_queries", "is_one_shot", "shares_budget", "repeat"):
            # Declared per class elsewhere; here it depends on what is wrapped.
            object.__setattr__(self, name, getattr(self.policy, name))

    def check(self, model: PreTrainedModel) -> None:
        self.policy.check(model)

    def budgets(self, budget: int, layers: int, least: int) -> list[int]:
        return self.policy.budgets(budget, layers, least)

    def arrive(self, queries: Queries, keys: NewKeys) -> Arrival:
        return self.policy.arrive(queries, keys)

    def observe(self, slots: Slots, seen: Observation) -> None:
        self.policy.observe(slots, seen)


@dataclass(frozen=True)
class ByValueNorm(Wrapper):
    """Ranks by another policy, times the norm of the token's value: what it can add to the output.

    Source: VATP, Guo et al. 2024 (arXiv:2406.12335).
    Differs: any policy in place of attention, so the rank among the tokens held, as a share of them, in
    place of the score, which may be negative and of any scale. The L2 norm, as in Expected Attention, not
    L1; its mean over the heads where all of them rank alike.
    """

    def score(self, slots: Slots) -> Scores:
        order = kernels.text_order(slots.positions)
        held = (slots.positions >= 0).sum(-1, keepdim=True)
        places = torch.arange(order.shape[-1], device=order.device)
        score = self.policy.score(slots).float().nan_to_num(nan=-torch.inf).gather(-1, order)
        rank = score.masked_fill(places >= held, -torch.inf).argsort(dim=-1, stable=True).argsort(dim=-1)
        free = order.shape[-1] - held
        share = (rank + 1 - free).clamp(min=0) / held.clamp(min=1)
        norms = slots.values().float().norm(dim=-1)
        weighed: Scores = to_slots(share, order) * (norms if self.per_head else norms.mean(1, keepdim=True))
        return weighed


@dataclass(frozen=True)
class Smoothed(Wrapper):
    """Ranks by a mean over the steps of another policy's scores, older ones fading by `decay` a step.

    A token's first score counts in full. Steps that evict nothing are not scored.

    Source: G-KV, 2025 (arXiv:2512.00504): scores that survive from one eviction to the next.
    Differs: a mean that forgets, of any policy's scores, at every step.
    """

    decay: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.decay < 1:
            raise PolicyError(f"Smoothed: decay must be at least 0 and below 1, got {self.decay}")
        if "smoothed" in self.policy.state:
            raise PolicyError(f"Smoothed: {self.policy!r} is smoothed already; wrap the policy inside")
        object.__setattr__(self, "state", (*self.policy.state, "smoothed", "weight"))

    def score(self, slots: Slots) -> Scores:
        smoothed, weight = slots.state["smoothed"], slots.state["weight"]
        smoothed.mul_(self.decay).add_(self.policy.score(slots).float(), alpha=1 - self.decay)
        weight.mul_(self.decay).add_(1 - self.decay)
        return smoothed / weight


@dataclass(frozen=True)
class InChunks(Wrapper):
    """Ranks by the mean of another policy's scores over the tokens held of a chunk of `size` positions.

    Neighbours in the text are so kept or evicted together, and the older ones of a chunk first.

    Source: ChunkKV, Liu et al. 2025 (arXiv:2502.00299).
    Differs: a chunk is scored by those of its tokens that are still held. Layers choose for themselves.
    """

    size: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size < 1:
            raise PolicyError(f"InChunks: size must be at least 1, got {self.size}")

    def score(self, slots: Slots) -> Scores:
        order = kernels.text_order(slots.positions)
        positions = slots.positions.gather(-1, order)
        chunks = positions.div(self.size, rounding_mode="floor")
        is_start = chunks != chunks.roll(1, -1)
        index = (is_start.cumsum(-1) - 1).clamp(min=0)
        score = self.policy.score(slots).float().gather(-1, order).masked_fill(positions < 0, 0.0)
        total = torch.zeros_like(score).scatter_add_(-1, index, score)
        count = torch.zeros_like(score).scatter_add_(-1, index, torch.ones_like(score))
        return to_slots((total / count.clamp(min=1)).gather(-1, index), order)
