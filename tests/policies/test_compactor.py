"""Compactor against its formula in float64, token by token."""

import math
from dataclasses import replace

import pytest
import torch

import windlass.policies.compactor as module
from tests.helpers.slots import GROUP, HEAD_DIM, HELD, KV_HEADS, SLOTS, assert_scores, slots_of, texts
from windlass import PolicyError
from windlass.policies import Compactor, Leverage, Observation
from windlass.testing import check_policy


@pytest.mark.parametrize(("sinks", "window"), [(0, 0), (11, 25), (60, 40)])
@pytest.mark.parametrize("block", [4, 9, 256])
@pytest.mark.parametrize("asked", [1, 5, 17])
def test_what_all_queries_of_a_block_look_at(
    monkeypatch: pytest.MonkeyPatch, block: int, asked: int, sinks: int, window: int
) -> None:
    """Tokens of a block look at one another, and at those before and after. Sinks and padding queries look at nothing.

    A token before the window is looked at by queries before it, over keys before it alone.
    """
    monkeypatch.setattr(module, "BLOCK", block)
    # A turn that grows with the position, as rotation does: one that is left out shows.
    slots = slots_of(block, ("attended",), rotate=lambda states, at: states * (1 + 0.01 * at[..., None]))
    slots = replace(slots, sinks=sinks, window=window)
    before = slots.state["attended"].clone()
    draw = torch.Generator().manual_seed(asked)
    queries = torch.randn(len(HELD), KV_HEADS * GROUP, asked, HEAD_DIM, generator=draw)
    positions = torch.full((len(HELD), asked), -1)
    for row, held in enumerate(HELD):
        newest = sorted((int(p) for p in slots.positions[row, 0] if p >= 0), reverse=True)
        count = max(0, min(held, asked - row))
        positions[row, :count] = torch.tensor(newest[:count])
    mass = torch.zeros(len(HELD), KV_HEADS, SLOTS)
    Compactor().observe(slots, Observation(mass, queries, positions))
    for row, head, order in texts(slots):
        newest = order[-(asked + block) :]
        total = dict.fromkeys(range(SLOTS), 0.0)
        for query in range(asked):
            at = int(positions[row, query])
            if at < sinks:
                continue
            place = {i: int(slots.positions[row, head, i]) for i in newest}
            near = [i for i in newest if place[i] >= sinks and (place[i] - sinks) // block == (at - sinks) // block]
            start = int(slots.next_positions[row]) - window
            for member in range(GROUP):
                asking = queries[row, head * GROUP + member, query].double() * (1 + 0.01 * at)
                weights = {}
                for i in near:
                    key = slots.keys()[row, head, i].double() * (1 + 0.01 * place[i])
                    weights[i] = math.exp(float(asking @ key) / math.sqrt(HEAD_DIM))
                older = math.fsum(weight for i, weight in weights.items() if place[i] < start)
                for i, weight in weights.items():
                    if place[i] >= start:
                        total[i] += weight / math.fsum(weights.values())
                    elif at < start:
                        total[i] += weight / older
        for i in range(SLOTS):
            added = float(slots.state["attended"][row, head, i] - before[row, head, i])
            assert added == pytest.approx(total[i], abs=2e-4), (row, head, i)


@pytest.mark.parametrize(("sinks", "window"), [(0, 0), (11, 25)])
@pytest.mark.parametrize("blend", [0.0, 0.3, 1.0])
def test_leverage_and_attention_in_standard_deviations(blend: float, sinks: int, window: int) -> None:
    """Leverage and attention of the tokens between sinks and window, as if these were not there."""
    slots = replace(slots_of(3, ("attended",)), sinks=sinks, window=window)
    window_starts = (slots.next_positions - window)[:, None, None]
    is_between = (slots.positions >= sinks) & (slots.positions < window_starts)
    leverage = Leverage().score(replace(slots, positions=slots.positions.where(is_between, -1)))

    def deviations(numbers: list[float]) -> list[float]:
        mean = math.fsum(numbers) / len(numbers)
        deviation = math.sqrt(math.fsum((n - mean) ** 2 for n in numbers) / (len(numbers) - 1))
        return [(n - mean) / deviation for n in numbers]

    def expected(row: int, head: int, held: list[int]) -> list[float]:
        if not held:
            return []
        order = [i for i in held if is_between[row, head, i]]
        norms = [math.sqrt(sum(float(v) ** 2 for v in slots.values()[row, head, i])) for i in order]
        weighed = [float(slots.state["attended"][row, head, i]) * norm for i, norm in zip(order, norms, strict=True)]
        evened = []
        for at in range(len(order)):
            near = weighed[max(0, at - 1) : at + 2]
            evened.append(sum(near) / len(near))
        first = deviations([float(leverage[row, head, i]) for i in order])
        scores = dict(zip(order, (blend * a + b for a, b in zip(first, deviations(evened), strict=True)), strict=True))
        return [scores.get(i, 0.0) for i in held]

    assert_scores(Compactor(blend), slots, expected, tolerance=1e-4)


def test_it_keeps_the_contract() -> None:
    check_policy(Compactor())
    for made, words in (
        (lambda: Compactor(1.5), "blend must be from 0 to 1, got 1.5"),
        (lambda: Compactor(sketch=0), "sketch must be at least 1, got 0"),
        (lambda: Compactor(observed_queries=0), "observed_queries must be at least 1, got 0"),
    ):
        with pytest.raises(PolicyError, match=f"Compactor: {words}"):
            made()
