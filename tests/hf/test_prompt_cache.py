"""Save and load: going on after a load is going on, and a bad file is one clear line."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel

import windlass
from tests.helpers.models import Models
from windlass import KVCache, PromptCacheError, UsageError
from windlass.cache.options import CacheOptions
from windlass.core.positions import EMPTY
from windlass.core.types import Scores
from windlass.policies import NAMES, Policy, Random, Recent, Slots
from windlass.testing import VOCABULARY

PROMPTS = (53, 38)  # tokens of the two rows
CASES = [
    *((kind(), "compact") for kind in NAMES.values()),
    *((windlass.policies.H2O(), mode) for mode in ("original", "self_extend(4, 8)", "clamp(9)")),
    (windlass.policies.KeyDiff(), "original"),
    (Random(keep_prompt=False, seed=3), "original"),
]


@dataclass(frozen=True)
class Oldest(Policy):
    """A policy from outside."""

    slope: float = -1.0

    def score(self, slots: Slots) -> Scores:
        return slots.positions.float() * self.slope


@pytest.fixture(scope="module")
def model(attached_model: Models) -> PreTrainedModel:
    return attached_model("llama")


def small(
    model: PreTrainedModel, policy: Policy | None = None, budget: int | None = 20, mode: str = "compact"
) -> KVCache:
    return KVCache(model, budget, policy, sinks=2, window=3, chunk=7, positions=mode, batch=2)


def read(model: PreTrainedModel, cache: KVCache, seed: int = 0) -> Tensor:
    """Feed one prompt per row. Returns the logits after it."""
    draw = torch.Generator().manual_seed(seed)
    return windlass.prefill(model, cache, [torch.randint(VOCABULARY, (n,), generator=draw).tolist() for n in PROMPTS])


@torch.no_grad()
def write(model: PreTrainedModel, cache: KVCache, logits: Tensor, tokens: int) -> Tensor:
    """Greedy decode. Returns the logits of each step, (tokens, batch, vocabulary)."""
    steps = []
    for _ in range(tokens):
        logits = model(input_ids=logits.argmax(-1, keepdim=True), past_key_values=cache).logits[:, -1]
        steps.append(logits)
    return torch.stack(steps)


def assert_goes_on(
    model: PreTrainedModel, cache: KVCache, path: Path, logits: Tensor, policy: Policy | None = None
) -> None:
    """Save, load, and write, take another prompt, write: the same as without."""
    cache.save(path)
    loaded = KVCache.load(path, model, policy=policy)
    for tokens in (18, 5):
        expected, got = (write(model, each, logits, tokens) for each in (cache, loaded))
        assert torch.equal(got.argmax(-1), expected.argmax(-1))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        logits, again = (read(model, each, seed=1) for each in (cache, loaded))
        torch.testing.assert_close(again, logits, rtol=1e-4, atol=1e-4)
    assert loaded.tokens == cache.tokens
    assert loaded.tokens_seen == cache.tokens_seen


@pytest.mark.parametrize(("policy", "mode"), CASES, ids=str)
def test_goes_on_after_eviction(policy: Policy, mode: str, model: PreTrainedModel, tmp_path: Path) -> None:
    cache = small(model, policy, mode=mode)
    assert_goes_on(model, cache, tmp_path / "after_prompt", read(model, cache))
    assert_goes_on(model, cache, tmp_path / "in_decode", write(model, cache, read(model, cache), 9)[-1])


FAMILIES = [
    *[("llama_dynamic", None), ("llama_dynamic", 20), ("mistral", 20), ("gemma2", 9), ("gemma2", 20)],
    *[("phi3", 9), ("smollm3", 9), ("cohere", 9), ("gpt_oss", None), ("gpt_oss", 20)],
    *[("gemma3n", 20), ("gemma4_e", 9), ("gemma4_e", None)],
]


@pytest.mark.parametrize(("family", "budget"), FAMILIES)
def test_goes_on_in_every_kind_of_layer(
    family: str, budget: int | None, attached_model: Models, tmp_path: Path
) -> None:
    model = attached_model(family)
    cache = small(model, windlass.policies.SnapKV(observed_queries=4), budget, "original")
    assert_goes_on(model, cache, tmp_path / "cache", write(model, cache, read(model, cache), 5)[-1])


def test_transformers_generate_goes_on(model: PreTrainedModel, tmp_path: Path) -> None:
    cache = KVCache(model, budget=20, sinks=2, window=3, policy=Recent())
    ids = torch.arange(60)[None] % VOCABULARY
    ids = model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)
    cache.save(tmp_path / "cache")
    loaded = KVCache.load(tmp_path / "cache", model)
    expected, got = (
        model.generate(ids, past_key_values=each, max_new_tokens=9, do_sample=False) for each in (cache, loaded)
    )
    assert torch.equal(got, expected)


def test_everything_but_the_tensors_comes_back(model: PreTrainedModel, tmp_path: Path) -> None:
    policy = windlass.policies.SnapKV(observed_queries=5, pool=3)
    cache = KVCache(model, 25, policy, sinks=1, window=4, chunk=9, positions="self_extend(3, 7)", batch=2, rollback=5)
    read(model, cache)
    cache.save(tmp_path / "cache")
    loaded = KVCache.load(tmp_path / "cache", model)
    for name in ("limits", "policy", "positions", "batch_size", "rows"):
        assert getattr(loaded, name) == getattr(cache, name), name
    assert loaded.tokens == cache.tokens
    held, again = ([layer.table.occupancy_bound for layer in each.layers] for each in (cache, loaded))
    assert again == held == [25, 25]


def test_a_cache_that_saw_nothing(model: PreTrainedModel, tmp_path: Path) -> None:
    small(model).save(tmp_path / "cache")
    loaded = KVCache.load(tmp_path / "cache", model)
    assert loaded.tokens == [[], []]
    torch.testing.assert_close(read(model, loaded), read(model, small(model)))


@torch.no_grad()
def test_tokens_stay_unknown(model: PreTrainedModel, tmp_path: Path) -> None:
    cache = KVCache(model)
    model(inputs_embeds=torch.randn(1, 5, 60), past_key_values=cache)
    cache.save(tmp_path / "cache")
    assert KVCache.load(tmp_path / "cache", model).tokens is None


def test_rollback_after_a_load(model: PreTrainedModel, tmp_path: Path) -> None:
    """Exact where nothing was evicted, refused where the evicted tokens are gone."""
    for budget in (None, 20):
        cache = small(model, budget=budget)
        read(model, cache)
        cache.save(tmp_path / "cache")
        loaded = KVCache.load(tmp_path / "cache", model)
        if budget is None:
            loaded.rollback(9)
            cache.rollback(9)
            torch.testing.assert_close(read(model, loaded, seed=1), read(model, cache, seed=1))
        else:
            with pytest.raises(UsageError, match="rollback of 1 tokens"):
                loaded.rollback(1)


def test_the_saved_cache_is_left_alone(model: PreTrainedModel, tmp_path: Path) -> None:
    cache = small(model)
    write(model, cache, read(model, cache), 3)
    before = [{name: tensor.clone() for name, tensor in layer.tensors().items()} for layer in cache.layers]
    cache.save(tmp_path / "cache")
    for layer, tensors in zip(cache.layers, before, strict=True):
        for name, tensor in layer.tensors().items():
            assert torch.equal(tensor, tensors[name]), name
    cache.rollback(3)


def test_a_file_holds_what_is_held_and_no_more(model: PreTrainedModel, tmp_path: Path) -> None:
    cache = small(model, windlass.policies.H2O())
    write(model, cache, read(model, cache), 3)
    path = tmp_path / "cache"
    cache.save(path)
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    positions = [tensor for name, tensor in tensors.items() if name.endswith("positions")]
    assert [tuple(p.shape) for p in positions] == [(2, 3, 20)] * 2
    assert all(int(p.min()) >= EMPTY for p in positions)
    # A slot: a key and a value of 8 float32 channels, a position, a float of state.
    slots = 2 * 2 * 3 * 20 * (2 * 8 * 4 + 4 + 4)
    tokens = (53 + 38 + 2 * 3) * 4
    assert sum(tensor.nbytes for tensor in tensors.values()) == slots + tokens
    assert slots + tokens < path.stat().st_size < slots + tokens + 4096
    assert slots < cache.bytes_held


def test_a_policy_from_outside(model: PreTrainedModel, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    cache = small(model, Oldest())
    assert_goes_on(model, cache, path, read(model, cache), Oldest())
    with pytest.raises(PromptCacheError, match=r"policy Oldest\(slope=-1.0\).*load\(path, model, policy=...\)"):
        KVCache.load(path, model)
    with pytest.raises(PromptCacheError, match=r"Oldest\(slope=-1.0\), not with Oldest\(slope=2.0\)"):
        KVCache.load(path, model, policy=Oldest(2.0))


@pytest.mark.parametrize("given", [None, 9])
def test_the_window_follows_the_budget_after_a_load_too(
    given: int | None, model: PreTrainedModel, tmp_path: Path
) -> None:
    """`compress` uses the given window. Where none was given, it takes the default of the new budget."""
    cache = KVCache(model, budget=64, window=given, chunk=64, batch=2, policy=Recent())
    logits = read(model, cache)
    cache.save(tmp_path / "cache")
    loaded = KVCache.load(tmp_path / "cache", model)
    assert loaded.limits == cache.limits
    for each in (cache, loaded):
        each.compress(16)
    assert loaded.limits == cache.limits
    assert cache.limits.window == (3 if given is None else 9)  # a quarter of the 12 slots that 4 sinks leave
    expected, got = (write(model, each, logits, 5) for each in (cache, loaded))
    assert torch.equal(got, expected)


def test_all_options_travel(model: PreTrainedModel, tmp_path: Path) -> None:
    options = CacheOptions(40, windlass.policies.H2O(), 3, None, 7, "clamp(9)", 2, 5, "int8", "mean_count(next)")
    cache = KVCache.from_options(model, options)
    read(model, cache)
    cache.save(tmp_path / "cache")
    loaded = KVCache.load(tmp_path / "cache", model).options
    assert loaded.document() == options.document()
    assert loaded.policy == options.policy
