"""Multi-head latent attention: the latent is held once, and reads equal transformers' expanded keys and values."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

import windlass
from tests.helpers.models import Models, Text, logits_at, masked, read
from windlass import KVCache, UnsupportedModel
from windlass.hf.deepseek import EXPAND
from windlass.kernels import cpu
from windlass.policies import NAMES, Recent
from windlass.testing import VOCABULARY, tiny_model

TOKENS, RANK, WIDTH = 45, 24, 32  # the width of a key: its latent, and the channels that all heads share
FAMILY = "deepseek_v3"
FAMILIES = (FAMILY, "minicpm3")
TOLERANCE = 1e-5

each_family = pytest.mark.parametrize("family", FAMILIES)


@torch.no_grad()
def one_shot(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = TOLERANCE) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).norm() <= tolerance * theirs.norm()


@pytest.fixture(scope="module")
def one_layer(plain_model: Models) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model of one layer, plain and attached: its latents depend on the tokens alone."""
    config = plain_model(FAMILY).config.__class__(**{**plain_model(FAMILY).config.to_dict(), "num_hidden_layers": 1})
    torch.manual_seed(3)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model = AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(plain.state_dict())
    return plain, windlass.attach(model)


@pytest.fixture
def _plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from windlass import kernels

    monkeypatch.setattr(cpu, "chosen", lambda: "none")
    kernels._is_compiled.cache_clear()
    yield
    kernels._is_compiled.cache_clear()


@each_family
@pytest.mark.parametrize("chunk", [1, 7, 18])
def test_a_budget_equals_an_explicit_mask(
    family: str, chunk: int, plain_model: Models, attached_model: Models, text: Text
) -> None:
    budget, sinks, ids = 20, 3, text(TOKENS)
    model = attached_model(family)
    ours = read(model, KVCache(model, budget, Recent(), sinks, positions="original"), ids, chunk)
    query, key = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)[None]
    seen = (key <= query) & ((key < sinks) | (key >= query - (budget - sinks)))
    theirs = masked(plain_model(family), ids, seen)
    assert_close(ours, theirs)
    assert (theirs - one_shot(plain_model(family), ids)).norm() > 0.05 * theirs.norm()


@pytest.mark.parametrize(("store", "per_token"), [("plain", 1152), ("int8", 576 + 2), ("int4", 288 + 36 * 4)])
def test_bytes_of_deepseek_v3s_shape(store: str, per_token: int) -> None:
    """Per token and layer in bfloat16, where keys and values of 128 heads would take 81,920."""
    options = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": 2,
        "first_k_dense_replace": 2,
        "q_lora_rank": 32,
        "bos_token_id": None,
    }  # the rest is that of the model itself
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("deepseek_v3", **options), dtype=torch.bfloat16)
    cache = KVCache(windlass.attach(model.eval()), 40, Recent(), sinks=3, store=store, chunk=9)
    read(model, cache, torch.arange(61)[None] % VOCABULARY, 9)
    for layer in cache.layers:
        parts = [layer.store.tensors()[name] for name in layer.store.part_names if name in layer.store.tensors()]
        assert sum(part.nbytes for part in parts) == per_token * layer.table.slots
        assert layer.store.packed()[1].data.data_ptr() == layer.store.packed()[0].data.data_ptr()


@pytest.mark.parametrize("store", ["plain", "int8", "int4", "int8(sinks=2, newest=5)", "int4(sinks=3, newest=7)"])
@pytest.mark.parametrize("chunk", [1, 29])
@pytest.mark.usefixtures("_plain_pytorch")
def test_kernels_read_every_store_as_the_reference_does(
    store: str,
    chunk: int,
    one_layer: tuple[PreTrainedModel, PreTrainedModel],
    text: Text,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from windlass import kernels

    model, ids = one_layer[1], text(TOKENS)
    truth = read(model, KVCache(model, 20, Recent(), store=store), ids, chunk)
    monkeypatch.undo()
    kernels._is_compiled.cache_clear()
    ours = KVCache(model, 20, Recent(), store=store)
    assert_close(read(model, ours, ids, chunk), truth)
    for layer in ours.layers:
        assert layer.store.values().equal(layer.store.keys()[..., -RANK:])


@pytest.mark.parametrize("policy", sorted(set(NAMES) - {"DMC"}))
def test_every_policy_keeps_its_budget(policy: str, attached_model: Models, text: Text) -> None:
    model = attached_model(FAMILY)
    cache = KVCache(model, 24, policy, chunk=16)
    windlass.prefill(model, cache, [text(TOKENS)[0].tolist()])
    assert read(model, cache, text(9, seed=5), 1).isfinite().all()
    assert all(int((layer.positions >= 0).sum(-1).max()) <= 24 for layer in cache.layers)


def test_a_merged_token_is_the_mean_of_whole_keys(attached_model: Models, text: Text) -> None:
    model = attached_model(FAMILY)
    cache, whole = KVCache(model, 20, Recent(), 3, merge="mean_count"), KVCache(model)
    ids = text(26)
    read(model, cache, ids, 1)
    read(model, whole, ids, 1)
    ours, theirs = cache.layers[0].table, whole.layers[0].table  # of the first: it is fed the same in both
    counts = ours.state["merged"][0, 0] + 1
    held = ours.positions[0, 0] >= 0
    total = (ours.store.keys()[0, 0] * counts[:, None])[held].sum(0)
    assert counts[held].sum() == 26
    assert_close(total, theirs.store.keys()[0, 0, :26].sum(0), 1e-4)
    assert ours.store.values().equal(ours.store.keys()[..., -RANK:])


def test_edits_and_positions_are_those_of_any_layer(
    one_layer: tuple[PreTrainedModel, PreTrainedModel], text: Text
) -> None:
    (plain, model), ids = one_layer, text(30)[0].tolist()
    for mode, moved in (("original", 6), ("compact", 0)):
        cache = KVCache(model, positions=mode)
        read(model, cache, torch.tensor([ids[:29]]), 29)
        cache.drop(11, 17)
        left, places = ids[:11] + ids[17:], [*range(11), *(at + moved for at in range(11, 24))]
        assert_close(read(model, cache, torch.tensor([[ids[29]]]), 1)[0, -1], logits_at(plain, left, places))


def test_a_dynamic_cache_of_transformers_comes_and_goes(
    plain_model: Models, attached_model: Models, text: Text
) -> None:
    """It holds latents as keys, and the channels that all heads share, rotated, as values."""
    plain, model, ids = plain_model(FAMILY), attached_model(FAMILY), text(TOKENS)
    own = DynamicCache(config=plain.config)
    with torch.no_grad():
        plain(ids[:, :30], past_key_values=own)
        cache = KVCache.from_rotated(model, own)
        expected = one_shot(plain, ids)[:, 30:]
        assert_close(read(model, cache, ids[:, 30:40], 10), expected[:, :10])
        theirs = plain(ids[:, 40:], past_key_values=cache.to_rotated()).logits
    assert_close(theirs, expected[:, 10:])


@pytest.mark.parametrize("store", ["plain", "int4(sinks=2, newest=5)"])
def test_a_file_goes_on(store: str, attached_model: Models, text: Text, tmp_path: Path) -> None:
    model, ids = attached_model(FAMILY), text(TOKENS)
    cache = KVCache(model, 20, "snapkv", store=store)
    read(model, cache, ids[:, :30], 30)
    cache.save(tmp_path / "cache")
    loaded = KVCache.load(tmp_path / "cache", model)
    assert not any("value" in name and tensor.numel() for name, tensor in loaded.layers[0].store.tensors().items())
    assert read(model, loaded, ids[:, 30:], 1).equal(read(model, cache, ids[:, 30:], 1))


def test_a_pass_that_fails_leaves_the_cache_as_it_was(attached_model: Models, text: Text) -> None:
    model, ids = attached_model(FAMILY), text(TOKENS)
    caches = [KVCache(model, 20, Recent()) for _ in range(2)]
    for cache in caches:
        read(model, cache, ids[:, :30], 7)
    last = model.model.layers[-1].self_attn

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    handle = last.o_proj.register_forward_pre_hook(fail)
    with pytest.raises(KeyboardInterrupt):
        read(model, caches[0], ids[:, 30:37], 7)
    handle.remove()
    one, other = (read(model, cache, ids[:, 30:], 1) for cache in caches)
    assert one.equal(other)
    caches[0].rollback(5)
    assert_close(read(model, caches[0], ids[:, -5:], 1), other[:, -5:])


class Adapted(nn.Linear):
    """As an adapter is: its weight is not all of it."""

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(states) * 1.5


def test_matrices_are_those_that_the_module_applies(text: Text) -> None:
    plain, model = tiny_model(FAMILY), tiny_model(FAMILY)
    for each in (plain, model):
        for layer in each.model.layers:
            layer.self_attn.kv_b_proj.__class__ = Adapted
    windlass.attach(model)
    assert_close(read(model, KVCache(model), text(TOKENS), 7), one_shot(plain, text(TOKENS)))


def test_what_is_no_matrix_for_each_head_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(FAMILY)
    kind: Any = type(model.model.layers[0].self_attn)
    expand = kind.expand_kv
    monkeypatch.setattr(kind, EXPAND, lambda self, latents, shared: expand(self, latents.tanh(), shared))
    with pytest.raises(UnsupportedModel, match="DeepseekV3ForCausalLM makes keys and values out of a latent otherwise"):
        windlass.attach(model)
    assert EXPAND not in vars(model.model.layers[0].self_attn)


def test_detached_and_without_our_cache_the_model_is_its_own(plain_model: Models, text: Text) -> None:
    model, ids = tiny_model(FAMILY), text(TOKENS)
    expected = one_shot(plain_model(FAMILY), ids)
    windlass.attach(model)
    read(model, KVCache(model), ids, 7)
    assert one_shot(model, ids).equal(expected)
    windlass.detach(model)
    assert one_shot(model, ids).equal(expected)
    assert not any(EXPAND in vars(module) for module in model.modules())
