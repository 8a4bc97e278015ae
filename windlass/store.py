"""How the bytes of a layer's keys and values are held."""

from abc import ABC, abstractmethod

from torch import Tensor

from windlass.shapes import NewKeys, NewValues, SlotIndex, SlotKeys, SlotValues


class Store(ABC):
    """Keys (un-rotated) and values of one layer, addressed by slot."""

    @abstractmethod
    def allocate(self, keys: NewKeys, values: NewValues, slots: int) -> None:
        """Make room for `slots` slots shaped and typed like one step's keys and values."""

    @property
    @abstractmethod
    def slots(self) -> int:
        """Places per (row, kv head); 0 before `allocate`."""

    @abstractmethod
    def write(self, index: SlotIndex, keys: NewKeys, values: NewValues) -> None:
        """Overwrite the slots at `index` with new tokens; leaves every other slot's bytes alone."""

    @abstractmethod
    def keys(self) -> SlotKeys:
        """All keys, in the dtype attention reads; free slots hold anything finite."""

    @abstractmethod
    def values(self) -> SlotValues:
        """All values, likewise."""

    @abstractmethod
    def rearrange(self, order: SlotIndex, slots: int) -> None:
        """Keep the slots at `order`, in that order, then free slots up to `slots`."""

    @abstractmethod
    def select_rows(self, rows: Tensor) -> None:
        """Keep the batch rows at `rows`, which may repeat."""

    @abstractmethod
    def copy_row(self, source: int, target: int) -> None:
        """Overwrite row `target` with row `source`, byte for byte."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Every tensor allocated, by name: what is counted, and what is saved."""

    @abstractmethod
    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Take back what `tensors` gave."""


class Plain(Store):
    """Keys and values as the model made them."""

    def __init__(self) -> None:
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def allocate(self, keys: NewKeys, values: NewValues, slots: int) -> None:
        batch, kv_heads, _, head_dim = keys.shape
        self._keys = keys.new_zeros(batch, kv_heads, slots, head_dim)
        self._values = values.new_zeros(batch, kv_heads, slots, values.shape[-1])

    @property
    def slots(self) -> int:
        return 0 if self._keys is None else self._keys.shape[2]

    def write(self, index: SlotIndex, keys: NewKeys, values: NewValues) -> None:
        kept_keys, kept_values = self.keys(), self.values()
        places = index.expand(-1, keys.shape[1], -1)[..., None]
        kept_keys.scatter_(2, places.expand(-1, -1, -1, keys.shape[-1]), keys.to(kept_keys.dtype))
        kept_values.scatter_(2, places.expand(-1, -1, -1, values.shape[-1]), values.to(kept_values.dtype))

    def keys(self) -> SlotKeys:
        assert self._keys is not None, "keys of a store that was never allocated"
        return self._keys

    def values(self) -> SlotValues:
        assert self._values is not None, "values of a store that was never allocated"
        return self._values

    def rearrange(self, order: SlotIndex, slots: int) -> None:
        self._keys = _rearranged(self.keys(), order, slots)
        self._values = _rearranged(self.values(), order, slots)

    def select_rows(self, rows: Tensor) -> None:
        self._keys, self._values = self.keys().index_select(0, rows), self.values().index_select(0, rows)

    def copy_row(self, source: int, target: int) -> None:
        self.keys()[target] = self.keys()[source]
        self.values()[target] = self.values()[source]

    def tensors(self) -> dict[str, Tensor]:
        return {} if self._keys is None else {"keys": self.keys(), "values": self.values()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self._keys, self._values = tensors["keys"], tensors["values"]


def _rearranged(states: Tensor, order: SlotIndex, slots: int) -> Tensor:
    batch, kv_heads, _, width = states.shape
    fresh = states.new_zeros(batch, kv_heads, slots, width)
    places = order.expand(-1, kv_heads, -1)[..., None].expand(-1, -1, -1, width)
    fresh[:, :, : order.shape[-1]] = states.gather(2, places)
    return fresh
