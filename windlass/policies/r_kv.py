"""R-KV: attention votes minus redundancy (cosine to other keys)."""

from dataclasses import dataclass

import torch
from torch.nn.functional import max_pool1d, normalize

from windlass import kernels
from windlass.core.errors import PolicyError
from windlass.core.inputs import PackedStates
from windlass.core.types import PerSlot, Scores, SlotIndex, SlotPositions
from windlass.policies.base import LayersAsRows, Needs, Observation, Policy, Slots, gather_sorted, scatter_sorted

BLOCK_BYTES = 4 * 2**20  # of cosines alive at once: few enough for the cache of a CPU


@dataclass(frozen=True)
class RKV(Policy, LayersAsRows):
    """Keeps tokens that the last queries attended to, unless other keys held are similar to theirs.

    Of near duplicates, keys of a cosine above `threshold`, the newest loses least and survives. `importance` is the
    weight of attention, the rest that of redundancy. Every step that evicts compares the keys held with one another.

    Source: R-KV, Cai et al. 2025 (arXiv:2505.24133).
    Differs: compares un-rotated keys, so a repetition far away counts as one nearby does. Works at any step, with
    SnapKV's running votes in place of the last `observed_queries`. Of query heads that share a kv head the mean counts,
    not the highest logit. A key without near duplicates spares none.
    Chunks: votes fade in chunks shorter than `observed_queries`, as those of `SnapKV` do (SmolLM2, 256 slots, nats:
    4.094 in steps of 64, 4.098 in steps of 8).
    """

    observed_queries: int = 8
    pool: int = 7
    importance: float = 0.07
    threshold: float = 0.5

    needs = Needs(state=("votes",))

    def __post_init__(self) -> None:
        if self.observed_queries < 1:
            raise PolicyError(f"RKV: observed_queries must be at least 1, got {self.observed_queries}")
        if self.pool < 1 or self.pool % 2 == 0:
            raise PolicyError(f"RKV: pool must be an odd number of at least 1, got {self.pool}")
        if not 0 <= self.importance <= 1:
            raise PolicyError(f"RKV: importance must be from 0 to 1, got {self.importance}")
        if not 0 <= self.threshold < 1:
            raise PolicyError(f"RKV: threshold must be at least 0 and below 1, got {self.threshold}")

    def observe(self, slots: Slots, observation: Observation) -> None:
        share = (observation.positions >= 0).sum(-1)[:, None, None] / self.observed_queries
        group = observation.queries.shape[1] // observation.mass.shape[1]
        slots.state["votes"].mul_(1 - share).add_(observation.mass, alpha=1 / (self.observed_queries * group))

    def score(self, slots: Slots) -> Scores:
        order = kernels.argsort_positions(slots.positions)
        is_held = (slots.positions >= 0).gather(-1, order)
        votes = slots.state["votes"].gather(-1, order) * is_held
        pooled = max_pool1d(votes, self.pool, stride=1, padding=self.pool // 2)
        keys = slots.packed_keys()
        alike = kernels.redundancy(keys, slots.positions, order, self.threshold)
        if alike is None:
            alike = redundancy(keys, slots.positions, order, self.threshold)
        near = alike.gather(-1, order) / is_held.sum(-1, keepdim=True).clamp(min=1)
        # Sums over slots round by the number of slots, which must not change the eviction.
        near = ((near * 2**16).round() / 2**16).masked_fill(~is_held, torch.finfo(torch.float32).min)
        score = self.importance * pooled - (1 - self.importance) * near.softmax(-1)
        return scatter_sorted(score, order)


def redundancy(states: PackedStates, positions: SlotPositions, order: SlotIndex, threshold: float) -> PerSlot:
    """Per slot, the sum of its key's cosines with the other keys held, without those that are exempt.

    Each key exempts the newest other one whose cosine with it is above `threshold`. `order` is that of the text. A free
    slot gets 0.
    """
    is_held = (positions >= 0).gather(-1, order)
    keys = normalize(gather_sorted(states.floats().float(), order), dim=-1) * is_held[..., None]
    ranks = torch.arange(keys.shape[2], dtype=torch.int32, device=keys.device)
    total = (keys.sum(2, keepdim=True) @ keys.mT).squeeze(2) - keys.square().sum(-1)
    block = max(1, BLOCK_BYTES // (4 * total.numel()))
    for start in range(0, len(ranks), block):
        cosines = keys[:, :, start : start + block] @ keys.mT
        cosines.diagonal(start, 2, 3).zero_()
        newest = torch.where(cosines > threshold, ranks, -1).amax(-1, keepdim=True)
        index = newest.clamp(min=0).long()
        exempt = cosines.gather(-1, index).masked_fill_(newest < 0, 0.0)
        total.scatter_add_(-1, index.squeeze(-1), -exempt.squeeze(-1))
    return scatter_sorted(total, order)
