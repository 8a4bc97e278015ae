"""Policies around another one, and where to look for an interface that only some policies offer."""

from abc import ABC
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import torch

from windlass import kernels
from windlass.core.errors import PolicyError
from windlass.core.inputs import Ranking
from windlass.core.types import Scores
from windlass.policies.base import (
    Budgeter,
    KernelPolicy,
    LayersAsRows,
    ModelSpecific,
    Needs,
    Observation,
    OneShot,
    Policy,
    Recency,
    Slots,
    lexsort_ranks,
    scatter_sorted,
)

MAX_GROUP: Final = 2**16
Interface = TypeVar("Interface")


@dataclass(frozen=True)
class Wrapper(Policy, ABC):
    """A policy around another one: it needs and observes the same as the inner one, and scores in its own way."""

    policy: Policy

    def __post_init__(self) -> None:
        if not isinstance(self.policy, Policy):
            raise PolicyError(f"{type(self).__name__}: policy must be another policy, got {self.policy!r}")

    @property
    def needs(self) -> Needs:  # type: ignore[override]  # the wrapped policy decides
        return self.policy.needs

    @property
    def observed_queries(self) -> int | None:  # type: ignore[override]  # the wrapped policy decides
        return self.policy.observed_queries

    def observe(self, slots: Slots, observation: Observation) -> None:
        self.policy.observe(slots, observation)


def find(policy: Policy, interface: type[Interface]) -> Interface | None:
    """The policy that offers `interface`: this one, or else the first that does of those it wraps."""
    if isinstance(policy, interface):
        return policy
    return find(policy.policy, interface) if isinstance(policy, Wrapper) else None


def scoring_chunk(policy: Policy) -> int:
    """Tokens in each step of the second pass that a policy needs, or 0 for none."""
    one_shot = find(policy, OneShot)
    return 0 if one_shot is None else one_shot.scoring_chunk


def keeps_newest(policy: Policy) -> bool:
    """Return True if a policy keeps just the sinks and the newest tokens."""
    return isinstance(policy, Recency) and policy.keeps_newest


def changes_keys(policy: Policy) -> bool:
    """Return True if attention reads other queries and keys than the model's."""
    trained = find(policy, ModelSpecific)
    return trained is not None and type(trained).preprocess is not ModelSpecific.preprocess


def ranking_of(policy: Policy) -> Ranking | None:
    """Work of a kernel in the place of a policy's methods. None if the policy itself must be asked."""
    return policy.ranking if isinstance(policy, KernelPolicy) and "ranking" in vars(type(policy)) else None


def ranks_layers_as_rows(policy: Policy) -> bool:
    """Return True if several layers may be ranked in one call, as rows of one batch."""
    is_own = LayersAsRows in type(policy).__bases__
    return is_own and (not isinstance(policy, Wrapper) or ranks_layers_as_rows(policy.policy))


@dataclass(frozen=True)
class ByValueNorm(Wrapper, LayersAsRows):
    """Ranks by another policy, times the norm of the token's value, the most that it can add to the output.

    Source: VATP, Guo et al. 2024 (arXiv:2406.12335).
    Differs: any policy in place of attention. A score may be negative and of any scale, so the rank among the tokens
    held, as a share of them, is taken in its place. The L2 norm, as in Expected Attention, not L1. Its mean over the
    heads where all of them rank alike.
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


@dataclass(frozen=True)
class Smoothed(Wrapper, LayersAsRows):
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
            raise PolicyError(f"Smoothed: {self.policy!r} is smoothed already. Wrap the policy inside")

    @property
    def needs(self) -> Needs:  # type: ignore[override]  # the wrapped policy decides
        inner = self.policy.needs
        return replace(inner, state=(*inner.state, "smoothed", "weight"))

    def score(self, slots: Slots) -> Scores:
        smoothed, weight = slots.state["smoothed"], slots.state["weight"]
        smoothed.mul_(self.decay).add_(self.policy.score(slots).float(), alpha=1 - self.decay)
        weight.mul_(self.decay).add_(1 - self.decay)
        return smoothed / weight


@dataclass(frozen=True)
class InChunks(Wrapper, LayersAsRows):
    """Ranks by the mean of another policy's scores over the tokens held of a chunk of `size` positions.

    So neighbours in the text are kept or evicted together. A chunk that is evicted in part loses its older tokens
    first.

    Source: ChunkKV, Liu et al. 2025 (arXiv:2502.00299).
    Differs: a chunk is scored by those of its tokens that are still held. Each kv head of each layer chooses its own
    chunks, where the paper sums the scores of a layer's heads and lets neighbouring layers share a choice.
    """

    size: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size < 1:
            raise PolicyError(f"InChunks: size must be at least 1, got {self.size}")

    def score(self, slots: Slots) -> Scores:
        order = kernels.argsort_positions(slots.positions)
        positions = slots.positions.gather(-1, order)
        chunks = positions.div(self.size, rounding_mode="floor")
        is_start = chunks != chunks.roll(1, -1)
        index = (is_start.cumsum(-1) - 1).clamp(min=0)
        score = self.policy.score(slots).float().gather(-1, order).masked_fill(positions < 0, 0.0)
        total = torch.zeros_like(score).scatter_add_(-1, index, score)
        count = torch.zeros_like(score).scatter_add_(-1, index, torch.ones_like(score))
        return scatter_sorted((total / count.clamp(min=1)).gather(-1, index), order)


@dataclass(frozen=True)
class InGroups(Wrapper, LayersAsRows):
    """Shrinks groups of `group` neighbours to their newest token. The group with the lowest best score comes first.

    A group is the positions that `self_extend(group, window)` reads at one position. With `merge="mean_count(next)"` it
    becomes one merged token: every second token is merged into the next one, then every second pair, and so on. Only
    then the next group begins. So at most one group is partly merged, and no token is dropped. A group that reaches
    into the window waits. Once every group is one token, these are merged into the next one, the lowest score first.

    Source: after llama.cpp PR 5719, which merges the tokens that self-extend reads at one position.
    Differs: a policy chooses which groups and leaves the remaining ones whole. There, all groups are merged.
    """

    group: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.group <= MAX_GROUP:
            raise PolicyError(f"InGroups: group must be from 2 to {MAX_GROUP}, got {self.group}")

    def score(self, slots: Slots) -> Scores:
        order = kernels.argsort_positions(slots.positions)
        positions = slots.positions.gather(-1, order)
        score = self.policy.score(slots).float().nan_to_num(nan=-torch.inf).gather(-1, order)
        groups = positions.div(self.group, rounding_mode="floor")
        index = ((groups != groups.roll(1, -1)).cumsum(-1) - 1).clamp(min=0)
        best = torch.full_like(score, -torch.inf).scatter_reduce_(-1, index, score, "amax").gather(-1, index)
        newest = torch.full_like(positions, -1).scatter_reduce_(-1, index, positions, "amax").gather(-1, index)
        age = newest - positions
        waits = newest >= slots.next_positions[:, None, None] - slots.window
        tier = (age == 0).int().where(~waits, 2)
        return scatter_sorted(lexsort_ranks(tier, best, age & -age), order)


@dataclass(frozen=True)
class Pyramid(Wrapper, Budgeter, Recency, LayersAsRows):
    """Lets the bottom layers keep many tokens and the top ones few, fewer by the same number from layer to layer.

    Beside sinks and window, the top layer keeps a `beta`-th of the mean. The mean is the budget, and each layer
    allocates its own share.

    Source: PyramidKV, Cai et al. 2024 (arXiv:2406.02069).
    Differs: any policy in place of SnapKV. Sinks are as safe as the window. Tokens left over by rounding go to the
    bottom. A layer that is given more tokens than the text has leaves the rest unspent. The authors' code hands it to
    the layers above.
    """

    beta: int | float = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if find(self.policy, Budgeter):  # type: ignore[type-abstract]  # looks for an interface
            raise PolicyError(f"Pyramid: {self.policy!r} gives each layer its budget already. Wrap the policy inside")
        if not self.beta >= 1:
            raise PolicyError(f"Pyramid: beta must be at least 1, got {self.beta}")

    @property
    def keeps_newest(self) -> bool:  # type: ignore[override]  # it ranks as the wrapped policy does
        return keeps_newest(self.policy)

    def budgets(self, budget: int, layers: int, least: int) -> list[int]:
        mean = budget - least + 1
        top = max(1.0, mean / self.beta)
        steps = [1 - 2 * layer / (layers - 1) for layer in range(layers)] if layers > 1 else [0.0]
        budgets = [least - 1 + int(mean + step * (mean - top)) for step in steps]
        left = budget * layers - sum(budgets)
        return [number + (layer < left) for layer, number in enumerate(budgets)]

    def score(self, slots: Slots) -> Scores:
        return self.policy.score(slots)


@dataclass(frozen=True)
class Composite(Wrapper, OneShot, LayersAsRows):
    """Lets the layers share one budget by the scores of their tokens, once a first text was read.

    `engine.prefill` holds the text whole. Then the best tokens of all heads of a layer make one composite, the second
    best another, and so on. The composites of all layers are ranked together by their mean score, and as many are kept
    as fit. So the heads of a layer keep equally many tokens, each its own, in memory without gaps, and layers differ.
    Scores must compare between layers: probabilities do, norms do not.

    Source: KVCompose, Akulov et al. 2025 (arXiv:2509.05165).
    Differs: takes any policy's scores. Rows of a batch join in a composite. Sinks and window are kept beside it. A text
    that did not come through `engine.prefill` is evicted by `KVCache.compress` only.
    """

    shares_budget = True

    @property
    def scoring_chunk(self) -> int:  # type: ignore[override]  # the wrapped policy decides
        return scoring_chunk(self.policy)

    def score(self, slots: Slots) -> Scores:
        return self.policy.score(slots)
