"""Caches that travel between transformers and windlass."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from tests.helpers.models import Models, Text
from windlass import KVCache, UsageError
from windlass.cache.options import CacheOptions
from windlass.policies import KeyDiff, Recent

TOLERANCE = 1e-5
GREEDY = {"do_sample": False, "pad_token_id": 0}


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: Tensor, cache: object = None, **options: object) -> Tensor:
    return model(ids, past_key_values=cache, **options).logits


TRAVELLERS = [
    *("llama", "llama4", "hunyuan", "gemma3", "gemma3n", "glm4", "mistral", "cohere", "smollm3", "llama_yarn", "phi3")
]


@pytest.mark.parametrize("family", TRAVELLERS)
def test_a_cache_travels_there_and_back(family: str, plain_model: Models, attached_model: Models, text: Text) -> None:
    plain, model, ids = plain_model(family), attached_model(family), text(45, rows=2)
    theirs = DynamicCache(config=plain.config)
    logits_of(plain, ids[:, :30], theirs)
    kept = [(layer.keys.clone(), layer.values.clone()) for layer in theirs.layers if layer.keys is not None]
    ours: Any = KVCache.from_rotated(model, theirs)
    assert (ours.tokens_seen, ours.next_positions) == ([30, 30], [30, 30])
    back: Any = ours.to_rotated()
    for layer, (keys, values) in zip((each for each in back.layers if each.keys is not None), kept, strict=True):
        assert torch.allclose(layer.keys, keys, rtol=0, atol=TOLERANCE)
        assert torch.equal(layer.values, values)

    expected = logits_of(plain, ids)[:, 30:]
    assert torch.allclose(logits_of(model, ids[:, 30:], ours), expected, rtol=0, atol=TOLERANCE)
    parts = [logits_of(plain, ids[:, at : at + 5], back) for at in (30, 35, 40)]
    assert torch.allclose(torch.cat(parts, 1), expected, rtol=0, atol=TOLERANCE)
    # And out again after more was written.
    assert torch.allclose(ours.to_rotated().layers[1].keys, back.layers[1].keys, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_an_import_is_rolled_back_only_where_nothing_was_dropped(
    family: str, plain_model: Models, attached_model: Models, text: Text
) -> None:
    """A sliding layer of a DynamicCache lacks tokens that an earlier query would see.

    A text within its window is whole.
    """
    plain, model, ids = plain_model(family), attached_model(family), text(41)
    for tokens in (30, 9):
        theirs = DynamicCache(config=plain.config)
        logits_of(plain, ids[:, :tokens], theirs)
        cache = KVCache.from_rotated(model, theirs)
        with pytest.raises(UsageError, match="Use drop") if tokens == 30 else nullcontext():
            cache.rollback(5)
        ours = logits_of(model, ids[:, cache.next_positions[0] : tokens + 1], cache)
        expected = logits_of(plain, ids[:, : tokens + 1])[:, -ours.shape[1] :]
        torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)
        if tokens == 30:
            with pytest.raises(UsageError, match="Use drop"):
                cache.rollback(2)
            cache.rollback(1)
            ours = logits_of(model, ids[:, tokens : tokens + 4], cache)
            expected = logits_of(plain, ids[:, : tokens + 4])[:, tokens:]
            torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_generation_goes_on_in_the_other_cache(
    family: str, plain_model: Models, attached_model: Models, text: Text
) -> None:
    plain, model, ids = plain_model(family), attached_model(family), text(22)
    expected = plain.generate(ids, max_new_tokens=16, **GREEDY).tolist()
    theirs = DynamicCache(config=plain.config)
    first = plain.generate(ids, past_key_values=theirs, max_new_tokens=8, **GREEDY)
    ours = KVCache.from_rotated(model, theirs)
    assert model.generate(first, past_key_values=ours, max_new_tokens=8, **GREEDY).tolist() == expected
    ours = KVCache(model, budget=64, policy=Recent())
    first = model.generate(ids, past_key_values=ours, max_new_tokens=8, **GREEDY)
    theirs = ours.to_rotated()
    assert plain.generate(first, past_key_values=theirs, max_new_tokens=8, **GREEDY).tolist() == expected


def test_from_rotated_refuses_what_it_cannot_know(attached_model: Models, text: Text) -> None:
    model = attached_model("llama_dynamic")
    theirs = DynamicCache(config=model.config)
    logits_of(model, text(70), theirs)
    with pytest.raises(UsageError, match=r"holds 70 tokens, more than the 64"):
        KVCache.from_rotated(model, theirs)
    with pytest.raises(UsageError, match="is empty"):
        KVCache.from_rotated(attached_model("llama"), DynamicCache(config=attached_model("llama").config))


def test_an_imported_cache_has_every_option(plain_model: Models, attached_model: Models, text: Text) -> None:
    """Its twin read the same text itself. Both evict and merge afterwards, and take three steps back."""
    model, ids = attached_model("llama"), text(60, rows=2)
    logits_of(plain_model("llama"), ids[:, :20], theirs := DynamicCache(config=model.config))
    options = CacheOptions(24, KeyDiff(), 2, 5, 7, "compact", 2, 3, "plain", "mean_count(next)")
    ours, twin = KVCache.from_rotated(model, theirs, options), KVCache.from_options(model, options)
    logits_of(model, ids[:, :20], twin)
    assert ours.options == twin.options == options
    for start in range(20, 60, 5):
        expected, got = (logits_of(model, ids[:, start : start + 5], each) for each in (twin, ours))
        assert torch.allclose(got, expected, rtol=0, atol=1e-4)
    for cache in (ours, twin):
        assert all(float(layer.table.state["merged"].max()) > 0 for layer in cache.layers)
    assert ours.limits.rollback == 3


@pytest.mark.parametrize("family", ["mistral", "gemma3"])
def test_an_import_of_sliding_layers_with_a_ring_is_saved_and_loaded(
    family: str, plain_model: Models, attached_model: Models, text: Text, tmp_path: Path
) -> None:
    """A sliding layer was given the newest tokens alone, so it has written fewer than the text has."""
    plain, model, ids = plain_model(family), attached_model(family), text(37)
    theirs = DynamicCache(config=plain.config)
    logits_of(plain, ids[:, :30], theirs)
    cache = KVCache.from_rotated(model, theirs, CacheOptions(store="int8(newest=4)"))
    cache.save(tmp_path / "import.safetensors")
    loaded = KVCache.load(tmp_path / "import.safetensors", model)
    assert torch.equal(logits_of(model, ids[:, 30:], loaded), logits_of(model, ids[:, 30:], cache))
