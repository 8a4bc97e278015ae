"""An indexer's keys follow their tokens: through edits, rollback, files, interrupted passes, joins and other stores."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tests.helpers.indexers import INDEX_WIDTH, bound_indexed, plain_indexed
from tests.helpers.models import Text, logits_at, read
from windlass import KVCache, UsageError
from windlass.cache.layer import SlotLayer
from windlass.hf.deepseek import IndexerObservation, indexed_layers
from windlass.hf.recurrent import LayerKinds
from windlass.policies import Recent

PICKED, TOKENS = 13, 45

each_class = pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa", "hy_v4"])  # three ways to rotate


def bound(name: str, layers: int = 4) -> PreTrainedModel:
    return bound_indexed(name, PICKED, layers)


def one_layer(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model of one layer, plain and attached: its contents depend on the tokens alone, so any edit is exact."""
    return plain_indexed(name, PICKED, num_hidden_layers=1), bound(name, 1)


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    """To 1e-4 of a standard deviation."""
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.std()


def index_keys(layer: SlotLayer) -> Tensor:
    """(1, tokens, channels): those that a layer holds, in the order of the text."""
    held = layer.positions[0, 0]
    order = held.where(held >= 0, 2 * TOKENS).argsort()[: int((held >= 0).sum())]
    keys = layer.store.index_keys
    assert keys is not None
    return keys[:, order]


def next_logits(model: PreTrainedModel, cache: KVCache, token: int) -> Tensor:
    return read(model, cache, torch.tensor([[token]]), 1)[0, -1]


@each_class
@pytest.mark.parametrize("mode", ["original", "compact"])
def test_drop_and_shift(name: str, mode: str, text: Text) -> None:
    (plain, model), ids = one_layer(name), text(41)[0].tolist()
    cache = KVCache(model, positions=mode)
    read(model, cache, torch.tensor([ids[:40]]), 40)
    cache.drop(11, 17)
    left, gap = ids[:11] + ids[17:40], 6 if mode == "original" else 0
    at = [*range(11), *(place + gap for place in range(11, 35))]
    assert_equal(next_logits(model, cache, ids[40]), logits_at(plain, [*left, ids[40]], at))
    cache = KVCache(model, positions=mode)
    read(model, cache, torch.tensor([ids[:40]]), 40)
    cache.drop(11, 17)
    cache.shift(17, 40, -6)
    assert_equal(next_logits(model, cache, ids[40]), logits_at(plain, [*left, ids[40]], list(range(35))))


@each_class
def test_divide(name: str, text: Text) -> None:
    (plain, model), ids = one_layer(name), text(41)[0].tolist()
    cache = KVCache(model, positions="original")
    read(model, cache, torch.tensor([ids[:40]]), 7)
    cache.divide(0, 40, 2)
    places = [*(at // 2 for at in range(40)), cache.next_positions[0]]
    assert_equal(next_logits(model, cache, ids[40]), logits_at(plain, ids, places))


@each_class
@pytest.mark.parametrize("mode", ["compact", "self_extend(4, 16)", "clamp(12)"])
def test_a_query_alone_is_read_in_every_mode(name: str, mode: str, text: Text) -> None:
    """By the positions that the mode gives its keys, of which the query's own is the last."""
    (plain, model), ids = one_layer(name), text(TOKENS)[0].tolist()
    cache = KVCache(model, 30, Recent(), 3, positions=mode)
    read(model, cache, torch.tensor([ids[:-1]]), 1)
    held = [*range(3), *range(TOKENS - 28, TOKENS)]
    last = TOKENS - 1
    if mode == "compact":
        places = list(range(31))
    elif mode == "clamp(12)":
        places = [12 - min(last - at, 12) for at in held]
    else:
        far = last // 4 + 16 - 16 // 4
        places = [far - (last - at) if last - at < 16 else at // 4 for at in held]
    assert_equal(next_logits(model, cache, ids[-1]), logits_at(plain, [ids[at] for at in held], places))


@each_class
@pytest.mark.parametrize("store", ["plain", "int8", "int4"])
def test_a_joined_text_brings_its_index_keys(name: str, store: str, text: Text) -> None:
    (plain, model), ids = one_layer(name), text(41)[0].tolist()
    cache, other = KVCache(model, store=store), KVCache(model)
    read(model, cache, torch.tensor([ids[:19]]), 19)
    read(model, other, torch.tensor([ids[19:40]]), 21)
    cache.splice(other)
    ours, theirs = cache.layers[0], KVCache(model)
    read(model, theirs, torch.tensor([ids[:40]]), 40)
    one, two = (index_keys(layer)[0] for layer in (ours, theirs.layers[0]))
    assert_equal(one, two)
    assert one.shape == (40, INDEX_WIDTH)
    if store == "plain":
        assert_equal(next_logits(model, cache, ids[40]), logits_at(plain, ids, list(range(41))))


@each_class
@pytest.mark.parametrize("budget", [None, 26])
def test_rollback(name: str, budget: int | None, text: Text) -> None:
    ids, other, model = text(TOKENS), text(9, seed=7), bound(name)
    cache, twin = (KVCache(model, budget, Recent()) for _ in range(2))
    read(model, twin, ids[:, :30], 30)
    read(model, cache, ids[:, :30], 30)
    read(model, cache, other[:, :6], 1)
    cache.crop(-6)
    assert_equal(read(model, cache, ids[:, 30:], 1), read(model, twin, ids[:, 30:], 1))


@each_class
def test_slots_are_packed_once_decode_begins(name: str, text: Text) -> None:
    model, ids = bound(name), text(TOKENS)
    cache, twin = (KVCache(model, 26, Recent(), 3, chunk=18) for _ in range(2))
    read(model, cache, ids[:, :36], 18)
    before = cache.layers[0].positions
    ours, theirs = read(model, cache, ids[:, 36:], 1), read(model, twin, ids, 1)[:, 36:]
    assert cache.layers[0].positions.shape != before.shape
    assert_equal(ours, theirs)


@each_class
@pytest.mark.parametrize("store", ["plain", "int8", "int4(sinks=2, newest=5)"])
def test_a_file_goes_on(name: str, store: str, text: Text, tmp_path: Path) -> None:
    model, ids = bound(name), text(TOKENS)
    cache = KVCache(model, 26, Recent(), store=store)
    read(model, cache, ids[:, :31], 31)
    cache.save(tmp_path / "cache")
    loaded = KVCache.load(tmp_path / "cache", model)
    assert index_keys(loaded.layers[0]).equal(index_keys(cache.layers[0]))
    assert read(model, loaded, ids[:, 31:], 1).equal(read(model, cache, ids[:, 31:], 1))


@each_class
def test_rows_take_their_index_keys_along(name: str, text: Text) -> None:
    model, ids = bound(name), text(TOKENS, rows=3)
    whole = read(model, KVCache(model, batch=3), ids, 9)
    cache = KVCache(model, batch=3)
    read(model, cache, ids[:, :36], 36)
    cache.copy(2, 0)
    cache.select_rows(torch.tensor([1, 0]))
    assert_equal(read(model, cache, ids[[1, 2], 36:], 3), whole[[1, 2], 36:])


@each_class
def test_a_pass_that_fails_leaves_the_cache_as_it_was(name: str, text: Text) -> None:
    model, ids = bound(name), text(TOKENS)
    caches = [KVCache(model, 26, Recent()) for _ in range(2)]
    for cache in caches:
        read(model, cache, ids[:, :30], 7)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    handle = model.model.layers[-1].self_attn.o_proj.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        read(model, caches[0], ids[:, 30:37], 7)
    handle.remove()
    one, other = (read(model, cache, ids[:, 30:], 1) for cache in caches)
    assert one.equal(other)


@pytest.mark.parametrize("store", ["int8", "int4"])
def test_low_bit_stores_hold_index_keys_as_they_are(store: str, text: Text) -> None:
    """So the first layer, which is fed the same, picks the same tokens."""
    model, ids = bound("deepseek_v32"), text(TOKENS)
    caches = [KVCache(model, 26, Recent(), store=each) for each in (store, "plain")]
    for cache in caches:
        read(model, cache, ids, 9)
    one, other = (index_keys(cache.layers[0]) for cache in caches)
    assert one.any()
    assert one.dtype == torch.float32
    assert one.equal(other)


def test_what_can_not_be_done_is_refused_by_name(text: Text) -> None:
    model, ids = bound("deepseek_v32"), text(TOKENS)
    cache = KVCache(model)
    read(model, cache, ids[:, :20], 20)
    with pytest.raises(UsageError, match="to_rotated: the layers of this model hold keys of an indexer"):
        cache.to_rotated()
    own = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=own)
    with pytest.raises(UsageError, match="from_rotated: the layers of this model hold keys of an indexer"):
        KVCache.from_rotated(model, own)
    twin = KVCache(model)
    read(model, twin, ids[:, :20], 20)
    cache.positions = "self_extend(4, 16)"
    with pytest.raises(UsageError, match="the model's indexer scores each token once in a pass"):
        read(model, cache, ids[:, 20:], 25)
    cache.positions = twin.positions
    assert read(model, cache, ids[:, 20:], 25).equal(read(model, twin, ids[:, 20:], 25))


def test_layers_that_share_keys_and_pick_are_not_served() -> None:
    seen, kinds = IndexerObservation(layers={0: None}), LayerKinds((0, 1), sources={1: 0})
    found = indexed_layers(kinds, [], seen, seen, torch.zeros(2, 1), 1e-4)
    assert found.unserved == "layer 1 attends to the keys of layer 0, and picks for itself"
    found = indexed_layers(LayerKinds((0,)), [], seen, seen, torch.zeros(2, 1), 1e-4)
    assert found.unserved == "layer 0 has an indexer that windlass does not know"
