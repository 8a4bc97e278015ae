"""Checks of attach on a model: faults planted in a tiny one, each refused by name, and the tokens that it reads."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, eager_attention_forward

import windlass
from tests.helpers.models import TEXT_CONFIG, Text, given_cache, read
from windlass import KVCache, UnsupportedModel, UsageError
from windlass.hf.model_facts import ordinary_ids
from windlass.testing import VOCABULARY, tiny_model


def biased_eager(
    module: LlamaAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **options: Any
) -> Any:
    """Attention that sees near tokens better, which no cache is told."""
    places = torch.arange(key.shape[2])
    distances = (places[-query.shape[2] :, None] - places).clamp(min=0)
    return eager_attention_forward(module, query, key, value, mask - 0.3 * distances.to(query.dtype), **options)


class FaultyAttention(LlamaAttention):
    """Llama's attention with one fault, or none."""

    fault = ""

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        attention_mask: Any = None,
        **options: Any,
    ) -> tuple[Tensor, Any]:
        cache = given_cache(options)
        fault, layer = self.fault, self.layer_idx
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        read = hidden_states
        if fault == "reads the token before":  # and forgets it from one pass to the next
            read = read + torch.cat((torch.zeros_like(read[:, :1]), read[:, :-1]), 1)
        query, key, value = (
            linear(read).view(shape).transpose(1, 2) for linear in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if cache is not None:
            if fault == "no write":
                return self.o_proj(query.transpose(1, 2).flatten(2)), None
            key, value = cache.update(key, value, layer + 2 if fault == "other number" else layer)
            if fault == "two writes":
                cache.update(key, value, layer)
        if fault == "changes keys":
            key = 2 * key
        elif fault == "changes values":
            value = value.clone()
        elif fault == "position bias":
            options["position_bias"] = torch.zeros(1)
        elif fault == "no position bias":
            options["position_bias"] = None
        own = biased_eager if fault == "attends otherwise" else eager_attention_forward
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, own)
        for _ in range(2 if fault == "two calls" else 1):
            out, weights = attend(self, query, key, value, attention_mask, dropout=0.0, scaling=self.scaling, **options)
        return self.o_proj(out.flatten(2)), weights


def faulty(fault: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny Llama whose last layer has this fault."""
    model = tiny_model("llama")
    nn.Module.to(model, dtype)
    attention = model.model.layers[-1].self_attn
    attention.__class__ = FaultyAttention
    attention.fault = fault
    return model


FAULTS = [
    ("two writes", "writes keys and values of layer 1 to the cache more than once in a pass"),
    ("two calls", "calls attention more than once in layer 1"),
    ("other number", "writes the keys of layer 1 to the cache as keys of layer 3"),
    ("no write", r"has layers without attention keys and values of their own: \[1\]"),
    ("changes keys", "changes keys or values in layer 1 between the cache and attention"),
    ("changes values", "changes keys or values in layer 1 between the cache and attention"),
    ("position bias", "layer 1 hands its attention position_bias, which windlass' attention does not know"),
    ("attends otherwise", r"attends otherwise in layer 1 than a cache does: its output is \d+\.\d% off"),
    ("reads the token before", r"attends otherwise in layer 1 than a cache does: its output is \d+\.\d% off"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("fault", "message"), FAULTS, ids=[fault for fault, _ in FAULTS])
def test_a_fault_is_refused_by_name(fault: str, message: str, dtype: torch.dtype) -> None:
    model = faulty(fault, dtype)
    with pytest.raises(UnsupportedModel, match=f"LlamaForCausalLM:? {message}"):
        windlass.attach(model)
    assert [name for name, module in model.named_modules() if {"windlass", "forward"} & set(vars(module))] == []
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("fault", ["", "no position bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_a_fault_nothing_is_refused(fault: str, dtype: torch.dtype) -> None:
    model = windlass.attach(faulty(fault, dtype))
    hooked = [name for name, module in model.named_modules() if module._forward_hooks or module._forward_pre_hooks]
    assert hooked == ["model.rotary_emb"]


LATER = [
    ("two calls", {}, "layer 1 calls attention twice in one pass"),
    ("position bias", {}, "layer 1 hands its attention position_bias"),
    ("", {"seq_idx": torch.zeros(1)}, "layer 0 hands its attention seq_idx"),
]


@pytest.mark.parametrize(("fault", "options", "message"), LATER, ids=["two calls", "position bias", "by the caller"])
def test_what_only_a_later_pass_does_is_refused_there(
    fault: str, options: dict[str, Tensor], message: str, text: Text
) -> None:
    model, ids = windlass.attach(faulty("")), text(13)
    cache, twin = KVCache(model), KVCache(model)
    with torch.no_grad():
        for one in (cache, twin):
            model(ids[:, :6], past_key_values=one)
        model.model.layers[-1].self_attn.fault = fault
        with pytest.raises(UsageError, match=message):
            model(ids[:, 6:], past_key_values=cache, **options)
        model.model.layers[-1].self_attn.fault = ""
        after = [model(ids[:, 6:], past_key_values=one).logits for one in (cache, twin)]
    assert torch.equal(*after)


PER_LAYER = {"global_head_dim": 8, "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0}
LOW = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}


def test_masks_made_outside_of_the_base_model_are_refused() -> None:
    model = tiny_model("llama")

    def masked(_module: nn.Module, args: Any, options: dict[str, Any]) -> Any:
        return args, {**options, "attention_mask": torch.zeros(1, 1, options["input_ids"].shape[1], 8)}

    handle = model.register_forward_pre_hook(masked, with_kwargs=True)
    with pytest.raises(UnsupportedModel, match="makes the attention masks outside of its decoder"):
        windlass.attach(model)
    handle.remove()


@torch.no_grad()
def assert_reads_as_without(model: PreTrainedModel, ids: Tensor) -> None:
    """With a cache, in chunks, the same logits as in one pass without."""
    expected = model(ids, use_cache=False).logits
    ours = read(windlass.attach(model), KVCache(model), ids, 9)
    assert (ours - expected).norm() <= 1e-5 * expected.norm()


def test_gemma4s_text_model_is_read_by_ids(text: Text) -> None:
    # Embeddings alone do not tell it the inputs that each layer has of its own.
    torch.manual_seed(0)
    config = AutoConfig.for_model("gemma4_text", **{**TEXT_CONFIG, **PER_LAYER, **LOW}, initializer_range=0.2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    assert_reads_as_without(model, text(25))


TWICE: list[tuple[str, str]] = [
    ("diffllama", "changes keys or values in layer 0 between the cache and attention"),
    ("hrm_text", "calls attention more than once in layer 0"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("model_type", "message"), TWICE, ids=[name for name, _ in TWICE])
def test_families_that_a_cache_cannot_hold(model_type: str, message: str, dtype: torch.dtype) -> None:
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(model_type, **TEXT_CONFIG), attn_implementation="eager"
    )
    with pytest.raises(UnsupportedModel, match=message):
        windlass.attach(model.to(dtype=dtype).eval())


def test_a_layer_that_is_known_to_repeat_its_keys(text: Text) -> None:
    torch.manual_seed(0)
    sizes = {**TEXT_CONFIG, "kv_channels": 8, "num_local_experts": 4, "initializer_range": 0.2}
    del sizes["head_dim"], sizes["num_attention_heads"]
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("jetmoe", **sizes), attn_implementation="eager"
    ).eval()
    assert_reads_as_without(model, text(25))


def test_a_model_without_its_weights_is_refused() -> None:
    model = tiny_model("llama")
    model.model.layers[1].mlp.to("meta")
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM has weights on the meta device"):
        windlass.attach(model)


def test_a_model_that_fails_by_itself_is_not_blamed_on_attention() -> None:
    model = tiny_model("llama")
    model.lm_head.forward = lambda _: 1 / 0
    with pytest.raises(UnsupportedModel, match="can't read a text even without a cache: ZeroDivisionError"):
        windlass.attach(model)


def test_ordinary_ids_are_spread_and_have_no_meaning_of_their_own() -> None:
    model = tiny_model("llama")
    first = ordinary_ids(model, 8).tolist()[0]
    assert len(set(first)) == 8
    assert min(first) > 0
    assert max(first) > VOCABULARY // 2
    model.config.pad_token_id, model.config.eos_token_id = first[0], first[1:3]
    model.get_input_embeddings().weight.data[first[3]] = 0.0
    again = ordinary_ids(model, 8).tolist()[0]
    assert not set(first[:4]) & set(again)
    assert len(set(again)) == 8
    assert ordinary_ids(model, 8).tolist()[0] == again


class Coded(nn.Module):
    """A projection that is 0.4 % off in short passes, as codes of activations may be. Its weights are of `dtype`."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = inner
        self.codes = nn.Parameter(torch.zeros(3, dtype=dtype), requires_grad=False)

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.inner(states)
        return out * 1.004 if 1 < states.shape[1] < 8 else out


def test_quantised_weights_may_round_activations() -> None:
    for dtype in (torch.int8, torch.float32):
        model = faulty("", torch.float32)
        attention: Any = model.model.layers[1].self_attn
        attention.o_proj = Coded(attention.o_proj, dtype)
        if dtype == torch.int8:
            windlass.attach(model)
        else:
            with pytest.raises(UnsupportedModel, match="attends otherwise in layer 1"):
                windlass.attach(model)


@pytest.mark.parametrize("part", ["self_attn.v_proj", "mlp.up_proj"])
def test_numbers_beyond_the_dtype_are_not_blamed_on_attention(part: str) -> None:
    model = tiny_model("llama").half()
    model.get_submodule(f"model.layers.0.{part}").weight.data.fill_(60_000)
    assert not bool(model(torch.tensor([[1, 2, 3]])).logits.isfinite().all())
    with pytest.raises(
        UnsupportedModel, match=r"infinite numbers or NaN in layer \d by itself\. Load it in bfloat16 or"
    ):
        windlass.attach(model)
    windlass.attach(model.float())
