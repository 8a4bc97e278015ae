"""Every policy against a slow simulation of its paper's rule, token by token in plain Python."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from tests.helpers.layers import BATCH, BUDGET, GROUP, HEAD_DIM, KV_HEADS, LIMITS, SINKS, WINDOW, layer_step
from windlass import PolicyError
from windlass.cache.decode import LayerCall
from windlass.cache.layer import SlotLayer
from windlass.core.step import HEADROOM, AttentionCall, Limits, Step
from windlass.policies import H2O, TOVA, KeyDiff, KeyNorm, Policy, Random, Recency, Recent, Slots, SnapKV
from windlass.positions.modes import Original
from windlass.stores.formats import Plain


@dataclass
class Head:
    """History of one kv head of one row: held and seen tokens."""

    held: list[int] = field(default_factory=list)
    keys: dict[int, Tensor] = field(default_factory=dict)
    mass: dict[int, float] = field(default_factory=dict)  # over all queries
    steps: list[list[dict[int, float]]] = field(default_factory=list)  # per step and query, over the group

    def attend(self, queries: Tensor, at: int) -> dict[int, float]:
        """Attention of one token's queries (group, head_dim) over the tokens held up to `at`."""
        total = dict.fromkeys(self.held, 0.0)
        for query in queries:
            weights = {p: math.exp(float(query @ self.keys[p]) * 0.5) for p in self.held if p <= at}
            for p, weight in weights.items():
                total[p] += weight / sum(weights.values())
        return total

    def keep(self, score: dict[int, float], end: int) -> None:
        """Evict the lowest scores over budget, sinks and window excepted, the older first of equals."""
        free = sorted((p for p in self.held if SINKS <= p < end - WINDOW), key=lambda p: (score[p], p))
        for p in free[: max(0, len(self.held) - BUDGET)]:
            self.held.remove(p)


Rule = Callable[[list[Head]], list[dict[int, float]]]


def recent(heads: list[Head]) -> list[dict[int, float]]:
    return [{p: float(p) for p in head.held} for head in heads]


def h2o(heads: list[Head]) -> list[dict[int, float]]:
    return [head.mass for head in heads]


def tova(heads: list[Head]) -> list[dict[int, float]]:
    last = {p: sum(head.steps[-1][-1][p] for head in heads) for p in heads[0].held}
    return [last] * len(heads)


def key_norm(heads: list[Head]) -> list[dict[int, float]]:
    return [{p: -float(head.keys[p].norm()) for p in head.held} for head in heads]


def key_diff(heads: list[Head]) -> list[dict[int, float]]:
    scores = []
    for head in heads:
        unit = {p: head.keys[p] / head.keys[p].norm() for p in head.held}
        mean = torch.stack(list(unit.values())).mean(0)
        scores.append({p: -float(torch.cosine_similarity(unit[p], mean, 0)) for p in head.held})
    return scores


def pooled_votes(heads: list[Head], pool: Callable[[list[float]], float]) -> list[dict[int, float]]:
    """observed_queries=4, pool=3. A step of n < 4 tokens keeps 1 - n/4 of the earlier votes. The window has none."""
    scores = []
    for head in heads:
        votes: dict[int, float] = {}
        for step in head.steps:
            seen = step[-4:]
            faded = {p: vote * (1 - len(seen) / 4) for p, vote in votes.items()}
            votes = {p: faded.get(p, 0.0) + sum(q.get(p, 0.0) for q in seen) / 4 for p in {*faded, *seen[-1]}}
        order = sorted(head.held)
        padded = [0.0, *(votes[p] if p <= order[-1] - WINDOW else 0.0 for p in order), 0.0]
        scores.append({p: pool(padded[i : i + 3]) for i, p in enumerate(order)})
    return scores


def snapkv(heads: list[Head]) -> list[dict[int, float]]:
    return pooled_votes(heads, max)


def snapkv_of_means(heads: list[Head]) -> list[dict[int, float]]:
    return pooled_votes(heads, lambda three: math.fsum(three) / 3)


ORACLES: list[tuple[Policy, Rule]] = [
    (Recent(), recent),
    (H2O(), h2o),
    (TOVA(), tova),
    (KeyNorm(), key_norm),
    (KeyDiff(), key_diff),
    (SnapKV(observed_queries=4, pool=3), snapkv),
    (SnapKV(observed_queries=4, pool=3, is_mean=True), snapkv_of_means),
]


def read_step(policy: Policy, rule: Rule, heads: list[Head], q: Tensor, k: Tensor, tokens: range) -> None:
    """Write, attend, observe, evict, in the heads of a row."""
    for h, head in enumerate(heads):
        head.held += tokens
        head.keys.update({p: k[h, p] for p in tokens})
        queries = q[h * GROUP : (h + 1) * GROUP]
        if isinstance(policy, Recency):  # masked to its window, so its attention is not comparable
            continue
        head.steps.append([head.attend(queries[:, p], p) for p in tokens])
        for seen in head.steps[-1]:
            for p, mass in seen.items():
                head.mass[p] = head.mass.get(p, 0.0) + mass
    if len(heads[0].held) > BUDGET:
        for head, score in zip(heads, rule(heads), strict=True):
            head.keep(score, tokens.stop)


@pytest.mark.parametrize("steps", [(1,) * 30, (12, 1, 1, 5, 1, 8, 1), (40,)], ids=str)
@pytest.mark.parametrize(
    ("policy", "rule"), ORACLES, ids=lambda value: repr(value) if isinstance(value, Policy) else ""
)
def test_a_policy_keeps_what_its_paper_says(policy: Policy, rule: Rule, steps: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(len(steps))
    total = sum(steps)
    q = torch.randn(BATCH, KV_HEADS * GROUP, total, HEAD_DIM, generator=g) * 2
    k = torch.randn(BATCH, KV_HEADS, total, HEAD_DIM, generator=g)
    layer = SlotLayer(0, LIMITS, policy, None, Plain())
    rows = [[Head() for _ in range(KV_HEADS)] for _ in range(BATCH)]
    at = prompt_end = 0
    for tokens in steps:
        end = at + tokens
        prompt_end = end if tokens > 1 else prompt_end
        layer_step(layer, q[:, :, at:end], k[:, :, at:end], k[:, :, at:end], at, prompt_end)
        size = 1 if tokens <= HEADROOM else tokens  # few tokens are taken one by one
        for b, heads in enumerate(rows):
            for start in range(at, end, size):
                read_step(policy, rule, heads, q[b], k[b], range(start, start + size))
            for h, head in enumerate(heads):
                ranked = layer.positions[b, h if policy.needs.per_head else 0]
                assert sorted(p for p in ranked.tolist() if p >= 0) == sorted(head.held), f"row {b}, head {h}, at {end}"
        at = end


def test_random_keeps_the_prompt_and_thins_the_rest_evenly() -> None:
    """Each head keeps its own few of 4,000 generated tokens.

    Over many heads, any age is as likely as under a fresh choice at every step: the chance to survive falls
    geometrically with age.
    """
    layer = SlotLayer(0, Limits(40, 2, 1, 8, 0), Random(), None, Plain())
    heads = 64
    empty = torch.zeros(1, heads, 1, 1)
    at, prompt = 0, 20
    survivors: list[int] = []
    for tokens in (prompt, *(1,) * 400):
        end = at + tokens
        states = empty.expand(1, heads, tokens, 1)
        step = Step(torch.arange(at, end)[None], (tokens,), torch.tensor([end]), torch.tensor([prompt]), end)
        layer.step(LayerCall(states, states, states, step, Original(), AttentionCall(1.0)))
        at = end
    for head in layer.positions[0]:
        held = sorted(p for p in head.tolist() if p >= 0)
        assert held[:prompt] == list(range(prompt))
        assert len(held) == 40
        survivors += [at - p for p in held[prompt:-1]]
    ages = torch.tensor(survivors).float()
    # 19 of 20 unprotected tokens survive each step, so the mean age is about 20.
    assert 16 < ages.mean() < 24
    assert len({tuple(sorted(head.tolist())) for head in layer.positions[0]}) == heads


def test_random_draws_depend_on_the_seed_only() -> None:
    positions = torch.arange(50)[None, None].expand(1, 3, -1)
    ends = torch.tensor([50])
    slots = [
        Slots(SlotLayer(0, LIMITS, Random(), None, Plain()).store, positions, {}, at, at, lambda k, _: k)
        for at in (ends, ends + 1)
    ]
    first = Random(seed=3, keep_prompt=False).score(slots[0])
    assert first.equal(Random(seed=3, keep_prompt=False).score(slots[0]))
    assert not first.equal(Random(seed=4, keep_prompt=False).score(slots[0]))
    assert not first.equal(Random(seed=3, keep_prompt=False).score(slots[1])), "a new draw at every step"
    assert first.unique().numel() == 150


@pytest.mark.parametrize(("numbers", "words"), [((0, 5), "at least 1"), ((8, 4), "odd number")])
def test_snapkv_refuses_numbers_without_meaning(numbers: tuple[int, int], words: str) -> None:
    with pytest.raises(PolicyError, match=words):
        SnapKV(*numbers)


@dataclass(frozen=True)
class Scores(Policy):
    """Returns a fixed tensor. Source: none. Differs: all."""

    what: str = "nan"

    def score(self, slots: Slots) -> Tensor:
        shape = slots.positions.shape
        return {
            "nan": torch.full(shape, torch.nan),
            "infinite": torch.full(shape, torch.inf),
            "flat": torch.zeros(shape[:2]),
            "raises": torch.zeros(0),
        }[self.what]


@pytest.mark.parametrize("what", ["nan", "infinite"])
def test_no_score_can_evict_sinks_or_window(what: str) -> None:
    layer = SlotLayer(0, LIMITS, Scores(what), None, Plain())
    states = torch.randn(BATCH, KV_HEADS, 30, HEAD_DIM)
    layer_step(layer, states.repeat_interleave(2, 1), states, states, 0, 30)
    held = layer.positions.sort(-1).values[..., -BUDGET:]
    assert (held[..., :SINKS] == torch.arange(SINKS)).all()
    assert (held[..., -WINDOW:] == torch.arange(27, 30)).all()


def test_a_score_of_the_wrong_shape_names_both_and_leaves_the_layer_whole() -> None:
    layer = SlotLayer(3, LIMITS, Scores("flat"), None, Plain())
    states = torch.randn(BATCH, KV_HEADS, 30, HEAD_DIM)
    with pytest.raises(
        PolicyError, match=r"Scores\(what='flat'\) in layer 3: score has shape \(2, 3\), expected \(2, 3, 39\)"
    ):
        layer_step(layer, states.repeat_interleave(2, 1), states, states, 0, 30)
    assert (layer.positions < 0).all()
    assert layer.table.occupancy_bound == 0
