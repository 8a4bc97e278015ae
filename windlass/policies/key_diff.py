"""Keys unlike the others."""

from dataclasses import dataclass

from torch.linalg import vector_norm
from torch.nn.functional import normalize

from windlass.policies.base import Policy, Slots
from windlass.shapes import Scores

LEAST_NORM = 1e-12  # a key of zeros has no direction


@dataclass(frozen=True)
class KeyDiff(Policy):
    """Keeps the tokens whose keys differ most from the mean direction of all keys held.

    Needs no attention weights, so it costs the same at any chunk.

    Source: Park et al. 2025 (arXiv:2504.15364), algorithm 1.
    Differs: compares un-rotated keys, so a token's novelty is its content alone, not its position.
    Cosines are compared in steps of 2**-16: keys of a repeated token differ by rounding alone.
    """

    def score(self, slots: Slots) -> Scores:
        keys = slots.keys().float()
        # Directions are keys times these, which is less to write than directions are.
        scales = (slots.positions >= 0) / vector_norm(keys, dim=-1).clamp(min=LEAST_NORM)
        anchor = normalize(scales.unsqueeze(2) @ keys, dim=-1)
        cosines: Scores = (anchor @ keys.mT).squeeze(2) * scales
        # The sum over slots rounds by their order, which must not decide what is kept.
        return -(cosines * 2**16).round()
