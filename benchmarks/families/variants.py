"""Configs that people run and that the defaults leave out: (model type, what is other) and how."""

from typing import Any, Final

_PUBLISHED_YARN: Final = {
    "rope_type": "yarn",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "attention_factor": 1.2079441541679836,
}
_TWO_TABLES: Final = {
    "full_attention": _PUBLISHED_YARN,
    "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
}
_EXPERTS: Final = {
    "enable_moe_block": True,
    "attention_k_eq_v": True,
    "num_experts": 8,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
    "hidden_size_per_layer_input": 0,
    "num_global_key_value_heads": 2,
}
_SHARED: Final = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
}
_NO_MAMBA: Final = {
    "num_hidden_layers": 4,
    "layer_types": ["full_attention"] * 4,
    "position_embedding_type": "rope",
    "num_local_experts": 0,
}
_CONVOLUTIONS: Final = {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}

VARIANTS: Final[dict[tuple[str, str], dict[str, Any]]] = {
    ("cohere", "norms of queries and keys"): {"use_qk_norm": True},
    ("exaone4", "no windows"): {"layer_types": ["full_attention"] * 4},
    ("gemma4_text", "experts, keys that are values"): {"init": _EXPERTS},
    ("gemma4_text", "no inputs per layer"): {"init": {"hidden_size_per_layer_input": 0}},
    ("gemma4_text", "layers that share keys"): {"init": _SHARED},
    ("granitemoehybrid", "no recurrent layers"): {"init": _NO_MAMBA},
    ("lfm2", "convolutions"): {"init": _CONVOLUTIONS},
    ("llama", "biases"): {"attention_bias": True, "mlp_bias": True},
    ("mellum", "two tables of one base"): {"rope_parameters": _TWO_TABLES, "sizes": {"head_dim": 128}},
    ("minimax_m2", "half of the channels turned"): {"rope_parameters.partial_rotary_factor": 0.5},
    ("ministral3", "queries scaled from token 16"): {"rope_parameters.original_max_position_embeddings": 16},
    ("mixtral", "windows"): {"sliding_window": 11},
    ("olmo", "clipped keys"): {"clip_qkv": 0.8},
    ("olmo3", "YaRN as published"): {"init": {"rope_parameters": _TWO_TABLES}, "sizes": {"hidden_size": 512}},
    ("phi", "norms of queries and keys"): {"qk_layernorm": True},
    ("qwen2", "windows in half of the layers"): {
        "init": {"use_sliding_window": True, "max_window_layers": 2, "num_hidden_layers": 4}
    },
}
