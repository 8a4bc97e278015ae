"""What transformers' `generate` asks of a cache, in terms of what a `KVCache` is."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from transformers import Cache

from windlass.core.errors import UsageError
from windlass.core.shapes import Attended, NewKeys, NewValues, Queries, TokenIds, TokenMask
from windlass.core.step import AttentionCall


class TransformersCache(Cache):
    """The protocol of `transformers.Cache` over a cache that owns its positions.

    `get_seq_length` counts every column fed, padding and evicted tokens included, which is what
    `generate` slices its inputs by.
    """

    is_rotated: ClassVar[bool] = False
    """Whether keys are stored as the model's own rotary module turned them."""

    def __init__(self, seam: object) -> None:
        super().__init__(layers=[])
        self.seam = seam  # of the one model that may use this cache

    @abstractmethod
    def begin(
        self, batch: int, tokens: int, mask: TokenMask | None, positions: Tensor | None, ids: TokenIds | None
    ) -> None:
        """Give the next columns their positions."""

    @abstractmethod
    def attend(self, layer: int, queries: Queries, keys: NewKeys, values: NewValues, call: AttentionCall) -> Attended:
        """One layer's write, attend, observe, evict."""

    @abstractmethod
    def end(self, is_complete: bool) -> None:
        """Make the step's tokens part of the text, or take them back."""

    @property
    @abstractmethod
    def columns_seen(self) -> int:
        """Columns fed so far, padding and evicted tokens included."""

    @property
    @abstractmethod
    def is_in_step(self) -> bool:
        """Whether the model that calls `update` is attached and in a step of this cache."""

    @abstractmethod
    def rollback(self, tokens: int | Sequence[int]) -> None:
        """Forget the newest tokens."""

    @abstractmethod
    def select_rows(self, rows: Tensor) -> None:
        """Keep the batch rows at `rows`, which may repeat."""

    @abstractmethod
    def reset(self) -> None:
        """Forget everything."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Hand the new tokens' keys and values on to windlass' attention, which stores them.

        What else models pass (the layer, tables of their rotation) depends on the model; none of it is needed.

        Raises: UsageError when the calling model is not attached.
        """
        if not self.is_in_step:
            raise UsageError("this model is not attached to windlass; call windlass.attach(model) first")
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
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
        """Nothing to do: a step can always be taken back."""

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
