"""Key norms: small keys receive much attention."""

from dataclasses import dataclass

import torch
from torch.linalg import vector_norm

from windlass.core.types import Scores
from windlass.policies.base import LayersAsRows, Policy, Slots


@dataclass(frozen=True)
class KeyNorm(Policy, LayersAsRows):
    """Keeps the tokens whose keys have the smallest L2 norm.

    Source: Devoto et al. 2024 (arXiv:2406.11430), section 3.
    Differs: the paper leaves the first two layers whole. Here every layer has the same budget. Norms are compared in
    steps of 1e-5 of their size: keys of a repeated token differ by rounding alone.
    """

    def score(self, slots: Slots) -> Scores:
        norms: Scores = vector_norm(slots.keys(), dim=-1, dtype=torch.float32)
        # A product over several rows rounds otherwise than over one, which must not change the eviction.
        return -(norms.log2() * 2**16).round()
