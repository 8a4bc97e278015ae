"""A row that another cache has read goes on beside others as it does alone, and leaves nothing behind."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.helpers.hybrids import KINDS, bound
from tests.helpers.models import Models, Text, read
from tests.helpers.shares import APART
from windlass import KVCache, Shares, UsageError
from windlass.cache.edits import arrange_rows, clear_row, put_row
from windlass.policies import NAMES, Policy
from windlass.policies.base import ModelSpecific

POLICIES = [policy() for policy in NAMES.values() if not issubclass(policy, ModelSpecific)]
TOLERANCE: dict[str, Any] = {"atol": 2e-5, "rtol": 0}
LENGTHS = (37, 9, 52)


def cache_of(model: PreTrainedModel, **options: Any) -> KVCache:
    usual: dict[str, Any] = {"budget": 17, "sinks": 2, "window": 3, "chunk": 13, "rollback": 5}
    return KVCache(model, **usual | options)


def beside(model: PreTrainedModel, cache: KVCache, tokens: Tensor, rows: Sequence[int]) -> Tensor:
    """Logits of one token of each of `rows`, while the others idle: (rows, vocabulary)."""
    mask = torch.zeros(cache.batch_size, 1, dtype=torch.long)
    ids = torch.zeros(cache.batch_size, 1, dtype=torch.long)
    mask[list(rows)], ids[list(rows), 0] = 1, tokens
    with torch.no_grad():
        return model(ids, attention_mask=mask, past_key_values=cache).logits[list(rows), -1]


def check(model: PreTrainedModel, ids: Tensor, **options: Any) -> None:
    """Three texts come into a batch of four at different times, leave, and come again."""
    alone = []
    for number, length in enumerate(LENGTHS):
        cache = cache_of(model, **options)
        read(model, cache, ids[number : number + 1, :length], 13)
        alone.append(cache)
    batch = cache_of(model, batch=4, **options)
    truth = copy.deepcopy(alone)
    at = list(LENGTHS)

    def step(rows: dict[int, int]) -> None:
        """One more token of each text, by the row it is in."""
        texts = list(rows.values())
        tokens = torch.tensor([int(ids[text, at[text]]) for text in texts])
        found = beside(model, batch, tokens, list(rows))
        for own, text in zip(found, texts, strict=True):
            wanted = read(model, truth[text], ids[text : text + 1, at[text] : at[text] + 1], 1)
            torch.testing.assert_close(own, wanted[0, -1], **TOLERANCE)
            at[text] += 1
            assert batch.tokens_seen[list(rows)[texts.index(text)]] == truth[text].tokens_seen[0]

    put_row(batch, 2, alone[0])
    for _ in range(3):
        step({2: 0})
    put_row(batch, 0, alone[1])
    for _ in range(12):
        step({2: 0, 0: 1})
    put_row(batch, 2, alone[2])  # over the first text
    for _ in range(4):
        step({0: 1, 2: 2})
    clear_row(batch, 0)
    assert batch.tokens_seen[0] == 0
    for layer in batch.layers:
        assert bool((layer.positions[0] < 0).all())
    step({2: 2})
    at[1], truth[1] = LENGTHS[1], copy.deepcopy(alone[1])
    put_row(batch, 3, alone[1])
    for _ in range(10):
        step({3: 1, 2: 2})


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_every_policy(attached_model: Models, text: Text, policy: Policy) -> None:
    check(attached_model("llama"), text(70, 3), policy=policy)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "gemma3", "phi3", "deepseek_v3", "gpt_oss", "llama4"])
def test_families(attached_model: Models, text: Text, family: str) -> None:
    check(attached_model(family), text(70, 3))


@pytest.mark.parametrize("family", KINDS)
def test_recurrent_layers(text: Text, family: str) -> None:
    check(bound(family), text(70, 3))


@pytest.mark.parametrize(
    "options",
    [
        {"store": "int8"},
        {"store": "int4(newest=6)"},
        {"merge": "mean"},
        {"positions": "compact"},
        {"positions": "self_extend(3, 5)"},
        {"budget": None, "policy": None},
        {"recall": 24, "recall_store": "int8"},
        {"shares": Shares(APART)},
    ],
    ids=str,
)
def test_options(attached_model: Models, text: Text, options: dict[str, Any]) -> None:
    check(attached_model("llama"), text(70, 3), **options)


@pytest.mark.parametrize("rows", [[None], [None] * 3])
def test_a_cache_that_never_wrote_has_as_many_rows_as_it_is_arranged_for(
    attached_model: Models, text: Text, rows: list[None]
) -> None:
    """The same holds for recalled tokens, past the first segment of the store."""
    model, ids = attached_model("llama"), text(1100, 1)
    options: dict[str, Any] = {"recall": 16, "recall_store": "plain", "chunk": 600}
    alone, lane = cache_of(model, **options), cache_of(model, batch=2, **options)
    read(model, alone, ids[:, :1020], 510)
    arrange_rows(lane, rows)
    lane.put_row(0, alone)
    for token in ids[0, 1020:1030]:
        wanted = read(model, alone, token[None, None], 1)
        found = beside(model, lane, token[None], [0])
        torch.testing.assert_close(found[0], wanted[0, -1], **TOLERANCE)


@pytest.mark.parametrize("store", ["plain", "int8", "int4(newest=6)"])
def test_nothing_is_left_of_a_cleared_row(attached_model: Models, text: Text, store: str) -> None:
    model, ids = attached_model("llama"), text(40, 3)
    cache = cache_of(model, batch=3, policy="h2o", store=store)
    read(model, cache, ids, 13)
    for layer in cache.layers:
        layer.forget_steps(0)  # slots reserved for a rollback are free
    before = [{name: tensor.clone() for name, tensor in layer.tensors().items()} for layer in cache.layers]
    cache.clear_row(1)
    for layer, was in zip(cache.layers, before, strict=True):
        for name, tensor in layer.tensors().items():
            if name in layer.store.constant_names:
                continue
            others = torch.tensor([0, 2])
            torch.testing.assert_close(tensor[others], was[name][others], atol=0, rtol=0, equal_nan=True)
            assert len(tensor[1].unique()) <= 1, name


@pytest.mark.parametrize("store", ["plain", "int8", "int4(newest=6)"])
@pytest.mark.parametrize("slots", [1021, 1600])
def test_rows_in_memory_of_pages_are_cleared_and_arranged(
    attached_model: Models, text: Text, store: str, slots: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of `slots` is no whole number of pages, and its free slots have bytes of tokens that are gone."""
    monkeypatch.setattr("windlass.stores.base.LARGE", 1)
    model, ids = attached_model("llama"), text(90, 4)
    lane = cache_of(model, batch=4, budget=slots, policy="h2o", store=store, rollback=0)
    read(model, lane, ids, 90)
    lane.drop(60, 90)
    alone = cache_of(model, budget=slots, policy="h2o", store=store, rollback=0)
    read(model, alone, ids[1:2, :40], 40)
    parts = [layer.store._allocated() for layer in lane.layers]
    assert all(part[3].any() for own in parts for part in own.values())
    clear_row(lane, 3)
    assert not any(part[3].any() for own in parts for part in own.values())
    was = copy.deepcopy(lane)
    arrange_rows(lane, [2, None, 0])
    kept = torch.tensor([2, 0])
    for layer, before in zip(lane.layers, was.layers, strict=True):
        is_held = before.positions[kept] >= 0
        assert torch.equal(layer.positions[[0, 2]], before.positions[kept])
        for now, then in ((layer.store.keys(), before.store.keys()), (layer.store.values(), before.store.values())):
            assert torch.equal(
                now[[0, 2]][is_held.expand(now[[0, 2]].shape[:3])], then[kept][is_held.expand(now[[0, 2]].shape[:3])]
            )
        for name, part in layer.store._allocated().items():
            assert not part[1].any(), name
            assert not part[[0, 2], :, 61:].any(), name
    assert lane.tokens_seen == [was.tokens_seen[2], 0, was.tokens_seen[0]]
    twin = copy.deepcopy(lane)
    put_row(lane, 1, alone, is_clear=True)
    put_row(twin, 1, alone)
    for one, other in zip(lane.layers, twin.layers, strict=True):
        for name, tensor in one.tensors().items():
            assert tensor.equal(other.tensors()[name]), name


def test_another_kind_of_cache_is_refused(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    cache, other = cache_of(model, batch=2), cache_of(model, policy="h2o")
    read(model, other, text(20), 13)
    with pytest.raises(UsageError, match=r"policy='KeyDiff\(\)', the other one 'H2O"):
        cache.put_row(0, other)
    with pytest.raises(UsageError, match="row 2 is not one of"):
        cache.put_row(2, cache_of(model))
    with pytest.raises(UsageError, match="another model"):
        cache.put_row(0, cache_of(attached_model("qwen3")))
    assert cache.tokens_seen == [0, 0]
