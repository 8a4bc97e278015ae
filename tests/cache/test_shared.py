"""Queries of layers without keys of their own read a layer's slots as its own queries found them, column by column."""

import copy
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.caches import MODES, POLICIES, assert_same
from tests.helpers.interrupts import interrupted_at
from tests.helpers.models import Models
from windlass import KVCache, UsageError
from windlass.core.step import AttentionCall, Pass
from windlass.policies import H2O, KeyDiff, KVzip, Policy, Recent
from windlass.policies.base import ModelSpecific

STEPS = [40, 3, 9, 1, 1, 16, 5]
ROWS, HEADS, KV_HEADS, HEAD_DIM = 2, 15, 3, 8
CALL, OTHER = AttentionCall(0.5), AttentionCall(0.9, softcap=3.0)
LIMITS: dict[str, Any] = {"sinks": 2, "window": 3, "batch": ROWS, "chunk": 40}


def shared_cache(attached_model: Models, **options: object) -> KVCache:
    """A cache of which the first layer is shared."""
    cache = KVCache(attached_model("llama"), **{"budget": 13, **LIMITS, **options})
    cache.shared = frozenset({0})
    cache.reset()
    return cache


def drawn(tokens: int, heads: int = HEADS, seed: int = 4) -> Tensor:
    return torch.randn(ROWS, heads, tokens, HEAD_DIM, generator=torch.Generator().manual_seed(seed))


def begin(cache: KVCache, tokens: int, padding: int = 0) -> None:
    """A pass in which the second row has `padding` columns less."""
    mask = torch.ones(ROWS, tokens, dtype=torch.bool)
    mask[1, :padding] = False
    cache.begin(ROWS, tokens, mask, None, torch.zeros(ROWS, tokens, dtype=torch.long))


def check(cache: KVCache, steps: list[int], drafts: int = 0) -> None:
    """The layer's own queries, handed in once more, read the same, and the cache equals one that nobody shares."""
    tokens, start = sum(steps), 0
    states = drawn(tokens), drawn(tokens, KV_HEADS, seed=5), drawn(tokens, KV_HEADS, seed=6)
    twin = copy.deepcopy(cache)
    twin.layers[0].is_shared = False
    for size in steps:
        queries, keys, values = (each[:, :, start : start + size] for each in states)
        for each in (cache, twin):
            each.schedule(Pass(drafts=drafts if start else 0))
            begin(each, size, padding=size // 2)
        own = cache.attend(0, queries, keys, values, CALL)
        torch.testing.assert_close(twin.attend(0, queries, keys, values, CALL), own, atol=0, rtol=0)
        for columns in {size, 1, (size + 1) // 2}:
            ours = cache.attend_shared(0, queries[:, :, size - columns :], CALL)
            torch.testing.assert_close(ours, own[:, :, size - columns :], atol=2e-6, rtol=0)
        for each in (cache, twin):
            each.commit()
        assert cache.layers[0].views == []
        for name, tensor in cache.layers[0].tensors().items():
            assert tensor.equal(twin.layers[0].tensors()[name]), name
        start += size


@pytest.mark.parametrize("policy", [each for each in POLICIES if not isinstance(each, ModelSpecific)], ids=repr)
def test_every_policy(attached_model: Models, policy: Policy) -> None:
    check(shared_cache(attached_model, policy=policy), STEPS)


@pytest.mark.parametrize(
    ("budget", "store", "merge"),
    [
        *product([13, None], ["plain", "int8", "int4", "int4(sinks=2, newest=5)"], [None]),
        *product([13], ["plain", "int8", "int4"], ["mean_count", "sum(threshold=0.2)"]),
    ],
)
def test_every_store_and_merge(attached_model: Models, budget: int | None, store: str, merge: str | None) -> None:
    check(shared_cache(attached_model, budget=budget, policy=KeyDiff(), store=store, merge=merge), STEPS)


@pytest.mark.parametrize("mode", [*MODES, "auto"])
@pytest.mark.parametrize("budget", [13, None])
def test_every_position_mode(attached_model: Models, mode: str, budget: int | None) -> None:
    cache = shared_cache(attached_model, budget=budget, policy=KeyDiff(), positions=mode)
    for layer in cache.layers:
        layer.rotary = copy.copy(layer.rotary)
        assert layer.rotary is not None
        layer.rotary.trained_length = 31
    check(cache, STEPS)


def test_more_drafts_than_a_store_can_take_back(attached_model: Models) -> None:
    """Entries of tokens in full precision are taken again within the pass."""
    cache = shared_cache(attached_model, policy=KeyDiff(), store="int4(sinks=2, newest=5)", rollback=1)
    check(cache, [40, 31], drafts=30)


@pytest.mark.parametrize("merge", [None, "mean_count"])
@pytest.mark.parametrize("heads", [HEADS, 6])
def test_other_queries_read_as_if_they_were_the_layers_own(
    attached_model: Models, heads: int, merge: str | None
) -> None:
    """KeyDiff observes no queries, so their owner makes no difference to evictions."""
    cache, twin = (shared_cache(attached_model, policy=KeyDiff(), merge=merge) for _ in range(2))
    for number, size in enumerate(STEPS):
        own, other = drawn(size, seed=number), drawn(size, heads, seed=number + 50)
        keys, values = (drawn(size, KV_HEADS, seed=number + at) for at in (100, 150))
        for each in (cache, twin):
            begin(each, size)
        cache.attend(0, own, keys, values, CALL)
        theirs = twin.attend(0, other, keys, values, OTHER)
        torch.testing.assert_close(cache.attend_shared(0, other, OTHER), theirs, atol=2e-6, rtol=0)
        for each in (cache, twin):
            each.commit()


def test_a_second_pass_is_shared_too(attached_model: Models) -> None:
    cache = shared_cache(attached_model, policy=KVzip(8), chunk=40)
    for how in (Pass(), Pass(is_second_pass=True), Pass()):
        cache.schedule(how)
        begin(cache, 7, padding=2)
        queries = drawn(7)
        own = cache.attend(0, queries, drawn(7, KV_HEADS, seed=8), drawn(7, KV_HEADS, seed=9), CALL)
        torch.testing.assert_close(cache.attend_shared(0, queries, CALL), own, atol=2e-6, rtol=0)
        cache.commit()
        assert cache.layers[0].views == []


def test_only_a_shared_layer_keeps_views(attached_model: Models) -> None:
    cache = shared_cache(attached_model, policy=Recent())
    begin(cache, 9)
    for layer in (0, 1):
        cache.attend(layer, drawn(9), drawn(9, KV_HEADS), drawn(9, KV_HEADS), CALL)
    assert [len(layer.views) for layer in cache.layers] == [1, 0]


def test_another_window_is_refused(attached_model: Models) -> None:
    cache = shared_cache(attached_model)
    begin(cache, 9)
    cache.attend(0, drawn(9), drawn(9, KV_HEADS), drawn(9, KV_HEADS), AttentionCall(0.5, sliding_window=11))
    with pytest.raises(UsageError, match=r"slots 0 .* sliding window of None, and their own layer has 11"):
        cache.attend_shared(0, drawn(9), CALL)


@pytest.mark.parametrize("policy", [H2O(), KeyDiff()], ids=repr)
@pytest.mark.parametrize("merge", [None, "mean_count"])
def test_an_interrupt_while_others_read_leaves_the_cache_as_it_was(
    attached_model: Models, policy: Policy, merge: str | None
) -> None:
    cache, line = shared_cache(attached_model, policy=policy, merge=merge), 1
    begin(cache, 40)
    cache.attend(0, drawn(40), drawn(40, KV_HEADS), drawn(40, KV_HEADS), CALL)
    cache.commit()
    before, text = copy.deepcopy(cache), cache.text
    while True:
        begin(cache, 5)
        cache.attend(0, drawn(5), drawn(5, KV_HEADS, seed=8), drawn(5, KV_HEADS, seed=9), CALL)
        if not interrupted_at(line, lambda: cache.attend_shared(0, drawn(5, seed=7), OTHER)):
            break
        cache.take_back(text)
        assert_same(cache, before)
        line += 13
    assert line > 200
