"""What low-bit stores must know of a model: the mean key of each layer, before rotation.

It is measured once per model, on texts that the model writes itself: random tokens, which it never
saw in such a row, have other keys (measured, see `benchmarks/low_bit.py`). A mean that is off costs
some precision and nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from windlass.core.shapes import KeyCentres
from windlass.hf.attach import forward, vocabulary_of

if TYPE_CHECKING:
    from windlass.hf.kv_cache import KVCache

ROWS = 8  # texts
TOKENS = 16  # of each, the first left out: all texts begin alike, and often with a token like no other


@torch.no_grad()
def key_centres(model: PreTrainedModel, cache: KVCache) -> list[KeyCentres | None]:
    """The mean key of each layer's heads; None for a layer that holds none.

    `cache` is an empty one of `ROWS` rows, which is filled. A model without a head over the
    vocabulary writes nothing, and has no centres.
    """
    if not model.can_generate():
        return [None] * len(cache.layers)
    generators = [torch.Generator().manual_seed(row) for row in range(ROWS)]
    ids = torch.full((ROWS, 1), _first_token(model), device=cache.device)
    for _ in range(TOKENS):
        logits = forward(model, ids, None, cache, [0])[:, 0]
        shares = logits.float().softmax(-1).cpu()
        drawn = [torch.multinomial(row, 1, generator=own) for row, own in zip(shares, generators, strict=True)]
        ids = torch.stack(drawn).to(cache.device)
    centres: list[KeyCentres | None] = []
    for layer in cache.layers:
        if layer.is_empty:
            centres.append(None)
            continue
        keys = layer.store.keys().float()
        is_counted = (layer.positions > 0)[..., None]
        mean = keys.where(is_counted, 0.0).sum((0, 2)) / is_counted.sum((0, 2))
        centres.append(mean.to(layer.store.keys().dtype))
    return centres


def _first_token(model: PreTrainedModel) -> int:
    """What a text begins with; any token will do where the config does not say, or names none of the model's."""
    config, vocabulary = model.config.get_text_config(), vocabulary_of(model)
    for ids in (config.bos_token_id, config.eos_token_id):
        first = ids[0] if isinstance(ids, list) and ids else ids
        if isinstance(first, int) and 0 <= first < vocabulary:
            return first
    return 0
