"""Tiny random models that have recurrent layers beside attention layers, one of each family."""

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from windlass.core.close_names import use_one_of
from windlass.core.errors import UsageError
from windlass.testing.models import VOCABULARY

LINEAR, FULL, CONV = "linear_attention", "full_attention", "conv"

# All different, so that no broadcast hides a fault: 6 query heads share 2 kv heads.
_SIZES: Final[Mapping[str, Any]] = {
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
_EXPERTS: Final = {"num_experts": 5, "num_local_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_MAMBA2: Final = {"mamba_n_heads": 5, "mamba_d_head": 24, "mamba_d_state": 9, "mamba_d_conv": 4, "mamba_expand": 2}
_DELTA: Final = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 7,
    "linear_value_head_dim": 9,
}
_LONG_CONV: Final = {"layer_types": [CONV, FULL, CONV, CONV, FULL], "conv_L_cache": 3}

_CONFIGS: Final[Mapping[str, tuple[str, Mapping[str, Any]]]] = {
    # name: (transformers' model type, its options)
    "qwen3_next": (
        "qwen3_next",
        {
            **_EXPERTS,
            **_DELTA,
            "head_dim": 16,
            "shared_expert_intermediate_size": 20,
            "layer_types": [LINEAR, LINEAR, FULL, LINEAR, FULL],
        },
    ),
    "lfm2": ("lfm2", {**_LONG_CONV, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("lfm2_moe", {**_EXPERTS, **_LONG_CONV, "num_dense_layers": 1}),
    "falcon_h1": ("falcon_h1", {**_MAMBA2, "mamba_d_ssm": 120, "mamba_n_groups": 1, "num_hidden_layers": 3}),
    "granite_h": (
        "granitemoehybrid",
        {
            **_MAMBA2,
            **_EXPERTS,
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
            **_EXPERTS,
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
    "jamba": (  # whose recurrent layers forget their state in a pass of several tokens
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
    "zamba2": (  # whose attention modules are told in a pass which layer they are
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

HYBRIDS: Final = tuple(_CONFIGS)


def tiny_hybrid(family: str, vocabulary: int = VOCABULARY) -> PreTrainedModel:
    """A small random model of one of `HYBRIDS`: float32, in eval mode, the same at every call.

    Raises: UsageError for an unknown family.
    """
    if family not in _CONFIGS:
        raise UsageError(f"family {family!r} is unknown; {use_one_of(family, HYBRIDS)}")
    model_type, options = _CONFIGS[family]
    sizes: dict[str, Any] = {**_SIZES, **options, "vocab_size": vocabulary}
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
    """Far from constant, so that leaving a part out shows; decays stay of an order at which states last."""
    last = name.rpartition(".")[2]
    if last in ("A_log", "D", "dt_bias"):
        parameter.data.copy_(torch.randn_like(parameter) * 0.5 - (1.0 if last == "dt_bias" else 0.0))
    elif parameter.ndim == 1:
        parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
        if any(part in name for part in ("q_norm", "k_norm", "q_layernorm", "k_layernorm")):
            parameter.data.add_(1.5)  # they decide how large scores are
    elif any(part in name for part in ("q_proj", "k_proj")):
        parameter.data.copy_(torch.randn_like(parameter) * 0.35 * _SIZES["hidden_size"] / parameter.shape[1])
    elif "conv" in name and parameter.ndim == 3 and parameter.shape[1] == 1:
        parameter.data.copy_(torch.randn_like(parameter) * 0.5)
