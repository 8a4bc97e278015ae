"""Layers with budgets of their own: the formulas by hand, allocation, files, and invariants."""

import math
from pathlib import Path

import pytest
import torch

import windlass
from tests.helpers.caches import assert_same, held
from tests.helpers.models import Models, Text, read
from windlass import KVCache, PolicyError
from windlass.cache.compress import shared_budgets
from windlass.core.step import HEADROOM, Limits
from windlass.policies import (
    H2O,
    Budgeter,
    ByValueNorm,
    Composite,
    KeyDiff,
    KVzip,
    OneShot,
    Policy,
    Pyramid,
    Recent,
    SnapKV,
)
from windlass.policies.wrappers import find, keeps_newest, scoring_chunk
from windlass.testing import check_policy


@pytest.mark.parametrize(
    ("budget", "layers", "least", "beta", "expected"),
    [
        # Mean 40 beside 10 protected: 2 at the top, 78 at the bottom, 19 fewer at each layer.
        (50, 5, 11, 20, [88, 69, 50, 31, 12]),
        (50, 5, 11, 1, [50, 50, 50, 50, 50]),
        (50, 1, 11, 20, [50]),
        # 5 beside 10: 1 at the top, 9 at the bottom, 8/3 fewer at each layer: 9, 6.33, 3.67, 1. The one left goes down.
        (15, 4, 11, 20, [20, 16, 13, 11]),
        (11, 3, 11, 20, [11, 11, 11]),
    ],
)
def test_a_pyramid_by_hand(budget: int, layers: int, least: int, beta: int, expected: list[int]) -> None:
    assert Pyramid(KeyDiff(), beta).budgets(budget, layers, least) == expected


@pytest.mark.parametrize("beta", [1, 2.5, 20, 1000])
def test_a_pyramid_keeps_to_its_mean_and_its_least(beta: int | float) -> None:
    for budget in range(8, 300, 7):
        for layers in range(1, 40):
            budgets = Pyramid(KeyDiff(), beta).budgets(budget, layers, 8)
            assert sum(budgets) == budget * layers
            assert budgets == sorted(budgets, reverse=True)
            assert budgets[-1] >= 8


def by_hand(scores: list[list[list[list[float]]]], limits: Limits) -> list[int]:
    """The budgets of layers whose rows' heads have these scores, by one list of all composites."""
    assert limits.budget is not None
    composites = []
    for layer, rows in enumerate(scores):
        heads = [sorted(head, reverse=True) for row in rows for head in row]
        for rank in range(max(map(len, heads))):
            some = [head[rank] for head in heads if rank < len(head)]
            composites.append((rank > 0, -math.fsum(some) / len(some), rank, layer))
    composites.sort()
    room = limits.budget - limits.sinks - limits.window
    kept = composites[: room * len(scores)]
    if len(kept) == len(composites):
        return [limits.budget] * len(scores)
    return [limits.sinks + limits.window + sum(which == layer for *_, which in kept) for layer in range(len(scores))]


@pytest.mark.parametrize("budget", [6, 7, 9, 12, 15, 17, 30])
def test_layers_share_a_budget_by_one_ranking_of_composites(budget: int) -> None:
    """Two rows of different lengths, three heads, four layers, and whole numbers, so that many scores are equal."""
    limits = Limits(budget, 2, 3, 64, 0)
    draw = torch.Generator().manual_seed(budget)
    layers, tensors = [], []
    for layer in range(4):
        tensor = torch.full((2, 3, 20), -torch.inf)
        for row, tokens in enumerate((14, 9)):
            for head in range(3):
                places = torch.randperm(20, generator=draw)[:tokens]
                tensor[row, head, places] = torch.randint(-4 - layer, 4 + 2 * layer, (tokens,), generator=draw).float()
        tensors.append(tensor)
        layers.append([[[s for s in head if s > -math.inf] for head in row] for row in tensor.tolist()])
    budgets = shared_budgets(tensors, limits)
    assert budgets == by_hand(layers, limits)
    assert sum(budgets) == 4 * budget
    assert min(budgets) >= 6


@pytest.mark.parametrize("policy", [Pyramid(SnapKV(8, 3), 4), Pyramid(Recent()), Composite(SnapKV(8, 3))], ids=repr)
@pytest.mark.parametrize("family", ["smollm3", "gemma3"])
def test_each_layer_takes_its_own_memory(
    attached_model: Models, text: Text, policy: Policy, family: str, tmp_path: Path
) -> None:
    model = attached_model(family)
    cache = KVCache(model, 20, policy, sinks=2, window=3, chunk=16, batch=2, rollback=5)
    windlass.prefill(model, cache, [text(60)[0].tolist(), text(41, seed=1)[0].tolist()])
    read(model, cache, text(1, rows=2), 1)
    free = [layer for layer in cache.layers if not layer.rules.is_whole_window]
    budgets = [layer.rules.limits.budget for layer in cache.layers]
    assert len(set(budgets)) > 1
    if family == "smollm3":
        assert sum(filter(None, budgets)) == 20 * len(budgets)
    for layer in free:
        assert layer.budget is not None
        assert layer.table.occupancy_bound == layer.budget >= 6
        assert layer.store.slots == layer.budget + HEADROOM + 5
        assert (layer.positions >= 0).sum(-1).unique().tolist() == [layer.budget]
    least, most = min(filter(None, budgets)), max(filter(None, budgets))
    assert f"budget   20 tokens a layer on average, from {least} to {most}, sinks 2" in cache.describe()
    cache.save(tmp_path / "cache")
    loaded = KVCache.load(tmp_path / "cache", model, policy=policy)
    assert [layer.rules.limits.budget for layer in loaded.layers] == budgets
    more = text(30, rows=2, seed=3)
    torch.testing.assert_close(*(read(model, each, more, 1) for each in (cache, loaded)), atol=1e-5, rtol=0)
    assert_same(cache, loaded)
    assert [layer.rules.limits.budget for layer in cache.layers] == budgets


def test_a_composite_keeps_the_best_ranks_of_all_layers(attached_model: Models, text: Text) -> None:
    """Against the scores of the same cache before it was cut."""
    model, ids = attached_model("llama"), text(50, rows=2)
    cache = KVCache(model, None, Composite(H2O()), sinks=2, window=3, chunk=64, batch=2)
    windlass.prefill(model, cache, ids.tolist())
    scores = [layer.table.state["mass"][:, :, :45].clone() for layer in cache.layers]  # slots in the order of the text
    scores = [score[:, :, 2:] for score in scores]
    cache.compress(20, window=5)
    budgets = by_hand([score.tolist() for score in scores], cache.limits)
    assert budgets != [20, 20]
    for layer, score, budget in zip(cache.layers, scores, budgets, strict=True):
        assert layer.budget == layer.rules.limits.budget == budget
        for row in range(2):
            for head, positions in enumerate(held(cache, layer.index, row)):
                best = score[row, head].argsort(descending=True)[: budget - 7] + 2
                assert positions == [0, 1, *sorted(best.tolist()), *range(45, 50)]


def test_one_shot_holds_the_text_until_it_was_read(attached_model: Models, text: Text) -> None:
    """In chunks, a composite is as the same cache without budget, cut by hand."""
    model, ids = attached_model("llama"), text(50)
    caches = [KVCache(model, budget, Composite(SnapKV(8, 3)), window=3, chunk=9) for budget in (14, None)]
    logits = [windlass.prefill(model, cache, ids.tolist()) for cache in caches]
    torch.testing.assert_close(*logits, atol=1e-5, rtol=0)
    caches[1].compress(14)
    assert_same(*caches)


@pytest.mark.parametrize(
    "policy",
    [Pyramid(SnapKV()), Composite(KVzip(5)), Pyramid(ByValueNorm(KVzip(5)), 3), Composite(KeyDiff())],
    ids=repr,
)
def test_what_is_wrapped_keeps_the_contract(policy: Policy, attached_model: Models, text: Text) -> None:
    check_policy(policy)
    model = attached_model("llama")
    cache = KVCache(model, 14, policy, window=3, chunk=9)
    windlass.prefill(model, cache, text(50).tolist())
    assert sum(layer.table.occupancy_bound for layer in cache.layers) == 28
    if scoring_chunk(policy):
        assert all((layer.table.state["peak"] > 0).any() for layer in cache.layers)


def test_declarations_pass_through() -> None:
    assert scoring_chunk(Composite(KVzip(7))) == 7
    assert find(Pyramid(KVzip()), OneShot)
    assert not find(Pyramid(SnapKV()), OneShot)
    assert keeps_newest(Pyramid(Recent()))
    assert not keeps_newest(Composite(Recent()))
    pyramid = find(ByValueNorm(Pyramid(H2O())), Budgeter)  # type: ignore[type-abstract]
    assert pyramid is not None
    assert pyramid.budgets(50, 5, 11) == [88, 69, 50, 31, 12]
    with pytest.raises(PolicyError, match=r"Pyramid: beta must be at least 1, got 0.5"):
        Pyramid(H2O(), 0.5)
