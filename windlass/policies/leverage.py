"""Leverage scores: keys that a combination of the other keys replaces badly."""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from windlass import kernels
from windlass.core.errors import PolicyError
from windlass.core.types import Scores, SlotKeys
from windlass.policies.base import LayersAsRows, Policy, Slots


@dataclass(frozen=True)
class Leverage(Policy, LayersAsRows):
    """Keeps the tokens whose keys have the highest statistical leverage: outliers in any direction.

    A key's leverage is its own weight when ridge regression on all keys held reproduces it. Heads wider than
    `sketch` channels are projected to that many by a fixed random matrix. Needs no attention weights. Each step
    that evicts reads all keys, with `sketch` multiplications for each of their numbers.

    Source: Compactor, Chari and Van Durme 2025 (arXiv:2507.08143).
    Differs: works at decode too, over the tokens held, sinks among them. The random matrix is the same
    in every head and at every step. The paper's other half, attention that is not causal, needs queries
    of the whole text and is left out.
    """

    sketch: int = 48
    ridge: float = 0.01

    def __post_init__(self) -> None:
        if self.sketch < 1:
            raise PolicyError(f"Leverage: sketch must be at least 1, got {self.sketch}")
        if not self.ridge > 0:
            raise PolicyError(f"Leverage: ridge must be above 0, got {self.ridge}")

    def score(self, slots: Slots) -> Scores:
        return self.score_among(slots, slots.positions >= 0)

    def score_among(self, slots: Slots, is_counted: Tensor) -> Scores:
        """The leverage of each counted slot among the counted ones. It is 0 for the other slots."""
        keys = slots.keys()
        projection = _gaussian(keys.shape[-1], self.sketch, keys.device) if keys.shape[-1] > self.sketch else None
        found = kernels.leverage(keys, is_counted, projection, self.ridge)
        if found is None:
            found = leverage(keys, is_counted, projection, self.ridge)
        # In steps: keys of the same word differ by the rounding of their pass, which must not change the eviction.
        return ((found * 2**16).round() / 2**16).float()


def leverage(keys: SlotKeys, is_counted: Tensor, projection: Tensor | None, ridge: float) -> Tensor:
    """The leverage in float64 of each counted key among the counted ones, once all are projected. 0 for the others.

    `projection` is (channels, width). None: keys stay as they are.
    """
    is_row = is_counted.unsqueeze(-1)
    # In float64: sums over slots round by their order, which must not change the eviction. With fewer tokens than
    # channels only the ridge is left in some directions.
    keys = keys.double()
    mean = (keys * is_row).sum(2, keepdim=True) / is_row.sum(2, keepdim=True).clamp(min=1)
    x = (keys - mean) * is_row
    if projection is not None:
        x = x @ projection
    factor = torch.linalg.cholesky_ex(x.mT @ x + ridge * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)).L
    whitened: Tensor = torch.linalg.solve_triangular(factor, x.mT, upper=False)
    return whitened.square().sum(-2)


@cache
def _gaussian(channels: int, width: int, device: torch.device) -> Tensor:
    """A random matrix, always the same, that keeps lengths on average."""
    draw = torch.randn(channels, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    matrix: Tensor = draw / width**0.5
    return matrix.to(device)
