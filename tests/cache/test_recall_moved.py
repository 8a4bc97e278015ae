"""Recall stores moved by splices, copies and files."""

import copy
from pathlib import Path

import pytest
import torch

import windlass
from tests.helpers.models import Models, Text, read
from tests.helpers.recalls import TOLERANCE, both, read_both, recalling
from windlass import KVCache
from windlass.cache import recall
from windlass.core.parse import PAGE


def test_splice(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(90, 2)
    ours, theirs = both(model, batch=2, positions="original"), both(model, positions="original", recall_store="plain")
    read_both(model, ours, ids[:, :30], 13)
    read_both(model, theirs, ids[:1, 30:65], 13)
    for mine, other in zip(ours, theirs, strict=True):
        mine.splice(other, 0, 1)
    assert ours[0].tokens_seen == [30, 65]
    read_both(model, ours, ids[:, 65:80], 13)
    read_both(model, ours, ids[:, 80:], 1)


def test_splice_of_another_kind_of_recall_store(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(50)
    mine, other, full = recalling(model), recalling(model, recall_store="int8"), KVCache(model)
    read(model, other, ids[:, :30], 13)
    mine.splice(other)
    read(model, full, ids[:, :30], 13)
    torch.testing.assert_close(read(model, mine, ids[:, 30:], 1), read(model, full, ids[:, 30:], 1), atol=0.1, rtol=0)


@pytest.mark.parametrize("store", ["plain", "int8", "int4"])
def test_a_prompt_cache_file_holds_what_was_evicted(
    attached_model: Models, text: Text, tmp_path: Path, store: str
) -> None:
    model, ids = attached_model("llama"), text(60, 2)
    cache = recalling(model, batch=2, recall_store=store, recall=24)
    read(model, cache, ids[:, :45], 13)
    cache.save(tmp_path / "text.cache")
    loaded = KVCache.load(tmp_path / "text.cache", model, recall_folder=tmp_path)
    assert loaded.options.recall_store.name == store
    assert loaded.recall_bytes > 0
    torch.testing.assert_close(read(model, loaded, ids[:, 45:], 1), read(model, cache, ids[:, 45:], 1), **TOLERANCE)


def test_a_copy_is_another_cache(attached_model: Models, text: Text, tmp_path: Path) -> None:
    model, ids = attached_model("llama"), text(60)
    cache = recalling(model, recall_folder=tmp_path)
    read(model, cache, ids[:, :40], 13)
    twin, third = copy.deepcopy(cache), copy.deepcopy(cache)
    read(model, twin, ids[:, :7], 1)
    torch.testing.assert_close(read(model, cache, ids[:, 40:], 1), read(model, third, ids[:, 40:], 1), **TOLERANCE)


def test_a_file_is_read_as_memory_is_and_has_no_name(attached_model: Models, text: Text, tmp_path: Path) -> None:
    model, ids = attached_model("llama"), text(1500)
    caches = recalling(model, recall_folder=tmp_path), recalling(model)
    outs = [read(model, cache, ids, 500) for cache in caches]
    assert outs[0].equal(outs[1])
    assert caches[0].recall_bytes == caches[1].recall_bytes
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("store", ["plain", "int8"])
def test_a_row_without_tokens_is_saved_spliced_and_joined(
    attached_model: Models, text: Text, tmp_path: Path, store: str
) -> None:
    model = attached_model("llama")
    ours, one = recalling(model, batch=2, recall_store=store), recalling(model, recall_store=store)
    read(model, one, text(40), 13)
    ours.put_row(0, one)
    ours.save(tmp_path / "text.cache")
    loaded = KVCache.load(tmp_path / "text.cache", model)
    assert [layer.table.recall.lengths for layer in loaded.layers if layer.table.recall] == [(40, 0)] * 2
    joined = recalling(model, batch=2, recall_store=store)
    joined.splice(ours, source=1, row=0)
    joined.splice(ours, source=0, row=1)
    assert [layer.table.recall.lengths for layer in joined.layers if layer.table.recall] == [(0, 40)] * 2
    for cache in (loaded, joined.select_rows(torch.tensor([1, 0])) or joined):
        for layer, other in zip(cache.layers, one.layers, strict=True):
            mine, its = layer.table.recall, other.table.recall
            assert mine is not None
            assert its is not None
            for name, part in mine.memory.filled(40).items():
                assert part[:1].equal(its.memory.filled(40)[name])


def test_many_tokens_are_taken_over_bit_by_bit(
    attached_model: Models, text: Text, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recall, "MOVED", 37)
    model = attached_model("llama")
    cache, other = (recalling(model, batch=2, recall_store="int8") for _ in range(2))
    mask = torch.ones(2, 120, dtype=torch.bool)
    mask[1, :50] = False
    with torch.no_grad():
        model(text(120, 2), attention_mask=mask, past_key_values=cache)
    cache.save(tmp_path / "text.cache")
    loaded = KVCache.load(tmp_path / "text.cache", model)
    other.splice(cache, source=1, row=0)
    other.splice(cache, source=0, row=1)
    other.select_rows(torch.tensor([1, 0]))
    for layers in zip(cache.layers, loaded.layers, other.layers, strict=True):
        stores = [layer.table.recall for layer in layers]
        truth, *rest = [each for each in stores if each is not None]
        for mine in rest:
            assert mine.lengths == truth.lengths == (120, 70)
            for row, length in enumerate(truth.lengths):
                memories = (mine.memory, truth.memory), *zip(mine.digests.both, truth.digests.both, strict=True)
                for (ours, its), count in zip(memories, (length, length // PAGE, length // PAGE), strict=True):
                    for name, part in its.filled(count).items():
                        assert ours.filled(count)[name][row].equal(part[row]), name
                assert mine.positions[row, :length].equal(truth.positions[row, :length])
        assert rest[0].codec.slots == 1  # and not the whole text once more


def test_a_first_pass_of_padding_alone(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(40, 2)
    caches = both(model, batch=2, positions="original")
    for cache in caches:
        with torch.no_grad():
            model(ids[:, :3], attention_mask=torch.zeros(2, 3), past_key_values=cache)
    read_both(model, caches, ids, 13)


def test_a_text_that_was_taken_back_is_saved_and_loaded_again(attached_model: Models, tmp_path: Path) -> None:
    """Its recall store has memory, and no tokens."""
    model = attached_model("llama")
    cache = KVCache(model, 8, "recent", 1, 3, batch=2, recall=8, rollback=4)
    windlass.prefill(model, cache, [[5, 6], [7, 8]])
    cache.rollback(2)
    for _ in range(2):
        cache.save(tmp_path / "cache")
        cache = KVCache.load(tmp_path / "cache", model)
    cache.shift(0, 1, 3, row=1)  # of no tokens
    twin = KVCache(model, 8, "recent", 1, 3, batch=2, recall=8, rollback=4)
    ids = [[9, 10, 11, 12] * 4, [13, 14, 15] * 5]
    assert torch.equal(windlass.prefill(model, cache, ids), windlass.prefill(model, twin, ids))
