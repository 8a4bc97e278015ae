"""Assisted decoding on models with recurrent layers: drafts are read one by one, and the wrong ones taken back."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import windlass
from tests.helpers.hybrid_caches import OF_CHUNKS, assert_close, assert_same, held
from tests.helpers.hybrids import KINDS, bound, plain
from tests.helpers.models import Text
from windlass import KVCache, UsageError
from windlass.policies import H2O, KeyDiff
from windlass.testing import HYBRIDS, tiny_hybrid, tiny_model

GREEDY: dict[str, Any] = {"max_new_tokens": 17, "do_sample": False, "pad_token_id": 0}
LIMITS: dict[str, Any] = {"budget": 16, "window": 5}


def read(family: str, cache: KVCache, ids: Tensor, drafts: int = 0) -> Tensor:
    """The logits of the last tokens, of which so many are drafts."""
    with torch.no_grad():
        logits: Tensor = bound(family)(ids, past_key_values=cache, logits_to_keep=drafts + 1).logits
    return logits


@pytest.mark.parametrize("family", HYBRIDS)
def test_assisted_decoding_writes_the_text_of_greedy_decoding(family: str, text: Text) -> None:
    model, ids = bound(family), torch.cat((text(9), text(13, seed=1), text(9)), 1)
    truth = plain(family).generate(ids, **GREEDY)
    for drafts in ({"assistant_model": tiny_model("qwen3")}, {"prompt_lookup_num_tokens": 7}):
        cache = KVCache(model)
        assert model.generate(ids, past_key_values=cache, **drafts, **GREEDY).tolist() == truth.tolist()
        assert cache.tokens is not None
        assert cache.tokens[0] == truth[0, : cache.tokens_seen[0]].tolist()


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("policy", [KeyDiff(), H2O()], ids=repr)
def test_a_budget_changes_nothing(family: str, policy: Any, text: Text) -> None:
    """Neither do right drafts: those of the text that greedy decoding has written."""
    model, ids = bound(family), text(30)
    truth = model.generate(ids, past_key_values=KVCache(model, policy=policy, **LIMITS), **GREEDY)
    cache = KVCache(model, policy=policy, **LIMITS)
    assert model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=9, **GREEDY).tolist() == truth.tolist()
    cache, at = KVCache(model, policy=policy, **LIMITS), ids.shape[1]
    cache.activate_past_recording()
    choices = read(family, cache, truth[:, : at + 3], 3)
    for drafts in (0, 4, 8):
        assert choices[0].argmax(-1).tolist() == truth[0, at : at + choices.shape[1]].tolist()
        at += choices.shape[1]
        if at < truth.shape[1]:
            choices = read(family, cache, truth[:, at - 1 : at + drafts], drafts)


@pytest.mark.parametrize("family", [*KINDS, "jamba", "zamba2"])
@pytest.mark.parametrize("budget", [None, 16])
@pytest.mark.parametrize("prompt", [1, 12])
def test_any_number_of_drafts_is_taken_back(family: str, budget: int | None, prompt: int, text: Text) -> None:
    """As if the tokens that stay had been read one by one. Behind a prompt that comes in the same pass, too."""
    cache, ids = KVCache(bound(family), budget), text(prompt + 6, seed=5)
    cache.activate_past_recording()
    read(family, cache, text(14))
    read(family, cache, text(1))
    for wrong in (0, 1, 4, 6):
        ours, truth = copy.deepcopy(cache), copy.deepcopy(cache)
        read(family, ours, ids, 6)
        before = held(ours)
        ours.crop(-wrong)
        if wrong == 0:
            assert_same(held(ours), before)
        read(family, truth, ids[:, :prompt])
        for at in range(prompt, prompt + 6 - wrong):
            read(family, truth, ids[:, at : at + 1])
        assert ours.tokens == truth.tokens
        after, theirs = held(ours), held(truth)
        for name, each in theirs.items():
            assert_close(after[name].float(), each.float(), OF_CHUNKS)
        assert_close(read(family, ours, text(3, seed=6)), read(family, truth, text(3, seed=6)), OF_CHUNKS)


def test_only_drafts_are_read_one_by_one(text: Text) -> None:
    """A pass without them is as ever, before and after. Detaching leaves the modules alone."""
    models = [windlass.attach(tiny_hybrid("qwen3_next")) for _ in range(2)]
    caches, model = [KVCache(each) for each in models], models[1]
    for seed in range(3):
        for each, cache in zip(models, caches, strict=True):
            with torch.no_grad():
                each(text(9, seed=seed), past_key_values=cache)
        caches[1].activate_past_recording()
        assert_same(held(caches[1]), held(caches[0]))
    assert all(not layer.drafts for layer in caches[1].recurrent)
    with pytest.raises(UsageError, match="has copies of its state at 0, 18 tokens only"):
        caches[1].rollback(2)
    assert KVCache(model).is_croppable is False
    assert caches[1].is_croppable
    windlass.detach(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_bytes_of_drafts_are_told(text: Text) -> None:
    cache = KVCache(bound("falcon_h1"))
    cache.activate_past_recording()
    read("falcon_h1", cache, text(9))
    before = cache.bytes_held
    states = sum(each.nbytes for layer in cache.recurrent for each in layer.tensors().values())
    read("falcon_h1", cache, text(6), 5)
    assert cache.bytes_held - before >= 5 * states
    read("falcon_h1", cache, text(1))
    assert all(not layer.drafts for layer in cache.recurrent)
