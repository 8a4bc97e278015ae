"""KVzip: the highest probability that a second pass over the text gives each token."""

from dataclasses import dataclass

import torch

from windlass.core.errors import PolicyError
from windlass.core.types import Scores
from windlass.policies.base import LayersAsRows, Needs, Observation, OneShot, Policy, Slots


@dataclass(frozen=True)
class KVzip(Policy, OneShot, LayersAsRows):
    """Keeps the tokens that the model attends to when it reads the same text a second time.

    `engine.prefill` holds a first text whole, feeds it to the model again in chunks of `scoring_chunk` tokens, drops
    each of these before the next, and then evicts. The score of a token is the largest probability that any query head
    gave it in the second pass. So the tokens kept serve any question on the text. The price is about three times the
    work of reading once, and the memory of the whole text until then. Later tokens were never scored: they rank above
    the text, the newest highest, and replace it as they come.

    Source: Kim et al. 2025 (arXiv:2505.23416).
    Differs: no prompt asks for the repetition, and a chunk does not begin with the end of the one before. Each head of
    a layer keeps as many tokens. `Composite(kvzip)` lets layers differ. Probabilities are over all tokens held, not
    over a chunk of them. A text that did not come through `engine.prefill`, or came to a cache that held some, is never
    scored: `Recent` is then the same for less.
    """

    scoring_chunk: int = 128

    needs = Needs(state=("peak",))

    def __post_init__(self) -> None:
        if self.scoring_chunk < 1:
            raise PolicyError(f"KVzip: scoring_chunk must be at least 1, got {self.scoring_chunk}")

    def observe(self, slots: Slots, observation: Observation) -> None:
        # Above 0, the initial state: a token that got no attention was scored, too.
        least = torch.finfo(torch.float32).tiny
        torch.maximum(slots.state["peak"], observation.mass.clamp(min=least), out=slots.state["peak"])

    def score(self, slots: Slots) -> Scores:
        peak = slots.state["peak"]
        return peak.masked_fill(peak == 0, 2.0)
