"""Another policy's scores, averaged over chunks of the text."""

from dataclasses import dataclass

import torch

from windlass import kernels
from windlass.core.errors import PolicyError
from windlass.core.types import Scores
from windlass.policies.base import Slots, scatter_sorted
from windlass.policies.wrapper import Wrapper


@dataclass(frozen=True)
class InChunks(Wrapper):
    """Ranks by the mean of another policy's scores over the tokens held of a chunk of `size` positions.

    So neighbours in the text are kept or evicted together; of a chunk that is evicted in part, the older tokens go
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
