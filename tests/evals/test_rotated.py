"""Keys that are stored rotated: the same numbers, and a clear error for each unsupported operation."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import windlass
from tests.helpers.models import Models, Text
from windlass.engine.generate import prefill
from windlass.evals.speed.measure import RotatedStorage
from windlass.policies import ExpectedAttention, Smoothed, TriAttention

FAMILIES = ("llama", "llama_yarn", "qwen3", "gemma2", "gemma3", "smollm3", "deepseek_v3", "gpt_oss")


@torch.no_grad()
def fed(model: PreTrainedModel, cache: object, ids: torch.Tensor, *sizes: int) -> torch.Tensor:
    """The logits of all tokens, fed in steps of these sizes."""
    assert sum(sizes) == ids.shape[1]
    return torch.cat([model(input_ids=part, past_key_values=cache).logits for part in ids.split(sizes, 1)], 1)


def is_close(one: Any, other: Any) -> bool:
    return bool((one - other).norm() <= 1e-5 * other.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_and_of_a_kv_cache(
    plain_model: Models, attached_model: Models, text: Text, family: str
):
    ids, sizes = text(45), (23, 19, 1, 1, 1)
    theirs = fed(plain_model(family), DynamicCache(config=plain_model(family).config), ids, *sizes)
    model = attached_model(family)
    assert is_close(fed(model, RotatedStorage(model), ids, *sizes), theirs)
    assert is_close(fed(model, windlass.KVCache(model), ids, *sizes), theirs)


def test_the_model_turned_the_keys_that_are_stored(plain_model: Models, attached_model: Models, text: Text):
    theirs, model = DynamicCache(), attached_model("llama")
    ours, unrotated = RotatedStorage(model), windlass.KVCache(model)
    fed(plain_model("llama"), theirs, text(20), 20)
    for cache in (ours, unrotated):
        fed(model, cache, text(20), 20)
    stored = [cache.layers[0].store.keys()[:, :, :20] for cache in (ours, unrotated)]
    assert is_close(stored[0], theirs.layers[0].keys)
    assert not is_close(stored[1], theirs.layers[0].keys)
    assert is_close(ours.to_rotated().layers[0].keys, theirs.layers[0].keys)


def test_evicts_rolls_back_and_copies_as_a_kv_cache(attached_model: Models, text: Text):
    model, logits = attached_model("llama"), []
    for kind in (RotatedStorage, windlass.KVCache):
        cache = kind(model, budget=16, policy=windlass.policies.Recent(), chunk=10, batch=2)
        fed(model, cache, text(42, rows=2), *(10,) * 4, 1, 1)
        cache.rollback(2)
        twin = copy.deepcopy(cache)
        assert type(twin) is kind
        ends = [fed(model, each, text(5, rows=2, seed=1), 3, 1, 1) for each in (cache, twin)]
        assert torch.equal(*ends)
        logits.append(ends[1])
    assert is_close(*logits)


@pytest.mark.parametrize(
    ("edit", "why"),
    [
        (lambda cache: cache.shift(3, 20, 1), "^shift would move positions"),
        (lambda cache: cache.divide(0, 20, 2), "^divide would move positions"),
        (lambda cache: cache.splice(cache), "^splice would move positions"),
        (lambda cache: cache.drop(15, 20), "^drop of the newest tokens would move positions"),
        (lambda cache: cache.keep(0, 15), "^keep without the newest tokens would move positions"),
        (lambda cache: setattr(cache, "positions", "compact"), 'reads at positions="original" only, got "compact"'),
    ],
)
def test_refuses_to_move_what_is_stored(
    attached_model: Models, text: Text, edit: Callable[[RotatedStorage], None], why: str
):
    model = attached_model("llama")
    cache = RotatedStorage(model)
    fed(model, cache, text(20), 20)
    with pytest.raises(windlass.UsageError, match=why):
        edit(cache)
    # It can free tokens before the end, which leaves the others where they are.
    cache.drop(3, 9)
    cache.keep(1, 20)
    other = windlass.KVCache(model)
    fed(model, other, text(20), 20)
    other.drop(3, 9)
    other.keep(1, 20)
    assert is_close(fed(model, cache, text(3), 1, 2), fed(model, other, text(3), 1, 2))


def test_refuses_positions_that_the_model_would_count_otherwise(attached_model: Models):
    model = attached_model("llama")
    with pytest.raises(windlass.UsageError, match='reads at positions="original" only, got "clamp'):
        RotatedStorage(model, positions="clamp(9)")
    with pytest.raises(windlass.UsageError, match="pairs are halves"):
        RotatedStorage(attached_model("cohere"))
    cache = RotatedStorage(model, batch=2)
    with pytest.raises(windlass.UsageError, match="no padding"):
        prefill(model, cache, [[1, 2], [3]])
    prefill(model, cache, [[1, 2, 3], [3, 4, 5]])
    cache.rollback([1, 0])
    with pytest.raises(windlass.UsageError, match="all rows must continue at 2"):
        prefill(model, cache, [[1], [3]])


@pytest.mark.parametrize(
    "policy",
    [ExpectedAttention(), Smoothed(TriAttention())],
    ids=repr,
)
def test_refuses_policies_that_would_take_rotated_queries_for_un_rotated_ones(
    attached_model: Models, policy: windlass.policies.Policy
) -> None:
    with pytest.raises(windlass.UsageError, match=r"Attention\(.* keeps statistics of un-rotated queries"):
        RotatedStorage(attached_model("llama"), budget=20, policy=policy)


def test_rotated_keys_are_not_taken_for_keys_before_rotation(
    attached_model: Models, text: Text, tmp_path: Path
) -> None:
    model = attached_model("llama")
    rotated, plain = RotatedStorage(model), windlass.KVCache(model)
    fed(model, rotated, text(9), 9)
    with pytest.raises(windlass.UsageError, match="before rotation"):
        rotated.save(tmp_path / "cache")
    assert not (tmp_path / "cache").exists()
    with pytest.raises(windlass.UsageError, match="the other does not"):
        plain.splice(rotated)
