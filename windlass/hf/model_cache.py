"""A `TextCache` that models of transformers take as `past_key_values`."""

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, LinearAttentionLayer

from windlass.cache.cache import TextCache
from windlass.cache.edits import refuse_pictures
from windlass.cache.history import History
from windlass.cache.layer import SlotLayer, append
from windlass.cache.merging import holds_merged_tokens
from windlass.cache.options import CacheOptions
from windlass.cache.recurrent import RecurrentLayer, refuse_edit
from windlass.cache.rows import RowTable
from windlass.cache.state import CacheState
from windlass.core.errors import UsageError
from windlass.core.positions import rotate, unrotate
from windlass.core.step import no_inference_mode
from windlass.hf.passes import not_compiled, refuse_prefix
from windlass.hf.recurrent import LayerKinds, LinearAttentionCache
from windlass.policies.base import INITIAL_STATE
from windlass.positions.modes import Auto, Compact
from windlass.positions.rotary import Rotary


class ModelCache(TextCache, Cache):  # type: ignore[misc]  # its layers are of our own kinds
    """A cache of un-rotated keys with the methods that transformers calls. Use `KVCache` to make one.

    `model_id` and `rotaries` are those of `TextCache`. `config` is the text model's. `kinds` tells whether each layer
    has keys or states.
    """

    def __init__(
        self,
        model_id: object,
        options: CacheOptions,
        rotaries: list[Rotary | None],
        device: torch.device,
        config: PreTrainedConfig,
        kinds: LayerKinds,
    ) -> None:
        Cache.__init__(self, layers=[])
        TextCache.__init__(self, model_id, options, rotaries, device)
        self.config, self.kinds, self.shared = config, kinds, kinds.shared

    def new_recurrent_layers(self) -> list[RecurrentLayer]:
        return [LinearAttentionCache(*each) for each in self.kinds.recurrent]

    def latent_of(self, layer: int) -> int:
        return self.kinds.latents.get(self.kinds.attention[layer], 0)

    def index_of(self, layer: int) -> int:
        return self.kinds.indexed.get(self.kinds.attention[layer], 0)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Hand the new tokens' keys and values on to windlass' attention, which stores them.

        Further arguments (the layer, tables of its rotation) depend on the model and are ignored.

        Raises: UsageError when the calling model is not attached.
        """
        if not self.is_in_step:
            raise UsageError(
                "this model is not attached to windlass. Call windlass.attach(model) first, and the model as a whole"
            )
        return key_states, value_states

    def _linear(self, layer_idx: int) -> LinearAttentionLayer:
        """Where the model keeps the state of a layer. Raises: UsageError when the calling model is not attached."""
        if not self.is_in_step:
            raise UsageError("this model is not attached to windlass. Call windlass.attach(model) first")
        layer = next((each for each in self.recurrent if each.index == layer_idx), None)
        if not isinstance(layer, LinearAttentionCache):
            raise UsageError(f"layer {layer_idx} asks for a recurrent state, and its config says that it keeps none")
        return layer.own

    @not_compiled
    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The newest inputs of a layer's convolution, which the model may write into, or None before the first pass."""
        own = self._linear(layer_idx)
        return own.conv_states[state_idx] if own.has_previous_state[state_idx] else None

    @not_compiled
    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """A layer's state, which the model may write into, or None before the first pass."""
        own = self._linear(layer_idx)
        return own.recurrent_states[state_idx] if own.has_previous_state[state_idx] else None

    @not_compiled
    @no_inference_mode
    def update_conv_state(  # type: ignore[override]  # arguments of transformers' layer, by name
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        """Keep the newest of a convolution's inputs. Returns its next input, with the earlier ones in front."""
        own = self._linear(layer_idx)
        return own.update_conv_state(conv_states, state_idx, conv_kernel_size=conv_kernel_size)

    @not_compiled
    @no_inference_mode
    def update_recurrent_state(  # type: ignore[override]  # as above
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0
    ) -> Tensor:
        """Keep and return a layer's state."""
        return self._linear(layer_idx).update_recurrent_state(recurrent_states, state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Return True if a layer, or all of them, have read a token."""
        layers = [each for each in self.recurrent if layer_idx in (None, each.index)]
        return bool(layers) and all(
            has
            for each in layers
            if isinstance(each, LinearAttentionCache)
            for number, has in each.own.has_previous_state.items()
            if state_idx in (None, number)
        )

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns fed, padding and evicted tokens included, by which `generate` slices its inputs."""
        return self.columns_seen

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.columns_seen + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Roll back `-tokens_to_remove` tokens. A positive number is the length to crop to."""
        columns = -tokens_to_remove if tokens_to_remove <= 0 else self.columns_seen - tokens_to_remove
        if columns > 0:
            self.rollback(columns)

    def activate_past_recording(self) -> None:
        """Note that assisted decoding begins: until `reset`, `logits_to_keep` of a pass tells its drafts.

        They are then read token by token, so that the text is that of plain decoding. A model that does not take
        `logits_to_keep` reads its first drafts with the prompt, before anything of it is evicted.
        """
        self.expects_drafts = True

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.select_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.select_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.select_rows(torch.arange(self.batch_size).repeat_interleave(repeats))

    @property
    def is_compileable(self) -> bool:
        return False

    @property
    def max_cache_len(self) -> int:
        """Refuse PEFT's prefix, which would replace this cache: PEFT reads this first. Raises: UsageError."""
        refuse_prefix()

    @property
    def is_croppable(self) -> bool:
        return self.expects_drafts or not self.recurrent

    @property
    def is_initialized(self) -> bool:
        return self.columns_seen > 0

    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    @property
    def is_linear(self) -> list[bool]:
        numbers = {each.index for each in self.recurrent} - set(self.kinds.attention)
        return [each in numbers for each in range(max(*self.kinds.attention, *numbers, 0) + 1)] if numbers else [False]

    @property
    def is_dummy(self) -> list[bool]:
        return [False]


def rows_of(source: Cache, kinds: LayerKinds) -> int:
    """The batch of a `DynamicCache`. Raises: UsageError when it is something else, or empty."""
    return _states_of(source, kinds)[0][0].shape[0]


def fill_from_rotated(cache: CacheState, source: Cache, kinds: LayerKinds, config: PreTrainedConfig) -> None:
    """See `KVCache.from_rotated`. `cache` is new, and `kinds` are those of the model's layers."""
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
                "model's rotation is constant: each key was rotated by the table of its moment. Feed the text again"
            )
        positions = torch.arange(seen - keys.shape[2], seen, device=keys.device)
        if layer.store.latent:  # there latents are named keys, and the channels that all heads share are named values
            keys, values = torch.cat((values, keys), -1), keys
        keys = _converted_keys(keys, positions, layer.rotary, seen, is_out=False)
        # transformers uses one class of cache layer for chunks and windows.
        types = getattr(config, "layer_types", None) or ()
        is_chunked = "chunked_attention" in types and types[kinds.attention[layer.index]] == "chunked_attention"
        layer.use_sliding_window(*((None, window) if is_chunked else (window, None)))
        append(layer, keys, values, positions.expand(keys.shape[0], 1, -1))
        # A sliding layer has dropped the tokens behind its window. A rollback would need them.
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
            f"to_rotated: layer {layer.index} does not hold positions {first} to {end - 1} in every row and head. "
            'Export a cache that has evicted under positions="compact"'
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
            f"{what}: the layers of this model hold keys of an indexer, too, and these are not converted. Keep the "
            "cache in a file with cache.save(path), or feed the text again"
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
