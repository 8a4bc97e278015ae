"""The mean key of each layer and head before RoPE, which low-bit stores subtract from keys.

It is measured once per model, on texts that the model writes itself: keys of random tokens have another mean
(measured, see `benchmarks/low_bit.py`), because the model never saw such a text. A mean that is off costs some
precision and nothing else.
"""

from typing import Any, Final

import torch
from transformers import PreTrainedModel

from windlass.cache.cache import TextCache
from windlass.cache.slot_layer import SlotLayer
from windlass.core.shapes import KeyMeans
from windlass.hf.forward import forward, vocabulary_of

ROWS: Final = 8  # texts
TOKENS: Final = 16  # of each; the first does not count: all texts begin alike, and often with a token like no other


@torch.no_grad()
def measure_key_means(model: Any, cache: TextCache) -> list[KeyMeans | None]:
    """The mean key of each layer's heads; None for a layer that holds no keys.

    `model` may be one around a model of transformers. The texts are written into `cache`, an empty one of `ROWS` rows.
    All means are None for a model without a head over the vocabulary, which cannot write. Draws from no shared random
    state.
    """
    if not model.can_generate():
        return [None] * len(cache.layers)
    generators = [torch.Generator().manual_seed(row) for row in range(ROWS)]
    ids = torch.full((ROWS, 1), _first_token(model), device=cache.device)
    for _ in range(TOKENS):
        logits = forward(model, ids, None, cache, [0])[:, 0]
        probabilities = logits.float().softmax(-1).cpu()
        drawn = [torch.multinomial(row, 1, generator=own) for row, own in zip(probabilities, generators, strict=True)]
        ids = torch.stack(drawn).to(cache.device)
    return [None if layer.is_empty else _mean_key(layer) for layer in cache.layers]


def _mean_key(layer: SlotLayer) -> KeyMeans:
    keys = layer.store.keys()
    is_counted = (layer.positions > 0)[..., None]
    mean = keys.float().where(is_counted, 0.0).sum((0, 2)) / is_counted.sum((0, 2))
    return mean.to(keys.dtype)


def _first_token(model: PreTrainedModel) -> int:
    """The token that a text begins with; any token will do if the config names none, or one the model lacks."""
    config, vocabulary = model.config.get_text_config(), vocabulary_of(model)
    for ids in (config.bos_token_id, config.eos_token_id):
        first = ids[0] if isinstance(ids, list) and ids else ids
        if isinstance(first, int) and 0 <= first < vocabulary:
            return first
    return 0
