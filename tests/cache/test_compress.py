"""`compress`: a cache that held more is as one that had the budget from the start and read the text in one chunk."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import windlass
from tests.helpers.caches import MODES, POLICIES, assert_same, bytes_of_slots, held
from tests.helpers.models import Models, Text, read
from windlass import KVCache, UsageError
from windlass.cache.options import CacheOptions
from windlass.cache.shares import Shares
from windlass.core.step import HEADROOM
from windlass.policies import H2O, ExpectedAttention, KeyDiff, KeyNorm, Policy, Recent, SnapKV
from windlass.policies.wrappers import keeps_newest
from windlass.testing import SLIDING_WINDOW

LENGTHS = (50, 23, 31)


def filled(model: PreTrainedModel, text: Text, budget: int | None, **options: object) -> KVCache:
    """A cache of three rows that read texts of different lengths in one chunk."""
    cache = KVCache(model, budget, chunk=64, batch=3, **options)  # type: ignore[arg-type]
    windlass.prefill(model, cache, [text(n, seed=n)[0].tolist() for n in LENGTHS])
    return cache


@pytest.mark.parametrize("wide", [None, 40])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_it_is_the_twin_that_had_the_budget(
    attached_model: Models, text: Text, policy: Policy, wide: int | None
) -> None:
    """`wide` is a budget that has already evicted from the longest row."""
    model = attached_model("llama")
    caches = filled(model, text, wide, policy=policy, window=3), filled(model, text, 12, policy=policy, window=3)
    caches[0].compress(12)
    if keeps_newest(policy):  # it attends to its window alone from the start, so that its keys are others
        assert [held(caches[0], 1, row) for row in range(3)] == [held(caches[1], 1, row) for row in range(3)]
    elif wide is None:
        assert_same(*caches)
        assert caches[0].limits == caches[1].limits
        more = text(9, rows=3, seed=9)
        logits = [read(model, cache, more, 1) for cache in caches]
        torch.testing.assert_close(*logits, atol=1e-5, rtol=0)
        logits = [read(model, cache, text(30, rows=3, seed=8), 30) for cache in caches]
        torch.testing.assert_close(*logits, atol=1e-5, rtol=0)
        assert_same(*caches)
    for layer in caches[0].layers:
        assert (layer.positions >= 0).sum(-1).unique().tolist() == [12]
        assert (layer.positions.sort(-1).values[..., -12:-8] == torch.arange(4)).all()


@pytest.mark.parametrize("merge", [None, "mean_count", "sum(next)"])
@pytest.mark.parametrize("store", ["plain", "int8", "int4"])
@pytest.mark.parametrize("mode", MODES)
def test_with_every_store_merge_and_mode(
    attached_model: Models, text: Text, store: str, merge: str | None, mode: str
) -> None:
    model = attached_model("llama")
    if merge is None:
        store = {"int4": "int4(sinks=2, newest=5)"}.get(store, store)
    options = {"policy": SnapKV(8, 3), "store": store, "positions": mode}
    caches = [filled(model, text, budget, merge=merge if budget else None, **options) for budget in (None, 14)]
    if merge is None:
        caches[0].compress(14)
    else:  # a cache that merges has a budget
        caches[0] = filled(model, text, 60, merge=merge, **options)
        caches[0].options = replace(caches[0].options, window=None)
        caches[0].compress(14)
    if store == "plain":
        assert_same(*caches)
    more = text(9, rows=3, seed=9)
    # Merged means are summed in another order, and the float16 scale of their codes may then be the next one: 2^-11.
    tolerance = 1e-3 if merge is not None and store != "plain" else 1e-5
    torch.testing.assert_close(*(read(model, cache, more, 1) for cache in caches), atol=tolerance, rtol=0)


@pytest.mark.parametrize("rollback", [0, 7])
def test_memory_is_by_the_formula_at_once(attached_model: Models, text: Text, rollback: int) -> None:
    model = attached_model("llama")
    cache = filled(model, text, None, policy=KeyDiff(), rollback=rollback)
    before = cache.bytes_held
    cache.compress(12)
    slots = 12 + HEADROOM + rollback
    assert cache.bytes_held == 2 * 3 * 3 * slots * ((8 + 8) * 4 + 4) < before
    read(model, cache, text(1, rows=3), 1)
    assert bytes_of_slots(cache) == 2 * 3 * 3 * slots * ((8 + 8) * 4 + 4)
    assert "budget   12 tokens a layer, sinks 4, window 2" in cache.describe()
    assert f"held     12 of {slots} slots in 2 layers" in cache.describe()


@pytest.mark.parametrize("budget", [None, 20])
def test_what_came_before_cannot_be_taken_back(attached_model: Models, text: Text, budget: int | None) -> None:
    model = attached_model("llama")
    cache = KVCache(model, budget, policy=Recent())
    read(model, cache, text(30), 30)
    cache.compress(12)
    with pytest.raises(UsageError, match="rollback of 1 tokens, but row 0 was edited 0 tokens ago"):
        cache.rollback(1)
    twin = copy.deepcopy(cache)
    read(model, cache, text(5, seed=1), 5)
    cache.rollback(3)
    read(model, twin, text(5, seed=1)[:, :2], 2)
    assert_same(cache, twin)


@pytest.mark.parametrize("policy", [KeyNorm(), H2O(), ExpectedAttention(), Recent()], ids=repr)
@pytest.mark.parametrize("family", ["mistral", "gemma3"])
@pytest.mark.parametrize("budget", [SLIDING_WINDOW + 3, SLIDING_WINDOW, SLIDING_WINDOW - 2])
def test_sliding_windows(attached_model: Models, text: Text, policy: Policy, family: str, budget: int) -> None:
    """A layer of a whole window keeps it while it fits. Otherwise an observing policy starts from its newest tokens."""
    model = attached_model(family)
    caches = [KVCache(model, wide, policy, sinks=2, window=3, chunk=64) for wide in (None, budget)]
    for cache in caches:
        read(model, cache, text(40), 40)
    caches[0].compress(budget)
    for mine, theirs in zip(*(cache.layers for cache in caches), strict=True):
        assert (mine.budget, type(mine.policy), mine.positions.shape[1]) == (
            theirs.budget,
            type(theirs.policy),
            theirs.positions.shape[1],
        )
        is_blind = policy.observed_queries != 0 and mine.sliding_window is not None and budget < mine.sliding_window
        for index, head in enumerate(held(caches[0], mine.index)):
            truth = list(range(40 - budget, 40)) if is_blind else held(caches[1], mine.index)[index]
            assert head == truth
    read(model, caches[0], text(20, seed=1), 7)
    assert [layer.table.occupancy_bound for layer in caches[0].layers] == [layer.budget for layer in caches[1].layers]


def test_a_saved_cache_keeps_its_new_budget(attached_model: Models, text: Text, tmp_path: Path) -> None:
    model = attached_model("gemma3")
    cache = filled(model, text, None, policy=SnapKV(8, 3))
    cache.compress(9)
    cache.save(tmp_path / "cache")
    loaded = KVCache.load(tmp_path / "cache", model)
    assert loaded.budget == 9
    more = text(30, rows=3, seed=9)
    torch.testing.assert_close(*(read(model, one, more, 1) for one in (cache, loaded)), atol=1e-5, rtol=0)
    assert_same(cache, loaded)


def test_an_empty_or_a_shorter_text_just_gets_the_budget(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(40)
    caches = [KVCache(model, budget, KeyDiff(), window=3, chunk=64) for budget in (None, None, 20)]
    caches[0].compress(20)
    read(model, caches[1], ids[:, :15], 15)
    caches[1].compress(20)
    read(model, caches[1], ids[:, 15:], 25)
    for cache in (caches[0], caches[2]):
        read(model, cache, ids[:, :15], 15)
        read(model, cache, ids[:, 15:], 25)
    assert_same(caches[0], caches[2])
    assert_same(caches[1], caches[2])
    caches[1].reset()
    assert caches[1].budget == 20
    assert all(layer.budget == 20 for layer in caches[1].layers)


def test_the_default_window_follows_the_budget_and_a_given_one_stays(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    for given, asked, expected in ((None, None, 6), (9, None, 9), (9, 5, 5), (None, 5, 5)):
        cache = KVCache(model, window=given)
        read(model, cache, text(40), 40)
        cache.compress(30, window=asked)
        assert cache.limits == KVCache(model, 30, window=expected, policy=Recent()).limits


@pytest.mark.parametrize(
    ("budget", "window", "words"),
    [
        (0, None, "budget must be from 1 to 1073741824, got 0"),
        (8, None, r"budget \(8 tokens\) must be at least sinks \(4\) \+ window \(5\) \+ 1, which is 10"),
        (12, 8, r"budget \(12 tokens\) must be at least sinks \(4\) \+ window \(8\) \+ 1, which is 13"),
        (12, 0, "window must be from 1"),
        (21, None, "compress to 21 tokens, but the cache keeps 20. A budget can only be lowered"),
    ],
)
def test_a_bad_budget_is_one_line_and_changes_nothing(
    attached_model: Models, text: Text, budget: int, window: int | None, words: str
) -> None:
    model = attached_model("llama")
    cache, twin = (KVCache(model, 20, H2O(), window=5) for _ in range(2))
    for each in (cache, twin):
        read(model, each, text(30), 30)
    with pytest.raises(UsageError, match=words):
        cache.compress(budget, window)
    assert cache.limits == twin.limits
    cache.rollback(1)
    twin.rollback(1)
    assert_same(cache, twin)


def test_a_policy_that_saw_no_queries_says_so(plain_model: Models, attached_model: Models, text: Text) -> None:
    with torch.no_grad():
        held_elsewhere = plain_model("llama")(text(30), use_cache=True).past_key_values
    model = attached_model("llama")
    cache = KVCache.from_rotated(model, held_elsewhere, CacheOptions(policy=ExpectedAttention()))
    with pytest.raises(UsageError, match=r"compress: ExpectedAttention.* has seen no queries yet. Let the model read"):
        cache.compress(12)
    read(model, cache, text(1), 1)
    cache.compress(12)
    assert cache.layers[1].table.occupancy_bound == 12
    cache = KVCache.from_rotated(model, held_elsewhere, CacheOptions(policy=KeyDiff()))
    cache.compress(12)
    assert cache.layers[1].table.occupancy_bound == 12


def test_heads_whose_share_grows_beyond_a_sliding_window_hold_that_window(attached_model: Models, text: Text) -> None:
    """All heads have 10 slots while 9 of 10 are protected. With one protected slot they have 6, 10 and 14."""
    model = attached_model("mistral")
    shares = Shares([[0.5, 1.0, 1.5]] * model.config.num_hidden_layers)
    cache = KVCache(model, 10, "tova", 0, 9, chunk=1, shares=shares)
    read(model, cache, text(20), 1)
    assert [layer.budget for layer in cache.layers] == [10] * len(cache.layers)
    cache.compress(10, window=1)
    assert sorted({layer.rules.limits.budget or 0 for layer in cache.layers}) == [6, 10, 14]
    read(model, cache, text(20, seed=1), 1)
    wide = [layer for layer in cache.layers if layer.rules.limits.budget == 14]
    assert len(wide) == model.config.num_hidden_layers
    for layer in wide:
        assert layer.positions[layer.positions >= 0].sort().values.tolist() == list(range(40 - SLIDING_WINDOW, 40))
