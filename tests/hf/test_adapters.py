"""PEFT's adapters: a prompt-cache file belongs to the weights that compute, and `attach` to the model that runs."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model

import windlass
from tests.helpers.models import Text
from windlass import KVCache, PromptCacheError, UsageError
from windlass.hf.weights import fingerprint
from windlass.testing import tiny_model

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT meets deprecated names of transformers
TARGETS = ["q_proj", "v_proj", "down_proj"]


def lora(rank: int = 4, **options: Any) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=8, target_modules=TARGETS, init_lora_weights=False, **options)


def tuned(seed: int = 0) -> Any:
    """A model with the adapters a, which is active, and b."""
    torch.manual_seed(seed)
    model: Any = get_peft_model(tiny_model("llama"), lora(), "first")
    model.add_adapter("second", lora(2))
    return model.eval()


@torch.no_grad()
def logits(model: Any, text: Text) -> torch.Tensor:
    found: torch.Tensor = model(text(12)).logits
    return found


def test_equal_fingerprints_are_equal_logits(text: Text) -> None:
    model, found = tuned(), {}

    def note(name: str) -> None:
        found[name] = fingerprint(model), logits(model, text)

    found["plain"] = fingerprint(tiny_model("llama")), logits(tiny_model("llama"), text)
    note("a")
    with model.disable_adapter():
        note("off")
    model.set_adapter("second")
    note("b")
    model.base_model.set_adapter(["first", "second"])
    note("a and b")
    model.base_model.set_adapter(["second", "first"])
    note("b and a")
    model.set_adapter("first")
    scales = [layer for layer in model.modules() if isinstance(layer, peft.tuners.lora.Linear)]
    for layer in scales:
        layer.scaling["first"] *= 2
    note("a doubled")
    for layer in scales:
        layer.scaling["first"] /= 2
    model.delete_adapter("second")
    note("a without b")
    model.merge_adapter()
    note("a merged")
    model = model.merge_and_unload()
    note("a unloaded")
    same = [{"plain", "off"}, {"a", "a without b"}, {"a and b", "b and a"}, {"a merged", "a unloaded"}]
    for one, (mark, ours) in found.items():
        for other, (mark_of_other, theirs) in found.items():
            assert (mark == mark_of_other) == (one == other or {one, other} in same), (one, other)
            if mark == mark_of_other:
                torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "config",
    [
        lora(use_dora=True),
        lora(modules_to_save=["lm_head"]),
        IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"], init_ia3_weights=False),
    ],
    ids=["dora", "modules_to_save", "ia3"],
)
def test_an_idle_adapter_of_any_kind_does_not_count(config: Any) -> None:
    torch.manual_seed(0)
    model: Any = get_peft_model(tiny_model("llama"), config, "first")
    active = fingerprint(model)
    assert active != fingerprint(tiny_model("llama"))
    model.add_adapter("second", config)
    assert fingerprint(model) == active
    model.set_adapter("second")
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if "second" in name:
                weights.mul_(1.5)
    assert fingerprint(model) != active
    with model.disable_adapter():
        assert fingerprint(model) == fingerprint(tiny_model("llama"))


def test_a_file_is_of_the_adapter_that_was_active(text: Text, tmp_path: Path) -> None:
    path = tmp_path / "cache"
    model: Any = windlass.attach(tuned())
    cache = KVCache(model, 16)
    with torch.no_grad():
        model(text(30), past_key_values=cache)
    cache.save(path)
    KVCache.load(path, model)
    model.add_adapter("idle", lora())
    KVCache.load(path, model)
    model.set_adapter("second")
    with pytest.raises(PromptCacheError, match="config or weights differ"):
        KVCache.load(path, model)
    model.set_adapter("first")
    with model.disable_adapter(), pytest.raises(PromptCacheError, match="config or weights differ"):
        KVCache.load(path, model)
    KVCache.load(path, model)


@pytest.mark.parametrize("is_merged", [False, True])
def test_the_model_inside_of_an_attached_one_is_told_of_it(is_merged: bool, text: Text) -> None:
    model = windlass.attach(tuned())
    outer, ids = model, text(12)
    inner: Any = model.merge_and_unload() if is_merged else model.get_base_model()
    with pytest.raises(UsageError, match=r"shares its layers with a PeftModel\w* that is attached. .*detach"):
        windlass.attach(inner)
    expected = logits(outer, text)
    with torch.no_grad():
        ours = outer(ids, past_key_values=KVCache(outer)).logits
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
    windlass.attach(windlass.detach(inner))
    with torch.no_grad():
        ours = inner(ids, past_key_values=KVCache(inner)).logits
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)
