"""Save and load: going on after a load is going on, and a bad file is one clear line."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

import windlass
from windlass import KVCache, Policy, PromptCacheError, UsageError, prompt_cache
from windlass.fingerprint import fingerprint
from windlass.policies import NAMES, KeyNorm, Random, Slots
from windlass.positions import EMPTY
from windlass.shapes import Scores
from windlass.testing import VOCABULARY, tiny_model

MODES = ("original", "compact", "self_extend(4, 8)", "clamp(9)")
PROMPTS = (53, 38)  # tokens of the two rows
POLICIES = [*(kind() for kind in NAMES.values()), Random(keep_prompt=False, seed=3)]


@dataclass(frozen=True)
class Oldest(Policy):
    """A policy from outside."""

    slope: float = -1.0

    def score(self, slots: Slots) -> Scores:
        return slots.positions.float() * self.slope


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return windlass.attach(tiny_model("llama"))


@pytest.fixture(scope="module")
def saved(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small file, of a cache that has evicted and holds policy state."""
    path = tmp_path_factory.mktemp("saved") / "cache.safetensors"
    cache = small(model, policy=windlass.H2O())
    read(model, cache)
    prompt_cache.save(cache, path, model)
    return path


def small(
    model: PreTrainedModel, policy: Policy | None = None, budget: int | None = 20, mode: str = "compact"
) -> KVCache:
    return KVCache(model, budget, policy, sinks=2, window=3, chunk=7, positions=mode, batch=2)


def read(model: PreTrainedModel, cache: KVCache, seed: int = 0) -> Tensor:
    """Feed one prompt per row; the logits after it."""
    draw = torch.Generator().manual_seed(seed)
    return windlass.prefill(model, cache, [torch.randint(VOCABULARY, (n,), generator=draw).tolist() for n in PROMPTS])


@torch.no_grad()
def write(model: PreTrainedModel, cache: KVCache, logits: Tensor, tokens: int) -> Tensor:
    """Greedy decode; the logits of each step, (tokens, batch, vocabulary)."""
    steps = []
    for _ in range(tokens):
        logits = model(input_ids=logits.argmax(-1, keepdim=True), past_key_values=cache).logits[:, -1]
        steps.append(logits)
    return torch.stack(steps)


def assert_goes_on(
    model: PreTrainedModel, cache: KVCache, path: Path, logits: Tensor, policy: Policy | None = None
) -> None:
    """Save, load, and write, take another prompt, write: the same as without."""
    prompt_cache.save(cache, path, model)
    loaded = prompt_cache.load(path, model, policy)
    for tokens in (23, 12):
        expected, got = (write(model, each, logits, tokens) for each in (cache, loaded))
        assert torch.equal(got.argmax(-1), expected.argmax(-1))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        logits, again = (read(model, each, seed=1) for each in (cache, loaded))
        torch.testing.assert_close(again, logits, rtol=1e-4, atol=1e-4)
    assert loaded.tokens == cache.tokens
    assert loaded.tokens_seen == cache.tokens_seen


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_goes_on_after_eviction(policy: Policy, mode: str, model: PreTrainedModel, tmp_path: Path) -> None:
    cache = small(model, policy, mode=mode)
    logits = read(model, cache)
    assert_goes_on(model, cache, tmp_path / "after_prompt", logits)
    assert_goes_on(model, cache, tmp_path / "in_decode", write(model, cache, read(model, cache), 9)[-1])


@pytest.mark.parametrize("family", ["llama_dynamic", "mistral", "gemma2", "phi3", "smollm3", "cohere", "gpt_oss"])
@pytest.mark.parametrize("budget", [None, 20, 9])
def test_goes_on_in_every_kind_of_layer(family: str, budget: int | None, tmp_path: Path) -> None:
    model = windlass.attach(tiny_model(family))
    cache = small(model, windlass.SnapKV(observed_queries=4), budget, "original")
    logits = write(model, cache, read(model, cache), 5)[-1]
    assert_goes_on(model, cache, tmp_path / "cache", logits)
