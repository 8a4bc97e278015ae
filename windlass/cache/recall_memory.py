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
from windlass.core.recall import TILE, ReadInput, rows_of, words_of
from windlass.core.shapes import SlotIndex
from windlass.stores.base import Parts

PIECE: Final = 1024  # tokens of the first segment


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

    A segment is half as large as all before it, in multiples of `piece`: few segments, and little that is not in use.
    Files without a name take no space any more when the process ends, whatever ends it.
    """

    def __init__(self, folder: Path | None, piece: int = PIECE) -> None:
        self.folder, self.piece = folder, piece
        self.segments: tuple[Segment, ...] = ()
        self._keys, self._width, self._dtype = "", 0, torch.uint8  # the part in tiles, and what its rows are like

    def __deepcopy__(self, memo: dict[int, object]) -> RecallMemory:
        """The same in memory, or a file, of its own."""
        twin = RecallMemory(self.folder, self.piece)
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

    def put(self, rows: slice, start: int, parts: Parts) -> None:
        """Write tokens of these rows from index `start` on."""
        parts = parts | {self._keys: words_of(parts[self._keys])}
        count = parts[self._keys].shape[2]
        for segment in self.segments:
            first, last = max(start, segment.start), min(start + count, segment.stop)
            if first >= last:
                continue
            for name, part in parts.items():
                own, new = segment.parts[name][rows], part[:, :, first - start : last - start]
                if name == self._keys and count == 1:
                    at = first - segment.start
                    own[:, :, at // TILE, :, at % TILE] = new[:, :, 0]
                elif name == self._keys:
                    index = torch.arange(first - segment.start, last - segment.start)
                    own.permute(2, 4, 0, 1, 3)[index // TILE, index % TILE] = new.permute(2, 0, 1, 3)
                else:
                    own[:, :, first - segment.start : last - segment.start] = new

    def read(self, index: SlotIndex) -> Parts:
        """A copy of the parts at `index` (batch, kv_heads, tokens)."""
        found: Parts = {}
        for name in self.segments[0].parts:
            is_tiled, pieces = name == self._keys, tuple(segment.parts[name] for segment in self.segments)
            rows = kernels.read_tokens(ReadInput(pieces, index, is_tiled))
            found[name] = rows_of(rows, self._width, self._dtype) if is_tiled else rows
        return found

    def between(self, rows: slice, start: int, stop: int, names: Sequence[str]) -> Parts:
        """The parts with these names of tokens `start` to `stop` of some rows."""
        found: dict[str, list[Tensor]] = {name: [] for name in names}
        for segment in self.segments:
            first, last = max(start, segment.start) - segment.start, min(stop, segment.stop) - segment.start
            for name in names if first < last else ():
                part = segment.parts[name][rows]
                if name == self._keys:
                    tiles = part[:, :, first // TILE : -(-last // TILE)].transpose(3, 4).flatten(2, 3)
                    skipped = first // TILE * TILE
                    part = rows_of(tiles, self._width, self._dtype)[:, :, first - skipped : last - skipped]
                else:
                    part = part[:, :, first:last]
                found[name].append(part)
        return {name: torch.cat(each, 2) for name, each in found.items()}

    def filled(self, tokens: int) -> Parts:
        """The parts of the first `tokens` of each row, in one piece."""
        keys = [each.parts[self._keys].transpose(3, 4).flatten(2, 3) for each in self.segments]
        pieces = {name: [each.parts[name] for each in self.segments] for name in self.segments[0].parts}
        pieces[self._keys] = [rows_of(each, self._width, self._dtype) for each in keys]
        return {name: torch.cat(each, 2)[:, :, :tokens] for name, each in pieces.items()}

    def select_rows(self, rows: Tensor) -> None:
        """Keep the batch rows at `rows`, which may repeat."""
        self.segments = tuple(
            each._replace(parts=self._copies({name: part[rows] for name, part in each.parts.items()}))
            for each in self.segments
        )

    def copy_row(self, source: int, target: int) -> None:
        """Overwrite row `target` with row `source`."""
        for segment in self.segments:
            for part in segment.parts.values():
                part[target] = part[source]

    def _copies(self, parts: Mapping[str, Tensor]) -> Parts:
        return {name: self._new(part, tuple(part.shape)).copy_(part) for name, part in parts.items()}

    def _new(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        if self.folder is None:
            return like.new_zeros(shape)
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
