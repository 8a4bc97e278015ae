"""The memory of a recall store: it grows with the text, piece by piece, and never moves."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, final

import torch
from torch import Tensor

from windlass import kernels
from windlass.core.errors import UsageError
from windlass.core.recall import TILE, ReadInput, WriteInput, rows_of, words_of
from windlass.core.shapes import SlotIndex
from windlass.stores.base import Parts

PIECE: Final = 1024  # tokens of the first segment


RECALL: Final = "recall."  # begins the names of a recall store's tensors, among all of a layer's
POSITIONS: Final = "positions"


def is_moved_later(name: str) -> bool:
    """Whether `RecallStore.load` takes a tensor of this name wherever it lies, as it may be larger than a device is."""
    return name.startswith(RECALL) and name != RECALL + POSITIONS


class Segment(NamedTuple):
    """The tokens from `start` up to `stop` of each row, as parts (batch, kv_heads, stop - start, width).

    The first part, that of the keys which are scanned, is (batch, kv_heads, tiles, words, 16) instead, see `TiledKeys`.
    """

    start: int
    stop: int
    parts: Parts


@final
class RecallMemory:
    """Parts of tokens by their index in a row, in memory or, where `folder` is given, in unnamed files there.

    The memory is the host's, which a GPU reads in place, or, where it `is_near`, that of the device that reads it.

    A segment is half as large as all before it, in multiples of `piece`: few segments, and little that is not in use.
    Files without a name take no space any more when the process ends, whatever ends it.
    """

    def __init__(self, folder: Path | None, piece: int = PIECE, is_near: bool = False) -> None:
        self.folder, self.piece, self.is_near = folder, piece, is_near
        self.reader = torch.device("cpu")
        """The device whose kernels read and write it; set before any token is held."""
        self.segments: tuple[Segment, ...] = ()
        self._keys, self._width, self._dtype = "", 0, torch.uint8  # the part in tiles, and what its rows are like

    def __deepcopy__(self, memo: dict[int, object]) -> RecallMemory:
        """The same in memory, or a file, of its own."""
        twin = RecallMemory(self.folder, self.piece, self.is_near)
        twin.reader = self.reader
        twin._keys, twin._width, twin._dtype = self._keys, self._width, self._dtype
        twin.segments = tuple(segment._replace(parts=self._copies(segment.parts)) for segment in self.segments)
        return twin

    @property
    def capacity(self) -> int:
        """Tokens of a row that there is room for."""
        return self.segments[-1].stop if self.segments else 0

    @property
    def names(self) -> tuple[str, ...]:
        """Of the parts."""
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
        start = self.capacity
        if capacity <= start:
            return
        size = -(-max(capacity - start, start // 2) // self.piece) * self.piece
        parts = {name: self._new(part, (*part.shape[:2], size, part.shape[3])) for name, part in sample.items()}
        keys, first = next(iter(sample.items()))
        words = words_of(first[:, :, :1])
        parts[keys] = self._new(words, (*first.shape[:2], size // TILE, words.shape[3], TILE))
        self._keys, self._width, self._dtype = keys, first.shape[3], first.dtype
        self.segments = (*self.segments, Segment(start, start + size, parts))

    def put(self, index: Tensor, parts: Parts) -> None:
        """Write tokens at (batch, tokens) `index`, in all heads; nowhere where it is negative."""
        for name, part in parts.items():
            is_keys, held = name == self._keys, tuple(segment.parts[name] for segment in self.segments)
            kernels.write_tokens(WriteInput(held, index, words_of(part) if is_keys else part, is_keys))

    def read(self, index: SlotIndex, names: Sequence[str]) -> Parts:
        """A copy of the parts with these names at `index` (batch, kv_heads, tokens), where the index is."""
        found: Parts = {}
        for name in names:
            is_tiled, pieces = name == self._keys, tuple(segment.parts[name] for segment in self.segments)
            rows = kernels.read_tokens(ReadInput(pieces, index, is_tiled))
            found[name] = rows_of(rows, self._width, self._dtype) if is_tiled else rows
        return found

    def filled(self, tokens: int) -> Parts:
        """The parts of the first `tokens` of each row, in one piece."""
        self._wait()
        keys = [each.parts[self._keys].transpose(3, 4).flatten(2, 3) for each in self.segments]
        pieces = {name: [each.parts[name] for each in self.segments] for name in self.segments[0].parts}
        pieces[self._keys] = [rows_of(each, self._width, self._dtype) for each in keys]
        return {name: torch.cat(each, 2)[:, :, :tokens] for name, each in pieces.items()}

    def select_rows(self, rows: Tensor) -> None:
        """Keep the batch rows at `rows`, which may repeat."""
        self.segments = tuple(
            each._replace(parts=self._copies({name: part[rows.to(part.device)] for name, part in each.parts.items()}))
            for each in self.segments
        )

    def copy_row(self, source: int, target: int) -> None:
        """Overwrite row `target` with row `source`."""
        self._wait()
        for segment in self.segments:
            for part in segment.parts.values():
                part[target] = part[source]

    def _copies(self, parts: Mapping[str, Tensor]) -> Parts:
        self._wait()
        return {name: self._new(part, tuple(part.shape)).copy_(part) for name, part in parts.items()}

    def _wait(self) -> None:
        """Until a GPU has done what it was given: it writes to the host's memory while the host goes on."""
        if self.reader.type == "cuda":
            torch.cuda.synchronize(self.reader)

    def _new(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        if self.is_near:
            return like.new_zeros(shape)
        if self.folder is None:
            self._wait()  # what was freed may still be written to
            return torch.zeros(shape, dtype=like.dtype, pin_memory=self.reader.type == "cuda")
        numbers = torch.Size(shape).numel()
        size = numbers * like.itemsize
        try:
            with tempfile.TemporaryFile(dir=self.folder) as file:
                file.truncate(size)
                mapped = mmap.mmap(file.fileno(), size)
        except OSError as error:
            raise UsageError(
                f"recall_folder {str(self.folder)!r} has no room for {size:,} bytes more ({error.strerror}); give a "
                "folder of another disk, or recall_store='int4'"
            ) from error
        return torch.frombuffer(mapped, dtype=like.dtype, count=numbers).view(shape)
