"""Sinks and a sliding window."""

from dataclasses import dataclass

from windlass.core.inputs import Ranking
from windlass.core.types import Scores
from windlass.policies.base import KernelPolicy, LayersAsRows, Needs, Policy, Recency, Slots


@dataclass(frozen=True)
class Recent(Policy, Recency, KernelPolicy, LayersAsRows):
    """Keeps the first `sinks` and the newest tokens.

    Source: StreamingLLM, Xiao et al. 2023 (arXiv:2309.17453).
    Differs: positions are the cache's choice. `positions="compact"` is the paper's in passes of up to 16 tokens. In
    longer ones sinks are read at a distance of up to the budget and the pass. A text is masked to the sinks and the
    newest tokens while it is read, as the paper's stream is: to read it with full attention and cut it then, read it
    without a budget and call `KVCache.compress`.
    """

    needs = Needs(per_head=False)

    @property
    def ranking(self) -> Ranking:
        return Ranking("nothing", "position")

    def score(self, slots: Slots) -> Scores:
        return slots.positions.float()
