"""Small keys matter."""

from dataclasses import dataclass

from windlass.policies.base import Policy, Slots
from windlass.shapes import Scores


@dataclass(frozen=True)
class KeyNorm(Policy):
    """Keeps the tokens whose keys have the smallest L2 norm.

    Source: Devoto et al. 2024 (arXiv:2406.11430), section 3.
    Differs: the paper leaves the first two layers whole; here every layer has the same budget. Norms are
    compared in steps of 1e-5 of their size: keys of a repeated token differ by rounding alone.
    """

    def score(self, slots: Slots) -> Scores:
        # A product over several rows rounds otherwise than over one, which must not decide what is kept.
        return -(slots.keys().float().square().sum(-1).log2() * 2**15).round()
