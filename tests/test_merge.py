"""Evicted tokens in cells: every rule against loops in float64, and what a cache does with them."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from windlass import KVCache, UsageError, prompt_cache
from windlass.layer import LayerCache
from windlass.low_bit import store_of
from windlass.merge import MERGES, TARGETS, MeanCount, absorb, merge_of
from windlass.policies import H2O, TOVA, KeyDiff, Policy, Recent, Slots
from windlass.positions import Original
from windlass.shapes import Scores
from windlass.step import AttentionCall, Limits, Step
from windlass.store import Plain

Models = Callable[[str], PreTrainedModel]
Text = Callable[..., Tensor]
HEADS, SLOTS, KEY_DIM, VALUE_DIM, SINKS, WINDOW, ENDS = 3, 17, 6, 4, 2, 3, (20, 24)


def by_hand(name: str, target: str, step: dict[str, Tensor], sliding_window: int | None) -> tuple[Tensor, ...]:
    """Keys, values and merged counts after the step, cell by cell in float64."""
    keys, values, merged = (step[name].double().clone() for name in ("keys", "values", "merged"))
    old_keys, old_values, old_merged = keys.clone(), values.clone(), merged.clone()
    ranked = merged.shape[1]
    for row, rank in product(range(2), range(ranked)):
        heads = range(HEADS) if ranked == 1 else [rank]
        held = {slot: int(at) for slot, at in enumerate(step["positions"][row, rank]) if at >= 0}
        oldest = 0 if sliding_window is None else ENDS[row] - sliding_window + 1
        cells = [s for s, at in held.items() if max(SINKS, oldest) <= at < ENDS[row] - WINDOW]
        joining: dict[int, list[tuple[int, int]]] = {}
        for token, at in zip(step["evicted"][row, rank].tolist(), step["before"][row, rank].tolist(), strict=True):
            if at < max(oldest, 0) or not cells:
                continue
            if target == "next":
                later = [s for s in cells if held[s] > at]
                cell = min(later, key=lambda s: held[s]) if later else max(cells, key=lambda s: held[s])
            else:
                likeness = {
                    s: sum(
                        float(torch.cosine_similarity(old_keys[row, h, token], old_keys[row, h, s], dim=0))
                        for h in heads
                    )
                    for s in cells
                }
                cell = max(cells, key=lambda s: likeness[s])
            joining.setdefault(cell, []).append((at, token))
        for cell, tokens in joining.items():
            merged[row, rank, cell] += sum(old_merged[row, rank, token] + 1 for _, token in tokens)
            for head, (new, old) in product(heads, ((keys, old_keys), (values, old_values))):
                members = [(1 + old_merged[row, rank, s], old[row, head, s]) for s in (cell, *(t for _, t in tokens))]
                mean = sum(n * x for n, x in members) / sum(n for n, _ in members)
                if name == "sum":
                    new[row, head, cell] = sum(x for _, x in members)
                elif name == "pick":
                    new[row, head, cell] = old[row, head, max(tokens)[1]] if head % 2 else old[row, head, cell]
                elif name != "values" or new is values:
                    new[row, head, cell] = mean
    return keys, values, merged


def random_step(ranked: int, seed: int) -> dict[str, Tensor]:
    """Two rows over budget; some slots free, some evicted ones too, some slots already cells."""
    g = torch.Generator().manual_seed(seed)
    positions = torch.stack([torch.randperm(ENDS[i // ranked], generator=g)[:SLOTS] for i in range(2 * ranked)])
    positions = positions.reshape(2, ranked, SLOTS).int()
    positions[..., 11] = -1
    evicted = torch.stack([torch.randperm(SLOTS, generator=g)[:6] for _ in range(2 * ranked)]).reshape(2, ranked, 6)
    before = positions.gather(-1, evicted)
    return {
        "keys": torch.randn(2, HEADS, SLOTS, KEY_DIM, generator=g),
        "values": torch.randn(2, HEADS, SLOTS, VALUE_DIM, generator=g),
        "merged": torch.randint(0, 3, (2, ranked, SLOTS), generator=g).float(),
        "positions": positions.scatter(-1, evicted, before.where(before < 0, -2)),
        "evicted": evicted,
        "before": before,
    }


@pytest.mark.parametrize("sliding_window", [None, 15])
@pytest.mark.parametrize("ranked", [1, HEADS])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", list(MERGES))
def test_every_rule_equals_loops_over_cells(name: str, target: str, ranked: int, sliding_window: int | None) -> None:
    limits = Limits(budget=SLOTS - 6, sinks=SINKS, window=WINDOW, chunk=5, rollback=0)
    for seed in range(4):
        step = random_step(ranked, seed)
        store = Plain()
        store.allocate(step["keys"], step["values"], SLOTS)
        every = torch.arange(SLOTS).expand(2, 1, -1)
        store.put(every, {"keys": step["keys"], "values": step["values"]})
        merged = step["merged"].clone()
        cells, before = absorb(
            MERGES[name](target), store, merged, step["positions"], step["evicted"], step["before"],
            torch.tensor(ENDS), limits, sliding_window,
        )  # fmt: skip
        expected = by_hand(name, target, step, sliding_window)
        for ours, truth in zip((store.keys(), store.values(), merged), expected, strict=True):
            torch.testing.assert_close(ours.double(), truth, atol=1e-5, rtol=0)
        assert not merged.equal(step["merged"])
        store.put(cells, before)
        assert store.keys().equal(step["keys"])
        assert store.values().equal(step["values"])


@dataclass(frozen=True)
class Oldest(Policy):
    """Keeps what came first: here one token at least of every kind."""

    def score(self, slots: Slots) -> Scores:
        return -slots.positions.float()


def attended(merge: str | None, budget: int, kinds: int) -> Tensor:
    """What the last query reads from a layer without rotation, of 60 tokens that are `kinds` different ones."""
    g = torch.Generator().manual_seed(1)
    limits = Limits(budget=budget, sinks=0, window=4, chunk=60, rollback=0)
    layer = LayerCache(0, limits, Oldest(), None, Plain(), merge_of(merge))
    keys, values = torch.randn(1, 2, kinds, 8, generator=g), torch.randn(1, 2, kinds, 5, generator=g)
    which = torch.cat((torch.arange(kinds), torch.randint(kinds, (60 - kinds,), generator=g)))
    call = AttentionCall(0.4)
    for at in range(60):
        step = Step(torch.tensor([[at]]), (1,), torch.tensor([at + 1]), torch.tensor([0]), at + 1)
        query = torch.randn(1, 4, 1, 8, generator=g)
        own = which[at : at + 1]
        out = layer.step(query, keys[:, :, own], values[:, :, own], step, Original(), call)
    return out


def test_cells_of_equal_tokens_lose_nothing() -> None:
    """n equal tokens in one cell weigh what they weighed apart; without the count they do not."""
    whole = attended(None, budget=64, kinds=9)
    torch.testing.assert_close(attended("mean_count", budget=30, kinds=9), whole, atol=1e-5, rtol=0)
    for worse in ("mean", "sum", "values", None):
        assert (attended(worse, budget=30, kinds=9) - whole).abs().max() > 1e-2, worse


POLICIES = [Recent(), KeyDiff(), H2O(), TOVA()]


def read(model: PreTrainedModel, cache: KVCache, ids: Tensor, size: int) -> Tensor:
    return torch.cat([model(piece, past_key_values=cache).logits for piece in ids.split(size, 1)], 1)


@pytest.mark.parametrize("store", ["plain", "int8"])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_step_that_merged_can_be_taken_back(attached_model: Models, text: Text, policy: Policy, store: str) -> None:
    model, ids = attached_model("llama"), text(60, rows=2)
    caches = [
        KVCache(model, budget=18, policy=policy, window=3, batch=2, merge="mean_count", store=store) for _ in range(2)
    ]
    for cache in caches:
        read(model, cache, ids[:, :40], 15)
    read(model, caches[0], ids[:, 40:47], 7)
    caches[0].rollback(7)
    for mine, theirs in zip(caches[0].layers, caches[1].layers, strict=True):
        held = mine.positions >= 0
        assert held.equal(theirs.positions >= 0)
        for name, tensor in mine.state.items():
            assert tensor[held.expand_as(tensor)].equal(theirs.state[name][held.expand_as(tensor)])
        for a, b in ((mine.store.keys(), theirs.store.keys()), (mine.store.values(), theirs.store.values())):
            mask = held.expand(-1, a.shape[1], -1)
            assert a[mask].equal(b[mask])
    # Part of a step, too: as if only its first tokens had come.
    read(model, caches[0], ids[:, 40:47], 7)
    caches[0].rollback(4)
    read(model, caches[1], ids[:, 40:43], 3)
    ours, theirs = (read(model, cache, ids[:, 43:], 1) for cache in caches)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("merge", ["mean_count", "mean(next)"])
def test_a_saved_cache_merges_on(attached_model: Models, text: Text, tmp_path: Path, merge: str) -> None:
    model, ids = attached_model("llama"), text(90)
    cache = KVCache(model, budget=20, policy=KeyDiff(), merge=merge)
    read(model, cache, ids[:, :50], 25)
    prompt_cache.save(cache, tmp_path / "cells.safetensors", model)
    again = prompt_cache.load(tmp_path / "cells.safetensors", model)
    assert str(again.merge) == merge
    assert float(again.layers[0].state["merged"].max()) > 0
    torch.testing.assert_close(
        read(model, again, ids[:, 50:], 1), read(model, cache, ids[:, 50:], 1), atol=1e-5, rtol=0
    )


def test_spliced_cells_keep_their_counts(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(50)
    caches = [KVCache(model, budget=20, policy=KeyDiff(), merge="mean_count") for _ in range(2)]
    read(model, caches[0], ids, 25)
    caches[1].splice(caches[0])
    for mine, theirs in zip(caches[1].layers, caches[0].layers, strict=True):
        ours, truth = ((layer.state["merged"] * (layer.positions >= 0)).sum(-1) for layer in (mine, theirs))
        assert ours.equal(truth)
        assert float(ours.sum()) == 30 * ours.numel()
    with pytest.raises(UsageError, match="splice: the other cache merges tokens by mean_count, this one does not"):
        KVCache(model, budget=20).splice(caches[0])
    with pytest.raises(UsageError, match="to_rotated: tokens of this cache were merged"):
        caches[0].to_rotated()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": None, "merge": "mean"}, "merge=mean needs a budget"),
        ({"merge": "average"}, "merge='average' is not a rule; use one of: mean_count, mean, sum, pick, values"),
        ({"merge": "mean(far)"}, r"merge='mean\(far\)' is not a rule"),
        ({"merge": "pick(next)", "store": "int4(newest=4)"}, r"merge=pick\(next\) does not go with store int4"),
    ],
)
def test_what_cannot_merge_is_refused(attached_model: Models, options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        KVCache(attached_model("llama"), **{"budget": 20, **options})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="target of a merge must be one of: nearest, next"):
        MeanCount("far")


def test_low_bit_cells_are_coded_anew_and_nothing_else(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(40)
    cache = KVCache(model, budget=20, policy=KeyDiff(), merge="mean_count", store=store_of("int8"), window=5)
    read(model, cache, ids[:, :30], 30)
    read(model, cache, ids[:, 30:31], 1)  # packs the slots
    layer = cache.layers[0]
    before = {name: tensor.clone() for name, tensor in layer.tensors().items()}
    read(model, cache, ids[:, 31:32], 1)
    cells = layer.records[-1].cells
    assert cells is not None
    changed = (layer.tensors()["key_codes"] != before["key_codes"]).any(-1)
    written = torch.zeros_like(changed).scatter(2, cells, True)
    written.scatter_(2, layer.records[-1].written.expand(-1, changed.shape[1], -1), True)
    assert changed.any()
    assert not (changed & ~written).any()
