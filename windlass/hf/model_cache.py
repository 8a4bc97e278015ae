"""A `TextCache` that models of transformers take as `past_key_values`."""

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig
from transformers.cache_utils import LinearAttentionLayer

from windlass.cache.cache import TextCache
from windlass.cache.options import CacheOptions
from windlass.cache.recurrent_layer import RecurrentLayer, refuse_edit
from windlass.core.errors import UsageError
from windlass.core.step import no_inference_mode
from windlass.hf.guards import refuse_prefix
from windlass.hf.linear_layer import LayerKinds, LinearLayer
from windlass.hf.running_pass import not_compiled
from windlass.positions.rotary import Rotary


class ModelCache(TextCache, Cache):  # type: ignore[misc]  # its layers are of our own kinds
    """A cache of un-rotated keys with the methods that transformers calls. `KVCache` is the one to make.

    `model_id` and `rotaries` are those of `TextCache`; `config` is the text model's, and `kinds` says what each of its
    layers keeps.
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
        return [LinearLayer(*each) for each in self.kinds.recurrent]

    def latent_of(self, layer: int) -> int:
        return self.kinds.latents.get(self.kinds.attention[layer], 0)

    def index_of(self, layer: int) -> int:
        return self.kinds.indexed.get(self.kinds.attention[layer], 0)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Hand the new tokens' keys and values on to windlass' attention, which stores them.

        What else models pass (the layer, tables of their rotation) depends on the model; none of it is needed.

        Raises: UsageError when the calling model is not attached.
        """
        if not self.is_in_step:
            raise UsageError(
                "this model is not attached to windlass; call windlass.attach(model) first, and the model as a whole"
            )
        return key_states, value_states

    def _linear(self, layer_idx: int) -> LinearAttentionLayer:
        """Where the model keeps the state of a layer. Raises: UsageError when the calling model is not attached."""
        if not self.is_in_step:
            raise UsageError("this model is not attached to windlass; call windlass.attach(model) first")
        layer = next((each for each in self.recurrent if each.index == layer_idx), None)
        if not isinstance(layer, LinearLayer):
            raise UsageError(f"layer {layer_idx} asks for a recurrent state, and its config says that it keeps none")
        return layer.own

    @not_compiled
    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """The newest inputs of a layer's convolution, which the model may write into; None before the first pass."""
        own = self._linear(layer_idx)
        return own.conv_states[state_idx] if own.has_previous_state[state_idx] else None

    @not_compiled
    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        """A layer's state, which the model may write into; None before the first pass."""
        own = self._linear(layer_idx)
        return own.recurrent_states[state_idx] if own.has_previous_state[state_idx] else None

    @not_compiled
    @no_inference_mode
    def update_conv_state(  # type: ignore[override]  # what transformers' layer takes, by name
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, conv_kernel_size: int | None = None
    ) -> Tensor:
        """Keep the newest of a convolution's inputs; returns what it is to read, those of before in front."""
        own = self._linear(layer_idx)
        return own.update_conv_state(conv_states, state_idx, conv_kernel_size=conv_kernel_size)

    @not_compiled
    @no_inference_mode
    def update_recurrent_state(  # type: ignore[override]  # as above
        self, recurrent_states: Tensor, layer_idx: int, state_idx: int = 0
    ) -> Tensor:
        """Keep a layer's state; returns it."""
        return self._linear(layer_idx).update_recurrent_state(recurrent_states, state_idx)

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        """Whether a layer, or all of them, have read a token."""
        layers = [each for each in self.recurrent if layer_idx in (None, each.index)]
        return bool(layers) and all(
            has
            for each in layers
            if isinstance(each, LinearLayer)
            for number, has in each.own.has_previous_state.items()
            if state_idx in (None, number)
        )

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns fed, padding and evicted tokens included: what `generate` slices its inputs by."""
        return self.columns_seen

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.columns_seen + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def crop(self, tokens_to_remove: int) -> None:
        """Roll back `-tokens_to_remove` tokens; a positive number is the length to crop to."""
        columns = -tokens_to_remove if tokens_to_remove <= 0 else self.columns_seen - tokens_to_remove
        if columns > 0:
            self.rollback(columns)

    def activate_past_recording(self) -> None:
        """Assisted decoding begins: until `reset`, `logits_to_keep` of a pass tells its drafts.

        They are then read token by token, so that the text is that of plain decoding. A model that does not take
        `logits_to_keep` reads its first drafts with the prompt, before anything of it is evicted.

        Raises: UsageError for a model with recurrent layers.
        """
        refuse_edit(self.recurrent, "assisted decoding, which takes drafts back")
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
        """Raises: UsageError. It is what PEFT asks before it puts its prefix in place of this cache."""
        refuse_prefix()

    @property
    def is_croppable(self) -> bool:
        return not self.recurrent

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
