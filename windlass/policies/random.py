"""Random eviction: the baseline that every other policy has to beat."""

from dataclasses import dataclass

import torch

from windlass.core.types import Scores
from windlass.policies.base import LayersAsRows, Policy, Slots


@dataclass(frozen=True)
class Random(Policy, LayersAsRows):
    """Evicts uniformly at random, per head. By default only tokens generated after the prompt.

    A prompt that alone exceeds the budget is thinned at random as well. The choice depends on `seed`, the token's
    position, its head and the length of the text, so it is the same in every process, batch and after a load.

    Source: Random Attention, 2026 (arXiv:2609.03430).
    Differs: the choice is a hash, not a generator, and the same in all layers. With `keep_prompt`, tokens that came in
    a pass of several tokens are a prompt's, but for the drafts of `generate`. A prompt read token by token is not kept,
    nor the last chunk of a prompt where it has one token.
    """

    keep_prompt: bool = True
    seed: int = 0

    def score(self, slots: Slots) -> Scores:
        positions = slots.positions.long()
        numbers = [torch.arange(head, head + 1, device=positions.device) for head in slots.heads or ()]
        heads = torch.cat(numbers) if numbers else torch.arange(positions.shape[1], device=positions.device)
        heads = heads[None, :, None]
        draw = _hash(positions + _hash(slots.next_positions.long()[:, None, None] + _hash(heads + self.seed)))
        score = draw.float() / 2**32
        if self.keep_prompt:
            score = score + (positions < slots.prompt_ends[:, None, None]).float()
        return score


def _hash(x: torch.Tensor) -> torch.Tensor:
    """32 well-mixed bits of each integer (the finaliser of MurmurHash3)."""
    x = x & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ (x >> 16)
