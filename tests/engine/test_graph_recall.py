"""Steps that recall evicted tokens, recorded once and replayed, against steps that run as they come."""

from functools import partial
from typing import Any

import pytest
import torch

import windlass
from tests.helpers.models import Models, Text
from tests.helpers.recorded import begun, same, write
from tests.helpers.tape import Tape
from windlass import KVCache, Sampling, kernels
from windlass.cache import cache as memory_of_cache
from windlass.cache import recall
from windlass.cache.recall import RecallMemory, RecallStore, RecallTokens
from windlass.core.parse import PAGE
from windlass.engine import generate
from windlass.engine.decode import CudaGraph, Decoder, Sampler
from windlass.hf.cpu_decoder import FewTokensLayer, WholeDecoder
from windlass.policies import H2O, TOVA, KeyDiff, SnapKV
from windlass.stores.formats import store_of
from windlass.testing import tiny_model

SAMPLED = Sampling(temperature=1.5, top_p=0.9, top_k=20, min_p=0.01, repetition_penalty=1.3, seed=5)


@pytest.fixture(autouse=True)
def _reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reference kernels, as compiled ones would hide their work from the tape."""
    monkeypatch.setattr(kernels, "_is_compiled", lambda _: False)
    monkeypatch.setattr(FewTokensLayer, "_kernel", lambda *_: None)  # which a shared model may have prepared before
    monkeypatch.setattr(WholeDecoder, "output", lambda *_: None)  # as above


RECALLING: list[dict[str, Any]] = [
    {"policy": H2O(), "recall": 8, "recall_store": "plain"},
    {"policy": KeyDiff(), "recall": 8, "recall_store": "int4", "positions": "compact"},
    {"policy": SnapKV(), "recall": 8, "recall_store": "int8", "store": "int8", "merge": "mean_count"},
    {"policy": TOVA(), "recall": 8, "batch": 3},
    {"policy": KeyDiff(), "recall": 8, "budget": 24},  # the first recorded step has evicted nothing yet
]


@pytest.mark.parametrize("options", RECALLING, ids=str)
@pytest.mark.parametrize("candidates", [256, 1])
def test_a_graph_recalls_what_steps_without_it_recall(
    options: dict[str, Any], candidates: int, attached_model: Models, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recall, "CANDIDATES", candidates)
    sampling, caches = Sampling() if options.get("batch") else SAMPLED, []
    tape, written = Tape(), []
    for graph in (tape, None):
        cache, logits = begun(attached_model("llama"), text, options)
        written.append(write(attached_model("llama"), cache, logits, graph, sampling, steps=40))
        caches.append(cache)
    assert written[0] == written[1]
    assert tape.replayed > 20
    same(*caches)
    same_recalled(caches, 2 if candidates == 1 else 0)


@pytest.mark.slow
def test_a_recall_store_grows_between_two_recordings(
    attached_model: Models, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recall, "CANDIDATES", 1)
    monkeypatch.setattr(memory_of_cache, "RecallMemory", partial(RecallMemory, piece=128))
    model, tape, caches, written = attached_model("llama"), Tape(), [], []
    for graph in (tape, None):
        cache, logits = begun(model, text, {"recall": 8, "policy": KeyDiff(), "budget": 14})
        written.append(write(model, cache, logits, graph, steps=130))
        cache.rollback(1)
        cache.drop(20, 31)
        logits = generate.prefill(model, cache, [[3, 5, 6]])
        written.append(write(model, cache, logits, graph, steps=12))
        caches.append(cache)
    assert written[:2] == written[2:]
    assert tape.captured >= 4
    same(*caches)
    same_recalled(caches, 2)
    assert {len(layer.table.recall.memory.segments) for layer in caches[0].layers if layer.table.recall} == {2}


def test_what_is_recorded_before_anything_can_be_recalled_recalls_later(
    attached_model: Models, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The longest row has ended, so nothing was evicted yet when the step is recorded that is replayed from then on."""
    model, tape, caches, written = attached_model("llama"), Tape(), [], []
    choose, recordings = RecallStore.choose, list[int]()

    def counted(store: RecallStore, *asked: torch.Tensor) -> RecallTokens:
        recordings.append(tape.captured)
        return choose(store, *asked)

    monkeypatch.setattr(RecallStore, "choose", counted)
    prompts = [text(24)[0].tolist(), text(23, seed=4)[0].tolist()]
    for graph in (tape, None):
        cache = KVCache(model, budget=24, batch=2, recall=8, recall_store="plain", policy=KeyDiff(), rollback=0)
        logits = generate.prefill(model, cache, prompts)
        decoder = Decoder(model, cache, Sampler(Sampling(), [[1], [1]], cache.device), logits, graph)
        for step in range(16):
            written.append(decoder.next_tokens()[1])
            decoder.advance([False, step < 15], step == 15)
        caches.append(cache)
        # In the step before the recording, too, so that a device has all kernels by then.
        assert graph is None or recordings == [0] * (2 * len(cache.layers))
    assert written[:16] == written[16:]
    assert tape.captured == 1
    for layer, other in zip(*(cache.layers for cache in caches), strict=True):
        assert layer.positions.equal(other.positions)
        is_held = (layer.positions >= 0)[..., None]
        assert (layer.store.keys() * is_held).equal(other.store.keys() * is_held)
    same_recalled(caches, 0)


def test_there_is_room_for_the_rows_that_write() -> None:
    store = RecallStore(8, store_of("plain").fresh(None), RecallMemory(None))
    keys, positions = torch.zeros(2, 3, 1024, 4), torch.arange(1024).expand(2, -1).clone()
    positions[1, 9:] = -1
    store.append(keys, keys, positions, (1024, 9))
    assert store.has_room((0, 1))
    assert not store.has_room((1, 1))


def same_recalled(caches: list[KVCache], candidates: int) -> None:
    for layer, other in zip(*(cache.layers for cache in caches), strict=True):
        mine, its = layer.table.recall, other.table.recall
        assert mine is not None
        assert its is not None
        assert mine.candidates == candidates
        assert (mine.last_recalled >= 0).any()
        assert mine.last_recalled.equal(its.last_recalled)
        for name, tensor in mine.tensors().items():
            assert tensor.equal(its.tensors()[name]), name
        for digests, others in zip(mine.digests.both, its.digests.both, strict=True):
            pages = max(mine.lengths) // PAGE
            for name, tensor in digests.filled(pages).items():
                assert tensor.equal(others.filled(pages)[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("options", RECALLING, ids=str)
@pytest.mark.parametrize("candidates", [256, 1])
@pytest.mark.filterwarnings("error")
def test_a_device_recalls_from_its_graph_what_it_recalls_without(
    options: dict[str, Any], candidates: int, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recall, "CANDIDATES", candidates)
    model = windlass.attach(tiny_model("llama").cuda())  # type: ignore[call-arg]
    written, caches = [], []
    for graph in (CudaGraph(), None):
        cache, logits = begun(model, text, options)
        written.append(write(model, cache, logits, graph, steps=40))
        caches.append(cache)
    assert written[0] == written[1]
    torch.cuda.synchronize()
    same(*caches)
    same_recalled(caches, 2 if candidates == 1 else 0)
    assert "on cuda" in caches[0].describe()
