"""Conversion between a transformers `DynamicCache`, whose keys are rotated, and a cache of un-rotated keys."""

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from windlass.cache.append import append
from windlass.cache.history import History
from windlass.cache.picture_edits import refuse_pictures
from windlass.cache.recurrent_layer import refuse_edit
from windlass.cache.rows import RowTable
from windlass.cache.slot_layer import SlotLayer
from windlass.cache.state import CacheState
from windlass.core.errors import UsageError
from windlass.core.rotate import rotate, unrotate
from windlass.hf.linear_layer import LayerKinds
from windlass.merge import holds_merged_tokens
from windlass.policies.base import INITIAL_STATE
from windlass.positions.modes import Auto, Compact
from windlass.positions.rotary import Rotary


def rows_of(source: Cache, kinds: LayerKinds) -> int:
    """The batch of a `DynamicCache`. Raises: UsageError when it is something else, or empty."""
    return _states_of(source, kinds)[0][0].shape[0]


def fill_from_rotated(cache: CacheState, source: Cache, kinds: LayerKinds, config: PreTrainedConfig) -> None:
    """See `KVCache.from_rotated`; `cache` is new. `kinds` are those of the model's layers."""
    refuse_edit(cache.recurrent, "from_rotated")
    missing = [what for name, what in INITIAL_STATE.items() if name in cache.policy.needs.state]
    if missing:
        raise UsageError(f"from_rotated: {cache.policy!r} ranks by {missing[0]}, which a DynamicCache does not know")
    refuse_indexed(cache, "from_rotated")
    states = _states_of(source, kinds)
    if len(states) != len(cache.by_layer):
        raise UsageError(f"the DynamicCache has {len(states)} layers, the model has {len(cache.by_layer)}")
    seen = source.get_seq_length()
    parts = [
        (layer, own_keys, own_values, window)
        for its, (all_keys, all_values, window) in zip(cache.by_layer, states, strict=True)
        for layer, own_keys, own_values in zip(its.layers, its.split(all_keys), its.split(all_values), strict=True)
    ]
    for layer, keys, values, window in parts:
        if layer.rotary is not None and layer.rotary.table_changes_at(seen):
            raise UsageError(
                f"the DynamicCache holds {seen} tokens, more than the {layer.rotary.constant_length} up to which this "
                "model's rotation is constant: each key was rotated by the table of its moment; feed the text anew"
            )
        positions = torch.arange(seen - keys.shape[2], seen, device=keys.device)
        if layer.store.latent:  # there latents are called keys, and what all heads share values
            keys, values = torch.cat((values, keys), -1), keys
        keys = _converted_keys(keys, positions, layer.rotary, seen, is_out=False)
        # Of transformers' caches, those of chunks and of windows are alike.
        types = getattr(config, "layer_types", None) or ()
        is_chunked = "chunked_attention" in types and types[kinds.attention[layer.index]] == "chunked_attention"
        layer.use_sliding_window(*((None, window) if is_chunked else (window, None)))
        append(layer, keys, values, positions.expand(keys.shape[0], 1, -1))
        # A sliding layer has dropped what its window left behind, which a rollback would have to bring back.
        layer.history = History(has_evicted=keys.shape[2] < seen)
    cache.rows = RowTable.after_prompt(cache.batch_size, seen)


def _states_of(source: Cache, kinds: LayerKinds) -> list[tuple[Tensor, Tensor, int | None]]:
    """Keys, values and sliding window of each layer that has any of its own."""
    if not isinstance(source, DynamicCache):
        raise UsageError(f"from_rotated takes a transformers DynamicCache, got {type(source).__name__}")
    states: list[tuple[Tensor, Tensor, int | None]] = []
    for index, layer in enumerate(source.layers):
        if index in kinds.sources and (not isinstance(layer, DynamicLayer) or layer.keys is None):
            continue
        if not isinstance(layer, DynamicLayer):
            raise UsageError(f"layer {index} of the DynamicCache is a {type(layer).__name__}: not keys and values")
        if layer.keys is None or layer.values is None or layer.keys.numel() == 0:
            raise UsageError(f"layer {index} of the DynamicCache is empty")
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        states.append((layer.keys, layer.values, window))
    if not states:
        raise UsageError("the DynamicCache is empty")
    return states


def to_rotated(cache: CacheState, config: PreTrainedConfig, kinds: LayerKinds) -> DynamicCache:
    """See `KVCache.to_rotated`. `kinds` are those of the model's layers."""
    refuse_edit(cache.recurrent, "to_rotated")
    refuse_pictures(cache, "to_rotated")
    refuse_indexed(cache, "to_rotated")
    if any(holds_merged_tokens(layer.positions, layer.table.state) for layer in cache.layers):
        raise UsageError("to_rotated: tokens of this cache were merged, and a DynamicCache does not know their counts")
    result = DynamicCache(config=config)
    trained = cache.trained_length
    is_beyond = trained is not None and max(cache.next_positions) > trained
    is_compact = isinstance(cache.positions, Compact) or (isinstance(cache.positions, Auto) and is_beyond)
    most = max((int((layer.positions >= 0).sum(-1).max()) for layer in cache.layers if not layer.is_empty), default=0)
    end = most if is_compact else max(cache.next_positions)
    for its in cache.by_layer:
        parts = [_rotated(layer, end, is_compact) for layer in its.layers]
        if len({keys.shape[2] for keys, _ in parts}) > 1:
            raise UsageError("to_rotated: shares let the heads of a layer keep different numbers of tokens")
        number = kinds.attention[its.layers[0].index]
        keys, values = (its.joined(states) for states in zip(*parts, strict=True))
        result.update(keys, values, number)
        exported = result.layers[number]
        if isinstance(exported, DynamicSlidingWindowLayer):
            exported.cumulative_length = end
    return result


def _rotated(layer: SlotLayer, end: int, is_compact: bool) -> tuple[Tensor, Tensor]:
    """The keys, rotated, and values of a layer of a text that ends at `end`. Raises: UsageError as above."""
    if layer.is_empty:
        raise UsageError("to_rotated: this cache is empty")
    held = (layer.positions >= 0).sum(-1)
    tokens = int(held.max())
    order = layer.positions.where(layer.positions >= 0, 2**31 - 1).argsort(dim=-1, stable=True)[..., :tokens]
    positions = layer.positions.gather(-1, order)
    first = 0 if layer.rules.most_visible is None else end - tokens
    expected = torch.arange(first, first + tokens, device=positions.device)
    if is_compact and first + tokens == end and bool((held == tokens).all()):
        positions = expected.expand_as(positions)
    elif not bool((positions == expected).all()) or first + tokens != end:
        raise UsageError(
            f"to_rotated: layer {layer.index} does not hold positions {first} to {end - 1} in every row and head; "
            'export a cache that has evicted under positions="compact"'
        )
    keys, values = (_gathered(states, order) for states in (layer.store.keys(), layer.store.values()))
    keys = _converted_keys(keys, positions, layer.rotary, first + tokens, is_out=True)
    if layer.store.latent:
        keys, values = values, keys[..., : -layer.store.latent]
    return keys, values


def refuse_indexed(cache: CacheState, what: str) -> None:
    """Raises: UsageError for a cache that holds an indexer's keys, which are not converted."""
    if any(layer.store.index for layer in cache.layers):
        raise UsageError(
            f"{what}: the layers of this model hold keys of an indexer, too, and these are not converted; keep the "
            "cache in a file with windlass.prompt_cache.save, or feed the text anew"
        )


def _gathered(states: Tensor, order: Tensor) -> Tensor:
    return states.gather(2, order.expand(-1, states.shape[1], -1)[..., None].expand(-1, -1, -1, states.shape[-1]))


def _converted_keys(keys: Tensor, positions: Tensor, rotary: Rotary | None, length: int, is_out: bool) -> Tensor:
    """Keys rotated in the model's layout of channels (`is_out`), or back to un-rotated with pairs as halves."""
    if rotary is None:
        return keys
    cos, sin = (table[positions] for table in rotary.tables(length, keys.device))
    states = keys.float()
    if is_out:
        states = rotary.layout.from_halves(rotate(states, cos, sin), rotary.rotary_pairs)
        states = states if rotary.norm_weights is None else rotary.norm_weights.put_in(states)
    else:
        states = states if rotary.norm_weights is None else rotary.norm_weights.left_out(states, states)[1]
        states = unrotate(rotary.layout.to_halves(states, rotary.rotary_pairs), cos, sin)
    return states.to(keys.dtype)
