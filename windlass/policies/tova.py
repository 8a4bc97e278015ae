"""What the newest token looks at."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from windlass.core.shapes import Scores
from windlass.policies.base import Observation, Policy, Slots


@dataclass(frozen=True)
class TOVA(Policy):
    """Evicts the token that the newest query attends to least, alike for all heads.

    Source: Oren et al. 2024 (arXiv:2401.06104), section 3.
    Differs: nothing at chunk 1; in a longer chunk only its last query is asked.
    """

    state: ClassVar[tuple[str, ...]] = ("last",)
    per_head: ClassVar[bool] = False

    observed_queries = 1

    def observe(self, slots: Slots, seen: Observation) -> None:
        last = slots.state["last"]
        is_observing = (seen.positions >= 0).any(-1)[:, None, None]
        last.copy_(torch.where(is_observing, seen.mass.sum(1, keepdim=True), last))

    def score(self, slots: Slots) -> Scores:
        return slots.state["last"]
