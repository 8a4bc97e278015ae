"""Digests of a recall store's pages: what they are, and that those of a text lead to all of it."""

import copy
from pathlib import Path

import pytest
import torch

from tests.helpers.models import Models, Text, read
from tests.helpers.recalls import both, read_both, recalling
from windlass import KVCache, prompt_cache
from windlass.cache import recall
from windlass.core.limits import PAGE
from windlass.kernels.reference_recall import digest_of


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_pages_with_the_best_digests_are_enough(
    monkeypatch: pytest.MonkeyPatch, attached_model: Models, text: Text, family: str
) -> None:
    monkeypatch.setattr(
        recall, "CANDIDATES", 12
    )  # as many pages as are recalled: those of the text, of 128 that have room
    model, ids = attached_model(family), text(67, 2)
    caches = both(model, batch=2, policy="keydiff", positions="original")
    read_both(model, caches, ids[:, :50], 13)
    read_both(model, caches, ids[:, 50:], 1)
    store = caches[0].layers[0].table.recall
    assert store is not None
    assert store.memory.capacity // PAGE > recall.CANDIDATES


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
    prompt_cache.save(cache, tmp_path / "text.cache", model)
    assert_digested(prompt_cache.load(tmp_path / "text.cache", model))


def assert_digested(cache: KVCache) -> None:
    """Each page's digest is as the store holds the largest and the least of its keys."""
    for layer in cache.layers:
        held = layer.table.recall
        assert held is not None
        keys = held.codec.decode_keys(held.memory.filled(max(held.lengths)))
        digests = [each.filled(-(-max(held.lengths) // PAGE)) for each in held.digests]
        for row, length in enumerate(held.lengths):
            for digest, wanted in zip(digests, digest_of(keys[row : row + 1, :, :length]), strict=True):
                for name, part in held.codec.parts_of(wanted, wanted[..., :0]).items():
                    assert digest[name][row : row + 1, :, : wanted.shape[2]].equal(part)
