"""Small keys matter."""

from dataclasses import dataclass

from windlass.policies.base import Policy, Slots
from windlass.shapes import Scores


@dataclass(frozen=True)
class KeyNorm(Policy):
    """Keeps the tokens whose keys have the smallest L2 norm.

    Source: Devoto et al. 2024 (arXiv:2406.11430), section 3.
    Differs: the paper leaves the first two layers whole; here every layer has the same budget.
    """

    def score(self, slots: Slots) -> Scores:
        return slots.keys().float().square().sum(-1).sqrt().neg()
