"""The seam: changes by `attach`, unchanged parts, and refused models."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedModel

import windlass
from tests.helpers.models import Models, Text
from windlass import KVCache, UnsupportedModel, UsageError
from windlass.policies import H2O
from windlass.testing import tiny_model

TOLERANCE = 1e-5
GREEDY = {"do_sample": False, "pad_token_id": 0}


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: Tensor, cache: object = None, **options: object) -> Tensor:
    return model(ids, past_key_values=cache, **options).logits


def held(cache: KVCache) -> list[object]:
    """Everything that a step may change."""
    counts = [list(cache.tokens_seen), list(cache.next_positions), copy.deepcopy(cache.tokens), cache.columns_seen]
    tensors = [tensor.clone() for layer in cache.layers for tensor in layer.tensors().values()]
    return [counts, [layer.table.occupancy_bound for layer in cache.layers], tensors]


def assert_same(one: list[Any], other: list[Any]) -> None:
    assert one[:2] == other[:2]
    assert all(torch.equal(a, b) for a, b in zip(one[2], other[2], strict=True))


def trained(model: PreTrainedModel, ids: Tensor) -> list[Tensor]:
    """The logits and all gradients of one training step."""
    model.train()
    model.zero_grad()
    torch.manual_seed(3)
    out = model(ids, labels=ids)
    out.loss.backward()
    model.eval()
    return [out.logits.detach(), *(parameter.grad.clone() for parameter in model.parameters())]


@pytest.mark.parametrize("family", ["llama_dynamic", "gemma3", "gpt_oss"])
def test_without_our_cache_nothing_changes(family: str, text: Text) -> None:
    model, ids = tiny_model(family), text(21, rows=2)
    model.config.attention_dropout = 0.3
    before, states = trained(model, ids), copy.deepcopy(model.state_dict())
    plain = logits_of(model, ids)
    generated = model.generate(ids, max_new_tokens=5, **GREEDY)

    def assert_unchanged() -> None:
        assert torch.equal(logits_of(model, ids), plain)
        assert torch.equal(model.generate(ids, max_new_tokens=5, **GREEDY), generated)
        assert all(torch.equal(a, b) for a, b in zip(trained(model, ids), before, strict=True))
        assert model.config._attn_implementation == "eager"
        assert list(model.state_dict()) == list(states)
        assert all(torch.equal(tensor, states[name]) for name, tensor in model.state_dict().items())

    assert windlass.attach(model) is model
    assert_unchanged()
    logits_of(model, ids, KVCache(model, batch=2))
    assert_unchanged()
    assert windlass.detach(model) is model
    assert_unchanged()
    assert [name for name, module in model.named_modules() if "windlass" in vars(module)] == []
    assert [name for name, module in model.named_modules() if "forward" in vars(module)] == []


def test_attach_keeps_each_modules_mode() -> None:
    model = tiny_model("llama").train()
    model.model.layers[1].eval()
    windlass.attach(model)
    assert model.training
    assert model.model.layers[0].training
    assert not model.model.layers[1].training


def test_attach_twice_is_attach(text: Text) -> None:
    model = windlass.attach(tiny_model("llama"))
    cache = KVCache(model)
    windlass.attach(model)
    expected = logits_of(tiny_model("llama"), text(9))
    assert torch.allclose(logits_of(model, text(9), cache), expected, rtol=0, atol=TOLERANCE)
    windlass.detach(model)
    with pytest.raises(UsageError, match=r"LlamaForCausalLM is not attached.*windlass\.attach"):
        windlass.detach(model)


def test_deepcopy_of_an_attached_model_stands_alone(text: Text) -> None:
    model = windlass.attach(tiny_model("gemma3"))
    twin, ids = copy.deepcopy(model), text(30)
    expected = logits_of(model, ids)
    with torch.no_grad():
        model.get_input_embeddings().weight.zero_()
    windlass.detach(model)
    cache = KVCache(twin)
    assert torch.allclose(logits_of(twin, ids, cache), expected, rtol=0, atol=TOLERANCE)
    assert cache.tokens_seen == [30]
    assert torch.equal(logits_of(windlass.detach(twin), ids), expected)


def test_save_pretrained_of_an_attached_model(tmp_path: Path, text: Text) -> None:
    model, ids = windlass.attach(tiny_model("qwen2")), text(20)
    expected = logits_of(model, ids, KVCache(model))
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert "windlass" not in (tmp_path / "config.json").read_text()
    assert torch.equal(logits_of(again, ids), logits_of(model, ids))
    assert torch.equal(logits_of(windlass.attach(again), ids, KVCache(again)), expected)


def test_a_cache_needs_its_own_attached_model(text: Text) -> None:
    model = tiny_model("llama")
    with pytest.raises(UsageError, match=r"LlamaForCausalLM is not attached.*windlass\.attach"):
        KVCache(model)
    cache = KVCache(windlass.attach(model))
    with pytest.raises(UsageError, match=r"not attached.*windlass\.attach"):
        logits_of(tiny_model("llama"), text(5), cache)
    with pytest.raises(UsageError, match="made for another model"):
        logits_of(windlass.attach(tiny_model("llama")), text(5), cache)
    windlass.detach(model)
    with pytest.raises(UsageError, match=r"not attached.*windlass\.attach"):
        model.generate(text(5), past_key_values=cache, max_new_tokens=2, **GREEDY)
    assert cache.tokens_seen == [0]


def test_sdpa_models_too(text: Text) -> None:
    model, ids = tiny_model("qwen2"), text(33)
    model.set_attn_implementation("sdpa")
    expected = logits_of(model, ids)
    cache = KVCache(windlass.attach(model))
    assert torch.allclose(logits_of(model, ids, cache), expected, rtol=0, atol=TOLERANCE)
    assert model.config._attn_implementation == "sdpa"


def test_a_cache_for_other_rows_is_refused(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    with pytest.raises(UsageError, match=r"batch=1.*2 rows"):
        logits_of(model, text(5, rows=2), KVCache(model))


REFUSED: list[tuple[dict[str, object], str]] = [
    ({"position_ids": torch.arange(11, 16)[None]}, r"position_ids\[0, 0\] is 11.*position 10"),
    ({"position_ids": torch.tensor([[10, 11, 13, 14, 15]])}, r"position_ids\[0, 2\] is 13.*position 12"),
    ({"position_ids": torch.arange(15)[None]}, r"position_ids are \(1, 15\), expected \(1, 5\)"),
    ({"attention_mask": torch.ones(1, 1, 5, 15, dtype=torch.bool)}, "two-dimensional"),
    ({"attention_mask": torch.ones(1, 9, dtype=torch.long)}, "covers 9 columns. Expected 15, the 10 seen and 5 new"),
    ({"output_attentions": True}, "output_attentions is not available"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
def test_a_refused_call_changes_nothing(
    options: dict[str, object], message: str, attached_model: Models, text: Text
) -> None:
    model, ids = attached_model("llama"), text(15)
    cache = KVCache(model, budget=12, policy=H2O(), window=3)
    logits_of(model, ids[:, :10], cache)
    before = held(cache)
    with pytest.raises(UsageError, match=message):
        logits_of(model, ids[:, 10:], cache, **options)
    assert_same(held(cache), before)
    assert model.config._attn_implementation == "eager"
    assert logits_of(model, ids[:, 10:], cache).isfinite().all()


def test_attention_matrices_that_the_config_asks_for_are_refused(text: Text) -> None:
    model = windlass.attach(tiny_model("llama"))
    model.config.output_attentions = True
    with pytest.raises(UsageError, match="output_attentions is not available"):
        logits_of(model, text(5), KVCache(model))


def test_training_with_a_cache_is_refused(text: Text) -> None:
    model = windlass.attach(tiny_model("llama")).train()
    cache = KVCache(model)
    with pytest.raises(UsageError, match=r"model\.eval\(\)"):
        model(text(5), past_key_values=cache)
    assert cache.tokens_seen == [0]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("tokens", [1, 9])
def test_a_pass_that_fails_half_way_leaves_the_cache_as_it_was(
    error: type[BaseException], tokens: int, text: Text
) -> None:
    model, ids = windlass.attach(tiny_model("gemma3")), text(40)
    cache, twin = (KVCache(model, budget=20, policy=H2O(), window=3) for _ in range(2))
    for one in (cache, twin):
        logits_of(model, ids[:, :24], one)
        logits_of(model, ids[:, 24:30], one)
    is_failing = True

    def fail(*_: object) -> None:
        if is_failing:
            raise error("half way")

    handle = model.model.layers[2].mlp.register_forward_hook(fail)
    with pytest.raises(error, match="half way"):
        logits_of(model, ids[:, 30 : 30 + tokens], cache)
    is_failing = False
    assert (cache.tokens_seen, cache.next_positions, cache.get_seq_length()) == ([30], [30], 30)
    for mine, theirs in zip(cache.layers, twin.layers, strict=True):
        assert mine.table.occupancy_bound == theirs.table.occupancy_bound
        assert positions_held(mine.positions) == positions_held(theirs.positions)
    assert torch.equal(logits_of(model, ids), logits_of(tiny_model("gemma3"), ids))
    assert torch.equal(logits_of(model, ids[:, 30:], cache), logits_of(model, ids[:, 30:], twin))
    handle.remove()


def positions_held(positions: Tensor) -> list[list[int]]:
    """Per row and head, sorted."""
    return [sorted(at for at in head if at >= 0) for head in positions.flatten(0, 1).tolist()]


SMALL = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
UNSUPPORTED: list[tuple[str, dict[str, object], str]] = [
    ("t5", {"vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 40, "num_layers": 2}, "T5Model is an encoder-decoder"),
    ("gpt2", {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4}, "GPT2LMHeadModel has no rotary module"),
    ("opt", {**SMALL, "word_embed_proj_dim": 32, "ffn_dim": 40}, "OPTForCausalLM has no rotary module"),
    (
        "gptj",
        {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
        "GPTJForCausalLM (has no rotary|does not rotate the keys)",  # by the release of transformers
    ),
    (
        "bloom",
        {"vocab_size": 97, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        "BloomForCausalLM has no rotary module",
    ),
    ("mpt", {"vocab_size": 97, "d_model": 32, "n_layers": 2, "n_heads": 4}, "MptForCausalLM has no rotary module"),
    ("falcon", {**SMALL, "alibi": False}, "FalconForCausalLM does not let its attention function be chosen"),
    ("mamba", {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2}, "MambaForCausalLM is recurrent"),
    ("lfm2", {**SMALL, "num_key_value_heads": 2, "layer_types": ["conv"] * 2}, "Lfm2ForCausalLM is recurrent in all"),
    (
        "gemma3_text",
        {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "use_bidirectional_attention": True},
        "Gemma3ForCausalLM: this model asks for a mask that is not causal",
    ),
]


@pytest.mark.parametrize(("model_type", "options", "message"), UNSUPPORTED, ids=[entry[0] for entry in UNSUPPORTED])
def test_what_cannot_work_is_refused_by_name(model_type: str, options: dict[str, object], message: str) -> None:
    config = AutoConfig.for_model(model_type, **options)
    make = AutoModel if config.is_encoder_decoder else AutoModelForCausalLM
    model = make.from_config(config, attn_implementation="eager").eval()
    with pytest.raises(UnsupportedModel, match=message):
        windlass.attach(model)
    assert [name for name, module in model.named_modules() if {"windlass", "forward"} & set(vars(module))] == []
    assert model.config._attn_implementation == "eager"


# Not told by their arguments to attention: the window (Qwen2-MoE, Phi-MoE), layers without RoPE
# (Cohere2), an output that is viewed in another shape (AFMoE).
UNTOLD: list[tuple[str, dict[str, object], list[int | None]]] = [
    ("qwen2_moe", {"num_experts": 4, "use_sliding_window": True, "max_window_layers": 2}, [5, None]),
    ("phimoe", {"num_local_experts": 4, "intermediate_size": 40}, [5, 5]),
    ("cohere2", {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}, [5, None]),
    ("afmoe", {"head_dim": 8, "layer_types": ["sliding_attention", "full_attention"]}, [5, None]),
]


@pytest.mark.parametrize(("model_type", "options", "windows"), UNTOLD, ids=[entry[0] for entry in UNTOLD])
def test_what_only_the_model_knows(
    model_type: str, options: dict[str, object], windows: list[int | None], text: Text
) -> None:
    options = {**SMALL, "num_key_value_heads": 2, "sliding_window": 5, "initializer_range": 0.2, **options}
    config = AutoConfig.for_model(model_type, **options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    expected = logits_of(model, text(20))
    cache = KVCache(windlass.attach(model))
    for chunk in (3, 20):
        cache.reset()
        parts = [logits_of(model, ids, cache) for ids in text(20).split(chunk, 1)]
        assert torch.allclose(torch.cat(parts, 1), expected, rtol=0, atol=TOLERANCE)
    assert [layer.sliding_window for layer in cache.layers] == windows
