"""Sinks and a sliding window."""

from dataclasses import dataclass
from typing import ClassVar

from windlass.core.shapes import Scores
from windlass.policies.base import Policy, Slots


@dataclass(frozen=True)
class Recent(Policy):
    """Keeps the first `sinks` and the newest tokens.

    Source: StreamingLLM, Xiao et al. 2023 (arXiv:2309.17453).
    Differs: positions are the cache's choice; `positions="compact"` is the paper's.
    """

    per_head: ClassVar[bool] = False
    is_recency: ClassVar[bool] = True

    def score(self, slots: Slots) -> Scores:
        return slots.positions.float()
