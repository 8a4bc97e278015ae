"""Policies that expect later queries to be like earlier ones, against their formulas with explicit rotations."""

import cmath
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.helpers.slots import GROUP, HEAD_DIM, SCALE, SPEEDS, assert_scores, observe, slots_of, turned_slots
from windlass import PolicyError
from windlass.cache.options import policy_of
from windlass.policies import ExpectedAttention, Policy, TriAttention
from windlass.testing import check_policy


def turn(state: Tensor, angle: Callable[[float], complex]) -> Tensor:
    """A state with each pair (i, i + 2) times a complex number that depends on its speed."""
    turned = state.clone()
    for pair, speed in enumerate(SPEEDS):
        z = complex(float(state[pair]), float(state[pair + 2])) * angle(speed)
        turned[pair], turned[pair + 2] = z.real, z.imag
    return turned


def at(position: int) -> Callable[[float], complex]:
    return lambda speed: SCALE * cmath.exp(1j * speed * position)


def softmax(scores: list[float]) -> list[float]:
    top = max(scores, default=0.0)
    weights = [math.exp(s - top) for s in scores]
    return [w / sum(weights) for w in weights]


@pytest.mark.parametrize(
    "policy",
    [
        ExpectedAttention(future=11),
        ExpectedAttention(future=1, skipped=0),
        ExpectedAttention(future=37, skipped=20, epsilon=0.02),
        ExpectedAttention(future=5, has_covariance=False),
    ],
    ids=repr,
)
@pytest.mark.parametrize("is_turned", [True, False])
def test_expected_attention(policy: ExpectedAttention, is_turned: bool) -> None:
    slots = turned_slots() if is_turned else slots_of(7)
    seen = observe(policy, slots)

    def expected(row: int, head: int, order: list[int]) -> list[float]:
        positions = slots.positions[row, head].tolist()
        keys = slots.keys()[row, head].double()
        norms = [float(v.norm()) for v in slots.values()[row, head].double()]
        scored = [i for i in order if positions[i] >= policy.skipped]
        shares = dict.fromkeys(scored, 0.0)
        for query_head in range(head * GROUP, (head + 1) * GROUP):
            queries = [q[query_head] for p, q in seen[row].items() if p >= policy.skipped]
            mean = sum(queries, torch.zeros(HEAD_DIM, dtype=torch.float64)) / max(len(queries), 1)
            centred = [q - mean for q in queries]
            newest = int(slots.next_positions[row]) - 1

            def ahead(state: Tensor, newest: int = newest) -> Tensor:
                if not is_turned:
                    return state
                places = range(newest + 1, newest + 1 + policy.future)
                return torch.stack([turn(state, at(p)) for p in places]).mean(0)

            logits = []
            for i in scored:
                key = turn(keys[i], at(positions[i])) if is_turned else keys[i]
                logit = float(key @ ahead(mean)) / math.sqrt(HEAD_DIM)
                if policy.has_covariance:
                    # k^T R S R^T k, S the mean of c c^T, is the mean of (k . R c)^2.
                    squares = [float(key @ ahead(c)) ** 2 for c in centred]
                    logit += sum(squares) / max(len(centred), 1) / (2 * HEAD_DIM)
                logits.append(logit)
            for i, share in zip(scored, softmax(logits), strict=True):
                shares[i] += share / GROUP
        scores = {i: math.log((shares[i] + policy.epsilon) * norms[i]) for i in scored}
        return [scores[i] if i in scores else max(scores.values()) + 1 for i in order]

    assert_scores(policy, slots, expected, tolerance=1e-3)


@pytest.mark.parametrize("policy", [TriAttention(), TriAttention(reach=1), TriAttention(reach=20)], ids=repr)
@pytest.mark.parametrize("is_turned", [True, False])
def test_tri_attention(policy: TriAttention, is_turned: bool) -> None:
    slots = turned_slots() if is_turned else slots_of(7)
    seen = observe(policy, slots)
    speeds, scale = (SPEEDS, SCALE) if is_turned else ((0.0,) * (HEAD_DIM // 2), 1.0)
    pairs = len(speeds)
    offsets = [2**i for i in range(20) if 2**i <= policy.reach]

    def numbers(state: Tensor) -> list[complex]:
        return [complex(float(state[i]), float(state[i + pairs])) for i in range(pairs)]

    def expected(row: int, head: int, order: list[int]) -> list[float]:
        best = [-math.inf] * len(order)
        for query_head in range(head * GROUP, (head + 1) * GROUP):
            queries = [q[query_head] for q in seen[row].values()]
            count = max(len(queries), 1)
            mean = sum(queries, torch.zeros(HEAD_DIM, dtype=torch.float64)) / count
            lengths = [sum(abs(numbers(q)[f]) for q in queries) / count for f in range(pairs)]
            scores = []
            for i in order:
                key = slots.keys()[row, head, i].double()
                distance = int(slots.next_positions[row]) - 1 - int(slots.positions[row, head, i])
                score = float(mean[2 * pairs :] @ key[2 * pairs :])
                for f, (q, k) in enumerate(zip(numbers(mean), numbers(key), strict=True)):
                    phase = cmath.phase(q * k.conjugate())
                    waves = [math.cos(speeds[f] * (distance + offset) + phase) for offset in offsets]
                    score += scale**2 * abs(q) * abs(k) * sum(waves) / len(offsets)
                    score += scale**2 * (lengths[f] - abs(q)) * abs(k)
                scores.append(score)
            centre = sum(scores) / max(len(scores), 1)
            spread = math.sqrt(sum((s - centre) ** 2 for s in scores) / max(len(scores), 1))
            best = [max(b, (s - centre) / spread) for b, s in zip(best, scores, strict=True)]
        return best

    # 2**16 positions ahead a float32 angle is off by some thousandths.
    assert_scores(policy, slots, expected, tolerance=3e-3)


@pytest.mark.parametrize(
    "policy",
    [ExpectedAttention(3, 2, 0), ExpectedAttention(has_covariance=False, epsilon=0.5), TriAttention(5, 2)],
    ids=repr,
)
def test_other_numbers_keep_the_contract(policy: Policy) -> None:
    check_policy(policy)
    assert policy_of(repr(policy)) == policy


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("expected_attention(0)", "ExpectedAttention: future must be at least 1, got 0"),
        ("expected_attention(observed_queries=0)", "ExpectedAttention: observed_queries must be at least 1, got 0"),
        ("expected_attention(skipped=-1)", "ExpectedAttention: skipped must be at least 0, got -1"),
        ("expected_attention(epsilon=-0.1)", "ExpectedAttention: epsilon must be at least 0, got -0.1"),
        ("tri_attention(0)", "TriAttention: reach must be at least 1, got 0"),
        ("tri_attention(observed_queries=0)", "TriAttention: observed_queries must be at least 1, got 0"),
    ],
)
def test_numbers_without_meaning_are_refused(spec: str, words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        policy_of(spec)
