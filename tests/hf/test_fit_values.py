"""`compress(fit=True)`: values by least squares over transformers' own attention in a repeated text."""

import copy
import re

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import windlass
from tests.helpers.caches import assert_same, held
from tests.helpers.models import Models, Text, read
from windlass import KVCache, UsageError
from windlass.cache.recompute import RIDGE
from windlass.hf import kv_cache
from windlass.policies import KeyDiff, KeyNorm, KVzip, Policy
from windlass.testing import SLIDING_WINDOW, tiny_hybrid

KV_HEADS, GROUP = 3, 5


@pytest.fixture
def pieces_of_7(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a short text is read again in several passes."""
    monkeypatch.setattr(kv_cache, "CHUNK", 7)


def filled(
    model: PreTrainedModel, prompts: list[list[int]], policy: Policy | None = None, **options: object
) -> KVCache:
    cache = KVCache(model, policy=policy or KeyDiff(), batch=len(prompts), chunk=64, **options)  # type: ignore[arg-type]
    windlass.prefill(model, cache, prompts)
    return cache


def attention(plain: PreTrainedModel, ids: list[int], piece: int) -> list[Tensor]:
    """Attention (heads, tokens, tokens) per layer of each token of the repeated text to those of the text."""
    rows: list[list[Tensor]] = [[] for _ in range(plain.config.num_hidden_layers)]
    for start in range(0, len(ids), piece):
        with torch.no_grad():
            seen = plain(torch.tensor([ids + ids[start : start + piece]]), output_attentions=True).attentions
        for layer, weights in enumerate(seen):
            rows[layer].append(weights[0, :, len(ids) :, : len(ids)].double())
    return [torch.cat(each, 1) for each in rows]


def probabilities(weights: Tensor, head: int, kept: list[int]) -> Tensor:
    """Probabilities of the query heads of a kv head, one after the other, among the kept tokens."""
    found = weights[head * GROUP : (head + 1) * GROUP].flatten(0, 1)[:, kept]
    return found / found.sum(-1, keepdim=True)


@pytest.mark.usefixtures("pieces_of_7")
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2", "qwen3"])
def test_values_are_those_of_least_squares(
    plain_model: Models, attached_model: Models, text: Text, family: str
) -> None:
    """Grouped heads, learned sinks, soft-caps. A layer that holds just its sliding window is unchanged."""
    ids = text(29)[0].tolist()
    model, truth = attached_model(family), attention(plain_model(family), ids, 7)
    whole = filled(model, [ids], sinks=2)
    cache, plain = copy.deepcopy(whole), copy.deepcopy(whole)
    cache.compress(11, window=3, fit=True)
    plain.compress(11, window=3)
    cut = 0
    for layer, before, other in zip(cache.layers, whole.layers, plain.layers, strict=True):
        assert layer.positions.equal(other.positions)
        is_held = (layer.positions >= 0).expand(-1, KV_HEADS, -1)
        assert layer.store.keys()[is_held].equal(other.store.keys()[is_held])
        if layer.sliding_window is not None and layer.sliding_window <= SLIDING_WINDOW <= 11:
            assert layer.store.values()[is_held].equal(other.store.values()[is_held])
            continue
        cut += 1
        for head in range(KV_HEADS):
            order = layer.positions[0, head].tolist()
            slots = [slot for slot, position in enumerate(order) if position >= 0]
            kept = [order[slot] for slot in slots]
            places = before.positions[0, head].tolist()
            values = before.store.values()[0, head][[places.index(p) for p in range(29)]].double()
            found = probabilities(truth[layer.index], head, kept)
            lacking = probabilities(truth[layer.index], head, list(range(29))) @ values - found @ values[kept]
            weight = (RIDGE * found.square().sum(0).mean()).sqrt()
            rows = torch.cat([found, weight * torch.eye(len(kept), dtype=torch.double)])
            change = torch.linalg.lstsq(rows, torch.cat([lacking, torch.zeros_like(values[kept])])).solution
            ours = layer.store.values()[0, head][slots].double()
            torch.testing.assert_close(ours, values[kept] + change, atol=2e-4, rtol=1e-3)
            assert (found @ (ours - values[kept]) - lacking).norm() < 0.9 * lacking.norm()
    assert cut


@pytest.mark.parametrize("policy", [KeyDiff(), KVzip(8)])
def test_a_budget_that_holds_all_changes_nothing(attached_model: Models, text: Text, policy: Policy) -> None:
    model, ids = attached_model("llama"), text(29)[0].tolist()
    caches = filled(model, [ids], policy), filled(model, [ids], policy)
    caches[0].compress(29, fit=True)
    caches[1].compress(29)
    assert_same(*caches)
    for ours, truth in zip(caches[0].layers, caches[1].layers, strict=True):
        is_held = (ours.positions >= 0).expand(-1, KV_HEADS, -1)
        assert ours.store.values()[is_held].equal(truth.store.values()[is_held])
    more = text(5, seed=4)
    torch.testing.assert_close(*(read(model, cache, more, 1) for cache in caches), atol=0, rtol=0)


@pytest.mark.usefixtures("pieces_of_7")
@pytest.mark.parametrize("mode", ["original", "compact"])
@pytest.mark.parametrize("merge", [None, "mean_count"])
def test_a_ragged_row_equals_the_row_alone(attached_model: Models, text: Text, mode: str, merge: str | None) -> None:
    model, lengths = attached_model("llama"), (40, 23, 9)
    prompts = [text(n, seed=n)[0].tolist() for n in lengths]
    options = {"policy": KeyNorm(), "window": 3, "positions": mode, "merge": merge, "budget": merge and 60}
    batch = filled(model, prompts, **options)  # type: ignore[arg-type]
    batch.compress(12, fit=True)
    kept, more = [held(batch, 1, row) for row in range(3)], text(6, rows=3, seed=9)
    together = read(model, batch, more, 1)
    for row, prompt in enumerate(prompts):
        alone = filled(model, [prompt], **options)  # type: ignore[arg-type]
        alone.compress(12, fit=True)
        assert kept[row] == held(alone, 1)
        torch.testing.assert_close(
            together[row : row + 1], read(model, alone, more[row : row + 1], 1), atol=1e-4, rtol=0
        )


@pytest.mark.usefixtures("pieces_of_7")
def test_an_interrupt_changes_nothing(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(29)[0].tolist()
    cache = filled(model, [ids])
    before, calls = copy.deepcopy(cache), [0]

    def interrupt(*_: object) -> None:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt

    handle = model.get_submodule("model.layers.1").register_forward_hook(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            cache.compress(11, fit=True)
    finally:
        handle.remove()
    assert calls == [3]
    assert cache.budget is None
    assert_same(cache, before)
    cache.compress(11, fit=True)
    before.compress(11, fit=True)
    assert_same(cache, before)


def without_ids(model: PreTrainedModel, text: Text) -> KVCache:
    cache = KVCache(model)
    with torch.no_grad():
        model(inputs_embeds=model.get_input_embeddings()(text(29)), past_key_values=cache)
    return cache


def dropped(model: PreTrainedModel, text: Text) -> KVCache:
    cache = filled(model, [text(29)[0].tolist()])
    cache.drop(5, 9)
    return cache


REFUSED = {
    "text": (lambda m, t: without_ids(m, t), "takes the ids of all of its tokens"),
    "int8": (lambda m, t: filled(m, [t(29)[0].tolist()], store="int8"), "the store 'int8' holds them otherwise"),
    "evicted": (
        lambda m, t: filled(m, [t(29)[0].tolist()], budget=20, window=3),
        "needs the whole text, and layer 0 holds 20 of 29 tokens. Make the cache without a budget",
    ),
    "edited": (dropped, "layer 0 holds 25 of 29 tokens. Make the cache without a budget, and compress it before any"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_fitted_is_refused(attached_model: Models, text: Text, name: str) -> None:
    make, says = REFUSED[name]
    cache = make(attached_model("llama"), text)
    before = copy.deepcopy(cache)
    with pytest.raises(UsageError, match=re.escape(says)):
        cache.compress(11, fit=True)
    assert cache.budget == before.budget
    for ours, truth in zip(cache.layers, before.layers, strict=True):
        assert all(tensor.equal(truth.tensors()[name]) for name, tensor in ours.tensors().items())


def test_a_state_that_would_read_twice_is_refused(text: Text) -> None:
    cache = filled(windlass.attach(tiny_hybrid("lfm2")), [text(29)[0].tolist()])
    with pytest.raises(UsageError, match="keeps a state that would read it twice"):
        cache.compress(11, fit=True)
