"""Files of linear scorers with random weights, and the scores, number by number."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windlass.hf.weights import fingerprint
from windlass.policies import linear_scorer
from windlass.policies.linear_scorer import STEPS, ZERO, LayerWeights, Scorer

KV_HEADS, GROUP, HEAD_DIM = 3, 5, 8  # of a tiny llama
TOLD = ("novel.txt", "", 7, 900)


def drawn(layers: Sequence[int] = (0, 1), model: str = "any", mark: str = "any", heads: int = KV_HEADS) -> Scorer:
    """A scorer of layers of `heads` kv heads, with predicted logarithms of order 1 below -4."""
    draw = torch.Generator().manual_seed(3)
    weights = {
        layer: LayerWeights(
            torch.randn(heads, GROUP + 1, HEAD_DIM, generator=draw) / 4, torch.randn(heads, generator=draw) - 4
        )
        for layer in layers
    }
    return Scorer(weights, dict.fromkeys(layers, (0.5,) * heads), model, mark, *TOLD)


def scorer_of(path: Path, model: PreTrainedModel, layers: Sequence[int] = (0, 1), heads: int = KV_HEADS) -> str:
    """The name of a file with a scorer that serves `model`."""
    linear_scorer.write(drawn(layers, type(model).__name__, fingerprint(model), heads), path)
    return str(path)


def by_hand(own: LayerWeights, head: int, queries: Tensor, key: Tensor) -> int:
    """The score of one token in a kv head: of its (group, head_dim) queries and its key."""
    states = [*queries.tolist(), key.tolist()]
    found = own.bias[head].item()
    for state, weights in zip(states, own.weights[head].tolist(), strict=True):
        found += sum(x * w for x, w in zip(state, weights, strict=True))
    return round(found * STEPS) + ZERO


@contextmanager
def projected(model: PreTrainedModel) -> Iterator[list[tuple[list[Tensor], list[Tensor]]]]:
    """The queries and the keys of each layer of a llama, before RoPE, pass after pass: (batch, tokens, heads, dim)."""
    found: list[tuple[list[Tensor], list[Tensor]]] = []
    hooks = []
    for layer in model.model.layers:
        noted: tuple[list[Tensor], list[Tensor]] = ([], [])
        found.append(noted)
        for kind, module in zip(noted, (layer.self_attn.q_proj, layer.self_attn.k_proj), strict=True):

            def note(_: Any, __: Any, out: Tensor, kind: list[Tensor] = kind) -> None:
                kind.append(out.unflatten(-1, (-1, HEAD_DIM)))

            hooks.append(module.register_forward_hook(note))
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
