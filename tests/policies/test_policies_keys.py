"""Policies that look at keys and values, against their formulas in float64, token by token."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from tests.helpers.slots import BATCH, GROUP, HEAD_DIM, KV_HEADS, SLOTS, assert_scores, slots_of, texts
from windlass import PolicyError
from windlass.cache.options import policy_of
from windlass.core.positions import EMPTY
from windlass.policies import RKV, LagKV, Leverage, Observation, Policy, Slots
from windlass.testing import check_policy


@pytest.mark.parametrize("lag", [2, 4, 7, 11, 40])
def test_lag_kv(lag: int) -> None:
    slots = lag_slots(lag)

    def shares(states: Tensor, block: list[int], next_block: list[int]) -> list[float]:
        spread = []
        for token in block:
            relative = []
            for channel in range(states.shape[1]):
                others = [float(states[i, channel]) for i in next_block]
                relative.append((float(states[token, channel]) - min(others)) / (max(others) - min(others)))
            mean = sum(relative) / len(relative)
            spread.append(math.sqrt(sum((r - mean) ** 2 for r in relative) / (len(relative) - 1)))
        total = sum(math.exp(s) for s in spread)
        return [math.exp(s) / total for s in spread]

    def expected(row: int, head: int, order: list[int]) -> list[float]:
        keys, values = slots.keys()[row, head].double(), slots.values()[row, head].double()
        end = (int(slots.next_positions[row]) - 1) // lag * lag
        read = [i for i in order if slots.positions[row, head, i] < end]
        blocks = [read[max(0, stop - lag) : stop] for stop in range(len(read), 0, -lag)][::-1]
        scores = []
        for block, after in itertools.pairwise(blocks):
            pairs = zip(shares(keys, block, after), shares(values, block, after), strict=True)
            share = [(k + v) / 2 for k, v in pairs]
            scores += [(sum(other < mine for other in share) + 0.5) / len(block) + mine / lag for mine in share]
        return scores + [2.0] * (len(order) - len(scores))

    assert_scores(LagKV(lag), slots, expected)


def lag_slots(seed: int = 0) -> Slots:
    slots = slots_of(seed, LagKV.needs.state)
    for tensor in slots.state.values():
        tensor.zero_()
    return slots


def test_lag_kv_ranks_stand_until_the_next_block_is_complete() -> None:
    slots = lag_slots()
    before = LagKV(4).score(slots).clone()
    slots.keys().mul_(torch.randn(slots.keys().shape, generator=torch.Generator().manual_seed(1)))
    block_ends = slots.next_positions + (-slots.next_positions).remainder(4)
    assert LagKV(4).score(replace(slots, next_positions=block_ends)).equal(before)
    assert not LagKV(4).score(replace(slots, next_positions=block_ends + 1)).equal(before)


def test_lag_kv_survives_a_block_of_one_repeated_token() -> None:
    slots = lag_slots()
    slots.keys().fill_(1.5)
    slots.values().fill_(-2.0)
    score = LagKV(lag=3).score(slots)
    for row, head, order in texts(slots):
        end = (int(slots.next_positions[row]) - 1) // 3 * 3
        ranked = sum(int(slots.positions[row, head, i]) < end for i in order) - 3
        ranks = score[row, head, order][max(0, ranked) % 3 : max(0, ranked)].unflatten(0, (-1, 3))
        assert (ranks.diff(dim=-1) > 0).all(), "of equals the newer ranks higher"
        assert ranked <= 0 or len(ranks)


def leverage_of(x: Tensor, ridge: float) -> list[float]:
    """x_i^T (X^T X + ridge I)^-1 x_i by an explicit inverse."""
    gram = sum((torch.outer(row, row) for row in x), ridge * torch.eye(x.shape[1], dtype=x.dtype))
    return [float(row @ torch.linalg.inv(gram) @ row) for row in x]


@pytest.mark.parametrize("ridge", [0.01, 3.0])
def test_leverage_of_all_channels(ridge: float) -> None:
    slots = slots_of(1)

    def expected(row: int, head: int, order: list[int]) -> list[float]:
        keys = slots.keys()[row, head, order].double()
        return leverage_of(keys - keys.mean(0), ridge) if order else []

    assert_scores(Leverage(sketch=HEAD_DIM, ridge=ridge), slots, expected)


def test_leverage_of_a_sketch_is_that_of_projected_keys() -> None:
    slots = slots_of(2)
    policy, width = Leverage(sketch=4), 4
    draw = torch.randn(HEAD_DIM, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def expected(row: int, head: int, order: list[int]) -> list[float]:
        keys = slots.keys()[row, head, order].double()
        centred = keys - keys.mean(0)
        projected = [[float(k @ draw[:, c]) / math.sqrt(width) for c in range(width)] for k in centred]
        return leverage_of(torch.tensor(projected, dtype=torch.float64), 0.01) if order else []

    assert_scores(policy, slots, expected)
    assert policy.score(slots).equal(policy.score(slots))


def test_leverage_finds_the_one_key_in_a_direction_of_its_own() -> None:
    slots = slots_of(3)
    slots.keys()[..., -1] = 0.0
    odd = [(row, head, order[5]) for row, head, order in texts(slots) if order]
    for row, head, slot in odd:
        slots.keys()[row, head, slot, -1] = 0.7  # much shorter than any key
    score = Leverage().score(slots)
    for row, head, slot in odd:
        held = slots.positions[row, head] >= 0
        assert score[row, head].where(held, -1.0).argmax() == slot


def votes_of(observation: Observation, votes: Tensor, wanted: int) -> list[list[dict[int, float]]]:
    """Votes of each slot, per row and head, after one more step."""
    after = []
    for row in range(BATCH):
        share = sum(p >= 0 for p in observation.positions[row].tolist()) / wanted
        heads = []
        for head in range(KV_HEADS):
            mass, old = observation.mass[row, head].tolist(), votes[row, head].tolist()
            heads.append({i: old[i] * (1 - share) + mass[i] / wanted / GROUP for i in range(SLOTS)})
        after.append(heads)
    return after


@pytest.mark.parametrize("policy", [RKV(), RKV(4, 3, 0.6, 0.9), RKV(5, 1, 0.3, 0.0)], ids=repr)
def test_r_kv(policy: RKV) -> None:
    slots = slots_of(4, ("votes",))
    before, weight = slots.state["votes"].clone(), policy.importance
    observed = torch.tensor([[60, 59, 58, EMPTY], [EMPTY] * 4, [40, 39, EMPTY, EMPTY]])
    seen = Observation(torch.rand(BATCH, KV_HEADS, SLOTS), torch.randn(BATCH, 2 * GROUP, 4, HEAD_DIM), observed)
    policy.observe(slots, seen)
    votes = votes_of(seen, before, policy.observed_queries)

    def expected(row: int, head: int, order: list[int]) -> list[float]:
        keys = slots.keys()[row, head].double()
        unit = [keys[i] / keys[i].norm() for i in order]
        n, reach = len(order), policy.pool // 2
        charged = [0.0] * n
        for j in range(n):
            near = [i for i in range(n) if i != j and float(unit[j] @ unit[i]) > policy.threshold]
            for i in range(n):
                if i != j and i != max(near, default=-1):
                    charged[i] += float(unit[j] @ unit[i]) / n
        total = sum(math.exp(c) for c in charged)
        pooled = [
            max(votes[row][head][order[j]] for j in range(max(0, i - reach), min(n, i + reach + 1))) for i in range(n)
        ]
        return [weight * p - (1 - weight) * math.exp(c) / total for p, c in zip(pooled, charged, strict=True)]

    assert_scores(policy, slots, expected)


def test_r_kv_keeps_the_newest_of_near_duplicates() -> None:
    slots = slots_of(5, ("votes",))
    slots.state["votes"].fill_(0.1)
    row, head, order = texts(slots)[0]
    keys = slots.keys()[row, head]
    keys[order] = torch.randn(len(order), HEAD_DIM)
    keys[[order[i] for i in (3, 9, 17)]] = torch.tensor([9.0, -9.0, 9.0, -9.0, 9.0, -9.0])
    score = RKV(threshold=0.99).score(slots)[row, head, order]
    assert score[17] > score[9] > score[3]


def test_r_kv_spares_none_where_no_key_is_near() -> None:
    slots = slots_of(8, ("votes",))
    row, head, order = texts(slots)[0]
    unit = normalize(slots.keys()[row, head, order].double(), dim=-1)
    cosines = (unit @ unit.T).fill_diagonal_(0.0)
    assert cosines.max() < 0.999
    shares = -RKV(importance=0.0, threshold=0.999).score(slots)[row, head, order].double()
    charged = cosines.sum(0) / len(order)
    torch.testing.assert_close((shares / shares[0]).log(), charged - charged[0], atol=1e-4, rtol=0)


def test_r_kv_compares_in_blocks_as_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    slots = slots_of(6, ("votes",))
    at_once = RKV().score(slots)
    monkeypatch.setattr("windlass.policies.r_kv.BLOCK_BYTES", 4 * BATCH * KV_HEADS * SLOTS * 5)
    torch.testing.assert_close(RKV().score(slots), at_once, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("policy", [LagKV(3), LagKV(5), Leverage(sketch=5), RKV(observed_queries=3, pool=3)], ids=repr)
def test_small_ones_keep_the_contract(policy: Policy) -> None:
    """The defaults are checked with all other policies. These are small enough for the check's small cache."""
    check_policy(policy)
    assert policy_of(repr(policy)) == policy


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("lag_kv(1)", "LagKV: lag must be at least 2, got 1"),
        ("leverage(0)", "Leverage: sketch must be at least 1, got 0"),
        ("leverage(ridge=0.0)", "Leverage: ridge must be above 0, got 0.0"),
        ("r_kv(0)", "RKV: observed_queries must be at least 1, got 0"),
        ("r_kv(pool=6)", "RKV: pool must be an odd number of at least 1, got 6"),
        ("r_kv(importance=1.5)", "RKV: importance must be from 0 to 1, got 1.5"),
        ("r_kv(threshold=1.0)", "RKV: threshold must be at least 0 and below 1, got 1.0"),
    ],
)
def test_numbers_without_meaning_are_refused(spec: str, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        policy_of(spec)
