"""Muon in the dtype of its weights: torch's own multiplies in bfloat16, which a CPU may have to emulate."""

import math
from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
STEPS: Final = 5
EPS: Final = 1e-7


class Muon(Optimizer):
    """Momentum of Nesterov whose matrix is brought near an orthogonal one, and a decay of the weights beside it.

    Source: Jordan 2024 (kellerjordan.github.io/posts/muon). Differs from `torch.optim.Muon`: float32 stays float32.
    """

    def __init__(self, matrices: Iterable[nn.Parameter], lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no loss is computed again
        """Change every matrix that has a gradient."""
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(matrix.grad)
                mean = state["momentum_buffer"].lerp_(matrix.grad, 1 - group["momentum"])
                rows, columns = matrix.shape
                rate = group["lr"] * math.sqrt(max(1.0, rows / columns))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(orthogonal(matrix.grad.lerp(mean, group["momentum"])), alpha=-rate)


def orthogonal(matrix: Tensor) -> Tensor:
    """A matrix with nearly the same singular vectors, and singular values of about 0.7 to 1.2.

    Source: the same, Newton-Schulz iteration of fifth order.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if is_tall else matrix
    found = found / found.norm().clamp(min=EPS)
    for _ in range(STEPS):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if is_tall else found
