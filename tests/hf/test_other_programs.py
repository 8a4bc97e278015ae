"""Changes of a model by accelerate and PEFT, in short: weights loaded when a layer runs, and a prefix for a cache."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

import windlass
from tests.helpers.models import Models, Text, read
from windlass import KVCache, UnsupportedModel, UsageError
from windlass.engine.generate import prefill
from windlass.policies import KeyDiff
from windlass.testing import tiny_model


def offload(model: PreTrainedModel) -> PreTrainedModel:
    """Its weights are there only while a layer runs, as accelerate's `cpu_offload` has it."""

    def hooked(module: nn.Module) -> None:
        weights = dict(module._parameters)
        absent = {
            name: None if each is None else nn.Parameter(each.to("meta"), requires_grad=False)
            for name, each in weights.items()
        }
        module._parameters.update(absent)
        module.register_forward_pre_hook(lambda *_: module._parameters.update(weights))
        module.register_forward_hook(lambda *_: module._parameters.update(absent))
        vars(module)["_hf_hook"] = SimpleNamespace(execution_device="cpu")

    for module in list(model.modules()):
        if module._parameters:
            hooked(module)
    assert model.device.type == "meta"
    return model


@pytest.mark.parametrize("is_attached_first", [True, False])
@pytest.mark.parametrize("store", ["plain", "int8"])
def test_offloaded_weights(
    is_attached_first: bool, store: str, attached_model: Models, text: Text, tmp_path: Path
) -> None:
    ids = text(30)
    if is_attached_first:
        model = offload(windlass.attach(tiny_model("llama")))
    else:
        model = windlass.attach(offload(tiny_model("llama")))
    found = []
    for one in (model, attached_model("llama")):
        cache = KVCache(one, 16, KeyDiff(), window=4, store=store)
        found.append(read(one, cache, ids, 10))
    torch.testing.assert_close(*found, atol=1e-5, rtol=0)
    prompts = [prefill(one, KVCache(one), ids.tolist()) for one in (model, attached_model("llama"))]
    torch.testing.assert_close(*prompts, atol=1e-5, rtol=0)
    with pytest.raises(UsageError, match=r"offloaded\. The fingerprint needs all weights"):
        KVCache(model).save(tmp_path / "file")


def test_a_model_without_weights_is_refused() -> None:
    with torch.device("meta"):
        model = tiny_model("llama")
    with pytest.raises(UnsupportedModel, match="has weights on the meta device"):
        windlass.attach(model)


def test_prefix_tuning_is_refused() -> None:
    model = windlass.attach(tiny_model("llama"))
    cache = KVCache(model)
    with pytest.raises(UsageError, match="PEFT's prefix tuning replaces the cache"):
        _ = cache.max_cache_len  # PEFT reads it from a cache that is not transformers' own
    for name in ("PREFIX_TUNING", "CARTRIDGE"):
        vars(model)["active_peft_config"] = SimpleNamespace(peft_type=name)
        with pytest.raises(UsageError, match="PEFT's prefix tuning replaces the cache"):
            KVCache(model)
    vars(model)["active_peft_config"] = SimpleNamespace(peft_type="LORA")
    assert KVCache(model).tokens_seen == [0]
