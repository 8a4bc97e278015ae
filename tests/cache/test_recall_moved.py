"""Recall stores moved by splices, copies and files."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor

import windlass
from tests.helpers.models import Models, Text, read
from tests.helpers.recalls import TOLERANCE, both, read_both, recalling
from windlass import KVCache
from windlass.cache import recall
from windlass.cache.recall import RecallMemory, RecallStore
from windlass.core.parse import PAGE
from windlass.core.positions import EMPTY
from windlass.stores.formats import Int8


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


SIZES = (300, 140, 9)  # tokens written to a store, tokens that stay after a cut, and new ones


def filled_store(text: Tensor) -> RecallStore:
    """A store of segments of 128 tokens, with the keys `text` (tokens, 8) of two heads."""
    store = RecallStore(16, Int8().fresh(None), RecallMemory(None, piece=128))
    return written(store, text)


def written(store: RecallStore, text: Tensor) -> RecallStore:
    """The store, after these keys and their doubles as values."""
    keys = torch.stack([text, -text])[None]
    start = store.lengths[0] if store.lengths else 0
    store.append(keys, 2 * keys, torch.arange(start, start + len(text), dtype=torch.int32)[None], [len(text)])
    return store


def told(store: RecallStore) -> list[Tensor]:
    """All numbers of a store."""
    tokens = store.lengths[0]
    digests = [each.filled(-(-tokens // PAGE)) for each in store.digests.both]
    return [
        store.positions[:, :tokens],
        *(part for parts in (store.memory.filled(tokens), *digests) for part in parts.values()),
    ]


@pytest.mark.parametrize("change", ["write", "cut", "clear", "pack"])
@pytest.mark.parametrize("is_first", [True, False])
def test_copies_share_memory_until_one_of_them_writes_there(
    monkeypatch: pytest.MonkeyPatch, change: str, is_first: bool
) -> None:
    monkeypatch.setattr(recall, "LARGEST", 1)
    tokens, kept, new = SIZES
    draw = torch.Generator().manual_seed(3)
    text, more = torch.randn(tokens, 8, generator=draw), torch.randn(new, 8, generator=draw)
    store, fresh = filled_store(text), filled_store(text)
    twin = copy.deepcopy(store)
    pairs = [*zip(store.memory.segments, twin.memory.segments, strict=True)]
    assert [own.parts is its.parts for own, its in pairs] == [True, True, False]
    one, other = (store, twin) if is_first else (twin, store)
    for each in (one, fresh):
        if change == "cut":
            each.cut_to([kept])
        elif change == "clear":
            each.clear()
        elif change == "pack":
            each.edit(lambda positions: positions.where(positions % 3 > 0, EMPTY), slice(0, 1))
            each.pack()
        written(each, more)
    assert all(map(torch.equal, told(one), told(fresh)))
    assert all(map(torch.equal, told(other), told(filled_store(text))))
    assert [each.number for each in one.memory.segments[:1]] == [each.number for each in other.memory.segments[:1]] or (
        change in ("clear", "pack")
    )


def test_a_store_is_put_into_an_empty_one_without_a_copy(attached_model: Models, text: Text) -> None:
    """A row that goes from cache to cache, as those of a server do."""
    model, ids = attached_model("llama"), text(2100)
    cache = recalling(model)
    read(model, cache, ids[:, :2090], 500)
    twin = cache.copy_of_row(0)
    for own, its in zip(cache.layers, twin.layers, strict=True):
        assert own.table.recall is not None
        assert its.table.recall is not None
        mine, theirs = (each.table.recall.memory.segments for each in (own, its))
        assert mine[0].parts is theirs[0].parts
        assert mine[-1].parts is not theirs[-1].parts
    assert read(model, twin, ids[:, 2090:], 1).equal(read(model, cache.copy_of_row(0), ids[:, 2090:], 1))
