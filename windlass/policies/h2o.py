"""H2O: attention that tokens received, summed over the text."""

from dataclasses import dataclass

from windlass.core.inputs import Ranking
from windlass.core.types import Scores
from windlass.policies.base import KernelPolicy, LayersAsRows, Needs, Observation, Policy, Slots


@dataclass(frozen=True)
class H2O(Policy, KernelPolicy, LayersAsRows):
    """Keeps the tokens that received the most attention since they were written.

    Source: Zhang et al. 2023 (arXiv:2306.14048), algorithm 1.
    Differs: the paper's recent half is the cache's `window`: give `window = budget // 2` for it.
    Each kv head ranks by the sum over its query heads. As in the paper a sum is not divided by the number of
    queries that could see the token, which some other libraries do.
    """

    needs = Needs(state=("mass",))
    observed_queries = None

    @property
    def ranking(self) -> Ranking:
        return Ranking("sum", "state")

    def observe(self, slots: Slots, observation: Observation) -> None:
        slots.state["mass"] += observation.mass

    def score(self, slots: Slots) -> Scores:
        return slots.state["mass"]
