"""Frames against the contents of the cache's layers."""

from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.models import Models, Text
from tests.helpers.policies import ALL_POLICIES
from windlass import KVCache
from windlass.cache.describe import bytes_by_part
from windlass.policies import H2O, KeyDiff, Policy, Recent
from windlass.view.recording import (
    DELTA,
    FULL,
    HEADER,
    MAGIC,
    Camera,
    Encoder,
    Frame,
    Record,
    end_record,
    frames_of,
    json_record,
    records_of,
)

ROW = 1  # of two rows, whose texts differ


class Look:
    """Takes frames of a row, and reads them again."""

    def __init__(self, cache: KVCache, row: int = ROW) -> None:
        self.camera, self.encoder, self.records = Camera(cache, row), Encoder(None), list[bytes]()

    def frame(self) -> None:
        self.records.append(self.encoder.frame(self.camera.snapshot(self.encoder.known)))

    def read(self) -> list[Record]:
        head = json_record(HEADER, {})
        data = b"".join([MAGIC, head, *self.records, end_record(len(self.records) + 1)])
        return list(records_of(data))[1:]

    def frames(self) -> list[Frame]:
        return list(frames_of(self.read()))


def held(cache: KVCache, row: int, layer: int, head: int) -> list[int]:
    """The positions of a kv head by the cache's own tensors."""
    table = cache.by_layer[layer].layers[0].table
    own = table.positions[row].expand(3, -1)[head]
    return sorted(own[own >= 0].tolist())


@torch.no_grad()
@pytest.mark.parametrize("policy", ALL_POLICIES, ids=repr)
def test_each_head_holds_what_the_layers_say(attached_model: Models, text: Text, policy: Policy) -> None:
    """While a prompt is read chunk by chunk, and while single tokens come."""
    model = attached_model("llama")
    cache = KVCache(model, budget=13, sinks=2, window=4, chunk=17, batch=2, policy=policy)
    look, wanted = Look(cache), []
    ids = text(60, rows=2)
    for piece in (*ids[:, :51].split(17, 1), *ids[:, 51:].split(1, 1)):
        model(piece, past_key_values=cache)
        look.frame()
        wanted.append([held(cache, ROW, layer, head) for layer in range(2) for head in range(3)])
    frames = look.frames()
    assert len(frames) == 12
    for frame, own in zip(frames, wanted, strict=True):
        assert [frame.of_head(layer, head).tolist() for layer in range(2) for head in range(3)] == own
        assert frame.ids == tuple(ids[ROW, : frame.seen].tolist())
    assert len({tuple(map(tuple, own)) for own in wanted}) == 12, "something was evicted at each step"


@torch.no_grad()
def test_deltas_lead_to_what_full_frames_say(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    cache = KVCache(model, budget=40, sinks=2, window=4, chunk=64, batch=2, policy=H2O())
    look, alone = Look(cache), []
    for piece in (text(50, rows=2), *text(30, rows=2, seed=3).split(1, 1)):
        model(piece, past_key_values=cache)
        look.frame()
        fresh = Look(cache)
        fresh.frame()
        alone.append(fresh.frames()[0])
    kinds = [record.kind for record in look.read()]
    assert kinds.count(DELTA) > 3 * kinds.count(FULL)
    assert kinds.count(FULL) >= 2, "now and then all of it, so that a reader may begin there"
    frames = look.frames()
    for frame, full in zip(frames, alone, strict=True):
        assert np.array_equal(frame.positions, full.positions)
        assert (frame.seen, frame.next, frame.planes, frame.ids) == (full.seen, full.next, full.planes, full.ids)
    assert np.array_equal(frames[0].numbers["mass"], alone[0].numbers["mass"])
    sent = [at for at, frame in enumerate(frames) if at == 0 or frame.numbers is not frames[at - 1].numbers]
    for at in sent:
        assert np.array_equal(frames[at].numbers["mass"], alone[at].numbers["mass"], equal_nan=True)
    assert len(sent) >= 4


@torch.no_grad()
def test_mass_and_merged_counts_are_those_of_the_slots(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    cache = KVCache(model, budget=12, sinks=1, window=2, chunk=9, policy=H2O(), merge="mean_count")
    for piece in text(40).split(9, 1):
        model(piece, past_key_values=cache)
    last = Look(cache, 0)
    last.frame()
    frame = last.frames()[0]
    assert set(frame.numbers) == {"mass", "merged"}
    state = cache.layers[1].table.state
    slots = cache.layers[1].table.slots
    for name in frame.numbers:
        own = frame.numbers[name].reshape(2, 3, slots)[1]
        assert np.array_equal(own, state[name][0].numpy())
    assert frame.numbers["merged"].max() > 0


@torch.no_grad()
@pytest.mark.parametrize("policy", [KeyDiff(), Recent()], ids=repr)
@pytest.mark.parametrize("store", ["plain", "int8"])
def test_what_a_step_recalls_is_told(attached_model: Models, text: Text, policy: Policy, store: str) -> None:
    """Where all that was evicted is recalled: in chunks and in single tokens, compiled or not."""
    model = attached_model("llama")
    options: dict[str, Any] = {"budget": 13, "sinks": 2, "window": 4, "chunk": 17, "batch": 2, "policy": policy}
    cache = KVCache(model, **options, recall=96, recall_store="plain", store=store)
    look, ids = Look(cache), text(60, rows=2)
    for piece in (*ids[:, :51].split(17, 1), *ids[:, 51:].split(1, 1)):
        model(piece, past_key_values=cache)
        look.frame()
    cache.rollback(1)
    look.frame()
    frames = look.frames()
    for before, frame in pairwise(frames[:-1]):
        newest = set(range(before.seen, frame.seen))
        for layer, head in product(range(2), range(3)):
            read_again = set(frame.recalled_by(layer, head).tolist())
            if len(newest) == 1:  # at a chunk's end others were evicted than had been when it was read
                stayed = set(before.of_head(layer, head).tolist())
                assert read_again == set(range(frame.seen)) - stayed - newest
            else:
                assert read_again == set(range(before.seen)) - set(before.of_head(layer, head).tolist())
    assert len(frames[0].recalled_by(1, 2)) == 0
    assert len(frames[-2].recalled_by(1, 2)) > 40
    assert len(frames[-1].recalled_by(1, 2)) == 0, "the step that recalled is no longer there"


@torch.no_grad()
def test_a_rolled_back_text_is_told_anew(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    cache = KVCache(model, budget=12, sinks=1, window=2, chunk=9, rollback=8)
    look = Look(cache, 0)
    model(text(20), past_key_values=cache)
    for piece in text(5, seed=1).split(1, 1):
        model(piece, past_key_values=cache)
    look.frame()
    cache.rollback(3)
    for piece in text(3, seed=2).split(1, 1):
        model(piece, past_key_values=cache)
    look.frame()
    before, after = look.frames()
    assert before.seen == after.seen == 25
    assert after.ids == (*text(20)[0].tolist(), *text(5, seed=1)[0, :2].tolist(), *text(3, seed=2)[0].tolist())
    assert before.ids != after.ids


@torch.no_grad()
def test_an_edited_text_says_so(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    cache = KVCache(model, budget=30, sinks=1, window=2, chunk=9)
    model(text(20), past_key_values=cache)
    assert not Camera(cache).snapshot().is_edited
    cache.drop(3, 8)
    cache.shift(8, 20, -5)
    assert Camera(cache).snapshot().is_edited


@torch.no_grad()
@pytest.mark.parametrize("store", ["plain", "int8", "int4"])
def test_the_formula_is_what_the_slots_take(attached_model: Models, text: Text, store: str) -> None:
    model = attached_model("llama")
    cache = KVCache(model, budget=12, sinks=1, window=2, chunk=9, batch=2, store=store, policy=H2O())
    model(text(9, rows=2), past_key_values=cache)
    parts = bytes_by_part(cache)
    told, size = Camera(cache).snapshot().formula
    assert size == sum(count for name, count in parts.items() if name not in ("rollback", "key_means"))
    assert told.startswith("2 layers x 2 rows x ")
    assert Camera(cache).snapshot().bytes_held == sum(parts.values())


@torch.no_grad()
def test_layers_of_other_lengths_and_windows(attached_model: Models, text: Text) -> None:
    """Some layers of Gemma 3 slide. Their planes report it, and have slots of their own."""
    model = attached_model("gemma3")
    cache = KVCache(model, budget=40, sinks=2, window=4, chunk=16, policy=KeyDiff())
    look = Look(cache, 0)
    for piece in text(60).split(16, 1):
        model(piece, past_key_values=cache)
        look.frame()
    frame = look.frames()[-1]
    windows = {plane.layer: plane.sliding_window for plane in frame.planes}
    assert windows == {layer.index: layer.sliding_window or 0 for layer in cache.layers}
    assert len(set(windows.values())) == 2
    for plane, own in zip(frame.planes, frame.by_plane(), strict=True):
        at = 0 if len(plane.heads) > 1 else plane.heads[0]
        positions = cache.layers[plane.layer].positions[0, at].clamp(min=-1)
        assert own.tolist() == positions.tolist()


def test_an_empty_cache_has_frames_too(attached_model: Models) -> None:
    look = Look(KVCache(attached_model("llama"), budget=12, policy=Recent()), 0)
    look.frame()
    [frame] = look.frames()
    assert (frame.seen, frame.planes, frame.positions.size) == (0, (), 0)
