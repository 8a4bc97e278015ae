"""Policies that let layers keep different numbers of tokens; which tokens, another policy decides."""

from dataclasses import dataclass

from windlass.core.errors import PolicyError
from windlass.core.shapes import Scores
from windlass.policies.base import Slots
from windlass.policies.wrappers import Wrapper


@dataclass(frozen=True)
class Pyramid(Wrapper):
    """Lets the bottom layers keep many tokens and the top ones few, falling by the same number from layer to layer.

    Beside sinks and window, the top layer keeps a `beta`-th of the mean. The mean is the budget, and each
    layer's memory is that of its own.

    Source: PyramidKV, Cai et al. 2024 (arXiv:2406.02069).
    Differs: any policy in place of SnapKV; sinks are as safe as the window; tokens left over by rounding go to
    the bottom.
    """

    beta: int | float = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "is_recency", self.policy.is_recency)
        if not self.beta >= 1:
            raise PolicyError(f"Pyramid: beta must be at least 1, got {self.beta}")

    def budgets(self, budget: int, layers: int, least: int) -> list[int]:
        mean = budget - least + 1
        top = max(1.0, mean / self.beta)
        steps = [1 - 2 * layer / (layers - 1) for layer in range(layers)] if layers > 1 else [0.0]
        budgets = [least - 1 + int(mean + step * (mean - top)) for step in steps]
        left = budget * layers - sum(budgets)
        return [number + (layer < left) for layer, number in enumerate(budgets)]

    def score(self, slots: Slots) -> Scores:
        return self.policy.score(slots)


@dataclass(frozen=True)
class Composite(Wrapper):
    """Lets the layers share a budget by what their tokens are worth, once a first text was read.

    `engine.prefill` holds it whole. Then the best tokens of all heads of a layer make one composite, the
    second best another, and so on; the composites of all layers are ranked together by their mean score,
    and as many are kept as fit. So the heads of a layer keep equally many tokens, each its own, in memory
    without gaps, and layers differ. Scores must compare between layers: probabilities do, norms do not.

    Source: KVCompose, Akulov et al. 2025 (arXiv:2509.05165).
    Differs: any policy's scores; rows of a batch join in a composite; sinks and window are kept beside it. A
    text that did not come through `engine.prefill` is cut by `KVCache.compress` only.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("is_one_shot", "shares_budget"):
            object.__setattr__(self, name, True)

    def score(self, slots: Slots) -> Scores:
        return self.policy.score(slots)
