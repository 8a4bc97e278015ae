"""Records: the bytes of a recording, and of a live stream of frames. All numbers are little endian.

stream   "windview", then records; of a file the first is HEADER and the last END
record   uint32 kind, uint32 length, uint32 CRC-32 of kind, length and payload; then `length` bytes of payload
HEADER   JSON: what the cache is, see `snapshot.about`; in a live stream another one begins another text
FULL     all slots, DELTA: those that have changed since the frame before; see `frames`
STATUS   JSON: what the server told of itself; in a live stream only
END      uint32: how many records came before
"""

import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from windlass.core.errors import RecordingError

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
    """The records of a whole file but for its END, each checked as it is given out.

    Raises: RecordingError for what is no recording, or is cut off, changed or longer than it says.
    """
    if data[: len(MAGIC)] != MAGIC:
        raise RecordingError("is no recording: it does not begin as one; make one with `windlass generate --record`")
    at, count = len(MAGIC), 0
    while True:
        if len(data) - at < HEAD.size:
            raise RecordingError(f"is cut off after {count} records; record it again")
        kind, length, told = HEAD.unpack_from(data, at)
        stop = at + HEAD.size + length
        if kind > END or stop > len(data):
            raise RecordingError(f"is cut off or damaged in record {count}, at byte {at}; record it again")
        payload = data[at + HEAD.size : stop]
        if zlib.crc32(payload, zlib.crc32(data[at : at + 8])) != told:
            raise RecordingError(f"is damaged in record {count}, at byte {at}: its checksum differs; record it again")
        if kind == END:
            if payload != COUNT.pack(count) or stop != len(data):
                raise RecordingError(f"is damaged: it does not end after {count} records; record it again")
            return
        yield Record(kind, payload)
        at, count = stop, count + 1


def parsed(payload: bytes, what: str) -> dict[str, Any]:
    """The JSON object of a payload, which errors call `what`. Raises: RecordingError for anything else."""
    try:
        told = json.loads(payload)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict):
        raise RecordingError(f"has {what} that is no JSON object; record it again")
    return told
