"""Tokens that join the one before them as they come, against attention over explicit weighted means, token by token."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.helpers.caches import assert_same, bytes_of_slots, held
from tests.helpers.models import Models, Text, read
from windlass import KVCache, UsageError
from windlass.core.step import HEADROOM
from windlass.policies import DMC, Needs, Policy, Recent, Slots
from windlass.policies.base import ACCUMULATES, ModelSpecific, NewTokens
from windlass.testing import tiny_model

Run = list[int]
MODES = ("original", "clamp(9)", "self_extend(3, 5)", "compact")
STEPS = {"tokens": (1,) * 40, "chunks": (7, 1, 1, 17, 2, 12), "whole": (40,)}


def by_hand(
    model: PreTrainedModel, ids: Tensor, policy: DMC, sinks: int, mode: str, rule: str
) -> tuple[Tensor, list[list[list[Run]]]]:
    """Logits of a text whose heads each accumulate by their own decisions, and the runs of each layer and head."""
    config, inner = model.config, model.model
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    hidden, told = inner.embed_tokens(ids[None]), list[list[list[Run]]]()
    for layer in inner.layers:
        inputs = layer.input_layernorm(hidden)
        shape = (len(ids), -1, head_dim)
        q, k, v = (getattr(layer.self_attn, f"{name}_proj")(inputs)[0].view(shape).double() for name in "qkv")
        out, runs_of_layer = torch.zeros_like(q), list[list[Run]]()
        for head in range(kv_heads):
            group = slice(head * heads // kv_heads, (head + 1) * heads // kv_heads)
            runs, cells = list[Run](), list[tuple[Tensor, Tensor, float]]()
            for t in range(len(ids)):
                key, value, query = k[t, head].clone(), v[t, head], q[t, group].clone()
                weight = float((query[:, policy.channel].mean() + policy.weight_bias).sigmoid())
                weight = weight if rule == "weighted" else 1.0
                accumulates = float(key[policy.channel]) + policy.bias > 0
                key[policy.channel] = query[:, policy.channel] = 0
                if accumulates and t > sinks:
                    old_key, old_value, total = cells.pop()
                    both = total + weight
                    key, value = (old_key * total + key * weight) / both, (old_value * total + value * weight) / both
                    weight = both
                    runs[-1].append(t)
                else:
                    runs.append([t])
                cells.append((key, value, weight))
                logits = torch.stack(
                    [
                        turned(inner, query, distance(mode, t, run[-1], len(runs) - 1 - i)) @ cell[0]
                        for i, (run, cell) in enumerate(zip(runs, cells, strict=True))
                    ],
                    -1,
                ) / math.sqrt(head_dim)
                if rule == "mean_count":
                    logits = logits + torch.tensor([math.log(len(run)) for run in runs])
                out[t, group] = logits.softmax(-1) @ torch.stack([cell[1] for cell in cells])
            runs_of_layer.append(runs)
        told.append(runs_of_layer)
        hidden = hidden + layer.self_attn.o_proj(out.flatten(1).float())[None]
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(inner.norm(hidden)), told


def distance(mode: str, query: int, key: int, newer: int) -> int:
    """At which a cell is read that stands at `key`, and after which `newer` cells stand."""
    if mode == "compact":
        return newer
    if mode == "self_extend(3, 5)" and query - key >= 5:
        return query // 3 + 5 - 5 // 3 - key // 3
    return min(query - key, 9) if mode == "clamp(9)" else query - key


def turned(inner: torch.nn.Module, query: Tensor, distance: int) -> Tensor:
    """A query, rotated to where it stands when the key stands at 0."""
    angles = inner.rotary_emb.inv_freq.double() * distance
    first, second = query.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@pytest.mark.parametrize("rule", ["weighted", "mean_count", "mean"])
@pytest.mark.parametrize(("mode", "steps"), [(m, s) for m in MODES for s in STEPS if m != "compact" or s == "tokens"])
def test_it_reads_what_the_recurrence_reads(
    attached_model: Models, text: Text, mode: str, steps: str, rule: str
) -> None:
    """Without a budget, for any steps. Ranks within a chunk count all tokens, so those are read token by token."""
    model, ids = attached_model("llama"), text(40)
    for policy, sinks in ((DMC(0.0, -0.4), 2), (DMC(1.0, 0.3, channel=-1), 0)):
        with torch.no_grad():
            truth, runs = by_hand(tiny_model("llama"), ids[0], policy, sinks, mode, rule)
        cache = KVCache(model, None, policy, sinks=sinks, positions=mode, merge=rule)
        with torch.no_grad():
            pieces = ids.split(STEPS[steps], 1)
            mine = torch.cat([model(piece, past_key_values=cache).logits for piece in pieces], 1)
        torch.testing.assert_close(mine, truth, atol=5e-5, rtol=0)
        lengths = set()
        for layer, of_heads in zip(cache.layers, runs, strict=True):
            for head, mine_at in enumerate(layer.positions[0].tolist()):
                assert sorted(p for p in mine_at if p >= 0) == [run[-1] for run in of_heads[head]]
                lengths.add(len(of_heads[head]))
                merged = layer.table.state["merged"][0, head]
                assert [int(merged[mine_at.index(run[-1])]) + 1 for run in of_heads[head]] == list(
                    map(len, of_heads[head])
                )
        assert len(lengths) > 2
        assert max(lengths) < 40  # heads hold different numbers of tokens


def test_rows_of_a_batch_are_read_as_if_alone(attached_model: Models, text: Text) -> None:
    """Padding on either side of a row takes part in no run."""
    model, ids = attached_model("llama"), text(31)
    policy = DMC(0.0)
    for is_left in (True, False):
        cache = KVCache(model, None, policy, sinks=1, batch=2, merge="weighted")
        rows = [ids[0, :31], ids[0, :19].flip(0)]
        padded = torch.zeros(2, 31, dtype=torch.long)
        mask = torch.zeros_like(padded)
        for row, own in enumerate(rows):
            at = slice(31 - len(own), None) if is_left else slice(0, len(own))
            padded[row, at], mask[row, at] = own, 1
        with torch.no_grad():
            mine = model(padded, attention_mask=mask, past_key_values=cache).logits
            again = model(ids[0, 5:7, None], past_key_values=cache).logits
        for row, own in enumerate(rows):
            alone = KVCache(model, None, policy, sinks=1, merge="weighted")
            truth = read(model, alone, own[None], 4)
            torch.testing.assert_close(mine[row, mask[row] > 0], truth[0], atol=5e-5, rtol=0)
            torch.testing.assert_close(
                again[row], read(model, alone, ids[0, 5 + row, None, None], 1)[0], atol=5e-5, rtol=0
            )


def test_memory_grows_by_runs(attached_model: Models, text: Text) -> None:
    """Without a budget: a head that joins nearly all tokens asks for no more slots, whatever was to be reserved."""
    model, ids = attached_model("llama"), text(400, rows=2)
    caches = [KVCache(model, None, DMC(bias), batch=2, merge="weighted") for bias in (8.0, -8.0)]
    for cache in caches:
        cache.reserve(400)
        read(model, cache, ids[:, :250], 50)
        assert (cache.layers[1].table.slots <= 128) == (cache is caches[0])
        read(model, cache, ids[:, 250:], 1)
    joined, apart = caches
    assert [layer.table.slots for layer in joined.layers] == [64, 64]  # 4 sinks, one run, and room for a chunk
    assert all(layer.table.slots >= 400 for layer in apart.layers)
    assert all(bool(((layer.positions >= 0).sum(-1) == 5).all()) for layer in joined.layers)
    assert bytes_of_slots(joined) * 5 < bytes_of_slots(apart)
    for layer in joined.layers:
        assert layer.table.state["merged"].amax(-1).unique().tolist() == [395]


@pytest.mark.parametrize("budget", [None, 24])
@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_what_is_rolled_back_was_never_there(
    attached_model: Models, text: Text, tmp_path: Path, budget: int | None, bias: float
) -> None:
    """Tokens that were taken in stand again, after whole steps, a part of a chunk, and from a file."""
    model, ids = attached_model("llama"), text(90, rows=2)

    def fresh() -> KVCache:
        return KVCache(model, budget, DMC(bias), window=3, batch=2, merge="weighted")

    def fed(*steps: int) -> KVCache:
        cache = fresh()
        for piece in ids[:, : sum(steps)].split(steps, 1):
            read(model, cache, piece, piece.shape[1])
        return cache

    def rolled_back(cache: KVCache, tokens: int) -> KVCache:
        cache.rollback(tokens)
        return cache

    assert_same(rolled_back(fed(30, *(1,) * 8), 5), fed(30, *(1,) * 3))
    assert_same(rolled_back(fed(30, 1, 1, 7), 4), fed(30, 1, 1, 3))
    if budget is None:  # a chunk of a prompt reads tokens that single steps would have evicted
        assert_same(rolled_back(fed(30, 20), HEADROOM), fed(30, 4))
    kept, twin = rolled_back(fed(30, 1, 1, 7), 4), fed(30, 1, 1, 3)
    kept.save(tmp_path / "runs")
    again = KVCache.load(tmp_path / "runs", model)
    for cache in (kept, again):
        torch.testing.assert_close(
            read(model, cache, ids[:, 50:], 9), read(model, twin, ids[:, 50:], 9), atol=1e-5, rtol=0
        )
        assert_same(cache, twin)
        twin = fed(30, 1, 1, 3)


def test_an_interrupted_pass_leaves_no_trace(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(60)
    caches = [KVCache(model, None, DMC(0.0), merge="weighted") for _ in range(2)]
    for cache in caches:
        read(model, cache, ids[:, :20], 20)
        read(model, cache, ids[:, 20:23], 1)

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    for tokens in (1, 9):
        hook = model.model.layers[1].mlp.register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            read(model, caches[0], ids[:, 23 : 23 + tokens], tokens)
        hook.remove()
        assert_same(*caches)
    logits = [read(model, cache, ids[:, 23:], 8) for cache in caches]
    assert logits[0].equal(logits[1])


def test_edits_begin_new_runs(attached_model: Models, text: Text) -> None:
    """A token whose predecessor was dropped is appended, whatever the model says."""
    model, ids = attached_model("llama"), text(30)
    cache = KVCache(model, None, DMC(8.0), sinks=0, merge="weighted")
    read(model, cache, ids[:, :20], 20)
    assert held(cache) == [[19]] * 3
    cache.shift(19, 20, -10)
    read(model, cache, ids[:, 20:25], 5)
    assert held(cache) == [[14]] * 3
    cache.drop(12, 15)
    read(model, cache, ids[:, 25:28], 1)
    layer = cache.layers[0]
    assert layer.table.state["merged"][layer.positions >= 0].tolist() == [2, 2, 2]


@dataclass(frozen=True)
class OfLayers(Policy, ModelSpecific):
    """Joins all tokens in layers of odd number."""

    needs = Needs(state=(ACCUMULATES,), per_head=False)

    def preprocess(self, queries: Tensor, keys: Tensor, layer: int) -> NewTokens:
        return NewTokens(queries, keys, {ACCUMULATES: torch.full_like(keys[:, :1, :, 0], layer % 2)})

    def score(self, slots: Slots) -> Tensor:
        return slots.positions.float()


def test_a_policy_of_ones_own_joins(attached_model: Models, text: Text) -> None:
    """In the chosen layers, and for all heads alike. `mean_count` gives each token the same weight."""
    model, ids = attached_model("llama"), text(33, rows=2)
    whole, cache = (
        KVCache(model, None, each, batch=2, merge=rule) for each, rule in ((Recent(), None), (OfLayers(), "mean_count"))
    )
    for each in (whole, cache):
        read(model, each, ids, 9)
    first, second = cache.layers
    assert first.positions[:, 0, :33].tolist() == [list(range(33))] * 2
    assert held(cache, 1) == [[0, 1, 2, 3, 32]]
    assert second.table.state["merged"][second.positions == 32].tolist() == [28, 28]
    for mine, truth in (
        (second.store.keys(), whole.layers[1].store.keys()),
        (second.store.values(), whole.layers[1].store.values()),
    ):
        at = (second.positions == 32).expand(-1, mine.shape[1], -1)
        torch.testing.assert_close(mine[at].view(2, -1, 8), truth[:, :, 4:33].mean(2), atol=1e-5, rtol=0)


def test_it_goes_with_stores_and_recall(attached_model: Models, text: Text) -> None:
    """Codes are rounded anew with each joining token. Recalled tokens are beside the slots of a budget."""
    model, ids = attached_model("llama"), text(60)

    def logits(**options: Any) -> Tensor:
        return read(model, KVCache(model, policy=DMC(0.0), window=3, merge="weighted", **options), ids, 9)

    truth, coded = logits(), logits(store="int8")
    recalled = logits(budget=30, recall=8, recall_store="plain")
    assert torch.nn.functional.cosine_similarity(truth, coded, dim=-1).min() > 0.97
    assert recalled[:, :27].equal(truth[:, :27])
    assert recalled.isfinite().all()
    assert (recalled - logits(budget=30)).abs().max() > 1e-3


def test_what_cannot_join_as_it_comes_is_refused(attached_model: Models) -> None:
    model = attached_model("llama")
    for rule in ("sum", "pick"):
        with pytest.raises(UsageError, match=rf"merge={rule} takes no means, and DMC\(.*. Use mean_count, mean, weigh"):
            KVCache(model, 20, DMC(), merge=rule)
    with pytest.raises(UsageError, match="merge=mean needs a budget"):
        KVCache(model, merge="mean")
