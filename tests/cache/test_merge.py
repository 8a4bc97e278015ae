"""Every merge rule against loops in float64, and the plan of a merge against its writes."""

from collections.abc import Iterable
from itertools import product

import pytest
import torch
from torch import Tensor

from tests.helpers.merges import ENDS, HEADS, SINKS, WINDOW, merged_by, random_step, view_of
from windlass.cache.merging import MERGES, TARGETS, plan_merge


def by_hand(
    name: str,
    target: str,
    step: dict[str, Tensor],
    sliding_window: int | None,
    attention_chunk: int | None,
) -> tuple[Tensor, ...]:
    """Keys, values, merged counts and weights after the step, target by target in float64."""
    keys, values, merged, weights = (step[each].double().clone() for each in ("keys", "values", "merged", "weights"))
    old_keys, old_values, old_merged = keys.clone(), values.clone(), merged.clone()
    ranked = merged.shape[1]
    for row, rank in product(range(2), range(ranked)):
        heads = range(HEADS) if ranked == 1 else [rank]
        held = {slot: int(at) for slot, at in enumerate(step["positions"][row, rank]) if at >= 0}
        oldest = 0 if sliding_window is None else ENDS[row] - sliding_window + 1
        oldest = oldest if attention_chunk is None else ENDS[row] // attention_chunk * attention_chunk
        cells = [s for s, at in held.items() if max(SINKS, oldest) <= at < ENDS[row] - WINDOW]
        joining: dict[int, list[tuple[int, int]]] = {}

        def like(token: int, cell: int, row: int = row, heads: Iterable[int] = heads) -> float:
            each = [torch.cosine_similarity(old_keys[row, h, token], old_keys[row, h, cell], dim=0) for h in heads]
            return float(sum(each)) / len(each)

        for token, at in zip(step["evicted"][row, rank].tolist(), step["before"][row, rank].tolist(), strict=True):
            if at < max(oldest, 0) or not cells:
                continue
            if target == "next":
                later = [s for s in cells if held[s] > at]
                cell = min(later, key=lambda s: held[s]) if later else max(cells, key=lambda s: held[s])
            else:
                cell = max(cells, key=lambda s: like(token, s))
            joining.setdefault(cell, []).append((at, token))
        for cell, tokens in joining.items():
            merged[row, rank, cell] += sum(old_merged[row, rank, token] + 1 for _, token in tokens)
            for head in heads:
                members = [(held[cell], cell), *tokens]
                counts = [float(1 + old_merged[row, rank, s]) for _, s in members]
                if name == "weighted":
                    counts = [float(step["weights"][row, rank, s]) for _, s in members]
                    weights[row, rank, cell] = sum(counts)
                ks = [old_keys[row, head, s] for _, s in members]
                vs = [old_values[row, head, s] for _, s in members]
                key: Tensor | float
                value: Tensor | float
                if name == "sum":
                    key, value = sum(ks), sum(vs)
                elif name == "pick":
                    last = max(range(len(members)), key=lambda i: -1 if i == 0 else members[i][0])
                    key, value = (ks[last], vs[last]) if head % 2 else (ks[0], vs[0])
                else:
                    key, value = (sum(n * x for n, x in zip(counts, xs, strict=True)) / sum(counts) for xs in (ks, vs))
                keys[row, head, cell] = key
                values[row, head, cell] = value
    return keys, values, merged, weights


@pytest.mark.parametrize(("sliding_window", "attention_chunk"), [(None, None), (15, None), (None, 13)])
@pytest.mark.parametrize("ranked", [1, HEADS])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", MERGES)
def test_every_rule_equals_loops_over_targets(
    name: str, target: str, ranked: int, sliding_window: int | None, attention_chunk: int | None
) -> None:
    rule = MERGES[name](target)
    for seed in range(2):
        step = random_step(ranked, seed)
        layer, plan = merged_by(rule, step, sliding_window, attention_chunk)
        expected = by_hand(name, target, step, sliding_window, attention_chunk)
        ours = layer.store.keys(), layer.store.values(), layer.state["merged"], layer.state["token_weight"]
        for mine, truth in zip(ours, expected, strict=True):
            torch.testing.assert_close(mine.double(), truth, atol=2e-5, rtol=0)
        assert not layer.state["merged"].equal(step["merged"])
        assert ours[0].isfinite().all()  # in free slots, too
        layer.store.put(plan.targets, plan.before.parts)
        assert layer.store.keys().equal(step["keys"])
        assert layer.store.values().equal(step["values"])


@pytest.mark.parametrize("ranked", [1, HEADS])
@pytest.mark.parametrize("name", MERGES)
def test_a_plan_changes_nothing_until_it_is_applied_and_is_reverted_exactly(name: str, ranked: int) -> None:
    step = random_step(ranked, 1)
    layer, twin = view_of(step), view_of(step)

    def is_as_before() -> bool:
        ours, theirs = ({**each.store.tensors(), **each.state} for each in (layer, twin))
        return all(ours[name].equal(theirs[name]) for name in theirs) and layer.positions.equal(step["positions"])

    plan = plan_merge(MERGES[name](), layer, step["evicted"], step["before"])
    assert is_as_before()
    plan.revert(layer.store, layer.state)
    assert is_as_before()
    plan.apply(layer.store, layer.state)
    assert not is_as_before()
    plan.revert(layer.store, layer.state)
    assert is_as_before()
