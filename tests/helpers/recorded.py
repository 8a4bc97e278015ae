"""Texts that are written with steps from a graph and without, and the caches that they leave."""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from tests.helpers.models import Text
from windlass import KVCache, Sampling
from windlass.engine.decode import Decoder, Graph, Sampler
from windlass.engine.generate import prefill

BUDGET, WINDOW, PROMPT, ENDS = 15, 4, 10, (19, 8, 14)  # ends: steps after which a row gets no more tokens


def begun(model: PreTrainedModel, text: Text, options: dict[str, Any]) -> tuple[KVCache, torch.Tensor]:
    """A cache with prompts of different lengths in its rows, and their logits."""
    # No slot stays reserved for taking steps back: these would get other tokens.
    kind = options.get("kind", KVCache)
    given = {name: value for name, value in options.items() if name != "kind"}
    cache = kind(model, **{"budget": BUDGET, "window": WINDOW, "chunk": 8, "rollback": 0, **given})
    prompts = [row[: PROMPT + 3 * at].tolist() for at, row in enumerate(text(PROMPT + 6, rows=cache.batch_size))]
    return cache, prefill(model, cache, prompts)


def write(
    model: PreTrainedModel,
    cache: KVCache,
    logits: torch.Tensor,
    graph: Graph | None,
    sampling: Sampling = Sampling(),  # noqa: B008  # it is frozen
    steps: int = 0,
    between: Callable[[int], None] = lambda _: None,
) -> list[list[int]]:
    """Rows of tokens, each as long as `ENDS` says, or `steps` for all. `between` is called before every step."""
    ends = [steps or end for end in ENDS[: cache.batch_size]]
    texts: list[list[int]] = [[] for _ in ends]
    decoding = Decoder(model, cache, Sampler(sampling, [[1]] * len(ends), cache.device), logits, graph)
    for step in range(max(ends)):
        between(step)
        for text, end, token in zip(texts, ends, decoding.next_tokens(), strict=True):
            text += [token] * (step < end)
        decoding.advance([step + 1 < end for end in ends], step + 1 == max(ends))
    return texts


def same(ours: KVCache, theirs: KVCache) -> None:
    """Equal to the bit, slot by slot, and the newest token is where each row's text ends."""
    assert vars(ours.rows) == vars(theirs.rows)
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        assert (layer.positions.amax((1, 2)) + 1).tolist() == ours.next_positions
        assert (layer.table.occupancy_bound, layer.history.has_evicted) == (
            other.table.occupancy_bound,
            other.history.has_evicted,
        )
        held, others = layer.tensors(), other.tensors()
        assert held.keys() == others.keys()
        for name, tensor in held.items():
            assert tensor.equal(others[name]), name
