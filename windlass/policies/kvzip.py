"""What the text itself is rebuilt from."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from windlass.core.errors import PolicyError
from windlass.core.shapes import Scores
from windlass.policies.base import Observation, Policy, Slots


@dataclass(frozen=True)
class KVzip(Policy):
    """Keeps the tokens that the model looks at when it reads the same text once more.

    `engine.prefill` holds a first text whole, shows it to the model again in pieces of `repeat` tokens,
    each forgotten before the next, and cuts the cache then. A token is worth the largest probability that
    any query head of any repeated token gave it. So what is kept serves any question on the text; the price
    is a second prefill, and meanwhile the memory of the whole text. Later tokens were never scored: they
    rank above the text, the newest highest, and push it out as they come.

    Source: Kim et al. 2025 (arXiv:2505.23416).
    Differs: no words ask for the repetition, and a piece does not begin with the end of the one before. Each
    head of a layer keeps as many tokens; `Composite(kvzip)` lets layers differ. Probabilities are over all
    tokens held, not over a piece of them. A text that did not come through `engine.prefill`, or came to a
    cache that held some, is never scored: `Recent` is then the same for less.
    """

    repeat: int = 128

    state: ClassVar[tuple[str, ...]] = ("peak",)
    is_one_shot: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise PolicyError(f"KVzip: repeat must be at least 1, got {self.repeat}")

    def observe(self, slots: Slots, seen: Observation) -> None:
        # Above 0, which is what a token begins with: one that nobody looked at has been scored, too.
        least = torch.finfo(torch.float32).tiny
        torch.maximum(slots.state["peak"], seen.mass.clamp(min=least), out=slots.state["peak"])

    def score(self, slots: Slots) -> Scores:
        peak = slots.state["peak"]
        return peak.masked_fill(peak == 0, 2.0)
