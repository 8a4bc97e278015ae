"""Frames, and a file of them, which is written while a text is read and written, and read again without a model.

Frames are the payloads of FULL and DELTA records:

payload  uint32 n, then n bytes of JSON, padded by spaces so that n is a multiple of 4. Then arrays
JSON     of both: seen, next, mode, edited, bytes, rows, seconds, text (the place in the text from which `ids` and
         `strings` are new), ids, strings, numbers (names). Of FULL: planes ([layer, heads, slots, sliding window]
         each), formula ([text, bytes]). Of DELTA: changes (how many slots). Where tokens are recalled: recalled
         ([layer, heads, tokens of a head] each)
arrays   of FULL: int32 position of each slot, plane after plane, -1 in a free one
         of DELTA: uint32 slot, numbered through all planes, and int32 new position, for each change
         of both: float32 of each slot for each name in `numbers`. NaN where a plane keeps no such number. Then int32
         positions that the newest step recalled, head after head of `recalled`, -1 for none
"""

import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Any, Final, NamedTuple, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers.decoders import DecodeStream
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from windlass.cache.describe import bytes_by_part, reading_now
from windlass.cache.layer import SlotLayer
from windlass.cache.recall import TOKEN_INDEX
from windlass.cache.state import CacheState
from windlass.core.errors import RecordingError, UsageError, whole_number
from windlass.core.files import check_writable, read_bytes, replacing
from windlass.core.positions import EMPTY, PLACES

HIDDEN: Final = frozenset({TOKEN_INDEX, *PLACES})  # state that is not a policy's, nor of a merge
NOTHING: Final = np.empty(0, np.int32)
SIZES_COST: Final = 0.001  # share of time that may go to measuring a cache's bytes
OVERLAP: Final = 256  # ids sent again, as they may differ after a rollback

Positions = NDArray[np.int32]
Numbers = NDArray[np.float32]


class SlotGroup(NamedTuple):
    """Slots that some kv `heads` of a layer have in common: alike in all of them, or of one head.

    `sliding_window` is the model's own there, 0 for none.
    """

    layer: int
    heads: tuple[int, ...]
    slots: int
    sliding_window: int = 0


class RecalledPlane(NamedTuple):
    """How many tokens the newest step may have read again in each of some kv `heads` of a layer."""

    layer: int
    heads: tuple[int, ...]
    tokens: int


@dataclass(frozen=True, eq=False)
class Snapshot:
    """One row of a cache between two steps.

    `positions` are those of all planes' slots one after another, EMPTY in a free slot. `numbers` the numbers of a
    policy or a merge for the same slots, NaN where a layer has none. `recalled` are the positions that the newest step
    read beside its slots, head after head of `recalled_planes`, EMPTY for none. `tokens` are the ids of the text from
    `text_from` on. `is_edited`: positions are no longer the places of `tokens`. `bytes_held` is of all `rows` of the
    cache.
    """

    number: int
    planes: tuple[SlotGroup, ...]
    positions: Positions
    numbers: dict[str, Numbers]
    text_from: int
    tokens: list[int]
    seen: int
    next_position: int
    mode: str
    is_edited: bool
    bytes_held: int
    rows: int
    formula: tuple[str, int]
    seconds: float
    recalled_planes: tuple[RecalledPlane, ...] = ()
    recalled: Positions = field(default_factory=NOTHING.copy)


class Camera:
    """Takes snapshots of one row of a cache, whose public `number` may differ.

    Memory is measured only when the slots change, and now and then, because it asks each tensor.
    """

    def __init__(self, cache: CacheState, row: int = 0, number: int = 0) -> None:
        self._cache, self._row, self._number = cache, row, number
        self._slots: list[int] = []
        self._planes: tuple[SlotGroup, ...] = ()
        self._measure_at = 0.0
        self._bytes_held, self._formula = 0, ("", 0)

    def snapshot(self, text_from: int = 0) -> Snapshot:
        """Copy the contents of the row, between two passes.

        The ids of its text are included from shortly before `text_from` on.
        """
        cache, now = self._cache, monotonic()
        layers = [layer for layer in cache.layers_to_read if not layer.is_empty]
        slots = [number for layer in layers for number in layer.positions.shape]
        if slots != self._slots or now >= self._measure_at:
            self._slots = slots
            self._planes = tuple(plane for layer in layers for plane in planes_of(layer))
            self._bytes_held, self._formula = sum(bytes_by_part(cache).values()), formula(layers)
            self._measure_at = now + (monotonic() - now) / SIZES_COST
        text = cache.rows.rows[self._row]
        start = max(0, min(text_from, len(text.ids or ())) - OVERLAP)
        positions = _joined([layer.positions[self._row] for layer in layers], torch.int32)
        return Snapshot(
            number=self._number,
            planes=self._planes,
            positions=np.maximum(positions, EMPTY) if layers else NOTHING,
            numbers=self._numbers(layers),
            text_from=start,
            tokens=[] if text.ids is None else [*text.ids[start:]],
            seen=text.tokens_seen,
            next_position=text.next_position,
            mode=reading_now(cache),
            is_edited=text.next_position != text.tokens_seen or text.ids is None,
            bytes_held=self._bytes_held,
            rows=cache.batch_size,
            formula=self._formula,
            seconds=now,
            **self._recalled(layers),
        )

    def _recalled(self, layers: Sequence[SlotLayer]) -> "_RecallTokens":
        planes, found = [], []
        for layer in layers:
            if layer.table.recall is not None:
                own = layer.table.recall.last_recalled[self._row]
                planes.append(RecalledPlane(layer.index, heads_of(layer), own.shape[1]))
                found.append(own)
        return {"recalled_planes": tuple(planes), "recalled": _joined(found, torch.int32)}

    def _numbers(self, layers: Sequence[SlotLayer]) -> dict[str, Numbers]:
        names = dict.fromkeys(name for layer in layers for name in layer.table.state if name not in HIDDEN)
        found = {}
        for name in names:
            parts = [
                layer.table.state[name][self._row]
                if name in layer.table.state
                else torch.full(layer.positions.shape[1:], torch.nan, device=layer.positions.device)
                for layer in layers
            ]
            found[name] = _joined(parts, torch.float32)
        return found


def planes_of(layer: SlotLayer) -> list[SlotGroup]:
    """The planes of a layer that has been written, in the order of its positions."""
    heads = heads_of(layer)
    groups = [heads] if layer.table.score_heads == 1 else [(head,) for head in heads]
    return [SlotGroup(layer.index, own, layer.table.slots, layer.sliding_window or 0) for own in groups]


def heads_of(layer: SlotLayer) -> tuple[int, ...]:
    """The kv heads of a layer that has been written."""
    return layer.heads or tuple(range(layer.store.layout[0]))


class _RecallTokens(TypedDict):
    recalled_planes: tuple[RecalledPlane, ...]
    recalled: Positions


def _joined(parts: Sequence[Tensor], dtype: torch.dtype) -> Any:
    """One copy out of the device, for all layers."""
    if not parts:
        return NOTHING
    return torch.cat([part.flatten().to(parts[0].device) for part in parts]).to("cpu", dtype).numpy()


def formula(layers: Sequence[SlotLayer]) -> tuple[str, int]:
    """Memory of the layers, as text and in bytes, from sizes that do not change with the text.

    Records for rolling back steps are counted separately in `bytes_held`.
    """
    counts: dict[tuple[int, int, int], int] = {}
    beside = 0
    for layer in layers:
        batch, _, slots = layer.positions.shape
        tensors = list(layer.tensors().values())
        own = sum(_allocated(each) for each in tensors if each.ndim > 2 and each.shape[2] == slots)
        key = batch, slots, own // (batch * slots)
        counts[key] = counts.get(key, 0) + 1
        beside += sum(map(_allocated, tensors)) - key[2] * batch * slots
    parts = [
        f"{count} layer{'s' * (count > 1)} x {batch} row{'s' * (batch > 1)} x {slots:,} slots x {each:,} bytes"
        for (batch, slots, each), count in counts.items()
    ]
    parts += [f"{beside:,} bytes beside them"] if beside else []
    return " + ".join(parts) or "nothing yet", beside + sum(
        count * batch * slots * each for (batch, slots, each), count in counts.items()
    )


def _allocated(tensor: Tensor) -> int:
    return tensor.untyped_storage().nbytes()


def about(cache: CacheState, number: int = 0) -> dict[str, Any]:
    """Facts of a cache for a page, in the header of its frames."""
    return {
        "number": number,
        "model": cache.model_name,
        "layers": len(cache.by_layer),
        "trained_length": cache.trained_length,
        **cache.options.labels(),
    }


CONTEXT: Final = 8  # tokens before the first new one: enough for a tokenizer to place its spaces


class TokenTexts:
    """The ids of a text so far, and the place where the next ones differ.

    Together the texts of all tokens are the text. One that only begins a character has none. Without a tokenizer, or
    with one that cannot go token by token, each token stands for itself.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer if tokenizer is not None and tokenizer.is_fast else None
        self._ids: list[int] = []
        self._stream = DecodeStream()

    @property
    def known(self) -> int:
        """Tokens so far."""
        return len(self._ids)

    def told(self, start: int, ids: Sequence[int]) -> tuple[int, list[int], list[str]]:
        """The place where the text changes when `ids` follow from `start`, the ids from there on, and their texts."""
        start = min(start, len(self._ids))
        before = self._ids[start:]
        same = next((at for at, (old, new) in enumerate(zip(before, ids, strict=False)) if old != new), None)
        at = start + (min(len(before), len(ids)) if same is None else same)
        new = list(ids[at - start :])
        if at < len(self._ids):
            del self._ids[at:]
            self._stream = DecodeStream(self._ids[-CONTEXT:]) if at else DecodeStream()
        self._ids += new
        return at, new, [self._text(each) for each in new]

    def _text(self, token: int) -> str:
        if self._backend is not None:
            return self._stream.step(self._backend, token) or ""
        return f"[{token}] " if self._tokenizer is None else str(self._tokenizer.decode([token]))


MAGIC: Final = b"windview"
VERSION: Final = 1
HEADER, FULL, DELTA, STATUS, END = range(5)
HEAD: Final = struct.Struct("<III")
COUNT: Final = struct.Struct("<I")


class Record(NamedTuple):
    """One record as it was read."""

    kind: int
    payload: bytes


def record(kind: int, payload: bytes) -> bytes:
    """The bytes of a record."""
    start = COUNT.pack(kind) + COUNT.pack(len(payload))
    return start + COUNT.pack(zlib.crc32(payload, zlib.crc32(start))) + payload


def json_record(kind: int, told: object) -> bytes:
    """A record of one JSON value."""
    return record(kind, json.dumps(told, ensure_ascii=False).encode())


def end_record(count: int) -> bytes:
    """The last record of a file that has `count` before it."""
    return record(END, COUNT.pack(count))


def records_of(data: bytes) -> Iterator[Record]:
    """The records of a whole file but for its END, each checked before it is returned.

    Raises: RecordingError for a file that is no recording, or is cut off, changed or too long.
    """
    if data[: len(MAGIC)] != MAGIC:
        raise RecordingError("is no recording: it does not begin as one. Make one with `windlass generate --record`")
    at, count = len(MAGIC), 0
    while True:
        if len(data) - at < HEAD.size:
            raise RecordingError(f"is cut off after {count} records. Record it again")
        kind, length, told = HEAD.unpack_from(data, at)
        stop = at + HEAD.size + length
        if kind > END or stop > len(data):
            raise RecordingError(f"is cut off or damaged in record {count}, at byte {at}. Record it again")
        payload = data[at + HEAD.size : stop]
        if zlib.crc32(payload, zlib.crc32(data[at : at + 8])) != told:
            raise RecordingError(f"is damaged in record {count}, at byte {at}: its checksum differs. Record it again")
        if kind == END:
            if payload != COUNT.pack(count) or stop != len(data):
                raise RecordingError(f"is damaged: it does not end after {count} records. Record it again")
            return
        yield Record(kind, payload)
        at, count = stop, count + 1


def parsed(payload: bytes, what: str) -> dict[str, Any]:
    """The JSON object of a payload. Raises: RecordingError, with the given label, for anything else."""
    try:
        told = json.loads(payload)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise RecordingError(f"has {what} that is no JSON object. Record it again")
    return told


NUMBERS_EVERY: Final = 8  # frames: numbers change with each token, faster than anybody reads
LENGTH: Final = struct.Struct("<I")
CHANGE: Final = np.dtype([("slot", "<u4"), ("position", "<i4")])
SCALARS: Final = {"seen": int, "next": int, "mode": str, "edited": bool, "bytes": int, "rows": int, "seconds": float}
MOST_SLOTS: Final = 2**28


class Encoder:
    """Encodes frames of one row: the first is FULL, later ones hold only the changes where that is smaller."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._texts = TokenTexts(tokenizer)
        self._planes: tuple[SlotGroup, ...] | None = None
        self._positions = NOTHING
        self._since_full = 0  # bytes of frames: a reader who goes back replays them
        self._until_numbers = 0
        self._began: float | None = None

    @property
    def known(self) -> int:
        """Tokens of the text that were told."""
        return self._texts.known

    def frame(self, now: Snapshot) -> bytes:
        """The record that leads from the frame before to `now`."""
        self._began = now.seconds if self._began is None else self._began
        at, ids, strings = self._texts.told(now.text_from, now.tokens)
        told: dict[str, Any] = {
            "seen": now.seen,
            "next": now.next_position,
            "mode": now.mode,
            "edited": now.is_edited,
            "bytes": now.bytes_held,
            "rows": now.rows,
            "seconds": round(now.seconds - self._began, 4),
            "text": at,
            "ids": ids,
            "strings": strings,
        }
        is_like = now.planes == self._planes
        slots = np.flatnonzero(now.positions != self._positions) if is_like else NOTHING
        is_full = not is_like or 2 * slots.size > now.positions.size or self._since_full > now.positions.nbytes
        told["numbers"] = list(now.numbers) if is_full or self._until_numbers <= 1 else []
        self._until_numbers = NUMBERS_EVERY if told["numbers"] else self._until_numbers - 1
        if is_full:
            told["planes"], told["formula"] = now.planes, now.formula
            changed = now.positions.astype("<i4").tobytes()
        else:
            told["changes"] = slots.size
            changes = np.empty(slots.size, CHANGE)
            changes["slot"], changes["position"] = slots, now.positions[slots]
            changed = changes.tobytes()
        numbers = [now.numbers[name].astype("<f4").tobytes() for name in told["numbers"]]
        if now.recalled_planes:
            told["recalled"] = now.recalled_planes
        numbers.append(now.recalled.astype("<i4").tobytes())
        self._planes, self._positions = now.planes, now.positions
        self._since_full = 0 if is_full else self._since_full + len(changed)
        text = json.dumps(told, ensure_ascii=False).encode()
        text += b" " * (-len(text) % 4)
        return record(FULL if is_full else DELTA, b"".join([LENGTH.pack(len(text)), text, changed, *numbers]))


@dataclass(frozen=True, eq=False)
class Frame:
    """Tokens of a row at one moment of a recording: see `Snapshot`. `numbers` are as of the newest frame with any."""

    seen: int
    next: int
    mode: str
    edited: bool
    bytes: int
    rows: int
    seconds: float
    formula: tuple[str, int]
    planes: tuple[SlotGroup, ...]
    positions: Positions
    numbers: dict[str, Numbers] = field(default_factory=dict)
    recalled_planes: tuple[RecalledPlane, ...] = ()
    recalled: Positions = field(default_factory=NOTHING.copy)
    ids: tuple[int, ...] = ()
    strings: tuple[str, ...] = ()

    def of_head(self, layer: int, head: int) -> Positions:
        """The positions that a kv head of a layer holds, in the order of the text."""
        for plane, own in zip(self.planes, self.by_plane(), strict=True):
            if plane.layer == layer and head in plane.heads:
                return np.sort(own[own >= 0])
        return NOTHING

    def recalled_by(self, layer: int, head: int) -> Positions:
        """The positions that the newest step read beside the slots of a kv head, in the order of the text."""
        at = 0
        for plane in self.recalled_planes:
            if plane.layer == layer and head in plane.heads:
                start = at + plane.heads.index(head) * plane.tokens
                own = self.recalled[start : start + plane.tokens]
                return np.sort(own[own >= 0])
            at += len(plane.heads) * plane.tokens
        return NOTHING

    def by_plane(self) -> list[Positions]:
        """The positions of each plane's slots."""
        return np.split(self.positions, np.cumsum([plane.slots for plane in self.planes])[:-1]) if self.planes else []


def frames_of(records: Sequence[Record]) -> Iterator[Frame]:
    """The frames that FULL and DELTA records lead to, one after another.

    Raises: RecordingError for numbers that contradict each other.
    """
    before: Frame | None = None
    for number, (kind, payload) in enumerate(records):
        try:
            before = _after(before, kind, payload)
        except (_Contradiction, KeyError, TypeError, ValueError, OverflowError) as error:
            raise RecordingError(f"is damaged: frame {number} contradicts itself ({error}). Record it again") from None
        yield before


class _Contradiction(Exception):
    """A record that contradicts another one."""


def _check(is_right: bool, what: str) -> None:
    if not is_right:
        raise _Contradiction(what)


def _after(before: Frame | None, kind: int, payload: bytes) -> Frame:
    """The frame that one record leads to."""
    _check(len(payload) >= LENGTH.size, "length")
    (length,) = LENGTH.unpack_from(payload)
    _check(length % 4 == 0 and length <= len(payload) - LENGTH.size, "length of its JSON")
    told = parsed(payload[LENGTH.size : LENGTH.size + length], "a frame")
    arrays = payload[LENGTH.size + length :]
    for name, wanted in SCALARS.items():
        _check(type(told[name]) is wanted or (wanted is float and type(told[name]) is int), name)
    _check(0 <= told["seen"] < 2**31 and 0 <= told["next"] < 2**31, "tokens")
    if kind == FULL:
        planes = tuple(_plane(each) for each in told["planes"])
        formula = (str(told["formula"][0]), int(told["formula"][1]))
    else:
        _check(before is not None, "nothing before it")
        assert before is not None
        planes, formula = before.planes, before.formula
    total = sum(plane.slots for plane in planes)
    _check(total <= MOST_SLOTS, "slots")
    count = total if kind == FULL else told["changes"]
    _check(type(count) is int and 0 <= count <= total, "changes")
    size = count * (4 if kind == FULL else CHANGE.itemsize)
    names = [str(name) for name in told["numbers"]]
    recalled_planes = tuple(_recalled_plane(each) for each in told.get("recalled", ()))
    of_recalled = sum(len(plane.heads) * plane.tokens for plane in recalled_planes)
    at_recalled = size + 4 * total * len(names)
    _check(len(arrays) == at_recalled + 4 * of_recalled, "length of its arrays")
    if kind == FULL:
        positions: Positions = np.frombuffer(arrays, "<i4", count).astype(np.int32)
    else:
        assert before is not None
        changes = np.frombuffer(arrays, CHANGE, count)
        _check(bool((changes["slot"] < total).all()), "slot")
        positions = before.positions.copy()
        positions[changes["slot"]] = changes["position"]
    recalled: Positions = np.frombuffer(arrays, "<i4", of_recalled, at_recalled).astype(np.int32)
    for each in (positions, recalled):
        _check(bool(((each >= -1) & (each < max(told["next"], 0))).all()), "positions")
    split = [np.frombuffer(arrays, "<f4", total, size + 4 * total * at) for at in range(len(names))]
    numbers = {} if before is None or kind == FULL else before.numbers
    ids, strings = (before.ids, before.strings) if before is not None else ((), ())
    start, more, texts = told["text"], told["ids"], told["strings"]
    _check(type(start) is int and 0 <= start <= len(ids) and len(more) == len(texts), "text")
    _check(all(type(each) is int for each in more) and all(type(each) is str for each in texts), "tokens of the text")
    return Frame(
        **{name: told[name] for name in SCALARS},
        formula=formula,
        planes=planes,
        positions=positions,
        numbers=dict(zip(names, split, strict=True)) or numbers,
        recalled_planes=recalled_planes,
        recalled=recalled,
        ids=(*ids[:start], *more),
        strings=(*strings[:start], *texts),
    )


def _recalled_plane(told: Any) -> RecalledPlane:
    layer, heads, tokens = told
    _check(all(type(each) is int and 0 <= each < 2**31 for each in (layer, tokens, *heads)), "recalled")
    return RecalledPlane(layer, tuple(heads), tokens)


def _plane(told: Any) -> SlotGroup:
    layer, heads, slots, window = told
    _check(all(type(each) is int and 0 <= each < 2**31 for each in (layer, slots, window, *heads)), "planes")
    return SlotGroup(layer, tuple(heads), slots, window)


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
