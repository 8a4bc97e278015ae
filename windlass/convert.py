"""Caches that travel between transformers and windlass."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from windlass.errors import UsageError
from windlass.positions import Compact
from windlass.rotary import Rotary, rotate, unrotate

if TYPE_CHECKING:
    from windlass.cache import KVCache


def fill_from_rotated(cache: KVCache, source: Cache) -> None:
    """See `KVCache.from_rotated`; `cache` is new."""
    if not isinstance(source, DynamicCache):
        raise UsageError(f"from_rotated takes a transformers DynamicCache, got {type(source).__name__}")
    if len(source.layers) != len(cache.layers):
        raise UsageError(f"the DynamicCache has {len(source.layers)} layers, the model has {len(cache.layers)}")
    seen = source.get_seq_length()
    for layer, theirs in zip(cache.layers, source.layers, strict=True):
        keys, values = theirs.keys, theirs.values
        if keys is None or values is None or keys.numel() == 0:
            raise UsageError(f"layer {layer.index} of the DynamicCache is empty")
        positions = torch.arange(seen - keys.shape[2], seen, device=keys.device)
        window = theirs.sliding_window if theirs.is_sliding else None
        layer.append(_turned(keys, positions, layer.rotary, seen, is_out=False), values, positions[None, None], window)
    cache.stand_after(seen)


def to_rotated(cache: KVCache) -> DynamicCache:
    """See `KVCache.to_rotated`."""
    result = DynamicCache(config=cache.config)
    is_compact = isinstance(cache.positions, Compact)
    end = max(cache.next_positions)
    for layer in cache.layers:
        if layer.is_empty:
            raise UsageError("to_rotated: this cache is empty")
        tokens = layer.most_held
        text_order = layer.positions.where(layer.positions >= 0, 2**31 - 1).argsort(dim=-1, stable=True)[..., :tokens]
        positions = layer.positions.gather(-1, text_order)
        first = 0 if layer.sliding_window is None else end - tokens
        expected = torch.arange(first, first + tokens, device=positions.device)
        if is_compact:
            positions = expected.expand_as(positions)
        elif not bool((positions == expected).all()) or first + tokens != end:
            raise UsageError(
                f"to_rotated: layer {layer.index} does not hold positions {first} to {end - 1} in every row and head; "
                'export a cache that has evicted under positions="compact"'
            )
        keys, values = (_gathered(states, text_order) for states in (layer.store.keys(), layer.store.values()))
        result.update(_turned(keys, positions, layer.rotary, first + tokens, is_out=True), values, layer.index)
        theirs = result.layers[layer.index]
        if theirs.is_sliding:
            theirs.cumulative_length = end
    return result


def _gathered(states: Tensor, order: Tensor) -> Tensor:
    return states.gather(2, order.expand(-1, states.shape[1], -1)[..., None].expand(-1, -1, -1, states.shape[-1]))


def _turned(keys: Tensor, positions: Tensor, rotary: Rotary | None, length: int, is_out: bool) -> Tensor:
    """Keys between the model's frame, rotated, and ours, un-rotated with pairs as halves."""
    if rotary is None:
        return keys
    cos, sin = (table[positions] for table in rotary.tables(length, keys.device))
    states = keys.float()
    if is_out:
        states = rotary.layout.from_halves(rotate(states, cos, sin), rotary.pairs)
    else:
        states = unrotate(rotary.layout.to_halves(states, rotary.pairs), cos, sin)
    return states.to(keys.dtype)
