"""Caches of hybrids in the middle of a text, and their contents."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.hybrids import KINDS, bound
from tests.helpers.models import Text, read
from windlass import KVCache, kernels
from windlass.policies import KeyDiff

TOLERANCE = 1e-5
OF_CHUNKS = 1e-4  # transformers' own, of states that are added up in one pass or in many
LIMITS: dict[str, Any] = {"budget": 12, "sinks": 2, "window": 3, "policy": KeyDiff()}

each_kind = pytest.mark.parametrize("family", KINDS)
each_pass = pytest.mark.parametrize("tokens", [1, 5])


def held(cache: KVCache) -> dict[str, Tensor]:
    """Everything that decides the next token: states, and tokens in the order of their positions."""
    found = {
        f"{state.label} {name}": each.clone() for state in cache.recurrent for name, each in state.tensors().items()
    }
    for layer in cache.layers:
        if not layer.is_empty:
            positions = layer.positions
            order = kernels.argsort_positions(positions)[..., : int((positions >= 0).sum(-1).max())]
            index, states = order.expand(-1, layer.store.layout[0], -1), (layer.store.keys(), layer.store.values())
            found[f"positions {layer.index}"] = positions.gather(-1, order).clamp(min=-1)
            found |= {f"{at} {layer.index}": kernels.read(each, index) for at, each in enumerate(states)}
    return found


def assert_same(ours: dict[str, Tensor], truth: dict[str, Tensor], where: object = "") -> None:
    """Equal to the bit."""
    assert ours.keys() == truth.keys(), where
    for name, each in ours.items():
        assert torch.equal(each, truth[name]), (where, name)


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = TOLERANCE) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).norm() <= tolerance * theirs.norm()


def begun(family: str, text: Text, rows: int = 2, has_checkpoints: bool = False) -> KVCache:
    """A cache that has read a prompt and a token, and evicts. It may have checkpoints behind both."""
    cache = KVCache(bound(family), batch=rows, **LIMITS)
    for piece in text(26, rows=rows).split((25, 1), 1):
        read(bound(family), cache, piece, piece.shape[1])
        if has_checkpoints:
            cache.checkpoint()
    return cache


def step(family: str, ids: Tensor, mask: Tensor | None = None) -> Callable[[KVCache], Tensor]:
    def work(cache: KVCache) -> Tensor:
        with torch.no_grad():
            return bound(family)(ids, attention_mask=mask, past_key_values=cache).logits

    return work
