"""One budget for all layers, shared by the scores of their tokens; another policy gives the scores."""

from dataclasses import dataclass

from windlass.core.types import Scores
from windlass.policies.base import OneShot, Slots
from windlass.policies.wrapper import Wrapper, scoring_chunk


@dataclass(frozen=True)
class Composite(Wrapper, OneShot):
    """Lets the layers share one budget by the scores of their tokens, once a first text was read.

    `engine.prefill` holds the text whole. Then the best tokens of all heads of a layer make one composite, the
    second best another, and so on; the composites of all layers are ranked together by their mean score,
    and as many are kept as fit. So the heads of a layer keep equally many tokens, each its own, in memory
    without gaps, and layers differ. Scores must compare between layers: probabilities do, norms do not.

    Source: KVCompose, Akulov et al. 2025 (arXiv:2509.05165).
    Differs: any policy's scores; rows of a batch join in a composite; sinks and window are kept beside it. A
    text that did not come through `engine.prefill` is evicted by `KVCache.compress` only.
    """

    shares_budget = True

    @property
    def scoring_chunk(self) -> int:  # type: ignore[override]  # what is wrapped decides
        return scoring_chunk(self.policy)

    def score(self, slots: Slots) -> Scores:
        return self.policy.score(slots)
