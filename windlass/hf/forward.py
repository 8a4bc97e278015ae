"""A pass of an attached model, as the engine and the evaluation call for it."""

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windlass.cache.cache import TextCache
from windlass.cache.layer import SlotLayer
from windlass.core.step import READ, Pass
from windlass.core.types import KeyMeans, ModelInfo
from windlass.hf.attach import attached
from windlass.hf.weights import fingerprint


def forward(
    model: PreTrainedModel,
    ids: Tensor,
    mask: Tensor | None,
    cache: TextCache,
    columns: list[int],
    how: Pass = READ,
) -> Tensor:
    """One pass, taken as `how` says; returns (batch, len(columns), vocabulary) logits of these columns and no others.

    Without columns hidden states come back.
    """
    given = {"input_ids": ids, "attention_mask": mask}
    out: Tensor
    cache.schedule(how)
    try:
        if columns:  # for the last one, which decode asks for, nothing is sent to a device
            wanted = 1 if columns == [ids.shape[1] - 1] else torch.tensor(columns, device=ids.device)
            out = model(**given, past_key_values=cache, logits_to_keep=wanted).logits
            if out.shape[1] > len(columns):  # some models take no `logits_to_keep`, and do not say so
                out = out[:, columns]
        else:
            out = attached(model).decoder.outer(**given, past_key_values=cache).last_hidden_state
    finally:
        cache.schedule(READ)
    return out


def vocabulary_of(model: PreTrainedModel) -> int:
    """How many token ids the model can read."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


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


def model_info(model: PreTrainedModel) -> ModelInfo:
    """What tells a policy whether it can serve an attached model; the fingerprint is taken when it is asked for."""
    return ModelInfo(type(model).__name__, partial(fingerprint, model), model.dtype, len(attached(model).rotaries))
