"""Tiny random models of many families, for tests without a network, and a policy tried on them."""

from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from windlass.core.errors import PolicyError, UsageError
from windlass.core.parse import use_one_of
from windlass.hf.attach import attach
from windlass.hf.kv_cache import KVCache
from windlass.policies.base import Policy

VOCABULARY = 97  # of every tiny model
SLIDING_WINDOW = 11  # of the tiny models that have one
TRAINED_LENGTH = 64  # of the tiny models whose rotary table depends on the length of the text

# All different, so that no broadcast hides a fault: 15 query heads share 3 kv heads.
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 60,
    "intermediate_size": 52,
    "num_hidden_layers": 2,
    "num_attention_heads": 15,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "max_position_embeddings": 512,
    # Large enough that attention is far from uniform: then a wrong mask or rotation shows.
    "initializer_range": 0.18,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_Options = Mapping[str, object]

_WIDE = {"hidden_size": 120, "initializer_range": 0.13}  # where head_dim is hidden_size / heads
_ALTERNATING = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": SLIDING_WINDOW,
}
_SLIDING, _FULL = "sliding_attention", "full_attention"
# The last four attend to the keys and values of layers 2 and 3, two to each.
_SHARED = {
    "num_hidden_layers": 8,
    "layer_types": [_SLIDING, _SLIDING, _FULL, _SLIDING, _FULL, _SLIDING, _SLIDING, _FULL],
    "num_kv_shared_layers": 4,
    "sliding_window": SLIDING_WINDOW,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 14,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "factor": 8.0,
    "short_factor": [1.0, 1.1, 1.3, 1.7],
    "long_factor": [1.0, 1.9, 3.7, 7.3],
    "original_max_position_embeddings": TRAINED_LENGTH,
}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
_YARN = {"original_max_position_embeddings": 64}
# Latent attention: channels of a query's and of a token's latent, and of a head's keys, rotated and not, and values.
_LATENT = {
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "q_lora_rank": 28,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
}
# Nine tokens for a picture of 24 pixels by 24.
_VISION = {
    "hidden_size": 20,
    "intermediate_size": 28,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 24,
    "patch_size": 8,
}
_PICTURE = {"mm_tokens_per_image": 9, "image_token_id": VOCABULARY - 1, "image_token_index": VOCABULARY - 1}


def _scaled(rope_type: str, factor: float, more: _Options = MappingProxyType({})) -> _Options:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 100.0, "factor": factor, **more}}


_CONFIGS: dict[str, tuple[str, _Options]] = {
    # name: (transformers' model type, its options)
    "llama": ("llama", {}),
    "llama_llama3": ("llama", _scaled("llama3", 8.0, _LLAMA3)),
    "llama_yarn": ("llama", _scaled("yarn", 8.0, _YARN)),
    "llama_dynamic": ("llama", {**_scaled("dynamic", 4.0), "max_position_embeddings": TRAINED_LENGTH}),
    "llama_linear": ("llama", _scaled("linear", 4.0)),
    "mistral": ("mistral", {"sliding_window": SLIDING_WINDOW}),
    "qwen2": ("qwen2", {**_ALTERNATING, "use_sliding_window": True}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", _EXPERTS),
    "mixtral": ("mixtral", _EXPERTS),
    "gemma2": ("gemma2", {**_ALTERNATING, "attn_logit_softcapping": 1.5, "query_pre_attn_scalar": 6}),
    "gemma3": ("gemma3_text", {**_ALTERNATING, "query_pre_attn_scalar": 6}),
    "phi3": ("phi3", {**_WIDE, "rope_parameters": _LONGROPE}),
    "smollm3": ("smollm3", {**_WIDE, "num_hidden_layers": 4, "no_rope_layer_interval": 2}),
    "olmo2": ("olmo2", _WIDE),
    "cohere": ("cohere", {**_WIDE, "logit_scale": 0.9}),
    "glm4": ("glm4", {}),
    "granite": (
        "granite",
        {**_WIDE, "attention_multiplier": 0.3, "embedding_multiplier": 2.0, "residual_multiplier": 0.7},
    ),
    "granite4": (  # without its recurrent layers
        "granitemoehybrid",
        {
            **_WIDE,
            "layer_types": ["full_attention"] * 2,
            "num_local_experts": 0,
            "shared_intermediate_size": 52,
            "mamba_n_heads": 8,
            "position_embedding_type": "rope",
            "attention_multiplier": 0.3,
        },
    ),
    "gemma3n": (
        "gemma3n_text",
        {**_SHARED, "activation_sparsity_pattern": [0.9, 0.5, *[0.0] * 6], "laurel_rank": 7, "altup_num_inputs": 3},
    ),
    "gemma4_e": ("gemma4_text", {**_SHARED, "global_head_dim": 12, "use_double_wide_mlp": True}),
    "gemma3_wrapped": (  # where it reads pictures, too
        "gemma3",
        {"text_config": {**_ALTERNATING, "query_pre_attn_scalar": 6}, "vision_config": _VISION, **_PICTURE},
    ),
    "gemma4_wrapped": (
        "gemma4",
        {
            "text_config": {
                **_ALTERNATING,
                "global_head_dim": 12,
                "num_kv_shared_layers": 0,
                "vocab_size_per_layer_input": VOCABULARY,
                "hidden_size_per_layer_input": 14,
                "use_bidirectional_attention": "vision",
                "pad_token_id": 0,  # in place of tokens of pictures
            },
            "vision_config": _VISION,
            "audio_config": None,
            **_PICTURE,
        },
    ),
    "stablelm": ("stablelm", {**_WIDE, "use_qkv_bias": True, "qk_layernorm": True}),
    "nanochat": ("nanochat", {}),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **_LATENT,
            **_EXPERTS,
            "num_experts": 6,
            "num_local_experts": 6,
            **_scaled("yarn", 8.0, {**_YARN, "mscale_all_dim": 1.0, "mscale": 1.0}),
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "n_routed_experts": 6,
            "n_group": 2,
            "topk_group": 1,
        },
    ),
    "minicpm3": ("minicpm3", {**_LATENT, "initializer_range": 0.3}),
    "hunyuan": ("hunyuan_v1_dense", {}),
    "hunyuan_moe": ("hunyuan_v1_moe", {**_EXPERTS, "moe_topk": 2, **_scaled("dynamic", 1.0, {"alpha": 50.0})}),
    "llama4": (
        "llama4_text",
        {
            **_EXPERTS,
            "num_hidden_layers": 4,
            "no_rope_layers": [1, 1, 0, 1],  # 0: no rotation, and attention to the whole text
            "attention_chunk_size": SLIDING_WINDOW,
            "interleave_moe_layer_step": 2,
            "intermediate_size_mlp": 44,
            "intermediate_size": 20,
            "use_qk_norm": True,
            "attn_temperature_tuning": True,
            "floor_scale": 6,
            "attn_scale": 0.4,
        },
    ),
    "gpt_oss": ("gpt_oss", {**_EXPERTS, **_ALTERNATING, **_scaled("yarn", 8.0, {**_YARN, "truncate": False})}),
}

FAMILIES = tuple(_CONFIGS)


def tiny_model(family: str) -> PreTrainedModel:
    """A small random model of one of `FAMILIES`: float32, in eval mode, the same at every call.

    Its logits are of order 1 and its attention far from uniform. Needs no network. Attention is
    transformers' own `eager`, which honours soft-caps and learned sinks.

    Raises: UsageError for an unknown family.
    """
    if family not in _CONFIGS:
        raise UsageError(f"family {family!r} is unknown. {use_one_of(family, FAMILIES)}")
    model_type, options = _CONFIGS[family]
    config = AutoConfig.for_model(model_type, **_sized(options))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
        for parameter in model.parameters():
            # Norms, biases and learned sinks start as constants, which would hide that they are used.
            if parameter.ndim == 1:
                parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
            elif (
                not parameter.is_meta and not parameter.any()
            ):  # as a projection of pictures starts, which would hide them
                parameter.data.normal_(0, 0.18)
    model.get_output_embeddings().weight.data.mul_(0.5)
    model.eval()
    return model


def _sized(options: _Options) -> _Options:
    """The config with all sizes, set on the text model where that is only a part of the model."""
    text = options.get("text_config")
    return {**options, "text_config": {**_SIZES, **text}} if isinstance(text, dict) else {**_SIZES, **options}


LINEAR, FULL, CONV = "linear_attention", "full_attention", "conv"

# All different, so that no broadcast hides a fault: 6 query heads share 2 kv heads.
_HYBRID_SIZES: Final[Mapping[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 60,
    "intermediate_size": 52,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_HYBRID_EXPERTS: Final = {
    "num_experts": 5,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 20,
}
_MAMBA2: Final = {"mamba_n_heads": 5, "mamba_d_head": 24, "mamba_d_state": 9, "mamba_d_conv": 4, "mamba_expand": 2}
_DELTA: Final = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 7,
    "linear_value_head_dim": 9,
}
_LONG_CONV: Final = {"layer_types": [CONV, FULL, CONV, CONV, FULL], "conv_L_cache": 3}

_HYBRID_CONFIGS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    # name: (transformers' model type, its options)
    "qwen3_next": (
        "qwen3_next",
        {
            **_HYBRID_EXPERTS,
            **_DELTA,
            "head_dim": 16,
            "shared_expert_intermediate_size": 20,
            "layer_types": [LINEAR, LINEAR, FULL, LINEAR, FULL],
        },
    ),
    "lfm2": ("lfm2", {**_LONG_CONV, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("lfm2_moe", {**_HYBRID_EXPERTS, **_LONG_CONV, "num_dense_layers": 1}),
    "falcon_h1": ("falcon_h1", {**_MAMBA2, "mamba_d_ssm": 120, "mamba_n_groups": 1, "num_hidden_layers": 3}),
    "granite_h": (
        "granitemoehybrid",
        {
            **_MAMBA2,
            **_HYBRID_EXPERTS,
            "shared_intermediate_size": 20,
            "layer_types": [LINEAR, LINEAR, FULL, LINEAR, FULL],
            "attention_multiplier": 0.3,
            "position_embedding_type": "nope",
        },
    ),
    "granite_h_rope": (
        "granitemoehybrid",
        {
            **_MAMBA2,
            **_HYBRID_EXPERTS,
            "shared_intermediate_size": 20,
            "layer_types": [LINEAR, FULL, LINEAR, FULL],
            "attention_multiplier": 0.3,
            "position_embedding_type": "rope",
        },
    ),
    "nemotron_h": (
        "nemotron_h",
        {
            "head_dim": 12,
            "layers_block_type": [LINEAR, "mlp", FULL, LINEAR, "moe", FULL],
            "ssm_state_size": 9,
            "mamba_num_heads": 6,
            "mamba_head_dim": 20,
            "n_groups": 2,
            "chunk_size": 16,
            "n_routed_experts": 5,
            "moe_intermediate_size": 20,
            "moe_shared_expert_intermediate_size": 22,
        },
    ),
    "olmo_hybrid": ("olmo_hybrid", {**_DELTA, "layer_types": [LINEAR, LINEAR, FULL, LINEAR, FULL]}),
    "jamba": (  # its recurrent layers forget their state in a pass of several tokens
        "jamba",
        {
            "num_hidden_layers": 5,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "mamba_d_state": 9,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 7,
        },
    ),
    "zamba2": (  # its attention modules learn their layer's number in a pass
        "zamba2",
        {
            "layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid", "hybrid"],
            "num_mem_blocks": 2,
            "adapter_rank": 7,
            "use_mem_rope": True,
            "n_mamba_heads": 5,
            "mamba_d_state": 9,
            "mamba_d_conv": 4,
            "chunk_size": 16,
            "time_step_min": 1e-9,  # to which transformers holds many tokens, and not single ones
        },
    ),
    "bamba": ("bamba", {**_MAMBA2, "num_hidden_layers": 5, "attn_layer_indices": [1, 4]}),
}

HYBRIDS: Final = tuple(_HYBRID_CONFIGS)


def tiny_hybrid(family: str, vocabulary: int = VOCABULARY) -> PreTrainedModel:
    """A small random model of one of `HYBRIDS`: float32, in eval mode, the same at every call.

    Raises: UsageError for an unknown family.
    """
    if family not in _HYBRID_CONFIGS:
        raise UsageError(f"family {family!r} is unknown. {use_one_of(family, HYBRIDS)}")
    model_type, options = _HYBRID_CONFIGS[family]
    sizes: dict[str, Any] = {**_HYBRID_SIZES, **options, "vocab_size": vocabulary}
    kinds = options.get("layer_types", options.get("layers_block_type"))
    if kinds is not None:
        sizes["num_hidden_layers"] = len(kinds)
    config = AutoConfig.for_model(model_type, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        )
        for name, parameter in model.named_parameters():
            _redraw(name, parameter)
    model.get_output_embeddings().weight.data.mul_(0.5)
    model.eval()
    return model


def _redraw(name: str, parameter: nn.Parameter) -> None:
    """Sample parameters far from constant, so that leaving a part out shows. States last long enough."""
    last = name.rpartition(".")[2]
    if last in ("A_log", "D", "dt_bias"):
        parameter.data.copy_(torch.randn_like(parameter) * 0.5 - (1.0 if last == "dt_bias" else 0.0))
    elif parameter.ndim == 1:
        parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
        if any(part in name for part in ("q_norm", "k_norm", "q_layernorm", "k_layernorm")):
            parameter.data.add_(1.5)  # they scale attention scores
    elif any(part in name for part in ("q_proj", "k_proj")):
        parameter.data.copy_(torch.randn_like(parameter) * 0.35 * _HYBRID_SIZES["hidden_size"] / parameter.shape[1])
    elif "conv" in name and parameter.ndim == 3 and parameter.shape[1] == 1:
        parameter.data.copy_(torch.randn_like(parameter) * 0.5)


TOKENS: Final = 45
BUDGET, SINKS, WINDOW, ROOM = 20, 3, 4, 60
PASSES: Final = (17, 17, *(1,) * 11)


def check_on_models(policy: Policy, families: Sequence[str] = (*FAMILIES, *HYBRIDS)) -> None:
    """Let tiny models of these families read a text with `policy`, and check the kept tokens.

    With room for the whole text the logits must be those without a budget. With a budget below it, each layer must hold
    as many tokens as it may, the first and the newest among them, and logits must be finite. A model that refuses the
    policy by name (`UsageError`) is passed over: recurrent layers, say, can't read a text twice. Takes about a second
    for each family.

    Raises: PolicyError, naming the family and the problem, and UsageError for an unknown family.
    """
    for family in families:
        model = _attached(family)
        try:
            caches = [_cache(model, budget, policy) for budget in (None, ROOM, BUDGET)]
        except UsageError:
            continue
        whole, roomy, bounded = (_read(model, each) for each in caches)
        if not (roomy - whole).norm() <= 1e-5 * whole.norm():
            raise PolicyError(f"{policy!r} changes the logits of a {family} model though nothing is evicted")
        if not bounded.isfinite().all():
            raise PolicyError(f"{policy!r} makes logits of a {family} model infinite or NaN")
        _check_kept(caches[-1], policy, family)


def _cache(model: PreTrainedModel, budget: int | None, policy: Policy) -> KVCache:
    return KVCache(model, budget, policy, SINKS, WINDOW, positions="original")


def _check_kept(cache: KVCache, policy: Policy, family: str) -> None:
    required = {*range(SINKS), *range(TOKENS - WINDOW, TOKENS)}
    for layer in cache.layers:
        if layer.rules.is_whole_window:  # a sliding window or chunk that fits is held whole under every policy
            continue
        for held in layer.positions[0].tolist():
            kept = {position for position in held if position >= 0}
            if len(kept) > BUDGET or not required <= kept:
                raise PolicyError(
                    f"{policy!r} keeps {len(kept)} tokens in layer {layer.index} of a {family} model, with a budget of "
                    f"{BUDGET}. Of the first {SINKS} and newest {WINDOW} it lacks {sorted(required - kept)}"
                )


@torch.no_grad()
def _read(model: PreTrainedModel, cache: KVCache) -> torch.Tensor:
    ids = torch.randint(VOCABULARY, (1, TOKENS), generator=torch.Generator().manual_seed(0))
    return torch.cat([model(piece, past_key_values=cache).logits for piece in ids.split(PASSES, 1)], 1)


@cache
def _attached(family: str) -> PreTrainedModel:
    return attach(tiny_hybrid(family) if family in HYBRIDS else tiny_model(family))
