"""What each attention layer of a model hands to its cache, seen when one token is read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windlass.core.attention import most_visible
from windlass.core.shapes import Attended, NewKeys, NewValues, Queries
from windlass.core.step import AttentionCall, no_inference_mode
from windlass.hf.kv_cache import KVCache
from windlass.hf.placement import device_of_inputs
from windlass.stores.base import Store


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one layer, the dtype of its keys, and its sliding window or chunk of attention.

    `latent`: of its keys' channels the last so many are its values (MLA), and are held once; 0 for none. `index`:
    channels of an indexer's key, held beside each key; 0 for none.
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
        """The most tokens that a query sees; None where there is no limit."""
        return most_visible(self.sliding_window, self.attention_chunk)

    @property
    def channels(self) -> int:
        """Numbers that are held of each token and kv head."""
        return self.head_dim + (0 if self.latent else self.value_dim) + self.index

    def of_heads(self, kv_heads: int) -> LayerShape:
        """That of so many of its kv heads, with their query heads."""
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


class _ShapeCache(KVCache):
    """A cache that holds nothing, and notes the shapes of what it is handed."""

    def __init__(self, model: PreTrainedModel) -> None:
        KVCache.__init__(self, model)
        self.shapes: dict[int, LayerShape] = {}
        self._values: dict[int, NewValues] = {}

    def attend(self, layer: int, queries: Queries, keys: NewKeys, values: NewValues, call: AttentionCall) -> Attended:
        """What one token alone reads: its own value."""
        heads, kv_heads = queries.shape[1], keys.shape[1]
        self.shapes[layer] = LayerShape(
            heads,
            kv_heads,
            keys.shape[3],
            values.shape[3],
            keys.dtype,
            call.sliding_window,
            self.latent_of(layer),
            call.attention_chunk,
            self.index_of(layer),
        )
        self._values[layer] = values
        return values.repeat_interleave(heads // kv_heads, 1)

    def attend_shared(self, layer: int, queries: Queries, call: AttentionCall) -> Attended:
        """As `attend`, of a layer that wrote."""
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
