"""The mean keys of a model, which low-bit stores count from."""

import copy

import pytest
import torch
from transformers import PreTrainedModel

import windlass
from tests.helpers.models import Models, Text, read
from windlass import KVCache
from windlass.hf.attach import attached
from windlass.testing import tiny_model


@pytest.fixture
def constant(plain_model: Models) -> PreTrainedModel:
    """A model whose keys are the bias of its key projection, whatever it reads."""
    model = copy.deepcopy(plain_model("qwen2"))
    for block in model.model.layers:
        torch.nn.init.zeros_(block.self_attn.k_proj.weight)
        torch.nn.init.normal_(block.self_attn.k_proj.bias, std=30.0)
    return windlass.attach(model)


def test_a_bias_of_the_keys_costs_nothing(constant: PreTrainedModel, text: Text) -> None:
    cache, plain = (KVCache(constant, store=store) for store in ("int4", "plain"))
    for one in (cache, plain):
        read(constant, one, text(20), 20)
    for ours, truth, key_means in zip(cache.layers, plain.layers, attached(constant).key_means or [], strict=True):
        torch.testing.assert_close(ours.store.keys()[:, :, :20], truth.store.keys()[:, :, :20], atol=1e-4, rtol=0)
        assert key_means is not None
        torch.testing.assert_close(key_means, truth.store.keys()[0, :, 0], atol=1e-4, rtol=0)


def test_key_means_are_measured_once_and_draw_from_no_shared_seed(
    plain_model: Models,
) -> None:
    model = windlass.attach(copy.deepcopy(plain_model("llama")))
    state = torch.get_rng_state()
    KVCache(model)
    assert attached(model).key_means is None  # a plain cache needs none
    KVCache(model, store="int8")
    first = attached(model).key_means
    assert torch.get_rng_state().equal(state)
    KVCache(model, store="int4")
    assert attached(model).key_means is first
    attached(model).key_means = None
    KVCache(model, store="int4")
    for again, mean in zip(attached(model).key_means or [], first or [], strict=True):
        assert again is not None
        assert mean is not None
        assert again.equal(mean)


def test_describe_tells_the_store(attached_model: Models) -> None:
    assert "  store    int4" in KVCache(attached_model("llama"), store="int4").describe()


def test_a_model_that_writes_no_text_has_no_key_means() -> None:
    model = windlass.attach(tiny_model("llama").model)
    KVCache(model, store="int8")
    assert attached(model).key_means == [None] * len(attached(model).rotaries)
