"""The contract of a store: how the bytes of one layer's keys and values are held.

A store turns a token into its *parts*: one row in each of a few tensors of shape (batch, kv_heads, slots, width).
`Store` allocates these tensors and reads, writes, moves, copies and saves their rows without a look inside. Only
`encode`, `decode_keys` and `decode_values` know the meaning of the parts.

To write a store, subclass `Store` in a file of its own:

1. name the parts in `part_names`, and make them in `encode`: new keys and values to parts.
2. give keys and values back in `decode_keys` and `decode_values`, in the dtype of the model.
3. return a new, empty store of the same settings in `fresh`.
4. return in `name` the text that a user types. List whole numbers in it, as in `int4(sinks=4)`, in `parameters`.
5. add one line to `STORES` in `windlass/stores/formats.py`. Without it, `KVCache(store=MyStore())` works, too.

Optional: `make_constants` and `constant_names` for tensors that all tokens share, `needs_key_means` for a store that
encodes keys relative to their mean, and `packed_keys` and `packed_values` for bytes that kernels read in place. By
default kernels are given decoded keys and values: correct for every store, at the price of decoding all slots at each
step.
"""

import copy
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from math import prod
from mmap import PAGESIZE, mmap
from typing import ClassVar, Final, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from windlass import kernels
from windlass.core.inputs import PackedStates, Writes
from windlass.core.types import IndexKeys, KeyMeans, NewKeys, NewValues, SlotIndex, SlotKeys, SlotValues
from windlass.stores.full_precision import FullPrecisionRing

LARGE: Final = 2**20  # bytes from which on memory is asked of the system
INDEX_KEYS: Final = "index_keys"  # name of the part that holds them, also in prompt-cache files
Parts = dict[str, Tensor]  # by name, each (batch, kv_heads, slots or tokens, width of its own)


def _pages(size: int) -> mmap:
    """Memory that is zero until it is written. It is given back once no tensor has it."""
    if sys.platform == "win32":
        return mmap(-1, size)
    from mmap import MAP_ANONYMOUS, MAP_PRIVATE  # which Windows lacks

    return mmap(-1, size, flags=MAP_PRIVATE | MAP_ANONYMOUS)


def _give_back(pages: mmap, row: Tensor, number: int) -> None:
    """Let the bytes of a row, the `number`th of its size in `pages`, be zeros: whole pages by giving them back."""
    from mmap import MADV_DONTNEED

    start, stop = number * len(row), (number + 1) * len(row)
    first, last = -(-start // PAGESIZE) * PAGESIZE, stop // PAGESIZE * PAGESIZE
    if first < last:
        pages.madvise(MADV_DONTNEED, first, last - first)
    row[: first - start] = 0
    row[max(first, last) - start :] = 0


class StoreSnapshot(NamedTuple):
    """The tensors of a store at some moment, and a copy of which tokens its ring held."""

    parts: Parts
    constants: Parts
    full_precision: Parts
    token_index: Tensor | None


class Store(ABC):
    """Keys (un-rotated) and values of one layer, addressed by slot. The module's docstring says how to write one.

    `full_precision` holds some tokens unquantised beside their parts. It is empty unless a store uses it.
    """

    part_names: ClassVar[tuple[str, ...]]
    """Names of the tensors that `encode` makes."""

    constant_names: ClassVar[tuple[str, ...]] = ()
    """Names of the tensors that `make_constants` makes."""

    parameters: ClassVar[tuple[str, ...]] = ()
    """Arguments of the constructor: whole numbers that a user may write in parentheses after the name."""

    needs_key_means: ClassVar[bool] = False
    """True if `fresh` needs the mean keys of a layer, which are measured once per model."""

    latent: int = 0
    """Number of value channels that are read from the last channels of the keys (0: values are stored)."""
    index: int = 0
    """Number of channels of an indexer's key, stored in full precision beside each token's parts (0: no indexer)."""

    def __init__(self, full_precision: FullPrecisionRing | None = None) -> None:
        self.full_precision = full_precision or FullPrecisionRing()
        self._parts: Parts = {}
        self._constants: Parts = {}
        self._mapped = WeakValueDictionary[int, mmap]()  # memory of parts, by address

    @property
    @abstractmethod
    def name(self) -> str:
        """The text that stands for this store in options, result rows and files. `store_of` reads it."""

    @abstractmethod
    def fresh(self, key_means: KeyMeans | None) -> "Store":
        """An empty store with the same settings, for a layer whose mean keys are `key_means` (None: unknown)."""

    @abstractmethod
    def encode(self, keys: NewKeys, values: NewValues) -> Parts:
        """The parts of these tokens. `make_constants` was called before. Values of no channels take no bytes."""

    @abstractmethod
    def decode_keys(self, parts: Parts) -> SlotKeys:
        """The keys that such parts stand for, in the model's dtype."""

    @abstractmethod
    def decode_values(self, parts: Parts) -> SlotValues:
        """The values that such parts stand for, in the model's dtype."""

    def make_constants(self, keys: NewKeys) -> Parts:
        """Make the tensors that all tokens share. Called once, with the first keys."""
        return {}

    def packed_keys(self) -> PackedStates:
        """All keys as kernels read them. The default decodes them first."""
        return PackedStates(self.keys())

    def packed_values(self) -> PackedStates:
        """All values as kernels read them. The default decodes them first."""
        return PackedStates(self.values())

    def packed(self) -> tuple[PackedStates, PackedStates]:
        """All keys and all values as kernels read them."""
        keys = self.packed_keys()
        return keys, replace(keys, last=self.latent) if self.latent else self.packed_values()

    def in_place(self) -> tuple[PackedStates, PackedStates] | None:
        """All keys and values where the store holds nothing else, so that a kernel may write to them, or None.

        A kernel encodes new tokens as `kernels.encode` does.
        """
        return None

    def in_place_beside_sinks(self) -> tuple[PackedStates, PackedStates] | None:
        """As `in_place`, where the store may hold some tokens in full precision, which no new token changes.

        A kernel that writes to a slot takes it out of `ring_index`, which keys and values share.
        """
        return self.in_place()

    def is_compatible(self, other: "Store") -> bool:
        """Return True if the parts of `other` stand for the same tokens here, so that `put` may take them as they are.

        Both stores must be allocated. Compares constants, so it waits for the device.
        """
        return type(other) is type(self) and all(
            self._constants[name].equal(other._constants[name].to(self._constants[name].device))
            for name in self.constant_names
        )

    def is_alike(self, other: "Store") -> bool:
        """Return True if the parts of `other` are the same numbers here, by kind and model, without a look at them.

        Both were given the same constants, in the same layer.
        """
        return type(other) is type(self)

    def parts_of(self, keys: NewKeys, values: NewValues) -> Parts:
        """The stored parts of these tokens."""
        return {name: part for name, part in self.encode(keys, self.stored(values)).items() if part.shape[3]}

    @property
    def index_keys(self) -> IndexKeys | None:
        """The indexer's keys of all slots, un-rotated, or None where there are none."""
        return self._allocated()[INDEX_KEYS][:, 0] if self.index else None

    def index_writes(self, new: Tensor | None) -> Writes:
        """The parts of (batch, tokens, channels) `new` keys of an indexer, for `write`. Nothing if there are none."""
        return [] if new is None else [(self._allocated()[INDEX_KEYS], new[:, None])]

    def stored(self, values: Tensor) -> Tensor:
        """The channels of the values that are not a part of the keys."""
        return values[..., :0] if self.latent else values

    def bytes_per_token(self, head_dim: int, value_dim: int, dtype: torch.dtype) -> int:
        """Bytes that a token takes per kv head, in a model of these sizes and this dtype, its index key included.

        Counts parts only: constants and `full_precision`, which do not grow with the slots, come on top.

        Raises: UsageError where the store cannot hold such keys or values.
        """
        keys, values = (torch.zeros(1, 1, 1, width, dtype=dtype) for width in (head_dim, value_dim))
        store = self.fresh(None)
        store.latent, store._constants = self.latent, store.make_constants(keys)
        return self.index * dtype.itemsize + sum(part.nbytes for part in store.parts_of(keys, values).values())

    def allocate(self, keys: NewKeys, values: NewValues, slots: int, rollback: int = 0) -> None:
        """Make room for `slots` slots shaped and typed like one step's keys and values.

        After a rollback of up to `rollback` tokens `full_precision` still holds all it should.

        Raises: UsageError where the store cannot hold such keys or values.
        """
        self.full_precision.allocate(keys, self.stored(values), rollback)
        self._constants = self.make_constants(keys)
        sample = self.parts_of(keys[:, :, :1], values[:, :, :1])
        if self.index:
            sample[INDEX_KEYS] = keys.new_empty(keys.shape[0], 1, 1, self.index)
        self._parts = {name: self._zeros(part, slots) for name, part in sample.items()}

    @property
    def slots(self) -> int:
        """Slots per (row, kv head), or 0 before `allocate`."""
        return self._parts[self.part_names[0]].shape[2] if self._parts else 0

    @property
    def layout(self) -> tuple[int, int, torch.dtype]:
        """(kv_heads, head_dim, dtype) of the keys."""
        keys = self.decode_keys({name: part[:1, :, :0] for name, part in self._allocated().items()})
        return keys.shape[1], keys.shape[3], keys.dtype

    def write(
        self, index: SlotIndex, keys: NewKeys, values: NewValues, positions: SlotIndex, beside: Writes = ()
    ) -> None:
        """Overwrite the slots at `index` with new tokens. Every other slot's bytes stay.

        `positions` are EMPTY for padding, which is written, but does not count as a token of the row.
        `beside`: other tensors to write at the same slots, see `kernels.write_all`.
        """
        self.put(index, self.parts_of(keys, values), beside)
        self.full_precision.write(index, keys, self.stored(values), positions)

    def put(self, index: SlotIndex, parts: Parts, beside: Writes = ()) -> None:
        """Overwrite these parts at `index` with those of this store, or of one that `is_compatible`."""
        held = self._allocated()
        kernels.write_all(index, [*((held[name], part) for name, part in parts.items()), *beside])

    def take(self, row: int, index: SlotIndex) -> Parts:
        """A copy of the parts at `index` (1, score_heads, tokens) of one row."""
        return {name: kernels.read(part[row : row + 1], index) for name, part in self._allocated().items()}

    def take_all(self, index: SlotIndex) -> Parts:
        """A copy of the parts at `index` of every row."""
        return {name: kernels.read(part, index) for name, part in self._allocated().items()}

    def read(self, row: int, index: SlotIndex) -> tuple[NewKeys, NewValues]:
        """The keys and values at `index` (1, score_heads, tokens) of one row."""
        keys, values = (kernels.read(states[row : row + 1], index) for states in (self.keys(), self.values()))
        return keys, values

    def keys(self) -> SlotKeys:
        """All keys, in the model's dtype. Free slots hold arbitrary finite numbers."""
        return self.full_precision.overlay(self.decode_keys(self._allocated()), self.full_precision.keys)

    def values(self) -> SlotValues:
        """All values, in the model's dtype. Free slots hold arbitrary finite numbers."""
        if self.latent:
            return self.keys()[..., -self.latent :]
        return self.full_precision.overlay(self.decode_values(self._allocated()), self.full_precision.values)

    def rearrange(self, order: SlotIndex, slots: int) -> None:
        """Keep the slots at `order`, in that order, then free slots up to `slots`."""
        kept, parts = order.shape[-1], {}
        for name, part in self._allocated().items():
            parts[name] = self._zeros(part, slots)
            parts[name][:, :, :kept] = kernels.read(part, order)
        self.full_precision.rearrange(order, self.slots)
        self._parts = parts

    def snapshot(self) -> StoreSnapshot:
        """The allocated tensors, for `restore_snapshot`. Writing to free slots changes nothing of it that is read."""
        ring = self.full_precision
        return StoreSnapshot(self._parts, self._constants, ring.tensors, ring.copied_token_index())

    def restore_snapshot(self, snapshot: StoreSnapshot) -> None:
        """Go back to the memory of `snapshot`."""
        self._parts, self._constants = snapshot.parts, snapshot.constants
        self.full_precision.put_back(snapshot.full_precision, snapshot.token_index)

    def first(self, rows: slice, slots: int) -> "Store":
        """A store of the first `slots` of these rows, in memory of its own. Tokens lie in no others."""
        twin = self._twin(rows, slots)
        twin._parts = {name: part[rows, :, :slots].clone() for name, part in self._allocated().items()}
        return twin

    def _twin(self, rows: slice, slots: int) -> "Store":
        """A store of these rows whose parts are still those of this one."""
        twin = copy.copy(self)
        twin.full_precision = self.full_precision.copied(rows, slots)
        twin._constants = {name: constant.clone() for name, constant in self._constants.items()}
        return twin

    def rearranged(self, rows: slice, order: SlotIndex, slots: int) -> "Store":
        """A store of these rows in memory of its own, rearranged as by `rearrange`."""
        twin = self._twin(rows, self.slots)
        twin._parts = {name: part[rows] for name, part in self._allocated().items()}
        twin.rearrange(order, slots)
        return twin

    def select_rows(self, rows: Tensor) -> None:
        """Keep the batch rows at `rows`, which may repeat."""
        self.full_precision.select_rows(rows)
        self._parts = {name: part.index_select(0, rows) for name, part in self._allocated().items()}

    def arrange_rows(self, rows: Sequence[int | None], slots: int) -> None:
        """Keep these batch rows in that order. None stands for a row of zeros. Tokens lie in the first `slots`."""
        parts = {name: self._zeros(part, part.shape[2], len(rows)) for name, part in self._allocated().items()}
        for name, part in self._parts.items():
            for own, source in zip(parts[name], rows, strict=True):
                if source is not None:
                    own[:, :slots] = part[source, :, :slots]
        self.full_precision.arrange_rows(rows)
        self._parts = parts

    def copy_row(self, source: int, target: int) -> None:
        """Overwrite row `target` with row `source`, byte for byte."""
        self.full_precision.copy_row(source, target)
        for part in self._allocated().values():
            part[target] = part[source]

    def put_row(self, other: "Store", target: int, is_clear: bool = False) -> None:
        """Overwrite row `target` with the first row of another store that is compatible and has no more slots.

        Further slots get zeros. `is_clear`: they have them.
        """
        self.full_precision.put_row(other.full_precision, target)
        given = other._allocated()
        for name, part in self._allocated().items():
            part[target, :, : other.slots] = given[name][0]
            if not is_clear:
                part[target, :, other.slots :] = 0

    def clear_row(self, row: int) -> None:
        """Let row `row` hold nothing, and its memory zeros. Linux gets whole pages of it back."""
        self.full_precision.clear_row(row)
        for part in self._allocated().values():
            pages = self._mapped.get(part.data_ptr()) if part.is_contiguous() else None
            if pages is None or sys.platform != "linux":
                part[row] = 0
            else:
                _give_back(pages, part[row].view(-1).view(torch.uint8), row)

    def _zeros(self, like: Tensor, slots: int, rows: int | None = None) -> Tensor:
        """A part of so many slots and rows (None: as many), like one of others. A CPU's memory is taken page by page,
        as tokens are written."""
        shape = like.shape[0] if rows is None else rows, like.shape[1], slots, like.shape[3]
        size = prod(shape) * like.itemsize
        if like.device.type != "cpu" or size < LARGE:
            return like.new_zeros(shape)
        try:
            pages = _pages(size)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"{size:,} bytes for slots") from error
        part = torch.frombuffer(pages, dtype=like.dtype).view(shape)
        self._mapped[part.data_ptr()] = pages
        return part

    def over(self, parts: Parts) -> "Store":
        """The same settings and constants over other memory, with no tokens in full precision beside it."""
        twin = copy.copy(self)
        twin._parts, twin.full_precision = parts, FullPrecisionRing()
        return twin

    def tensors(self) -> Parts:
        """Every allocated tensor by name, as a file holds them."""
        return {**self._parts, **self._constants, **self.full_precision.tensors} if self._parts else {}

    def restore(self, tensors: Parts) -> None:
        """Hold the tensors that `tensors()` gave, in place of the present ones. Other names are ignored."""
        self.full_precision.restore(tensors)
        self._parts = {name: tensors[name] for name in (*self.part_names, INDEX_KEYS) if name in tensors}
        self._constants = {name: tensors[name] for name in self.constant_names}

    def _allocated(self) -> Parts:
        assert self._parts, "tokens of a store that was never allocated"
        return self._parts
