"""What a model's indexer picks of a layer's slots, for attention that reads no others."""

from abc import ABC, abstractmethod

from torch import Tensor

from windlass.core.shapes import IndexKeys, PickedSlots

Turn = tuple[Tensor, Tensor]  # cos and sin (batch, tokens or slots, rotary_pairs)


class Picker(ABC):
    """The indexer of one layer, asked about the queries of some columns of a step."""

    limit: int
    """How many slots it picks for each query."""

    keys: Tensor
    """(batch, tokens, channels): the step's own index keys, un-rotated."""

    @abstractmethod
    def picked(self, keys: IndexKeys, seen: PickedSlots, keys_turn: Turn | None, queries_turn: Turn | None) -> Tensor:
        """Of the slots that each query sees, the `limit` that score best; which others are named does not matter.

        `keys` are those of all slots, un-rotated; the turns are those of the layer's keys and queries, None without
        rotation. Which of equal scores are picked is left to `torch.topk`, as in the model itself.
        """

    @abstractmethod
    def columns(self, start: int, stop: int) -> "Picker":
        """The same for some of these columns."""
