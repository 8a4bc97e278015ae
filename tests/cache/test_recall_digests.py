"""Digests of a recall store's pages: their numbers, and that those of a text lead to all of it."""

import copy
from pathlib import Path

import pytest
import torch

from tests.helpers.models import Models, Text, read
from tests.helpers.recalls import TOLERANCE, both, digests_of, read_both, recalling
from windlass import KVCache, kernels
from windlass.cache import recall
from windlass.core.inputs import BestPages, PageInput
from windlass.core.parse import PAGE
from windlass.kernels import reference


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_pages_with_the_best_digests_are_enough(
    monkeypatch: pytest.MonkeyPatch, attached_model: Models, text: Text, family: str
) -> None:
    monkeypatch.setattr(recall, "CANDIDATES", 3)  # fewer than the 12 recalled pages, with room for 128
    model, ids = attached_model(family), text(67, 2)
    caches = both(model, batch=2, policy="keydiff", positions="original")
    read_both(model, caches, ids[:, :50], 13)
    read_both(model, caches, ids[:, 50:], 1)
    store = caches[0].layers[0].table.recall
    assert store is not None
    assert store.candidates == 24


def test_single_tokens_choose_by_digests_in_one_call_and_step_by_step(
    monkeypatch: pytest.MonkeyPatch, attached_model: Models, text: Text
) -> None:
    monkeypatch.setattr(recall, "CANDIDATES", 5)
    model, ids = attached_model("llama"), text(400, 2)
    caches = [recalling(model, batch=2, recall=16, positions="original") for _ in range(2)]
    for cache in caches:
        read(model, cache, ids[:, :380], 97)
    asked = list[PageInput]()

    def best_pages(call: PageInput) -> BestPages:
        asked.append(call)
        return reference.best_pages(call)

    for at in range(380, 400):
        outputs = [read(model, caches[0], ids[:, at : at + 1], 1)]
        with monkeypatch.context() as plain:
            plain.setattr(kernels, "decode_of", lambda *_: None)
            plain.setattr(kernels, "best_pages", best_pages)
            outputs.append(read(model, caches[1], ids[:, at : at + 1], 1))
        torch.testing.assert_close(*outputs, **TOLERANCE)
        for layers in zip(*(cache.layers for cache in caches), strict=True):
            ours, plainly = (layer.table.recall for layer in layers)
            assert ours is not None
            assert plainly is not None
            assert ours.last_recalled.equal(plainly.last_recalled)
            assert (ours.last_recalled >= 0).any()
    assert {call.candidates for call in asked} == {5}
    assert all(call.digests for call in asked)


@pytest.mark.parametrize("store", ["plain", "int8", "int4"])
@pytest.mark.parametrize("positions", ["clamp(50)", "original"])  # without and with a kernel for single tokens
def test_digests_are_those_of_what_is_held(
    attached_model: Models, text: Text, tmp_path: Path, store: str, positions: str
) -> None:
    model, ids = attached_model("llama"), text(9300, 2)
    cache = recalling(model, batch=2, recall=24, recall_store=store, positions=positions)
    mask = torch.ones(2, 37, dtype=torch.bool)
    mask[0, :13] = False
    with torch.no_grad():
        model(ids[:, :37], attention_mask=mask, past_key_values=cache)
    assert_digested(cache)
    read(model, cache, ids[:, 37:43], 1)
    assert_digested(cache)
    cache.rollback(3)
    read(model, cache, ids[:, 50:60], 1)
    assert_digested(cache)
    cache.select_rows(torch.tensor([1, 0]))
    cache.copy(1, 0)
    cache.splice(copy.deepcopy(cache), 0, 1)
    read(model, cache, ids[:, 60:9300], 700)  # another segment of digests
    assert_digested(cache)
    cache.save(tmp_path / "text.cache")
    assert_digested(KVCache.load(tmp_path / "text.cache", model))


def assert_digested(cache: KVCache) -> None:
    """Each page's digest is as the store holds the largest and the least of its keys."""
    for layer in cache.layers:
        held = layer.table.recall
        assert held is not None
        keys = held.codec.decode_keys(held.memory.filled(max(held.lengths)))
        digests = [each.filled(-(-max(held.lengths) // PAGE)) for each in held.digests.both]
        for row, length in enumerate(held.lengths):
            for digest, wanted in zip(digests, digests_of(keys[row : row + 1, :, :length]), strict=True):
                for name, part in held.codec.parts_of(wanted, wanted[..., :0]).items():
                    assert digest[name][row : row + 1, :, : wanted.shape[2]].equal(part)
