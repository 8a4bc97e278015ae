"""Budgets that fall from the bottom layer to the top one; another policy decides which tokens they hold."""

from dataclasses import dataclass

from windlass.core.errors import PolicyError
from windlass.core.types import Scores
from windlass.policies.base import Budgeter, Recency, Slots
from windlass.policies.wrapper import Wrapper, find, keeps_newest


@dataclass(frozen=True)
class Pyramid(Wrapper, Budgeter, Recency):
    """Lets the bottom layers keep many tokens and the top ones few, fewer by the same number from layer to layer.

    Beside sinks and window, the top layer keeps a `beta`-th of the mean. The mean is the budget, and each layer
    allocates its own share.

    Source: PyramidKV, Cai et al. 2024 (arXiv:2406.02069).
    Differs: any policy in place of SnapKV; sinks are as safe as the window; tokens left over by rounding go to
    the bottom. A layer that is given more tokens than the text has leaves the rest unspent; the authors' code hands
    it to the layers above.
    """

    beta: int | float = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        if find(self.policy, Budgeter):  # type: ignore[type-abstract]  # an interface is looked for
            raise PolicyError(f"Pyramid: {self.policy!r} gives each layer its budget already; wrap the policy inside")
        if not self.beta >= 1:
            raise PolicyError(f"Pyramid: beta must be at least 1, got {self.beta}")

    @property
    def keeps_newest(self) -> bool:  # type: ignore[override]  # it ranks as what is wrapped does
        return keeps_newest(self.policy)

    def budgets(self, budget: int, layers: int, least: int) -> list[int]:
        mean = budget - least + 1
        top = max(1.0, mean / self.beta)
        steps = [1 - 2 * layer / (layers - 1) for layer in range(layers)] if layers > 1 else [0.0]
        budgets = [least - 1 + int(mean + step * (mean - top)) for step in steps]
        left = budget * layers - sum(budgets)
        return [number + (layer < left) for layer, number in enumerate(budgets)]

    def score(self, slots: Slots) -> Scores:
        return self.policy.score(slots)
