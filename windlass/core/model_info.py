"""A model as rooms below `hf` know it."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ModelInfo:
    """What tells a policy whether it can serve a model.

    `name` is the name of its class. `fingerprint` hashes its architecture and a sample of every parameter: it
    reads the weights, so call it only where the answer depends on it. `layers` counts attention layers.
    """

    name: str
    fingerprint: Callable[[], str]
    dtype: torch.dtype
    layers: int
