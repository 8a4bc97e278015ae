"""Sparse attention with an indexer: while it would pick every token that a query sees, and where it can't be asked."""

import copy

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

import windlass
from tests.helpers.indexers import bound_indexed, made, plain_indexed
from tests.helpers.models import Text, masked, read
from windlass import KVCache, UnsupportedModel, UsageError
from windlass.policies import Recent
from windlass.testing import VOCABULARY

PICKED, TOKENS = 24, 45
MODELS = ("deepseek_v32", "glm_moe_dsa")  # an indexer in each layer, and in one of several

each_model = pytest.mark.parametrize("name", MODELS)


def bound(name: str) -> PreTrainedModel:
    return bound_indexed(name, PICKED)


def plain(name: str) -> PreTrainedModel:
    return plain_indexed(name, PICKED)


@torch.no_grad()
def one_shot(name: str, ids: Tensor) -> Tensor:
    return plain(name)(ids, use_cache=False).logits


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert (ours - theirs).norm() <= 1e-5 * theirs.norm()


@each_model
@pytest.mark.parametrize("chunk", [1, 7, PICKED])
def test_a_text_of_as_many_tokens_as_are_picked(name: str, chunk: int, text: Text) -> None:
    ids = text(PICKED)
    assert_close(read(bound(name), KVCache(bound(name)), ids, chunk), one_shot(name, ids))


@each_model
@pytest.mark.parametrize("chunk", [1, 5])
def test_a_budget_below_equals_an_explicit_mask(name: str, chunk: int, text: Text) -> None:
    budget, sinks, ids = 19, 3, text(TOKENS)
    ours = read(bound(name), KVCache(bound(name), budget, Recent(), sinks, positions="original"), ids, chunk)
    query, key = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)[None]
    seen = (key <= query) & ((key < sinks) | (key >= query - (budget - sinks)))
    theirs = masked(plain(name), ids, seen)
    assert_close(ours, theirs)
    assert (theirs - one_shot(name, ids)).norm() > 0.05 * theirs.norm()


@each_model
def test_merged_tokens_are_read_while_nothing_is_picked(name: str, text: Text) -> None:
    ids = text(TOKENS)
    cache, twin = (KVCache(bound(name), 22, Recent(), merge="mean_count") for _ in range(2))
    for each in (cache, twin):
        read(bound(name), each, ids[:, :20], 20)
    with pytest.raises(UsageError, match=r"would pick 24 of them .* merge='mean_count.*' averages tokens"):
        read(bound(name), cache, ids[:, 20:25], 5)
    one, other = (read(bound(name), each, ids[:, 20:], 2) for each in (cache, twin))
    assert one.equal(other)


@each_model
def test_without_our_cache_the_indexer_picks(name: str, text: Text) -> None:
    ids, model = text(TOKENS), made(name, PICKED)
    windlass.attach(model)
    read(model, KVCache(model), ids[:, :9], 9)
    with torch.no_grad():
        assert model(ids, use_cache=False).logits.equal(one_shot(name, ids))
        windlass.detach(model)
        assert model(ids, use_cache=False).logits.equal(one_shot(name, ids))
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize(
    ("name", "types", "why"),
    [
        ("deepseek_v4", ["heavily_compressed_attention", "compressed_sparse_attention"], "keeps one entry for several"),
        ("minimax_m3_vl_text", ["full_attention", "minimax_m3_sparse"], "picks blocks of columns of its cache"),
    ],
)
def test_what_no_eviction_can_serve_is_refused_by_name(name: str, types: list[str], why: str) -> None:
    config = AutoConfig.for_model(name, num_hidden_layers=2, layer_types=types)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(UnsupportedModel, match=why) as caught:
        windlass.attach(model)
    assert str(caught.value).startswith(type(model).__name__)


def test_a_window_that_depends_on_the_first_pass_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model("unlimited_ocr"))
    with pytest.raises(UnsupportedModel, match="keeps the tokens of the first pass of a text"):
        windlass.attach(model)


@each_model
def test_a_copy_of_an_attached_model_is_served_by_itself(name: str, text: Text) -> None:
    ids, twin = text(PICKED), copy.deepcopy(bound(name))
    assert_close(read(twin, KVCache(twin), ids, 7), one_shot(name, ids))
    assert_close(read(bound(name), KVCache(bound(name)), ids, 7), one_shot(name, ids))


def test_the_indexer_matters_beyond() -> None:
    """Else none of this would show a fault."""
    ids = torch.arange(TOKENS)[None] % VOCABULARY
    model = made("deepseek_v32", PICKED)
    with torch.no_grad():
        sparse = model(ids, use_cache=False).logits
        for layer in model.model.layers:
            layer.self_attn.indexer.index_topk = TOKENS
        whole = model(ids, use_cache=False).logits
    assert (sparse - whole).norm() > 0.05 * whole.norm()
