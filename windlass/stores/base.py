"""How the bytes of a layer's keys and values are held."""

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from windlass import kernels
from windlass.core.packed import Held
from windlass.core.shapes import KeyCentres, NewKeys, NewValues, SlotIndex, SlotKeys, SlotValues
from windlass.kernels.reference import Writes
from windlass.stores.exact import Exact

Parts = dict[str, Tensor]  # by name, each (batch, kv_heads, slots or tokens, width of its own)


class Store(ABC):
    """Keys (un-rotated) and values of one layer, addressed by slot.

    A token is one row of every part, and what `exact` may hold of it beside. So whatever moves tokens
    moves bytes, and only `encode` and the two `decode` look into them.
    """

    part_names: ClassVar[tuple[str, ...]]
    """Of the tensors that `encode` makes."""

    constant_names: ClassVar[tuple[str, ...]] = ()
    """Of the tensors that `begin` makes: the same for all tokens."""

    needs_centres: ClassVar[bool] = False
    """Whether the mean key of a layer is of use, see `calibrate`."""

    def __init__(self, exact: Exact | None = None) -> None:
        self.exact = exact or Exact()
        self._parts: Parts = {}
        self._constants: Parts = {}

    @property
    @abstractmethod
    def name(self) -> str:
        """What a user calls it."""

    @abstractmethod
    def fresh(self, centres: KeyCentres | None) -> "Store":
        """An empty store of the same kind, for a layer whose mean keys are `centres` (None: unknown)."""

    @abstractmethod
    def encode(self, keys: NewKeys, values: NewValues) -> Parts:
        """The parts that stand for these tokens."""

    @abstractmethod
    def decode_keys(self, parts: Parts) -> SlotKeys:
        """The keys that such parts stand for, in the dtype attention reads."""

    @abstractmethod
    def decode_values(self, parts: Parts) -> SlotValues:
        """The values, likewise."""

    @abstractmethod
    def held_keys(self) -> Held:
        """The keys as they lie in memory."""

    @abstractmethod
    def held_values(self) -> Held:
        """The values as they lie in memory."""

    @abstractmethod
    def reads_like(self, other: "Store") -> bool:
        """Whether the parts of `other` stand for the same tokens here."""

    def begin(self, keys: NewKeys) -> Parts:
        """The constants, once the first keys show their layout."""
        return {}

    def allocate(self, keys: NewKeys, values: NewValues, slots: int, spare: int = 0) -> None:
        """Make room for `slots` slots shaped and typed like one step's keys and values.

        `spare` tokens can be taken back, and what then is to be exact is.
        """
        self.exact.allocate(keys, values, spare)
        self._constants = self.begin(keys)
        sample = self.encode(keys[:, :, :1], values[:, :, :1])
        self._parts = {name: part.new_zeros(*part.shape[:2], slots, part.shape[3]) for name, part in sample.items()}

    @property
    def slots(self) -> int:
        """Places per (row, kv head); 0 before `allocate`."""
        return self._parts[self.part_names[0]].shape[2] if self._parts else 0

    @property
    def layout(self) -> tuple[int, int, torch.dtype]:
        """(kv_heads, head_dim, dtype) of the keys that are held."""
        keys = self.decode_keys({name: part[:1, :, :0] for name, part in self._held().items()})
        return keys.shape[1], keys.shape[3], keys.dtype

    def write(
        self, index: SlotIndex, keys: NewKeys, values: NewValues, positions: SlotIndex, beside: Writes = ()
    ) -> None:
        """Overwrite the slots at `index` with new tokens; leaves every other slot's bytes alone.

        `positions` are EMPTY for padding, which is written, but is not one of the newest tokens. What a layer
        keeps `beside` is written with them, see `kernels.write_all`.
        """
        self.put(index, self.encode(keys, values), beside)
        self.exact.write(index, keys, values, positions)

    def put(self, index: SlotIndex, parts: Parts, beside: Writes = ()) -> None:
        """Overwrite the parts at `index` with those of a store that this one `reads_like`."""
        kernels.write_all(index, [*((held, parts[name]) for name, held in self._held().items()), *beside])

    def take(self, row: int, index: SlotIndex) -> Parts:
        """A copy of the parts at `index` (1, ranked, tokens) of one row."""
        return {name: kernels.read(part[row : row + 1], index) for name, part in self._held().items()}

    def take_all(self, index: SlotIndex) -> Parts:
        """A copy of the parts at `index` of every row."""
        return {name: kernels.read(part, index) for name, part in self._held().items()}

    def read(self, row: int, index: SlotIndex) -> tuple[NewKeys, NewValues]:
        """The keys and values at `index` (1, ranked, tokens) of one row."""
        keys, values = (kernels.read(states[row : row + 1], index) for states in (self.keys(), self.values()))
        return keys, values

    def keys(self) -> SlotKeys:
        """All keys, in the dtype attention reads; free slots hold anything finite."""
        return self.exact.over(self.decode_keys(self._held()), self.exact.keys)

    def values(self) -> SlotValues:
        """All values, likewise."""
        return self.exact.over(self.decode_values(self._held()), self.exact.values)

    def rearrange(self, order: SlotIndex, slots: int) -> None:
        """Keep the slots at `order`, in that order, then free slots up to `slots`."""
        kept = order.shape[-1]
        self.exact.rearrange(order, self.slots)
        for name, part in self._held().items():
            fresh = part.new_zeros(*part.shape[:2], slots, part.shape[3])
            fresh[:, :, :kept] = kernels.read(part, order)
            self._parts[name] = fresh

    def select_rows(self, rows: Tensor) -> None:
        """Keep the batch rows at `rows`, which may repeat."""
        self.exact.select_rows(rows)
        self._parts = {name: part.index_select(0, rows) for name, part in self._held().items()}

    def copy_row(self, source: int, target: int) -> None:
        """Overwrite row `target` with row `source`, byte for byte."""
        self.exact.copy_row(source, target)
        for part in self._held().values():
            part[target] = part[source]

    def tensors(self) -> Parts:
        """Every tensor allocated, by name: what is counted, and what is saved."""
        return {**self._parts, **self._constants, **self.exact.copies} if self._parts else {}

    def restore(self, tensors: Parts) -> None:
        """Take back what `tensors` gave; other names are passed over."""
        self.exact.restore(tensors)
        self._parts = {name: tensors[name] for name in self.part_names}
        self._constants = {name: tensors[name] for name in self.constant_names}

    def _held(self) -> Parts:
        assert self._parts, "tokens of a store that was never allocated"
        return self._parts


class Plain(Store):
    """Keys and values as the model made them."""

    part_names = ("keys", "values")

    def __repr__(self) -> str:
        return "Plain()"

    @property
    def name(self) -> str:
        return "plain"

    def fresh(self, centres: KeyCentres | None) -> "Plain":
        return Plain()

    def encode(self, keys: NewKeys, values: NewValues) -> Parts:
        return {"keys": keys, "values": values}

    def decode_keys(self, parts: Parts) -> SlotKeys:
        return parts["keys"]

    def decode_values(self, parts: Parts) -> SlotValues:
        return parts["values"]

    def held_keys(self) -> Held:
        return Held(self.keys(), 8 * self.keys().itemsize)

    def held_values(self) -> Held:
        return Held(self.values(), 8 * self.values().itemsize)

    def reads_like(self, other: Store) -> bool:
        return isinstance(other, Plain)
