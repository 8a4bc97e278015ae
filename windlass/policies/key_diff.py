"""KeyDiff: the cosine of each key with the mean direction of all keys held."""

from dataclasses import dataclass

from windlass import kernels
from windlass.core.inputs import Ranking
from windlass.core.types import Scores
from windlass.policies.base import KernelPolicy, LayersAsRows, Policy, Slots


@dataclass(frozen=True)
class KeyDiff(Policy, KernelPolicy, LayersAsRows):
    """Keeps the tokens whose keys differ most from the mean direction of all keys held.

    Needs no attention weights, so it costs the same at any chunk.

    Source: Park et al. 2025 (arXiv:2504.15364), algorithm 1.
    Differs: compares un-rotated keys, so a token's novelty is its content alone, not its position. In the first
    layer all copies of a word therefore tie, and the newest of them are kept.
    Cosines are compared in steps of 2**-16: keys of a repeated token differ by rounding alone.
    """

    @property
    def ranking(self) -> Ranking:
        return Ranking("nothing", "novelty")

    def score(self, slots: Slots) -> Scores:
        # The sum over slots rounds by their order, which must not change the eviction.
        return -(kernels.mean_key_cosine(slots.packed_keys(), slots.positions) * 2**16).round()
