"""DMC against its recurrence in plain loops, and against a model without the channel that decides."""

from itertools import pairwise, product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers.caches import assert_same
from tests.helpers.models import Models, Text, read
from windlass import KVCache, PolicyError, UsageError
from windlass.cache.decode import LayerCall
from windlass.cache.layer import SlotLayer
from windlass.cache.merging import merge_of
from windlass.cache.options import CacheOptions, policy_of
from windlass.core.step import AttentionCall, Limits, Step
from windlass.policies import DMC, Composite, KeyDiff, Policy, Recent, Smoothed
from windlass.positions.modes import Original
from windlass.stores.formats import Plain
from windlass.testing import tiny_model

BATCH, KV_HEADS, GROUP, HEAD_DIM, VALUE_DIM, TOKENS, RUNS = 2, 3, 5, 8, 6, 24, 9
Cell = tuple[int, Tensor, Tensor, float]  # position, key, value and weight


def recurrence(queries: Tensor, keys: Tensor, values: Tensor, policy: DMC) -> list[Cell]:
    """One head's cells after a text, token by token, with queries (group, tokens, head_dim)."""
    cells: list[Cell] = []
    for t in range(keys.shape[0]):
        key, value = keys[t].double().clone(), values[t].double()
        logit = float(sum(query[t, policy.channel] for query in queries.double())) / queries.shape[0]
        weight = 1 / (1 + float(torch.tensor(-logit - policy.weight_bias, dtype=torch.float64).exp()))
        weight += torch.finfo(torch.float32).eps
        accumulates = float(key[policy.channel]) + policy.bias > 0
        key[policy.channel] = 0
        if accumulates and cells:
            _, last_key, last_value, total = cells.pop()
            z = total + weight
            key = ((z - weight) * last_key + weight * key) / z
            value = ((z - weight) * last_value + weight * value) / z
            weight = z
        cells.append((t, key, value, weight))
    return cells


def decided(seed: int, policy: DMC) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a text in which every head begins RUNS runs, the last with the last token."""
    g = torch.Generator().manual_seed(seed)
    queries = torch.randn(BATCH, KV_HEADS * GROUP, TOKENS, HEAD_DIM, generator=g)
    keys = torch.randn(BATCH, KV_HEADS, TOKENS, HEAD_DIM, generator=g)
    for row, head in product(range(BATCH), range(KV_HEADS)):
        starts = [0, TOKENS - 1, *(torch.randperm(TOKENS - 2, generator=g)[: RUNS - 2] + 1).tolist()]
        logits = torch.rand(TOKENS, generator=g) + 0.1
        logits[starts] *= -1
        logits[0] *= -1 if seed % 2 else 1  # no token stands before the first one, which cannot join
        keys[row, head, :, policy.channel] = logits - policy.bias
    return queries, keys, torch.randn(BATCH, KV_HEADS, TOKENS, VALUE_DIM, generator=g)


@pytest.mark.parametrize("steps", [(1,) * TOKENS, (5, 1, 1, 9, 8), (TOKENS,)], ids=len)
@pytest.mark.parametrize("policy", [DMC(), DMC(bias=0.5, weight_bias=-0.3, channel=-1)], ids=repr)
def test_the_cells_of_a_text_are_those_of_the_recurrence(policy: DMC, steps: tuple[int, ...]) -> None:
    for seed in range(2):
        queries, keys, values = decided(seed, policy)
        limits = Limits(budget=RUNS, sinks=0, window=1, chunk=TOKENS, rollback=0)
        layer, at = SlotLayer(0, limits, policy, None, Plain(), merge_of("weighted")), 0
        for tokens in steps:
            now, ends = slice(at, at + tokens), torch.tensor([at + tokens] * BATCH)
            step = Step(torch.arange(at, at + tokens).expand(BATCH, -1), (tokens,) * BATCH, ends, ends, at + tokens)
            q, k, v = (states[:, :, now] for states in (queries, keys, values))
            layer.step(LayerCall(q, k, v, step, Original(), AttentionCall(0.3)))
            at += tokens
        for row, head in product(range(BATCH), range(KV_HEADS)):
            group = queries[row, head * GROUP : (head + 1) * GROUP]
            cells = recurrence(group, keys[row, head], values[row, head], policy)
            places = layer.positions[row, head]
            order = [places.tolist().index(at) for at, *_ in cells]
            assert len(cells) == RUNS == int((places >= 0).sum())
            held = layer.store.keys(), layer.store.values(), layer.table.state["token_weight"]
            for mine, truth in zip(held, zip(*(cell[1:] for cell in cells), strict=True), strict=True):
                expected = torch.stack([torch.as_tensor(each, dtype=torch.float64) for each in truth])
                torch.testing.assert_close(mine[row, head, order].double(), expected, atol=1e-5, rtol=0)
            merged = layer.table.state["merged"][row, head, order]
            assert merged.tolist() == [b - a - 1 for a, b in zip([-1, *places[order]], places[order], strict=False)]


def held_by_hand(decisions: list[bool], budget: int, sinks: int, window: int) -> list[list[int]]:
    """Members of each cell of one head after a text that came token by token."""
    cells: list[list[int]] = []
    for t, accumulates in enumerate(decisions):
        if accumulates and t > sinks:
            cells[-1] = [*cells[-1], t]
        else:
            cells.append([t])
        if len(cells) > budget:
            gone = min(i for i, cell in enumerate(cells) if sinks <= cell[-1] <= t - window)
            cells[gone : gone + 2] = [cells[gone] + cells[gone + 1]]
    return cells


def kept_by_hand(decisions: list[bool], budget: int, sinks: int, window: int) -> list[int]:
    """Tokens of one head that stay where none are merged."""
    kept = list[int]()
    joins = set[int]()  # tokens that the one after them would have taken in
    for t, _ in enumerate(decisions):
        kept.append(t)
        if len(kept) > budget:
            joins |= {a for a, b in pairwise(kept) if b == a + 1 and decisions[b]}
            free = [i for i, at in enumerate(kept[:-1]) if sinks <= at <= t - window]
            joining = [i for i in free if kept[i] in joins and kept[i + 1] <= t - window]
            kept.pop(min(joining or free))
    return kept


@pytest.mark.parametrize(
    ("family", "bias", "budget"),
    # Channels as halves, interleaved, with a norm of keys.
    [("llama", 0.0, 24), ("llama", 1.0, 11), ("llama", -8.0, 18), ("glm4", 0.0, 13), ("qwen3", 1.0, 24)],
)
def test_each_head_goes_by_its_own_decisions(
    attached_model: Models, text: Text, family: str, bias: float, budget: int
) -> None:
    """Also where a budget is too small for the runs, or too large: the first layer of a model, from its own keys."""
    model, ids, policy = attached_model(family), text(36, rows=BATCH), DMC(bias)
    whole, weighed = KVCache(model, batch=BATCH), KVCache(model, policy=policy, batch=BATCH)
    for each in (whole, weighed):
        read(model, each, ids, 36)
    taken, weights = whole.layers[0].store.keys()[:, :, :36], weighed.layers[0].table.state["token_weight"].double()
    cache = KVCache(model, budget, policy, sinks=2, window=3, batch=BATCH, merge="weighted")
    read(model, cache, ids, 1)
    layer, seen = cache.layers[0], set[str]()
    values = whole.layers[0].store.values()[:, :, :36].double()
    for row, head in product(range(BATCH), range(KV_HEADS)):
        decisions = (taken[row, head, :, 0] + bias > 0).tolist()
        cells = held_by_hand(decisions, budget, 2, 3)
        seen.add(str(cells))
        places = layer.positions[row, head].tolist()
        assert sorted(at for at in places if at >= 0) == [cell[-1] for cell in cells]
        truths: list[tuple[Tensor, ...]] = []
        for cell in cells:
            w = weights[row, head, cell]
            key, value = (
                (w[:, None] * states[row, head, cell].double()).sum(0) / w.sum() for states in (taken, values)
            )
            key[0] = 0
            truths.append((key, value, w.sum()))
        slots = [places.index(cell[-1]) for cell in cells]
        held = layer.store.keys(), layer.store.values(), layer.table.state["token_weight"]
        for mine, truth in zip(held, zip(*truths, strict=True), strict=True):
            torch.testing.assert_close(mine[row, head, slots].double(), torch.stack(truth), atol=2e-5, rtol=0)
    assert len(seen) > 2 if bias >= 0 else len(seen) == 1


@pytest.mark.parametrize("channel", [0, -1])
@pytest.mark.parametrize("family", ["llama", "glm4", "mistral"])  # halves, interleaved in part, in a sliding window
def test_attention_is_that_of_a_model_without_the_channel(
    attached_model: Models, text: Text, family: str, channel: int
) -> None:
    """Rows of its weights are 0, in transformers' own attention, and nothing is over budget."""
    model, ids = tiny_model(family), text(40, rows=2)
    config = model.config
    for layer in model.model.layers:
        for linear, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            for parameter in getattr(layer.self_attn, linear).parameters():
                parameter.data.view(heads, config.head_dim, -1)[:, channel] = 0
    with torch.no_grad():
        truth = model(ids).logits
    ours = attached_model(family)
    for budget, step in ((None, 40), (50, 7)):
        cache = KVCache(ours, budget, DMC(channel=channel), batch=2, merge="weighted" if budget else None)
        torch.testing.assert_close(read(ours, cache, ids, step), truth, atol=2e-5, rtol=0)
    assert (read(ours, KVCache(ours, batch=2), ids, 40) - truth).abs().max() > 1e-2


def test_it_can_be_taken_back_saved_and_spliced(attached_model: Models, text: Text, tmp_path: Path) -> None:
    """With each token's initial state, also where a part of a step stands."""
    model, ids = attached_model("llama"), text(70, rows=2)
    options = {"budget": 30, "policy": DMC(0.0), "window": 3, "batch": 2, "merge": "weighted"}
    caches = [KVCache(model, **options) for _ in range(2)]  # type: ignore[arg-type]
    for cache in caches:
        read(model, cache, ids[:, :40], 15)
    read(model, caches[0], ids[:, 40:47], 7)
    caches[0].rollback(7)
    assert_same(*caches)
    read(model, caches[0], ids[:, 40:47], 7)
    caches[0].rollback(4)
    read(model, caches[1], ids[:, 40:43], 3)
    assert_same(*caches)
    caches[1].save(tmp_path / "cells")
    caches[1] = KVCache.load(tmp_path / "cells", model)
    more = [read(model, cache, ids[:, 43:], 5) for cache in caches]
    torch.testing.assert_close(*more, atol=1e-5, rtol=0)
    assert_same(*caches)
    fresh, one = (KVCache(model, **{**options, "batch": 1}) for _ in range(2))  # type: ignore[arg-type]
    read(model, one, ids[:1, :40], 15)
    fresh.splice(one)
    for mine, theirs in zip(fresh.layers, one.layers, strict=True):
        for name in ("token_weight", "token_accumulates", "merged"):
            orders = [layer.positions.where(layer.positions >= 0, 2**30).argsort(-1) for layer in (mine, theirs)]
            assert (
                mine.table.state[name]
                .gather(-1, orders[0])[mine.positions.gather(-1, orders[0]) >= 0]
                .equal(theirs.table.state[name].gather(-1, orders[1])[theirs.positions.gather(-1, orders[1]) >= 0])
            )


def test_without_merging_what_joins_is_dropped(attached_model: Models, text: Text) -> None:
    """The control: once over budget, tokens that the next one would take in go first. Keys and values are unchanged."""
    model, ids = attached_model("llama"), text(40)
    whole, cache = KVCache(model, policy=DMC(0.0)), KVCache(model, 20, DMC(0.0), sinks=2, window=3)
    read(model, whole, ids, 40)
    read(model, cache, ids, 1)
    layer, seen = cache.layers[0], set[str]()
    for head, places in enumerate(layer.positions[0].tolist()):
        decisions = whole.layers[0].table.state["token_accumulates"][0, head, :40] > 0
        kept = kept_by_hand(decisions.tolist(), 20, 2, 3)
        assert sorted(at for at in places if at >= 0) == kept
        seen.add(str(kept))
        mine = layer.store.keys()[0, head, [places.index(at) for at in kept]]
        torch.testing.assert_close(mine, whole.layers[0].store.keys()[0, head, kept], atol=1e-5, rtol=0)
    assert len(seen) > 1


@pytest.mark.parametrize("policy", [Smoothed(DMC(0.0)), Composite(DMC(0.0))], ids=repr)
def test_a_policy_around_it_lets_tokens_in_as_it_does(attached_model: Models, text: Text, policy: Policy) -> None:
    model, ids = attached_model("llama"), text(30)
    caches = [KVCache(model, 40, each, merge="weighted") for each in (DMC(0.0), policy)]
    logits = [read(model, cache, ids, 30) for cache in caches]
    assert logits[0].equal(logits[1])
    for mine, theirs in zip(*(cache.layers for cache in caches), strict=True):
        for name in ("token_weight", "token_accumulates"):
            assert mine.table.state[name].equal(theirs.table.state[name])
        assert mine.table.state["token_weight"].max() > 0


def test_what_cannot_be_honoured_is_refused(plain_model: Models, attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    with pytest.raises(UsageError, match=r"merge=weighted takes weights from the policy, and Recent\(\) gives none"):
        KVCache(model, 20, merge="weighted", policy=Recent())
    with pytest.raises(PolicyError, match="DMC: channel must be 0, the first, or -1, the last, got 3"):
        DMC(channel=3)
    with torch.no_grad():
        elsewhere = plain_model("llama")(text(30), use_cache=True).past_key_values
    with pytest.raises(UsageError, match=r"from_rotated: DMC\(.*\) ranks by learned weights, which a DynamicCache"):
        KVCache.from_rotated(model, elsewhere, CacheOptions(policy=DMC()))
    with pytest.raises(UsageError, match=r"splice: DMC\(.*\) ranks by learned weights, which the other cache's policy"):
        KVCache(model, 20, DMC()).splice(KVCache(model, policy=KeyDiff()))


def test_it_has_a_name(attached_model: Models) -> None:
    assert policy_of("dmc(bias=0, channel=-1)") == DMC(0, 5.0, -1)
    assert str(merge_of("weighted(nearest)")) == "weighted(nearest)"
    assert KVCache(attached_model("llama"), 20, policy_of("dmc"), merge="weighted").merge is not None
