"""Policies around policies: the formula on given scores, and the inner policy works as it would alone."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.helpers.models import Models, Text, read
from tests.helpers.policies import Given, OneForAll, given
from tests.helpers.slots import KV_HEADS, assert_scores, slots_of, texts
from windlass import KVCache, PolicyError, PromptCacheError
from windlass.policies import (
    H2O,
    RKV,
    TOVA,
    ByValueNorm,
    ExpectedAttention,
    InChunks,
    KeyDiff,
    LagKV,
    Policy,
    Recent,
    Smoothed,
    SnapKV,
)
from windlass.policies.wrappers import keeps_newest
from windlass.testing import check_policy


def test_by_value_norm() -> None:
    policy = ByValueNorm(Given())
    slots = given(policy)
    slots.state["given"][0, 1, texts(slots)[1][2][4]] = torch.nan

    def expected(row: int, head: int, order: list[int]) -> list[float]:
        score = [-math.inf if math.isnan(s) else s for s in slots.state["given"][row, head, order].tolist()]
        score_heads = sorted(range(len(order)), key=lambda i: (score[i], i))
        norms = [math.sqrt(sum(float(v) ** 2 for v in slots.values()[row, head, i])) for i in order]
        scores = [(score_heads.index(i) + 1) / len(order) * norms[i] for i in range(len(order))]
        return [0.0 if math.isinf(s) else was for s, was in zip(score, scores, strict=True)]

    assert_scores(policy, slots, expected)


def test_by_value_norm_of_a_ranking_for_all_heads() -> None:
    slots = slots_of(1)
    slots = replace(slots, positions=slots.positions[:, :1])
    score = ByValueNorm(OneForAll()).score(slots)
    norms = slots.values().norm(dim=-1)
    for row, _, order in texts(slots):
        score_heads = sorted(order, key=lambda i, row=row: (int(slots.positions[row, 0, i]) * 7 % 10, order.index(i)))  # type: ignore[misc]
        for place, slot in enumerate(score_heads):
            mean = sum(float(norms[row, head, slot]) for head in range(KV_HEADS)) / KV_HEADS
            assert float(score[row, 0, slot]) == pytest.approx((place + 1) / len(order) * mean, rel=1e-5)


@pytest.mark.parametrize("size", [1, 4, 10, 200])
def test_in_chunks(size: int) -> None:
    policy = InChunks(Given(), size)
    slots = given(policy, size)

    def expected(row: int, head: int, order: list[int]) -> list[float]:
        positions = slots.positions[row, head].tolist()
        score = slots.state["given"][row, head].tolist()
        chunks = {i: [j for j in order if positions[j] // size == positions[i] // size] for i in order}
        return [sum(score[j] for j in chunks[i]) / len(chunks[i]) for i in order]

    assert_scores(policy, slots, expected)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
def test_smoothed(decay: float) -> None:
    """Three steps. In the second a slot gets a new token, whose past does not count."""
    policy = Smoothed(Given(), decay)
    slots = given(policy)
    row, head, order = texts(slots)[0]
    past: list[list[float]] = []
    for step in range(3):
        slots.state["given"].add_(torch.randn(slots.positions.shape, generator=torch.Generator().manual_seed(step)))
        past.append(slots.state["given"][row, head, order].tolist())
        if step == 1:
            for name in ("smoothed", "weight"):  # as a layer does when it writes a token
                slots.state[name][row, head, order[2]] = 0.0
        score = policy.score(slots)[row, head, order]
        for i in range(len(order)):
            since = past[1:] if step >= 1 and i == 2 else past
            weights = [decay**age for age in range(len(since))][::-1]
            mean = sum(w * scores[i] for w, scores in zip(weights, since, strict=True)) / sum(weights)
            assert float(score[i]) == pytest.approx(mean, rel=1e-4, abs=1e-5)


WRAPPED = [
    ByValueNorm(SnapKV()),
    ByValueNorm(TOVA()),
    Smoothed(KeyDiff()),
    Smoothed(ExpectedAttention(), 0.5),
    InChunks(RKV(), 4),
    InChunks(LagKV(3), 3),
    InChunks(Smoothed(ByValueNorm(H2O())), 4),
]


@pytest.mark.parametrize("policy", WRAPPED, ids=repr)
def test_what_is_wrapped_keeps_the_contract(policy: Policy) -> None:
    check_policy(policy)


def test_it_prints_as_it_is_made() -> None:
    assert repr(InChunks(Smoothed(SnapKV(pool=3), 0.5), 4)) == (
        "InChunks(policy=Smoothed(policy=SnapKV(observed_queries=32, pool=3, is_mean=False), decay=0.5), size=4)"
    )
    assert Smoothed(H2O()) == Smoothed(H2O())
    assert Smoothed(H2O()).needs.state == ("mass", "smoothed", "weight")
    assert not keeps_newest(ByValueNorm(Recent())), "it no longer keeps just the newest"
    assert ByValueNorm(SnapKV(7)).observed_queries == 7
    assert ExpectedAttention.needs.statistics == InChunks(ExpectedAttention()).needs.statistics


@pytest.mark.parametrize("policy", [ByValueNorm(Smoothed(H2O())), InChunks(ExpectedAttention(), 4)], ids=repr)
def test_what_is_inside_observes_as_it_would_alone(policy: Policy, attached_model: Models, text: Text) -> None:
    """Before anything is evicted, both see the same. After it, no slot is lost."""
    model, ids = attached_model("llama"), text(60, rows=2)
    while isinstance(inner := getattr(policy, "policy", None), Policy):
        outer, policy = policy, inner
        caches = [KVCache(model, budget=30, policy=each, window=3, batch=2) for each in (outer, policy)]
        for cache in caches:
            read(model, cache, ids[:, :28], 7)
        for mine, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
            assert mine.positions.equal(theirs.positions)
            assert all(mine.table.state[name].equal(tensor) for name, tensor in theirs.table.state.items())
            assert all(mine.table.statistics[name].equal(tensor) for name, tensor in theirs.table.statistics.items())
        read(model, caches[0], ids[:, 28:], 1)
        assert all(((layer.positions >= 0).sum(-1) == 30).all() for layer in caches[0].layers)


def test_a_file_of_a_wrapped_policy_is_read_with_that_policy(
    attached_model: Models, text: Text, tmp_path: Path
) -> None:
    model = attached_model("llama")
    cache = KVCache(model, budget=12, policy=Smoothed(H2O(), 0.5), window=3)
    read(model, cache, text(30), 30)
    cache.save(tmp_path / "cache")
    with pytest.raises(PromptCacheError, match=r"not with Smoothed\(policy=H2O\(\), decay=0.6\)"):
        KVCache.load(tmp_path / "cache", model, policy=Smoothed(H2O(), 0.6))
    loaded = KVCache.load(tmp_path / "cache", model)
    again = [read(model, one, text(9, seed=1), 1) for one in (cache, loaded)]
    torch.testing.assert_close(*again, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Smoothed(H2O(), 1.0), "Smoothed: decay must be at least 0 and below 1, got 1.0"),
        (lambda: Smoothed(InChunks(Smoothed(H2O()))), "is smoothed already. Wrap the policy inside"),
        (lambda: InChunks(H2O(), 0), "InChunks: size must be at least 1, got 0"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], Policy], words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        make()
