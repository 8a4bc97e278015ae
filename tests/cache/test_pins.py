"""Positions that are pinned in the middle of a text are never evicted, whatever the policy ranks last."""

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import windlass
from tests.helpers.models import Models, Text
from windlass import KVCache
from windlass.core.errors import UsageError
from windlass.policies.base import Policy, Slots
from windlass.policies.wrappers import Wrapper

LIMITS: dict[str, Any] = {"budget": 24, "window": 3, "chunk": 7, "sinks": "system"}
PINS = [(9, 12), (20, 24), (31, 33)]  # 9 of 24, beside 4 sinks, the window and one more
PINNED = {at for start, stop in PINS for at in range(start, stop)}
POLICIES = [
    "recent",
    "key_diff",
    "h2o",
    "snapkv(observed_queries=3)",
    "tova",
    "key_norm",
    "lag_kv(lag=5)",
    "random",
    "r_kv",
]
STORES: list[dict[str, Any]] = [
    {"store": "int8"},
    {"store": "int4(sinks=2, newest=5)"},
    {"recall": 8},
    {"positions": "compact"},
    {"store": "int8", "recall": 8, "policy": "h2o"},
]


@dataclass(frozen=True)
class Highest(Wrapper):
    """A policy that ranks the pinned positions of row 0 highest by itself."""

    def score(self, slots: Slots) -> Tensor:
        pinned = torch.isin(slots.positions, torch.tensor(sorted(PINNED), dtype=slots.positions.dtype))
        return self.policy.score(slots).float().masked_fill(pinned, torch.inf)


def held(cache: KVCache, row: int = 0) -> list[list[set[int]]]:
    """The positions that each head of each layer holds, where it does not hold a whole sliding window."""
    layers = [layer for layer in cache.layers if not layer.rules.is_whole_window]
    return [[{at for at in head if at >= 0} for head in layer.positions[row].tolist()] for layer in layers]


def pinned(model: PreTrainedModel, **options: Any) -> KVCache:
    cache = KVCache(model, **LIMITS | options)
    cache.set_sinks(4, pins=PINS)
    return cache


def read(model: PreTrainedModel, cache: KVCache, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(ids, past_key_values=cache).logits[:, -1]
    return logits


def assert_kept(cache: KVCache, seen: int, budget: int = 24) -> None:
    wanted = {at for at in PINNED | {*range(4)} | {*range(seen - 3, seen)} if 0 <= at < seen}
    for heads in held(cache):
        for head in heads:
            assert wanted <= head
            assert len(head) == min(seen, budget)


@pytest.mark.parametrize("options", [*({"policy": each} for each in POLICIES), *STORES], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_pins_are_a_policy_that_ranks_them_highest(
    attached_model: Models, text: Text, family: str, options: dict[str, Any]
) -> None:
    """A prompt in chunks, then token by token, each rolled back once."""
    model, ids = attached_model(family), text(70, 1)
    cache = pinned(model, **{"policy": "key_diff"} | options)
    policy: Policy = Highest(cache.options.policy)
    twin = KVCache(model, **LIMITS | options | {"policy": policy})
    twin.set_sinks(4)
    is_recent = options.get("policy") == "recent"  # its twin masks nothing within a chunk
    step = 1 if is_recent else 7
    for at in (*range(0, 42, step), *range(42, 70)):
        size = step if at < 42 else 1
        ours, theirs = (read(model, each, ids[:, at : at + size]) for each in (cache, twin))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert held(cache) == held(twin)
        assert_kept(cache, at + size)
        if at >= 42:
            before = held(cache)
            read(model, cache, ids[:, 3:4])
            cache.rollback(1)
            assert held(cache) == before


@pytest.mark.parametrize("policy", ["recent", "key_diff", "h2o", "snapkv(observed_queries=3)"])
def test_rolled_back_across_evictions(attached_model: Models, text: Text, policy: str) -> None:
    model, ids = attached_model("llama"), text(70, 1)
    cache, twin = (pinned(model, policy=policy, rollback=16) for _ in "ab")
    for each in (cache, twin):
        windlass.prefill(model, each, ids[:, :40].tolist())
    for at in range(40, 52):
        read(model, cache, ids[:, at : at + 1])
    cache.rollback(12)
    assert held(cache) == held(twin)
    for at in range(52, 70):
        torch.testing.assert_close(*(read(model, each, ids[:, at : at + 1]) for each in (cache, twin)))
        assert_kept(cache, 40 + at - 51)


def test_a_chunk_sees_what_single_tokens_see(attached_model: Models, text: Text) -> None:
    """By `Recent`, which masks the tokens of a chunk to those that are not evicted before."""
    model, ids = attached_model("llama"), text(70, 1)
    wide, narrow = (pinned(model, policy="recent", chunk=chunk) for chunk in (64, 1))
    ours, theirs = (windlass.prefill(model, each, ids.tolist()) for each in (wide, narrow))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    newest = sorted({*range(70)} - PINNED - {*range(4)})[-24 + 13 :]
    assert held(wide) == held(narrow) == [[PINNED | {*range(4), *newest}]] * len(wide.layers)


@pytest.mark.parametrize("policy", ["recent", "key_diff", "h2o"])
def test_a_row_with_pins_is_what_it_is_alone(attached_model: Models, text: Text, policy: str, tmp_path: Path) -> None:
    """Beside a row without, copied into another cache, from a file, and as a copy."""
    model, ids = attached_model("llama"), text(60, 3)
    rows: list[list[tuple[int, int]]] = [[], PINS, [(5, 14)]]
    cache = KVCache(model, batch=3, policy=policy, **LIMITS)
    for row, pins in enumerate(rows):
        cache.set_sinks(5 * row, row, pins)
    windlass.prefill(model, cache, ids[:, :40].tolist())
    cache.save(tmp_path / "rows.safetensors")
    loaded = KVCache.load(tmp_path / "rows.safetensors", model)
    single, twin = KVCache(model, policy=policy, **LIMITS), copy.deepcopy(cache)
    single.put_row(0, cache, 1)
    alone = [KVCache(model, policy=policy, **LIMITS) for _ in rows]
    for row, pins in enumerate(rows):
        alone[row].set_sinks(5 * row, pins=pins)
        windlass.prefill(model, alone[row], ids[row : row + 1, :40].tolist())
    for at in range(40, 60):
        column = ids[:, at : at + 1]
        together = read(model, cache, column)
        for each in (loaded, twin):
            torch.testing.assert_close(read(model, each, column), together, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(read(model, single, column[1:2]), together[1:2], rtol=1e-4, atol=1e-4)
        for row, own in enumerate(alone):
            found = read(model, own, column[row : row + 1])
            torch.testing.assert_close(found, together[row : row + 1], rtol=1e-4, atol=1e-4)
    assert [held(cache, row) for row in range(3)] == [held(each) for each in alone]
    assert all({*range(5, 14)} <= head for layer in held(cache, 2) for head in layer)
    assert held(single) == held(cache, 1)


def test_a_cut_keeps_pins(attached_model: Models, text: Text) -> None:
    """Also where the layers share the budget by their scores."""
    model, ids = attached_model("llama"), text(60, 1)
    cache, shared = KVCache(model, sinks="system", window=3), pinned(model, policy="composite(key_norm)")
    cache.set_sinks(4, pins=PINS)
    for each in (cache, shared):
        windlass.prefill(model, each, ids.tolist())
    with pytest.raises(UsageError, match="never evicts its 13 sinks and pins and the 3 newest"):
        cache.compress(16)
    cache.compress(20)
    for each, tokens in ((cache, 20), (shared, 24)):
        assert all({*PINNED, *range(4), 57, 58, 59} <= head for layer in held(each) for head in layer)
        assert sum(len(layer[0]) for layer in held(each)) == tokens * len(each.layers)


@pytest.mark.parametrize("policy", ["composite(key_norm)", "composite(h2o)", "recent", "snapkv"])
def test_pins_behind_the_sinks_are_sinks(attached_model: Models, text: Text, policy: str) -> None:
    model, ids = attached_model("llama"), text(60, 1)
    cache, twin = (KVCache(model, **LIMITS | {"budget": 30, "policy": policy}) for _ in "ab")
    cache.set_sinks(4, pins=[(4, 9), (9, 15)])
    twin.set_sinks(15)
    for each in (cache, twin):
        windlass.prefill(model, each, ids[:, :50].tolist())
    assert held(cache) == held(twin)
    for at in range(50, 60):
        torch.testing.assert_close(*(read(model, each, ids[:, at : at + 1]) for each in (cache, twin)))
        assert held(cache) == held(twin)


@pytest.mark.parametrize("policy", ["recent", "key_diff", "h2o"])
def test_pins_that_come_late(attached_model: Models, text: Text, policy: str) -> None:
    """Once kernels have evicted by themselves. Without pins they do so again."""
    model, ids = attached_model("llama"), text(110, 1)
    cache = KVCache(model, policy=policy, **LIMITS)
    cache.set_sinks(4)
    for at in range(110):
        if at == 40:
            cache.set_sinks(4, pins=[(37, 44)])
        if at == 80:
            cache.set_sinks(4)
        read(model, cache, ids[:, at : at + 1])
        assert (
            at < 40 or at >= 80 or all({*range(37, min(at + 1, 44))} <= head for layer in held(cache) for head in layer)
        )
        assert all(len(head) == min(at + 1, 24) for layer in held(cache) for head in layer)
    if policy == "recent":
        assert held(cache) == [[{*range(4), *range(90, 110)}]] * len(cache.layers)


def test_pins_that_cannot_be_held_are_refused(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(40, 1)
    cache = KVCache(model, **LIMITS)
    with pytest.raises(UsageError, match="have 21 tokens, and the budget of 24 tokens has room for 20 beside"):
        cache.set_sinks(4, pins=[(9, 20), (14, 26)])
    with pytest.raises(UsageError, match=r"pins: \[9, 8\) is no range of positions"):
        cache.set_sinks(4, pins=[(9, 8)])
    with pytest.raises(UsageError, match="merge=mean_count averages evicted tokens into those that stay, pinned ones"):
        KVCache(model, merge="mean_count", **LIMITS).set_sinks(4, pins=[(9, 11)])
    cache.set_sinks(8, pins=[(2, 5), (20, 26), (6, 12), (12, 13)])
    assert cache.rows.rows[0].pins == ((8, 12), (12, 13), (20, 26))
    windlass.prefill(model, cache, ids.tolist())
    before = held(cache)
    for edit in (
        lambda: cache.drop(30, 35),
        lambda: cache.shift(30, 40, 2),
        lambda: cache.keep(0, 30),
        lambda: cache.divide(0, 40, 2),
        lambda: cache.splice(copy.deepcopy(cache), at=9),
    ):
        with pytest.raises(UsageError, match="would move tokens away from the positions that are pinned"):
            edit()
        assert (held(cache), cache.next_positions) == (before, [40])
    cache.set_sinks(8)
    cache.drop(30, 35)
