"""The memory of a recall store: it grows with the text, piece by piece, and never moves."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple, final

import torch
from torch import Tensor

from windlass import kernels
from windlass.core.errors import UsageError
from windlass.core.shapes import SlotIndex
from windlass.stores.base import Parts

PIECE: Final = 1024  # tokens of the first segment; the size of each is a multiple of it


class Segment(NamedTuple):
    """The tokens from `start` up to `stop` of each row, as parts (batch, kv_heads, stop - start, width)."""

    start: int
    stop: int
    parts: Parts


@final
class RecallMemory:
    """Parts of tokens by their index in a row, in memory or, where `folder` is given, in unnamed files there.

    A segment is half as large as all before it: few segments, and little that is not in use. Files without a name take
    no space any more when the process ends, whatever ends it.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.segments: list[Segment] = []

    def __deepcopy__(self, memo: dict[int, object]) -> RecallMemory:
        """The same in memory, or a file, of its own."""
        twin = RecallMemory(self.folder)
        for segment in self.segments:
            twin.segments.append(segment._replace(parts=twin._copies(segment.parts)))
        return twin

    @property
    def capacity(self) -> int:
        """Tokens of a row that there is room for."""
        return self.segments[-1].stop if self.segments else 0

    def grow(self, capacity: int, sample: Parts) -> None:
        """Make room for `capacity` tokens of a row, whose parts are like those of `sample`.

        Raises: UsageError where the folder has no room.
        """
        start = self.capacity
        if capacity <= start:
            return
        wanted = max(capacity - start, start // 2, 1)
        stop = start + -(-wanted // PIECE) * PIECE
        parts = {name: self._new(part, stop - start) for name, part in sample.items()}
        self.segments.append(Segment(start, stop, parts))

    def put(self, rows: slice, start: int, parts: Parts) -> None:
        """Write tokens of these rows from index `start` on."""
        count = next(iter(parts.values())).shape[2]
        for segment in self.segments:
            first, last = max(start, segment.start), min(start + count, segment.stop)
            if first < last:
                for name, part in parts.items():
                    own = segment.parts[name][rows, :, first - segment.start : last - segment.start]
                    own.copy_(part[:, :, first - start : last - start])

    def read(self, index: SlotIndex) -> Parts:
        """A copy of the parts at `index` (batch, kv_heads, tokens)."""
        found: Parts = {}
        for segment in self.segments:
            is_here = (index >= segment.start) & (index < segment.stop)
            local = (index - segment.start).clamp(0, segment.stop - segment.start - 1)
            for name, part in segment.parts.items():
                own = kernels.read(part, local)
                found[name] = own.where(is_here[..., None], found[name]) if name in found else own
        return found

    def filled(self, tokens: int) -> Parts:
        """The parts of the first `tokens` of each row, in one piece."""
        names = self.segments[0].parts
        return {name: torch.cat([each.parts[name] for each in self.segments], 2)[:, :, :tokens] for name in names}

    def select_rows(self, rows: Tensor) -> None:
        """Keep the batch rows at `rows`, which may repeat."""
        self.segments = [
            segment._replace(
                parts=self._copies({name: part.index_select(0, rows) for name, part in segment.parts.items()})
            )
            for segment in self.segments
        ]

    def copy_row(self, source: int, target: int) -> None:
        """Overwrite row `target` with row `source`."""
        for segment in self.segments:
            for part in segment.parts.values():
                part[target] = part[source]

    def _copies(self, parts: Mapping[str, Tensor]) -> Parts:
        return {name: self._new(part, part.shape[2]).copy_(part) for name, part in parts.items()}

    def _new(self, like: Tensor, tokens: int) -> Tensor:
        shape = (*like.shape[:2], tokens, like.shape[3])
        if self.folder is None:
            return like.new_zeros(shape)
        numbers = like.shape[0] * like.shape[1] * tokens * like.shape[3]
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
