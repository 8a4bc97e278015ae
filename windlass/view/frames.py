"""Frames: the payloads of FULL and DELTA records, made of snapshots and read again.

payload  uint32 n, then n bytes of JSON, padded by spaces so that n is a multiple of 4; then arrays
JSON     of both: seen, next, mode, edited, bytes, rows, seconds, text (the place in the text from which `ids` and
         `strings` are new), ids, strings, numbers (names); of FULL: planes ([layer, heads, slots, sliding window]
         each), formula ([text, bytes]); of DELTA: changes (how many slots); where tokens are recalled: recalled
         ([layer, heads, tokens of a head] each)
arrays   of FULL: int32 position of each slot, plane after plane, -1 in a free one
         of DELTA: uint32 slot, numbered through all planes, and int32 new position, for each change
         of both: float32 of each slot for each name in `numbers`; NaN where a plane keeps no such number; then int32
         positions that the newest step recalled, head after head of `recalled`, -1 for none
"""

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from transformers import PreTrainedTokenizerBase

from windlass.core.errors import RecordingError
from windlass.view.snapshot import NOTHING, Numbers, Plane, Positions, RecalledPlane, Snapshot
from windlass.view.token_texts import TokenTexts
from windlass.view.wire import DELTA, FULL, Record, parsed, record

NUMBERS_EVERY: Final = 8  # frames: all numbers change with each token, and nobody reads them so fast
LENGTH: Final = struct.Struct("<I")
CHANGE: Final = np.dtype([("slot", "<u4"), ("position", "<i4")])
SCALARS: Final = {"seen": int, "next": int, "mode": str, "edited": bool, "bytes": int, "rows": int, "seconds": float}
MOST_SLOTS: Final = 2**28


class Encoder:
    """Frames of one row: the first is FULL; then what has changed since the frame before, where that is less."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._texts = TokenTexts(tokenizer)
        self._planes: tuple[Plane, ...] | None = None
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
    """What a row held at one moment of a recording; see `Snapshot`. `numbers` are as of the newest frame with any."""

    seen: int
    next: int
    mode: str
    edited: bool
    bytes: int
    rows: int
    seconds: float
    formula: tuple[str, int]
    planes: tuple[Plane, ...]
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
            raise RecordingError(f"is damaged: frame {number} contradicts itself ({error}); record it again") from None
        yield before


class _Contradiction(Exception):
    """What cannot be."""


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


def _plane(told: Any) -> Plane:
    layer, heads, slots, window = told
    _check(all(type(each) is int and 0 <= each < 2**31 for each in (layer, slots, window, *heads)), "planes")
    return Plane(layer, tuple(heads), slots, window)
