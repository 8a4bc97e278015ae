"""A watch copies while somebody looks, and not otherwise."""

import gc
import threading
import time
import weakref

import pytest
import torch

from tests.helpers.models import Models, Text
from windlass import KVCache
from windlass.view import server
from windlass.view.recording import (
    HEADER,
    MAGIC,
    Camera,
    Encoder,
    Snapshot,
    end_record,
    frames_of,
    json_record,
    records_of,
)
from windlass.view.server import SchedulerWatcher


@pytest.fixture
def cache(attached_model: Models, text: Text) -> KVCache:
    made = KVCache(attached_model("llama"), budget=12, sinks=1, window=2, chunk=9, batch=2)
    with torch.no_grad():
        attached_model("llama")(text(9, rows=2), past_key_values=made)
    return made


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which stands still until it is set."""
    now = [100.0]
    monkeypatch.setattr(server, "monotonic", lambda: now[0])
    return now


def test_nothing_is_copied_while_nobody_looks(cache: KVCache, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[object] = []
    monkeypatch.setattr(Camera, "snapshot", lambda *given: copies.append(given))
    watch = SchedulerWatcher()
    assert not watch.is_watched
    watch.step(cache)
    viewer = watch.attach()
    watch.detach(viewer)
    watch.detach(viewer)
    assert not watch.is_watched
    watch.step(cache)
    assert copies == []


def test_five_frames_a_second_at_most(cache: KVCache, clock: list[float]) -> None:
    watch = SchedulerWatcher()
    viewer = watch.attach()
    assert watch.is_watched
    taken = []
    for step in range(100):
        clock[0] = 100 + step * 0.03
        watch.step(cache)
        taken.append(viewer.take() is not None)
    assert taken[0]
    assert sum(taken) == 15, "three seconds"
    watch.step(cache, is_last=True)
    assert viewer.take() is not None, "what a row holds in the end is shown in any case"


def test_a_copy_that_takes_long_is_made_less_often(
    cache: KVCache, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Camera.snapshot

    def slow(camera: Camera, text_from: int = 0) -> Snapshot:
        clock[0] += 0.05
        return plain(camera, text_from)

    monkeypatch.setattr(Camera, "snapshot", slow)
    watch = SchedulerWatcher()
    viewer = watch.attach()
    taken = 0
    began = clock[0]
    while clock[0] < began + 20:
        watch.step(cache)
        taken += viewer.take() is not None
        clock[0] += 0.01
    assert taken == 4, "a hundredth of the time: a copy of 50 ms each 5 s"


def test_a_viewer_sees_the_text_it_asked_for_or_the_newest(cache: KVCache, clock: list[float]) -> None:
    watch = SchedulerWatcher()
    newest, third = watch.attach(), watch.attach(3)

    def numbers(viewer: server.Viewer, *stepped: int) -> list[int]:
        found = []
        for number in stepped:
            clock[0] += 1.0
            watch.step(cache, row=number % 2, number=number)
            taken = viewer.take()
            found += [] if taken is None else [taken.header["number"]]
        return found

    assert numbers(newest, 3, 4, 3, 4, 5, 4, 5) == [3, 4, 4, 5, 5]
    assert numbers(third, 3, 4, 3, 5) == [3, 3]
    newest.take()
    clock[0] += 10
    assert numbers(newest, 3) == [3], "the newest has ended"


@torch.no_grad()
def test_a_slow_viewer_gets_whole_frames(
    cache: KVCache, clock: list[float], attached_model: Models, text: Text
) -> None:
    """Frames that it did not take are replaced. Frames that it takes lead to the contents of the cache."""
    watch, encoder = SchedulerWatcher(), Encoder(None)
    viewer = watch.attach()
    frames, wanted = [], []
    for step, piece in enumerate(text(40, rows=2, seed=5).split(1, 1)):
        attached_model("llama")(piece, past_key_values=cache)
        clock[0] += 1.0
        watch.step(cache, row=1)
        if step % 7 == 6:
            seen = viewer.take()
            assert seen is not None
            frames.append(encoder.frame(seen.snapshot))
            viewer.known = encoder.known
            wanted.append((step + 10, cache.rows.rows[1].tokens, cache.layers[1].positions[1].clamp(min=-1).tolist()))
    data = b"".join([MAGIC, json_record(HEADER, {}), *frames, end_record(len(frames) + 1)])
    read = list(frames_of(list(records_of(data))[1:]))
    for frame, (seen_tokens, ids, positions) in zip(read, wanted, strict=True):
        assert frame.seen == seen_tokens
        assert list(frame.ids) == ids
        own = [each for plane, each in zip(frame.planes, frame.by_plane(), strict=True) if plane.layer == 1]
        assert [each.tolist() for each in own] == positions


def test_no_cache_is_kept_for_a_viewer_who_has_left(attached_model: Models) -> None:
    watch, made = SchedulerWatcher(), KVCache(attached_model("llama"), budget=12)
    alive = weakref.ref(made)
    viewer = watch.attach()
    watch.step(made)
    watch.step(made, is_last=True)
    del made
    gc.collect()
    assert alive() is None, "the text is over"
    again = KVCache(attached_model("llama"), budget=12)
    alive = weakref.ref(again)
    watch.step(again, number=1)
    watch.detach(viewer)
    del again
    gc.collect()
    assert alive() is None, "nobody looks"


def test_viewers_come_and_go_while_steps_run(cache: KVCache) -> None:
    watch, errors, is_over = SchedulerWatcher(), list[BaseException](), threading.Event()

    def looks() -> None:
        try:
            for _ in range(60):
                viewer = watch.attach()
                viewer.take(0.002)
                watch.detach(viewer)
        except BaseException as error:
            errors.append(error)

    def steps() -> None:
        try:
            while not is_over.is_set():
                watch.step(cache)
                time.sleep(0.0002)
        except BaseException as error:
            errors.append(error)

    engine = threading.Thread(target=steps)
    engine.start()
    viewers = [threading.Thread(target=looks) for _ in range(3)]
    for each in viewers:
        each.start()
    for each in viewers:
        each.join(30)
    is_over.set()
    engine.join(30)
    assert errors == []
    assert not watch.is_watched
