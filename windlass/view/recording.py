"""A file of frames: written while a text is read and written, and read again without a model."""

from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

from transformers import PreTrainedTokenizerBase

from windlass.cache.state import CacheState
from windlass.core.errors import RecordingError, UsageError, whole_number
from windlass.core.files import check_writable, read_bytes, replacing
from windlass.view.frames import (
    DELTA,
    FULL,
    HEADER,
    MAGIC,
    VERSION,
    Camera,
    Encoder,
    Frame,
    Record,
    about,
    end_record,
    frames_of,
    json_record,
    parsed,
    records_of,
)


class Recorder:
    """Writes the contents of one row of a cache, a frame for each `step`, to a file.

    Use it in a `with` block: the whole file is there when the block ends without an error. Without a `tokenizer` tokens
    are shown by their ids.

    Raises: UsageError for a row that the cache lacks, or a file that cannot be written.
    """

    def __init__(
        self, path: Path, cache: CacheState, row: int = 0, tokenizer: PreTrainedTokenizerBase | None = None
    ) -> None:
        check_writable(path, "recording")
        self._camera = Camera(cache, whole_number("row", row, 0, cache.batch_size - 1))
        self._path, self._cache, self._encoder = path, cache, Encoder(tokenizer)
        self._ends = ExitStack()
        self._count = 0

    def __enter__(self) -> "Recorder":
        self._file = self._ends.enter_context(self._ends.enter_context(replacing(self._path)).open("wb"))
        self._file.write(MAGIC)
        self._write(json_record(HEADER, {"version": VERSION, **about(self._cache)}))
        return self

    def step(self) -> None:
        """Write the present contents of the row. Call it between two steps of the model."""
        self._write(self._encoder.frame(self._camera.snapshot(self._encoder.known)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._file.write(end_record(self._count))
        self._ends.__exit__(kind, error, trace)

    def _write(self, data: bytes) -> None:
        self._file.write(data)
        self._count += 1


@dataclass(frozen=True, eq=False)
class Recording:
    """Contents of a file: the `header` of `snapshot.about`, and the records that lead from frame to frame."""

    header: dict[str, Any]
    records: tuple[Record, ...]

    @cached_property
    def frames(self) -> list[Frame]:
        """All frames. Raises: RecordingError for one that contradicts itself."""
        return list(frames_of(self.records))


def read_recording(path: Path) -> Recording:
    """Read the recording of `Recorder` at `path`. Frames are decoded on request.

    Raises: RecordingError for a file that is missing, damaged, too new, or no recording.
    """
    try:
        return recording_of(read_bytes(path, f"recording {path}"))
    except UsageError as error:
        raise RecordingError(str(error)) from None
    except RecordingError as error:
        raise RecordingError(f"{path} {error}") from None


def recording_of(data: bytes) -> Recording:
    """Read a recording from the bytes of a file. Raises: RecordingError, in words about the file."""
    first, *rest = records_of(data) if data else [Record(FULL, b"")]
    if first.kind != HEADER:
        raise RecordingError("is damaged: it has no header. Record it again")
    header = parsed(first.payload, "a header")
    if header.get("version") != VERSION:
        raise RecordingError(f"has version {header.get('version')!r}, and {VERSION} is read here. Update windlass")
    frames = tuple(each for each in rest if each.kind in (FULL, DELTA))
    if not frames or any(each.kind == HEADER for each in rest):
        raise RecordingError("is damaged: it has no frames, or several headers. Record it again")
    return Recording(header, frames)
