"""A `TextCache` that models of transformers take as `past_key_values`."""

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig

from windlass.cache.cache import TextCache
from windlass.cache.options import CacheOptions
from windlass.core.errors import UsageError
from windlass.hf.guards import refuse_prefix
from windlass.positions.rotary import Rotary


class ModelCache(TextCache, Cache):  # type: ignore[misc]  # its layers are of our own kinds
    """A cache of un-rotated keys with the methods that transformers calls. `KVCache` is the one to make.

    `model_id` and `rotaries` are those of `TextCache`; `config` is the text model's.
    """

    def __init__(
        self,
        model_id: object,
        options: CacheOptions,
        rotaries: list[Rotary | None],
        device: torch.device,
        config: PreTrainedConfig,
    ) -> None:
        Cache.__init__(self, layers=[])
        TextCache.__init__(self, model_id, options, rotaries, device)
        self.config = config

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
        """Raises: UsageError. It is what PEFT asks before it puts its prefix in place of this cache."""
        refuse_prefix()

    @property
    def is_croppable(self) -> bool:
        return True

    @property
    def is_initialized(self) -> bool:
        return self.columns_seen > 0

    @property
    def is_sliding(self) -> list[bool]:
        return [False]

    @property
    def is_linear(self) -> list[bool]:
        return [False]

    @property
    def is_dummy(self) -> list[bool]:
        return [False]
