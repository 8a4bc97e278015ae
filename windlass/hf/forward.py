"""A pass of an attached model, as the engine and the evaluation call for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windlass.cache.cache import TextCache
from windlass.cache.layer import SlotLayer
from windlass.cache.options import CacheOptions
from windlass.core.inputs import most_visible
from windlass.core.step import READ, AttentionCall, Pass, no_inference_mode
from windlass.core.types import Attended, KeyMeans, ModelInfo, NewKeys, NewValues, Queries
from windlass.hf.attach import attached
from windlass.hf.model_cache import ModelCache
from windlass.hf.model_facts import device_of_inputs
from windlass.hf.weights import fingerprint
from windlass.stores.base import Store


def forward(
    model: PreTrainedModel,
    ids: Tensor,
    mask: Tensor | None,
    cache: TextCache,
    columns: list[int],
    how: Pass = READ,
) -> Tensor:
    """One pass, taken as `how` says. Returns (batch, len(columns), vocabulary) logits of these columns and no others.

    Without columns it returns hidden states.
    """
    given = {"input_ids": ids, "attention_mask": mask}
    out: Tensor
    cache.schedule(how)
    try:
        if mask is None and columns == [0] and ids.shape[1] == 1:
            logits = attached(model).token(model, ids, cache)
            if logits is not None:
                return logits
        if columns:  # decode asks for the last column, which needs no transfer to the device
            wanted = 1 if columns == [ids.shape[1] - 1] else torch.tensor(columns, device=ids.device)
            out = model(**given, past_key_values=cache, logits_to_keep=wanted).logits
            if out.shape[1] > len(columns):  # some models silently ignore `logits_to_keep`
                out = out[:, columns]
        else:
            out = attached(model).decoder.outer(**given, past_key_values=cache).last_hidden_state
    finally:
        cache.schedule(READ)
    return out


def vocabulary_of(model: PreTrainedModel) -> int:
    """Number of token ids that the model can read."""
    weight = model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    return weight.shape[0]


ROWS: Final = 8  # texts
TOKENS: Final = 16  # of each text, without the first: all texts begin alike, often with a special token


@torch.no_grad()
def measure_key_means(model: Any, cache: TextCache) -> list[KeyMeans | None]:
    """The mean key of each layer's heads, or None for a layer that holds no keys.

    `model` may be a wrapper of a model of transformers. The texts are written into `cache`, an empty one of `ROWS`
    rows. All means are None for a model without a head over the vocabulary, which cannot write. Uses no shared random
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
    """The token that a text begins with, or any token if the config names none, or one outside of the vocabulary."""
    config, vocabulary = model.config.get_text_config(), vocabulary_of(model)
    for ids in (config.bos_token_id, config.eos_token_id):
        first = ids[0] if isinstance(ids, list) and ids else ids
        if isinstance(first, int) and 0 <= first < vocabulary:
            return first
    return 0


def model_info(model: PreTrainedModel) -> ModelInfo:
    """Facts about an attached model for policies. The fingerprint is computed on first use."""
    return ModelInfo(type(model).__name__, partial(fingerprint, model), model.dtype, len(attached(model).rotaries))


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer, the dtype of its keys, and its sliding window or chunk of attention.

    `latent`: number of the last channels of its keys that are its values (MLA), and are held once, or 0. `index`:
    channels of an indexer's key, held beside each key, or 0.
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    sliding_window: int | None
    latent: int = 0
    attention_chunk: int | None = None
    index: int = 0

    @property
    def most_visible(self) -> int | None:
        """The most tokens that a query sees, its own among them. None: no limit."""
        return most_visible(self.sliding_window, self.attention_chunk)

    @property
    def channels(self) -> int:
        """Numbers that are held of each token and kv head."""
        return self.head_dim + (0 if self.latent else self.value_dim) + self.index

    def of_heads(self, kv_heads: int) -> LayerShape:
        """The shape with so many of its kv heads, and their query heads."""
        return replace(self, heads=self.heads // self.kv_heads * kv_heads, kv_heads=kv_heads)

    def empty_store(self, like: Store) -> Store:
        """A store of the same settings as `like`, for this layer."""
        store = like.fresh(None)
        store.latent, store.index = self.latent, self.index
        return store

    def bytes_per_token(self, store: Store) -> int:
        """Bytes that a token takes per kv head in such a store, see `Store.bytes_per_token`."""
        return self.empty_store(store).bytes_per_token(self.head_dim, self.value_dim, self.dtype)

    def states(self, device: torch.device) -> tuple[Queries, NewKeys, NewValues]:
        """Queries, keys and values of one token, all 0."""
        sizes = (self.heads, self.head_dim), (self.kv_heads, self.head_dim), (self.kv_heads, self.value_dim)
        queries, keys, values = (torch.zeros(1, n, 1, width, dtype=self.dtype, device=device) for n, width in sizes)
        return queries, keys, values


class _ShapeCache(ModelCache):
    """A cache that holds nothing, and notes the shapes of its inputs."""

    def __init__(self, model: PreTrainedModel) -> None:
        own, config = attached(model), model.config.get_text_config()
        super().__init__(own, CacheOptions(), own.rotaries, device_of_inputs(model), config, own.kinds)
        self.heads = own.heads
        self.reset()
        self.shapes: dict[int, LayerShape] = {}
        self._values: dict[int, NewValues] = {}

    def attend(self, layer: int, queries: Queries, keys: NewKeys, values: NewValues, call: AttentionCall) -> Attended:
        """The attention of one token alone: its own value."""
        heads, kv_heads = queries.shape[1], keys.shape[1]
        self.shapes[layer] = LayerShape(
            heads=heads,
            kv_heads=kv_heads,
            head_dim=keys.shape[3],
            value_dim=values.shape[3],
            dtype=keys.dtype,
            sliding_window=call.sliding_window,
            latent=self.latent_of(layer),
            attention_chunk=call.attention_chunk,
            index=self.index_of(layer),
        )
        self._values[layer] = values
        return values.repeat_interleave(heads // kv_heads, 1)

    def attend_shared(self, layer: int, queries: Queries, call: AttentionCall) -> Attended:
        """Attention of one token to the values of `layer`."""
        values = self._values[layer]
        return values.repeat_interleave(queries.shape[1] // values.shape[1], 1)


@no_inference_mode
def layer_shapes(model: PreTrainedModel) -> list[LayerShape]:
    """The shape of each layer of an attached model, from one pass of one token that no cache holds.

    Raises: UsageError when the model is not attached.
    """
    cache = _ShapeCache(model)
    first: Tensor = torch.zeros(1, 1, dtype=torch.long, device=device_of_inputs(model))
    model(input_ids=first, past_key_values=cache)
    return [cache.shapes[layer] for layer in range(len(cache.layers))]
