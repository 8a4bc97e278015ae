"""Tensor shapes of the package, the token ids of a text, and a model as the rooms below `hf` know it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from itertools import chain
from typing import Final, Self, TypeVar, final, overload

import torch
from jaxtyping import Bool, Float, Int, Num
from torch import Tensor

TokenIds = Int[Tensor, "batch tokens"]
TokenMask = Bool[Tensor, "batch tokens"]
RowCounts = Int[Tensor, " batch"]
PinnedRanges = Int[Tensor, "batch ranges 2"]

Queries = Float[Tensor, "batch heads tokens head_dim"]
NewKeys = Float[Tensor, "batch kv_heads tokens head_dim"]
NewValues = Float[Tensor, "batch kv_heads tokens value_dim"]
Attended = Float[Tensor, "batch heads tokens value_dim"]
QueryPositions = Int[Tensor, "batch tokens"]
ObservedColumns = Int[Tensor, "batch observed"]

SlotKeys = Float[Tensor, "batch kv_heads slots head_dim"]
SlotValues = Float[Tensor, "batch kv_heads slots value_dim"]
KeyMeans = Float[Tensor, "kv_heads head_dim"]
Scales = Float[Tensor, "batch kv_heads slots scales"]
IndexKeys = Float[Tensor, "batch slots index_channels"]
PickedSlots = Bool[Tensor, "batch tokens slots"]
SlotPositions = Int[Tensor, "batch score_heads slots"]
SlotIndex = Int[Tensor, "batch score_heads chosen"]
ListedSlots = Int[Tensor, "_ _ _"]  # as SlotIndex, one of a list whose lengths differ
PerSlot = Float[Tensor, "batch kv_heads slots"]
Scores = Float[Tensor, "batch score_heads slots"]

LinearInputs = Float[Tensor, "*rows in_features"]
LinearOutputs = Float[Tensor, "*rows out_features"]
LinearWeights = Num[Tensor, "out_features in_features"]
CodeScales = Float[Tensor, " out_features"]
PackedCodes = Num[Tensor, "*experts padded_features packed_in_features"]
GroupPairs = (
    Num[Tensor, "*experts groups padded_features columns"] | Num[Tensor, "*experts blocks groups columns block"]
)
SuperPairs = Num[Tensor, "*experts blocks super_groups columns block"]
Bias = Float[Tensor, " out_features"]
NormWeights = Float[Tensor, " normed"]
Hidden = Float[Tensor, "batch tokens hidden"]
AttendedTokens = Float[Tensor, "batch tokens heads value_dim"]

RotaryQueries = Int[Tensor, "batch score_heads tokens"]
RotaryKeys = Int[Tensor, "batch score_heads slots"]
RotaryTable = Float[Tensor, "length half_rotary_dim"]

Compared = TypeVar("Compared", tuple[int, ...], tuple[bytes, ...], str, bytes)
BLOCK: Final = 1024  # tokens whose ids texts have in common
ID_BYTES: Final = 4
SHARED: Final = 4096  # blocks of the latest texts


def shared(one: Compared, other: Compared) -> int:
    """The number of first tokens, blocks, characters or bytes that both share."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:  # the first that differs is from `low` up to `high`
        middle = (low + high) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle)
    return low


@lru_cache(maxsize=SHARED)
def _shared_block(block: bytes) -> bytes:
    """The object that stands for a block in all texts, which then compare it by its address."""
    return block


@lru_cache(maxsize=SHARED)
def _block_digest(block: bytes) -> bytes:
    return sha256(block).digest()


@lru_cache(maxsize=SHARED)
def _block_bounds(block: bytes) -> tuple[int, int]:
    ids = array("i", block)
    return min(ids), max(ids)


@final
class Tokens(Sequence[int]):
    """The ids of a text. Nobody changes them. Texts with a common beginning share memory. Appending takes time for the
    new tokens only."""

    __slots__ = ("_blocks", "_rest")

    def __init__(self, blocks: tuple[bytes, ...] = (), rest: bytes = b"") -> None:
        """Whole `blocks`, and the ids behind them. `of` makes a text of ids."""
        self._blocks, self._rest = blocks, rest

    @classmethod
    def of(cls, ids: Iterable[int]) -> Self:
        """The text of these ids."""
        return ids if isinstance(ids, cls) else cls.of_bytes(array("i", ids).tobytes())

    @classmethod
    def of_bytes(cls, packed: bytes) -> Self:
        """The text of the ids in `packed`, the inverse of `bytes`."""
        return cls()._and(packed)

    def __add__(self, ids: Iterable[int]) -> Self:
        return self._and(bytes(ids) if isinstance(ids, Tokens) else array("i", ids).tobytes())

    def _and(self, packed: bytes) -> Self:
        rest, size = self._rest + packed, BLOCK * ID_BYTES
        whole = len(rest) // size * size
        new = tuple(_shared_block(rest[at : at + size]) for at in range(0, whole, size))
        return type(self)(self._blocks + new, rest[whole:])

    def __len__(self) -> int:
        return len(self._blocks) * BLOCK + len(self._rest) // ID_BYTES

    def __bytes__(self) -> bytes:
        return b"".join([*self._blocks, self._rest])

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(memoryview(each).cast("i") for each in (*self._blocks, self._rest))

    @overload
    def __getitem__(self, at: int) -> int: ...
    @overload
    def __getitem__(self, at: slice) -> Self: ...
    def __getitem__(self, at: int | slice) -> int | Self:
        if isinstance(at, int):
            block, place = divmod(range(len(self))[at], BLOCK)
            return int(memoryview(self._from(block)).cast("i")[place])
        start, stop, step = at.indices(len(self))
        if step != 1:
            return self.of([*self][at])
        stop = max(start, stop)
        first, last = start // BLOCK, stop // BLOCK
        if start == 0:
            return type(self)(self._blocks[:last], self._from(last)[: stop % BLOCK * ID_BYTES])
        held = b"".join([*self._blocks[first : last + 1], self._rest if last >= len(self._blocks) else b""])
        return self.of_bytes(held[(start - first * BLOCK) * ID_BYTES : (stop - first * BLOCK) * ID_BYTES])

    def _from(self, block: int) -> bytes:
        return self._blocks[block] if block < len(self._blocks) else self._rest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tokens) and (self._blocks, self._rest) == (other._blocks, other._rest)

    def __hash__(self) -> int:
        return hash((self._blocks, self._rest))

    def __repr__(self) -> str:
        return f"Tokens({len(self)})"

    def starts_with(self, other: Tokens) -> bool:
        """Return True if it begins with all of another text."""
        whole = len(other._blocks)
        return self._blocks[:whole] == other._blocks and self._from(whole).startswith(other._rest)

    def shared(self, other: Tokens) -> int:
        """The number of first tokens that both texts share."""
        whole = shared(self._blocks, other._blocks)
        return whole * BLOCK + shared(self._from(whole), other._from(whole)) // ID_BYTES

    @property
    def digest(self) -> str:
        """A hash of all ids."""
        return sha256(b"".join([*map(_block_digest, self._blocks), self._rest])).hexdigest()

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the largest id of a text that has tokens."""
        each = [_block_bounds(each) for each in (*self._blocks, *filter(None, [self._rest]))]
        return min(least for least, _ in each), max(largest for _, largest in each)


@dataclass(frozen=True)
class ModelInfo:
    """Facts of a model that decide if a policy can serve it.

    `name` is the name of its class. `fingerprint` hashes its architecture and a sample of every parameter: it
    reads the weights, so call it only where the answer depends on it. `layers` counts attention layers.
    """

    name: str
    fingerprint: Callable[[], str]
    dtype: torch.dtype
    layers: int


def bounds_of(ids: Sequence[int]) -> tuple[int, int]:
    """The least and the largest of some ids."""
    return ids.bounds if isinstance(ids, Tokens) else (min(ids), max(ids))


CosSin = tuple[Tensor, Tensor]  # cos and sin (batch, tokens or slots, rotary_pairs)


class Picker(ABC):
    """The indexer of one layer, asked about the queries of some columns of a step."""

    limit: int
    """Number of slots to pick for each query."""

    keys: Tensor
    """(batch, tokens, channels): the step's own index keys, un-rotated."""

    @abstractmethod
    def picked(
        self, keys: IndexKeys, seen: PickedSlots, keys_cos_sin: CosSin | None, queries_cos_sin: CosSin | None
    ) -> Tensor:
        """The `limit` slots that score best among those each query sees. Names of unseen slots do not matter.

        `keys` are those of all slots, un-rotated. The turns are those of the layer's keys and queries (None: no
        rotation). Which of equal scores are picked is left to `torch.topk`, as in the model itself.
        """

    @abstractmethod
    def columns(self, start: int, stop: int) -> Picker:
        """The same for some of these columns."""
