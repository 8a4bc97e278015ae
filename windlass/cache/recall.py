"""Recall: all tokens of a layer, kept outside of its slots. Each step reads the best evicted ones beside the slots.

Every token is written here, un-rotated, when it is written to a slot. Evictions are not noted: a slot knows the index
of its token, and all other tokens may be recalled. So nothing has to be moved when a token is evicted, nor when an
eviction is rolled back.
"""

from __future__ import annotations

import copy
import mmap
import operator
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Final, NamedTuple, TypeVar, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from windlass import kernels
from windlass.core.errors import UsageError
from windlass.core.inputs import (
    TILE,
    Digests,
    PageInput,
    ReadInput,
    RecallPiece,
    TiledKeys,
    WriteInput,
    rows_of,
    tokens_of,
    words_of,
)
from windlass.core.parse import PAGE
from windlass.core.positions import EMPTY
from windlass.core.types import NewKeys, NewValues, Queries, QueryPositions, Scores, SlotIndex
from windlass.kernels.reference import digest_of
from windlass.stores.base import Parts, Store

PIECE: Final = 1024  # tokens of the first segment
LARGEST: Final = 4  # most pieces in a segment on the host, as each copy of a row copies the newest segment


RECALL: Final = "recall."  # prefix of the names of a recall store's tensors
POSITIONS: Final = "positions"


def is_moved_later(name: str) -> bool:
    """Return True if `RecallStore.load` takes a tensor of this name on any device, as it may not fit on the model's."""
    return name.startswith(RECALL) and name != RECALL + POSITIONS


class Segment(NamedTuple):
    """The tokens from `start` up to `stop` of each row, as parts (batch, kv_heads, stop - start, width).

    The first part, that of the keys which are scanned, is (batch, kv_heads, tiles, words, 16) instead, see `TiledKeys`.
    `number` names its contents, once all of it is written.
    """

    start: int
    stop: int
    parts: Parts
    number: str


@final
class RecallMemory:
    """Parts of tokens by their index in a row, in memory or, where `folder` is given, in unnamed files there.

    The memory is the host's, which a GPU reads in place, or, where it `is_near`, that of the device that reads it.

    A segment is half as large as all before it, in multiples of `piece`: few segments, and little unused memory.
    Copies have the first segments in common once these are `shared`, and nobody writes there any more.
    Files without a name take no space any more when the process ends, whatever ends it.
    """

    def __init__(self, folder: Path | None, piece: int = PIECE, is_near: bool = False) -> None:
        self.folder, self.piece, self.is_near = folder, piece, is_near
        self.reader = torch.device("cpu")
        """The device whose kernels read and write the memory. It is set before the first token."""
        self.segments: tuple[Segment, ...] = ()
        self.shared = 0
        """Number of first segments that other memories have too, or a file."""
        self.planned: list[tuple[int, str]] = []
        """Ends and numbers of the next segments."""
        self._keys, self._width, self._dtype = "", 0, torch.uint8  # the part in tiles, its width and its dtype
        self._counted: tuple[tuple[Segment, ...], int] = (), 0

    def __deepcopy__(self, memo: dict[int, object]) -> RecallMemory:
        """A copy with memory, or a file, of its own, but for the shared segments."""
        twin = RecallMemory(self.folder, self.piece, self.is_near)
        twin.reader = self.reader
        twin._keys, twin._width, twin._dtype = self._keys, self._width, self._dtype
        twin.shared, shared = self.shared, self.segments[: self.shared]
        own = (each._replace(parts=self._copies(each.parts), number=_new()) for each in self.segments[self.shared :])
        twin.segments = (*shared, *own)
        return twin

    def share(self, tokens: int) -> None:
        """Let copies share the segments within the first `tokens` of every row, which stay as they are."""
        self.shared = max(self.shared, sum(each.stop <= tokens for each in self.segments))

    def own(self, tokens: int) -> None:
        """Copy the shared segments that have room behind the first `tokens`, where a row is to be written."""
        first = sum(each.stop <= tokens for each in self.segments[: self.shared])
        if first < self.shared:
            taken = self.segments[first : self.shared]
            copied = (each._replace(parts=self._copies(each.parts), number=_new()) for each in taken)
            self.segments = (*self.segments[:first], *copied, *self.segments[self.shared :])
            self.shared = first

    @property
    def capacity(self) -> int:
        """The number of tokens of a row that fit."""
        return self.segments[-1].stop if self.segments else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all segments, counted anew where these have changed."""
        if self._counted[0] is not self.segments:
            size = sum(part.nbytes for each in self.segments for part in each.parts.values())
            self._counted = self.segments, size
        return self._counted[1]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the parts."""
        return tuple(self.segments[0].parts)

    @property
    def no_keys(self) -> Parts:
        """The first part as a store knows it, of no tokens."""
        tiles = self.segments[0].parts[self._keys]
        return {self._keys: torch.empty(*tiles.shape[:2], 0, self._width, dtype=self._dtype)}

    @property
    def sample(self) -> Parts:
        """Parts of one token of each row."""
        return {name: part[:, :, :1] for name, part in self.segments[0].parts.items()} | {
            self._keys: self.no_keys[self._keys].new_empty(
                *self.segments[0].parts[self._keys].shape[:2], 1, self._width
            )
        }

    def grow(self, capacity: int, sample: Parts) -> None:
        """Make room for `capacity` tokens of a row, whose parts are like those of `sample`.

        Raises: UsageError where the folder has no room.
        """
        while (start := self.capacity) < capacity:
            size = -(-max(capacity - start, start // 2) // self.piece) * self.piece
            size = min(size, LARGEST * self.piece) if self.reader.type == "cpu" else size
            stop, number = self.planned.pop(0) if self.planned else (start + size, _new())
            self._add(start, stop - start, number, sample)

    def _add(self, start: int, size: int, number: str, sample: Parts) -> None:
        parts = {name: self._new(part, (*part.shape[:2], size, part.shape[3])) for name, part in sample.items()}
        keys, first = next(iter(sample.items()))
        words = words_of(first[:, :, :1])
        parts[keys] = self._new(words, (*first.shape[:2], size // TILE, words.shape[3], TILE))
        self._keys, self._width, self._dtype = keys, first.shape[3], first.dtype
        self.segments = (*self.segments, Segment(start, start + size, parts, number))

    def put(self, index: Tensor, parts: Parts) -> None:
        """Write tokens at (batch, tokens) `index`, in all heads. Negative indices are skipped."""
        for name, part in parts.items():
            is_keys, held = name == self._keys, tuple(segment.parts[name] for segment in self.segments)
            kernels.write_tokens(WriteInput(held, index, words_of(part) if is_keys else part, is_keys))

    def read(self, index: SlotIndex, names: Sequence[str]) -> Parts:
        """Copy the parts with these names at `index` (batch, kv_heads, tokens), on the index's device."""
        found: Parts = {}
        for name in names:
            is_tiled, pieces = name == self._keys, tuple(segment.parts[name] for segment in self.segments)
            rows = kernels.read_tokens(ReadInput(pieces, index, is_tiled))
            found[name] = rows_of(rows, self._width, self._dtype) if is_tiled else rows
        return found

    def filled(self, tokens: int, start: int = 0) -> Parts:
        """The parts of the tokens from `start` up to `tokens` of each row, in one piece."""
        self._wait()
        own = [each for each in self.segments if each.stop > start] or [*self.segments[-1:]]
        keys = [each.parts[self._keys].transpose(3, 4).flatten(2, 3) for each in own]
        pieces = {name: [each.parts[name] for each in own] for name in own[0].parts}
        pieces[self._keys] = [rows_of(each, self._width, self._dtype) for each in keys]
        first = own[0].start
        return {name: torch.cat(each, 2)[:, :, start - first : tokens - first] for name, each in pieces.items()}

    def select_rows(self, rows: Tensor) -> None:
        """Keep the batch rows at `rows`, which may repeat."""
        self.shared = 0
        self.segments = tuple(
            each._replace(
                parts=self._copies({name: part[rows.to(part.device)] for name, part in each.parts.items()}),
                number=_new(),
            )
            for each in self.segments
        )

    def copy_row(self, source: int, target: int) -> None:
        """Overwrite row `target` with row `source`."""
        self._wait()
        self.own(0)
        for segment in self.segments:
            for part in segment.parts.values():
                part[target] = part[source]

    def _copies(self, parts: Mapping[str, Tensor]) -> Parts:
        self._wait()
        return {name: self._new(part, tuple(part.shape)).copy_(part) for name, part in parts.items()}

    def _wait(self) -> None:
        """Wait for a GPU to finish, as it writes to the host's memory while the host goes on."""
        if self.reader.type == "cuda":
            torch.cuda.synchronize(self.reader)

    def _new(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        if self.is_near:
            return like.new_zeros(shape)
        if self.folder is None:
            self._wait()  # a kernel may still write to freed memory
            return torch.zeros(shape, dtype=like.dtype, pin_memory=self.reader.type == "cuda")
        numbers = torch.Size(shape).numel()
        size = numbers * like.itemsize
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                file.truncate(size)
                mapped = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise UsageError(
                f"recall_folder {str(self.folder)!r} has no room for {size:,} bytes more ({error.strerror}). Give a "
                "folder of another disk, or recall_store='int4'"
            ) from error
        return torch.frombuffer(mapped, dtype=like.dtype, count=numbers).view(shape)


def _new() -> str:
    """The number of a new segment."""
    return secrets.token_hex(8)


View = TypeVar("View")
Views = tuple[tuple[Segment, ...], tuple[View, ...]]
"""Segments as kernels read them. Only those of new segments are made."""


def _views(known: Views[View], segments: tuple[Segment, ...], of: Callable[[int], View]) -> Views[View]:
    same = sum(takewhile(bool, map(operator.is_, known[0], segments)))
    return segments, (*known[1][:same], *map(of, range(same, len(segments))))


NOWHERE: Final = -1  # the index of a column that is not written


@final
class PageDigests:
    """The digests of all pages of `memory`, in the format of `codec`, near the device that ranks pages by them."""

    def __init__(self, codec: Store, memory: RecallMemory) -> None:
        self.codec, self.memory = codec, memory
        folder, piece = memory.folder, memory.piece // PAGE
        self.largest, self.least = (RecallMemory(folder, piece, is_near=folder is None) for _ in range(2))
        self._tiled: Views[Digests] = (), ()

    @property
    def both(self) -> tuple[RecallMemory, RecallMemory]:
        """The memory of the largest numbers, and that of the least."""
        return self.largest, self.least

    def __deepcopy__(self, memo: dict[int, object]) -> PageDigests:
        twin = PageDigests(copy.deepcopy(self.codec, memo), copy.deepcopy(self.memory, memo))
        twin.largest, twin.least = (copy.deepcopy(each, memo) for each in self.both)
        twin._tiled = self._tiled[0][: self.largest.shared], self._tiled[1][: self.largest.shared]
        return twin

    def share(self, tokens: int) -> None:
        """Let copies share the digests of whole pages within the first `tokens` of every row."""
        for each in self.both:
            each.share(tokens // PAGE)

    def own(self, tokens: int) -> None:
        """Copy shared digests of pages that are not within the first `tokens`."""
        for each in self.both:
            each.own(tokens // PAGE)

    def grow(self, sample: Parts) -> None:
        """Make room for the digest of each page, where tokens are like those of `sample`."""
        pages = self.memory.capacity // PAGE
        for each in self.both:
            if pages > each.capacity:
                keys = self.codec.decode_keys(sample)[:, :, :1]
                each.grow(pages, self.codec.parts_of(keys, keys[..., :0]))

    def write(self, before: Tensor, after: Tensor, most: int, kv_heads: int) -> None:
        """Digest the pages of the tokens from `before` to `after` (batch,), at most `most` tokens a row.

        Rows without new tokens keep their digests. The digest of a page without tokens is never read. This does not
        wait for the device.
        """
        pages = before[:, None] // PAGE + torch.arange((most + PAGE - 2) // PAGE + 1, device=before.device)
        known = pages.clamp(max=self.memory.capacity // PAGE - 1)[:, None]
        tokens = tokens_of(known.expand(-1, kv_heads, -1))
        keys = self.codec.decode_keys(self.memory.read(tokens, self.largest.names)).unflatten(2, (-1, PAGE))
        bounds = digest_of(keys, (tokens < after[:, None, None]).unflatten(2, (-1, PAGE)))
        for each, numbers in zip(self.both, bounds, strict=True):
            each.put(pages.where((before < after)[:, None], NOWHERE), self.codec.parts_of(numbers, numbers[..., :0]))

    def tiled(self) -> tuple[Digests, ...]:
        """The digests as kernels read them. The result is the same object until the memory grows."""
        if self._tiled[0] is not self.largest.segments:
            self._tiled = _views(self._tiled, self.largest.segments, lambda at: Digests(*self._keys(at)))
        return self._tiled[1]

    def _keys(self, at: int) -> Iterator[TiledKeys]:
        no_keys = self.largest.no_keys
        for memory in self.both:
            parts = memory.segments[at].parts
            yield TiledKeys(parts[next(iter(no_keys))], self.codec.over(parts | no_keys).packed_keys())


TOKEN_INDEX: Final = "recall_index"  # state: the number of tokens written to the row before that of the slot
CANDIDATES: Final = 256  # pages with the best digests, scored token by token. A larger recall takes more
DISTANCE: Final = 128  # distance at which queries score all tokens
MOVED: Final = 4096  # tokens that are moved at once
DECIDING: Final = 16  # the newest queries of a step choose the tokens that all of its queries recall


class RecallTokens(NamedTuple):
    """Tokens to read beside the slots: their parts in a store, and their positions, EMPTY for none."""

    parts: Parts
    positions: Tensor  # (batch, kv_heads, recalled) int32


@final
class RecallStore:
    """All tokens of a layer's rows. A token's index is the number of tokens written to its row before it.

    A step recalls at most `tokens`. `codec` is the format of the tokens in `memory`.
    """

    def __init__(self, tokens: int, codec: Store, memory: RecallMemory) -> None:
        self.tokens, self.codec, self.memory = tokens, codec, memory
        self.lengths: tuple[int, ...] = ()
        """Number of tokens in each row. Positions behind them are not read."""
        self.device = torch.device("cpu")
        """The device that ranks tokens: the model's, or the host, which then receives queries and kept tokens."""
        self.positions = torch.empty(1, 0, dtype=torch.int32)
        """(batch, capacity): the position of each token in its text, EMPTY if it was dropped or never written."""
        self.last_recalled = torch.empty(1, 0, 0, dtype=torch.int32)
        """(batch, kv_heads, recalled): the positions that the newest step recalled, EMPTY for none."""
        self.digests = PageDigests(codec, memory)
        self._ends = torch.empty(0, dtype=torch.int64)
        self._ended: tuple[int, ...] | None = None  # the numbers in `_ends`, known without a device sync
        self._scanned: Views[RecallPiece] = (), ()

    def __deepcopy__(self, memo: dict[int, object]) -> RecallStore:
        """A copy that shares all memory in which nothing is written any more."""
        for each in (self.memory, self.digests):
            each.share(min(self.lengths, default=0))
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy({**self.__dict__, "_scanned": ((), ())}, memo))
        twin._scanned = self._scanned[0][: self.memory.shared], self._scanned[1][: self.memory.shared]
        return twin

    @property
    def is_empty(self) -> bool:
        """Return True if nothing was ever written."""
        return not self.memory.segments

    def append(self, keys: NewKeys, values: NewValues, positions: QueryPositions, counts: Sequence[int]) -> Scores:
        """Store these tokens, `counts` of each row. The others are padding, with EMPTY positions.

        Returns (batch, 1, tokens) the index of each token in its row, as the state of its slot.
        """
        if self.is_empty:
            self._settle(keys.device, keys.dtype)
        keys, values, positions = (each.detach().to(self.device) for each in (keys, values, positions))
        if self.is_empty:
            self.codec.allocate(keys[:, :, :1], values[:, :, :1], 1)
            self.lengths = (0,) * keys.shape[0]
        ends = tuple(map(operator.add, self.lengths, counts))
        parts = self.codec.parts_of(keys, values)
        self._grow(max(1, *ends), parts)  # the first pass may have only padding
        is_token = positions >= 0
        index = (self.ends[:, None] + is_token.cumsum(1) - 1).where(is_token, NOWHERE)
        self._put(index, parts, positions)
        self.lengths = self._ended = ends
        return index[:, None].float()

    @property
    def ends(self) -> Tensor:
        """`lengths` on the device, (batch,) int64. It is a new tensor whenever the host alone has changed them."""
        if self._ended != self.lengths:
            self._ends, self._ended = torch.tensor(self.lengths, device=self.device), self.lengths
        return self._ends

    @property
    def step_tensors(self) -> list[Tensor]:
        """Tensors that a recorded step reads here. If one is replaced, the step has to be recorded again."""
        return [] if self.is_empty else [self.positions, self.ends]

    def has_room(self, counts: Sequence[int]) -> bool:
        """Return True if so many more tokens of each row fit in the memory."""
        return self.is_empty or max(map(operator.add, self.lengths, counts)) <= self.memory.capacity

    def count_recorded(self, lengths: Sequence[int]) -> None:
        """Set the lengths, which the device knows already: a recorded step has changed them, or will."""
        self.lengths = self._ended = tuple(lengths)

    def choose(self, queries: Queries, is_query: Tensor, kept: Scores) -> RecallTokens:
        """The evicted tokens of the pages that matter most to the queries.

        `queries` (turned as attention turns them) are weighed where `is_query` (batch, tokens). `kept`
        (batch, score_heads, slots) are the indices of the tokens in slots, negative in the others.
        """
        keys = tuple(piece.keys for piece in self.pieces())
        best = kernels.best_pages(
            PageInput(
                queries=queries,
                is_query=is_query,
                pieces=keys,
                positions=self.positions,
                kept_index=kept,
                count=self.page_count,
                digests=self.digests.tiled() if self.candidates else (),
                candidates=self.candidates,
            )
        )
        index = tokens_of(best.pages)
        positions = self.positions[:, None].expand(-1, index.shape[1], -1).gather(-1, index)
        positions = self.last_recalled.copy_(positions.where(best.is_read, EMPTY))
        return RecallTokens(self.memory.read(index, self.memory.names), positions.clone())

    @property
    def page_count(self) -> int:
        """The most pages that a step reads."""
        return min(self.tokens, self.memory.capacity) // PAGE

    @property
    def candidates(self) -> int:
        """The number of pages that digests select for a search token by token. 0: all pages are searched."""
        most = max(CANDIDATES, 2 * self.page_count)
        return most if self.memory.capacity // PAGE > most else 0

    def make_room(self) -> None:
        """Grow the memory by one token of each row, if it is full.

        Raises: UsageError where the folder has no room.
        """
        self._grow(max(self.lengths) + 1, self.memory.sample)

    @property
    def room(self) -> int:
        """The number of further tokens of each row that fit in the memory."""
        return self.memory.capacity - max(self.lengths, default=0)

    def forget_recalled(self) -> None:
        """Clear the positions that the latest step recalled."""
        self.last_recalled.fill_(EMPTY)

    def count_written(self, positions: QueryPositions, counts: Sequence[int]) -> None:
        """Count the token that a kernel has written in each row where `counts` is 1."""
        for row, start in enumerate(self.lengths):
            self.positions[row, start : start + counts[row]] = positions[row, : counts[row]]
        self.lengths = tuple(map(operator.add, self.lengths, counts))

    def clear(self) -> None:
        """Forget all tokens. The memory stays allocated."""
        self.cut_to([0] * len(self.lengths))

    def roll_back(self, counts: Sequence[int]) -> None:
        """Forget the newest `counts` tokens of each row."""
        if not self.is_empty:
            self.cut_to([length - count for length, count in zip(self.lengths, counts, strict=True)])

    def cut_to(self, lengths: Sequence[int]) -> None:
        """Forget the tokens of each row beyond these lengths."""
        for each in (self.memory, self.digests):
            each.own(min(lengths, default=0))
        self.lengths = tuple(lengths)
        self.last_recalled.fill_(EMPTY)
        for row, length in enumerate(lengths):
            self.positions[row, length:] = EMPTY

    def edit(self, change: Callable[[Tensor], Tensor], rows: slice) -> None:
        """Replace the positions of some rows, by the same change as those of the slots."""
        if not self.is_empty:
            now = self.positions[rows, None]
            self.positions[rows] = change(now).to(torch.int32).where(now >= 0, EMPTY)[:, 0]
            self.last_recalled[rows] = EMPTY

    def pack(self) -> Tensor | None:
        """Remove the tokens of the only row that have no position. Returns (tokens,) the new index of each token.

        None: all have one, and nothing has changed.
        """
        tokens = self.lengths[0] if self.lengths else 0
        is_kept = self.positions[0, :tokens] >= 0
        if bool(is_kept.all()):
            return None
        order, parts = is_kept.nonzero()[:, 0], self.memory.filled(tokens)
        positions = self.positions.index_select(1, order)
        self.cut_to([0])
        for first in range(0, len(order), MOVED):
            stop = min(first + MOVED, len(order))
            held = {name: part[:, :, order[first:stop].to(part.device)] for name, part in parts.items()}
            self._put_rows(held, positions[:, first:stop], [stop], len(order))
        return is_kept.cumsum(0) - 1

    def join(self, other: RecallStore, source: int, row: int, at: int, batch: int, device: torch.device) -> int:
        """Append row `source` of another store to one of `batch` rows, as text that goes on at position `at`.

        Returns the index at which the appended tokens begin. `device` is the model's. Tokens in another format are
        converted once.
        """
        if self.is_empty and at == 0 and len(other.lengths) == batch == 1 and self._is_like(other):
            self.__dict__.update(copy.deepcopy(other).__dict__)
            self.last_recalled.fill_(EMPTY)
            return 0
        length, start = other.lengths[source] if other.lengths else 0, 0 if self.is_empty else self.lengths[row]
        parts = other.memory.filled(length) if length else {}
        for first in range(0, length, MOVED):
            here = slice(first, min(first + MOVED, length))
            held = {name: part[source : source + 1, :, here].to(other.device) for name, part in parts.items()}
            theirs = other.codec.over(held)
            if self.is_empty:
                self._settle(device, other.codec.layout[2])
                keys, values = (each[:, :, :1].to(self.device) for each in (theirs.keys(), theirs.values()))
                self.codec.allocate(keys, values, 1)
                self.lengths = (0,) * batch
            if not self.codec.is_compatible(other.codec):
                held = self.codec.parts_of(theirs.keys().to(self.device), theirs.values().to(self.device))
            positions, ends = other.positions[source : source + 1, here], [*self.lengths]
            ends[row] += here.stop - first
            self._put_rows(held, (positions + at).where(positions >= 0, EMPTY), ends, start + length)
        return start

    def _is_like(self, other: RecallStore) -> bool:
        """Return True if a copy of the other store can take the place of this empty one."""
        is_one = self.tokens == other.tokens and self.codec.name == other.codec.name
        return is_one and self.memory.folder == other.memory.folder

    def select_rows(self, rows: Tensor) -> None:
        """Keep the batch rows at `rows`, which may repeat."""
        rows = rows.to(self.device)
        self.memory.select_rows(rows)
        for each in self.digests.both:
            each.select_rows(rows)
        self.positions = self.positions.index_select(0, rows)
        self.last_recalled = self.last_recalled.index_select(0, rows)
        self.lengths = tuple(self.lengths[row] for row in rows.tolist())

    def copy_row(self, source: int, target: int) -> None:
        """Overwrite row `target` with row `source`."""
        self.memory.copy_row(source, target)
        for each in self.digests.both:
            each.copy_row(source, target)
        self.positions[target] = self.positions[source]
        self.last_recalled[target] = self.last_recalled[source]
        self.lengths = tuple(self.lengths[source if row == target else row] for row in range(len(self.lengths)))

    def clear_row(self, row: int) -> None:
        """Forget the tokens of row `row`."""
        if not self.is_empty:
            self.memory.own(0)
            self.digests.own(0)
            self.positions[row] = EMPTY
            self.last_recalled[row] = EMPTY
            self.lengths = tuple(0 if index == row else length for index, length in enumerate(self.lengths))

    def settled(self) -> tuple[tuple[int, str], ...]:
        """Ends and numbers of the segments in which nothing is written any more."""
        self.memory.share(min(self.lengths, default=0))
        return tuple((each.stop, each.number) for each in self.memory.segments[: self.memory.shared])

    def tensors(self, start: int = 0) -> dict[str, Tensor]:
        """All tensors that a file has to hold, by name. `start`: leaves out the parts of the first `start`
        tokens, and their positions where these are 0, 1, 2, ..."""
        if self.is_empty:
            return {}
        tokens = max(self.lengths)
        constants = {name: self.codec.tensors()[name] for name in self.codec.constant_names}
        is_plain = bool((self.positions[:, :start] == torch.arange(start, device=self.positions.device)).all())
        positions = self.positions[:, start * is_plain : tokens]
        parts = self.memory.filled(tokens, start) | constants | {POSITIONS: positions}
        return {RECALL + name: tensor for name, tensor in parts.items()}

    def settled_tensors(self, start: int, stop: int) -> dict[str, Tensor]:
        """The parts of the tokens of one segment, as `tensors` names them."""
        return {RECALL + name: part for name, part in self.memory.filled(stop, start).items()}

    def load(self, tensors: Mapping[str, Tensor], lengths: Sequence[int]) -> None:
        """Load `tensors` of rows of these lengths into this empty store. Other names among them are ignored."""
        own = {name.removeprefix(RECALL): each for name, each in tensors.items() if name.startswith(RECALL)}
        positions = own.pop(POSITIONS)
        parts = {name: each for name, each in own.items() if name not in self.codec.constant_names}
        own |= {name: part[:, :, :1].clone() for name, part in parts.items()}  # as much as `append` allocates
        self.codec.restore({name: each.to(positions.device) for name, each in own.items()})
        self._settle(positions.device, self.codec.layout[2])
        self.codec.restore({name: each.to(self.device) for name, each in own.items()})
        self.lengths, longest = (0,) * len(lengths), max(lengths)
        for first in range(0, max(longest, 1), MOVED):  # a store of no tokens is not empty: it has memory
            here = slice(first, min(first + MOVED, longest))
            ends = [min(length, here.stop) for length in lengths]
            held = {name: part[:, :, here] for name, part in parts.items()}
            self._put_rows(held, positions[:, here], ends, max(longest, 1))

    @property
    def nbytes(self) -> int:
        """Bytes of all that is `allocated`."""
        memories = (self.memory, *self.digests.both)
        return self.positions.nbytes + self.last_recalled.nbytes + sum(each.nbytes for each in memories)

    def allocated(self) -> list[Tensor]:
        """All allocated tensors, in the memory of the host, a file, or the device."""
        segments = (segment for each in (self.memory, *self.digests.both) for segment in each.segments)
        return [self.positions, self.last_recalled, *(part for each in segments for part in each.parts.values())]

    def pieces(self) -> tuple[RecallPiece, ...]:
        """Keys and values of all segments. The result is the same object until the memory grows."""
        if self._scanned[0] is not self.memory.segments:
            self._scanned = _views(self._scanned, self.memory.segments, self._piece)
        return self._scanned[1]

    def _piece(self, at: int) -> RecallPiece:
        parts, no_keys = self.memory.segments[at].parts, self.memory.no_keys
        keys, values = self.codec.over(parts | no_keys).packed()
        return RecallPiece(TiledKeys(parts[next(iter(no_keys))], keys), values)

    def _grow(self, tokens: int, sample: Parts) -> None:
        self.memory.grow(tokens, sample)
        self.digests.grow(sample)
        more = self.memory.capacity - self.positions.shape[1]
        if more > 0:
            batch, kv_heads = next(iter(sample.values())).shape[:2]
            held = self.positions.to(self.device).expand(batch, -1)
            recalled = held.new_full((batch, kv_heads, self.page_count * PAGE), EMPTY)
            self.positions, self.last_recalled = pad(held, (0, more), value=EMPTY), recalled  # or neither

    def _settle(self, device: torch.device, dtype: torch.dtype) -> None:
        """Choose the device that ranks tokens, for a model on this device. Only the host reads files."""
        if self.memory.folder is None:
            self.device = kernels.recall_device(device, dtype)
        for each in (self.memory, *self.digests.both):
            each.reader = self.device

    def _put_rows(self, parts: Parts, positions: QueryPositions, ends: Sequence[int], room: int) -> None:
        """Write tokens behind those of each row, up to its end. One row of parts may stand for all.

        `room` is the number of tokens of a row to make room for.
        """
        batch, count = len(ends), positions.shape[1]
        held = {name: part.to(self.device).expand(batch, -1, -1, -1) for name, part in parts.items()}
        self._grow(room, held)
        starts, stops = (torch.tensor(each, device=self.device)[:, None] for each in (self.lengths, list(ends)))
        index = starts + torch.arange(count, device=self.device)
        self._put(index.where(index < stops, NOWHERE), held, positions.to(self.device).expand(batch, -1))
        self.lengths = self._ended = tuple(ends)

    def _put(self, index: Tensor, parts: Parts, positions: QueryPositions) -> None:
        """Write tokens at (batch, tokens) `index`, behind those of their row. This does not wait for the device."""
        self.memory.put(index, parts)
        is_token, before = index >= 0, self.ends.clone()
        written = positions.to(torch.int32).where(is_token, EMPTY)
        self.positions.scatter_reduce_(1, index.clamp(min=0), written, "amax")  # EMPTY is below all positions
        self._ended = None  # until the host knows it
        self._ends.add_(is_token.sum(1))
        self.digests.write(before, self._ends, index.shape[1], next(iter(parts.values())).shape[1])


class RecallSnapshot(NamedTuple):
    """The lengths of a store's rows, and its memory. Memory grows by new tensors, so the old ones stay valid."""

    lengths: tuple[int, ...]
    positions: Tensor
    last_recalled: Tensor
    segments: list[tuple[tuple[Segment, ...], int]]

    @classmethod
    def of(cls, store: RecallStore) -> RecallSnapshot:
        """Snapshot of a store as it is now."""
        segments = [(each.segments, each.shared) for each in (store.memory, *store.digests.both)]
        return cls(store.lengths, store.positions, store.last_recalled, segments)

    def restore(self, store: RecallStore) -> None:
        """Cut the store back to this snapshot, its memory included."""
        for memory, (segments, shared) in zip((store.memory, *store.digests.both), self.segments, strict=True):
            memory.segments, memory.shared = segments, shared
        store.positions, store.last_recalled = self.positions, self.last_recalled
        store.cut_to(self.lengths)
