"""Exceptions of the general procedure of `families.tiny`, by model type.

`init` is given to the config's constructor, before it is shrunk. `sizes` are sizes of this type alone. Any other key
is the path of an attribute, or of an entry of a dictionary, that is set afterwards. Almost all replace a default that
leaves a part out, or that is None and cannot be built.
"""

from typing import Any, Final

_Changes = dict[str, Any]

_MROPE: Final = {"rope_parameters.mrope_section": [2, 3, 3]}
_TEXT_MROPE: Final = {"text_config.rope_parameters.mrope_section": [2, 3, 3]}
_GRANITE: Final = {"attention_multiplier": 0.35}
_MAMBA2: Final = {"mamba_n_heads": 8, "mamba_d_head": 16}
_INDEXER: Final = {
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 16,
    "indexer_compress_ratio": 4,
}
_ZAMBA: Final = ["linear_attention", "linear_attention", "hybrid", "linear_attention", "hybrid", "linear_attention"]
_ASSISTANT: Final = {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}

EXCEPTIONS: Final[dict[str, _Changes]] = {
    "bamba": {**_MAMBA2, "attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 500, "global_config.encoder_cross_output_size": 128},
    "chameleon": {"init": {"vocabulary_map": {"<image>": 130}}},
    "cohere_compass": {"text_config.rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}},
    "dbrx": {"init": {"attn_config": {"rope_theta": 10000.0, "clip_qkv": 8.0, "kv_n_heads": 8}}},
    "deepseek_ocr2": {
        "init": {"text_config": {"mlp_layer_types": ["dense", *["sparse"] * 11], "num_experts_per_tok": 2}}
    },
    "deepseek_v2": {"init": {"num_experts_per_tok": 2}},
    "diffusion_gemma": {"init": {"text_config": {"num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 48}}},
    "dots1": {
        "init": {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1}
    },
    "dots3_note": {"sizes": {"head_dim": 32}},
    "dots3_note_text": {"sizes": {"head_dim": 32}},
    "emu3": {"init": {"vocabulary_map": {"<image>": 130}}},
    "ernie4_5_vl_moe": {"text_config.rope_parameters.mrope_section": [3, 3, 2]},
    "falcon_h1": {**_MAMBA2, "mamba_d_ssm": 128},
    "gemma4_assistant": {"init": {"text_config": _ASSISTANT}},
    "gemma4_unified_assistant": {"init": {"text_config": _ASSISTANT}},
    "glm46v": _TEXT_MROPE,
    "glm4v": _TEXT_MROPE,
    "glm4v_moe": {"text_config.rope_parameters.mrope_section": [1, 1, 2]},
    "glm_ocr": _TEXT_MROPE,
    "glmga": _TEXT_MROPE,
    # Their default multiplies scores of 16 channels by 1: a softmax so steep that rounding is all that is compared.
    "granite": _GRANITE,
    "granite_swa": _GRANITE,
    "granitemoe": _GRANITE,
    "granitemoe_swa": _GRANITE,
    "granitemoeshared": _GRANITE,
    "granite4_vision": {
        "text_config.attention_multiplier": 0.35,
        "init": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "4/8"},
    },
    # Whole blocks of Mamba would be all that is left.
    "granitemoehybrid": {
        **_GRANITE,
        **_MAMBA2,
        "init": {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2},
    },
    "hrm_text": {"num_hidden_layers": 16, "num_layers_per_stack": 2},
    "hunyuan_vl": {"text_config.rope_parameters.mrope_section": [2, 2, 2, 2]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {
        "init": {"num_hidden_layers": 4, "num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 2}
    },
    "mamba2": {"num_heads": 8},
    "muse_spark": {"text_config.qk_scale_factor": 2.0},  # as for Granite
    "paddleocr_vl": _TEXT_MROPE,
    "qwen2_5_omni_thinker": _TEXT_MROPE,
    "qwen2_5_vl": _TEXT_MROPE,
    "qwen2_vl": _TEXT_MROPE,
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 131},  # checkpoints have it, the config class has not
    "qwen4_exp": {"init": {"text_config": _INDEXER}},
    "qwen4_exp_text": {"init": _INDEXER},
    "reformer": {"init": {"is_decoder": True, "axial_pos_embds": False}},
    "step3p7": {"init": {"text_config": {"sliding_window": 11}}},
    "xlstm": {"num_blocks": 4, "hidden_size": 128, "embedding_dim": 128},
    "xmod": {"init": {"default_language": "en_XX"}},
    "zamba": {
        "num_hidden_layers": 6,
        "layers_block_type": _ZAMBA,
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
    },
    "zamba2": {
        "attention_hidden_size": 128,
        "mamba_headdim": 64,
        "n_mamba_heads": 2,
        "attention_head_dim": 32,
        "kv_channels": 16,
    },
}
