"""Files of frames: written frames are read back, and damaged files are refused."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from tests.helpers import models
from tests.helpers.models import MODEL, Models, Text
from windlass import KVCache, UsageError
from windlass.core.errors import RecordingError
from windlass.hf.load import load
from windlass.policies import H2O
from windlass.view.recording import (
    DELTA,
    FULL,
    HEADER,
    LENGTH,
    MAGIC,
    Camera,
    Encoder,
    Recorder,
    about,
    end_record,
    json_record,
    read_recording,
    record,
    recording_of,
    records_of,
)

tokenizer = models.tokenizer  # fixture
HEAD = 12


@torch.no_grad()
def written(path: Path, attached_model: Models, text: Text) -> KVCache:
    model = attached_model("llama")
    cache = KVCache(model, budget=12, sinks=1, window=2, chunk=9, policy=H2O())
    with Recorder(path, cache) as recorder:
        for piece in (*text(27).split(9, 1), *text(6, seed=1).split(1, 1)):
            model(piece, past_key_values=cache)
            recorder.step()
    return cache


def test_a_recording_tells_what_the_cache_was(tmp_path: Path, attached_model: Models, text: Text) -> None:
    path = tmp_path / "a.view"
    cache = written(path, attached_model, text)
    recording = read_recording(path)
    assert {name: recording.header[name] for name in about(cache)} == about(cache)
    assert [frame.seen for frame in recording.frames] == [9, 18, 27, 28, 29, 30, 31, 32, 33]
    last = recording.frames[-1]
    now = Camera(cache).snapshot()
    assert np.array_equal(last.positions, now.positions)
    assert last.strings[:2] == tuple(f"[{token}] " for token in text(27)[0, :2].tolist())
    seconds = [frame.seconds for frame in recording.frames]
    assert seconds[0] == 0.0
    assert seconds == sorted(seconds)


@torch.no_grad()
def test_the_tokens_together_are_the_text(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    model, _ = load(MODEL, "float32")
    words = "The naïve café lay by the river — 漢字, and 😀 went on."
    ids = tokenizer(words, return_tensors="pt")["input_ids"]
    cache = KVCache(model, budget=24, sinks=1, window=4, chunk=16)
    with Recorder(tmp_path / "a.view", cache, tokenizer=tokenizer) as recorder:
        for piece in ids.split(7, 1):
            model(piece, past_key_values=cache)
            recorder.step()
    last = read_recording(tmp_path / "a.view").frames[-1]
    assert "".join(last.strings) == tokenizer.decode(ids[0])
    assert len(last.strings) == ids.shape[1]
    assert "" in last.strings, "a token that only begins a character"


def test_a_file_that_is_cut_off_is_refused(tmp_path: Path, attached_model: Models, text: Text) -> None:
    """At each length around the ends of records, and at some in between."""
    path = tmp_path / "a.view"
    written(path, attached_model, text)
    data = path.read_bytes()
    ends, at = [len(MAGIC)], len(MAGIC)
    while at < len(data):
        at += HEAD + int.from_bytes(data[at + 4 : at + 8], "little")
        ends.append(at)
    lengths = {
        0,
        1,
        len(MAGIC) - 1,
        *(end + by for end in ends for by in (-1, 0, 1, 5, HEAD, HEAD + 1)),
        len(data) // 2,
    }
    assert len(recording_of(data).frames) == 9
    for length in sorted(lengths - {len(data)}):
        damaged = data[:length] if length < len(data) else data + b"\0" * (length - len(data))
        with pytest.raises(RecordingError, match=r"cut off|damaged|no recording|no header"):
            _ = recording_of(damaged).frames


def test_each_byte_that_is_changed_is_found(tmp_path: Path, attached_model: Models, text: Text) -> None:
    path = tmp_path / "a.view"
    written(path, attached_model, text)
    data = bytearray(path.read_bytes())
    first = len(MAGIC) + HEAD + int.from_bytes(data[12:16], "little")
    places = [*range(first + HEAD + 40), *range(first + HEAD + 40, len(data), 97), len(data) - 1]
    for at in places:
        data[at] ^= 1 << (at % 8)
        with pytest.raises(RecordingError):
            _ = recording_of(bytes(data)).frames
        data[at] ^= 1 << (at % 8)
    assert len(recording_of(bytes(data)).frames) == 9


@torch.no_grad()
def test_frames_that_contradict_themselves_are_refused(attached_model: Models, text: Text) -> None:
    """With checksums that are right: somebody has made them so."""
    model = attached_model("llama")
    cache = KVCache(model, budget=12, sinks=1, window=2, chunk=9)
    model(text(9), past_key_values=cache)
    header = json_record(HEADER, {"version": 1, **about(cache)})
    encoder = Encoder(None)
    camera = Camera(cache)
    full = encoder.frame(camera.snapshot())
    model(text(1), past_key_values=cache)
    delta = encoder.frame(camera.snapshot(encoder.known))

    def file(*records: bytes) -> bytes:
        return b"".join([MAGIC, *records, end_record(len(records))])

    def changed(frame: bytes, old: bytes, new: bytes) -> bytes:
        kind = int.from_bytes(frame[:4], "little")
        (length,) = LENGTH.unpack_from(frame, HEAD)
        told = frame[HEAD + 4 : HEAD + 4 + length].replace(old, new)
        assert told != frame[HEAD + 4 : HEAD + 4 + length]
        told = told.rstrip() + b" " * (-len(told.rstrip()) % 4)
        return record(kind, LENGTH.pack(len(told)) + told + frame[HEAD + 4 + length :])

    assert len(recording_of(file(header, full, delta)).frames) == 2
    assert delta[0] == DELTA
    assert full[0] == FULL
    beyond = record(DELTA, delta[HEAD:-8] + (2**31).to_bytes(4, "little") + delta[-4:])
    far = record(DELTA, delta[HEAD:-4] + (10_000).to_bytes(4, "little"))
    below = record(DELTA, delta[HEAD:-4] + (-2).to_bytes(4, "little", signed=True))
    bad = [
        (header, delta),
        (header, full, beyond),
        (header, full, far),
        (header, full, below),
        (header, full, header),
        (full, delta),
        (header,),
        (header, changed(full, b'"seen": 9', b'"seen": "9"')),
        (header, changed(full, b'"seen": 9', b'"seen": -9')),
        (header, changed(full, b'"seen": 9', b'"senn": 9')),
        (header, changed(full, b'"text": 0', b'"text": 5')),
        (header, changed(full, b'"planes": [', b'"planes": [[0, [0], -4, 0], ')),
        (header, changed(full, b'"planes": [', b'"planes": [[0, [0], 9000000000, 0], ')),
        (header, full, changed(delta, b'"changes": ', b'"changes": 9')),
        (header, full, record(DELTA, delta[HEAD:] + b"\0\0\0\0")),
        (header, record(FULL, b"")),
        (header, record(FULL, LENGTH.pack(4) + b"[1,2")),
        (header, record(FULL, LENGTH.pack(2**31) + b"{}")),
        (header, record(FULL, LENGTH.pack(200_000) + b"[" * 200_000)),
        (json_record(HEADER, {"version": 2}), full),
        (json_record(HEADER, []), full),
    ]
    for records in bad:
        with pytest.raises(RecordingError):
            _ = recording_of(file(*records)).frames
    assert [each.kind for each in records_of(file(header, full))] == [HEADER, FULL]


def test_a_bad_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.view"
    with pytest.raises(RecordingError, match=r"a\.view cannot be read"):
        read_recording(path)
    path.write_bytes(b"windlass is not this")
    with pytest.raises(RecordingError, match=r"a\.view is no recording"):
        read_recording(path)
    path.write_bytes(b"")
    with pytest.raises(RecordingError, match=r"a\.view is"):
        read_recording(path)


def test_a_file_is_there_as_a_whole_or_not_at_all(tmp_path: Path, attached_model: Models) -> None:
    path = tmp_path / "a.view"
    path.write_bytes(b"before")
    cache = KVCache(attached_model("llama"), budget=12)

    def interrupted() -> None:
        with Recorder(path, cache) as recorder:
            recorder.step()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert path.read_bytes() == b"before"
    assert [each.name for each in tmp_path.iterdir()] == ["a.view"]
    with pytest.raises(UsageError, match="row"):
        Recorder(path, cache, row=1)
    with pytest.raises(UsageError, match="is a folder"):
        Recorder(tmp_path, cache)
