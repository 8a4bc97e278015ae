"""Tiny models whose sparse attention has an indexer, of every class of transformers that has one like DeepSeek's."""

from functools import cache
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

import windlass
from windlass.testing import VOCABULARY

INDEX_WIDTH = 14
OPTIONS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 60,
    "intermediate_size": 52,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 4,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "q_lora_rank": 28,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 10,
    "index_n_heads": 11,  # so many that hardly a score is 0: the pick among equal scores is that of `torch.topk`
    "index_head_dim": INDEX_WIDTH,
    "initializer_range": 0.18,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
SHARED = {"indexer_types": ["full", "shared", "full", "shared"]}  # every other layer reads the picks of the one before
OWN: dict[str, dict[str, Any]] = {
    "deepseek_v32": {},
    "glm_moe_dsa": SHARED,
    "axk2": {},
    "hy_v4": SHARED,  # rotates the last channels of an index key
    "dots3_note_text": {"layer_types": ["indexed_attention", "sliding_attention"] * 2, "sliding_window": 9},
}
CLASSES = tuple(OWN)


def made(name: str, picked: int, **options: Any) -> PreTrainedModel:
    """A model of this type, not attached, whose indexers pick so many tokens. Every call gives the same."""
    layers = options.get("num_hidden_layers", 4)
    own = {option: each[:layers] if isinstance(each, list) else each for option, each in OWN[name].items()}
    config = AutoConfig.for_model(name, **{**OPTIONS, "index_topk": picked, **own, **options})
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


plain_indexed = cache(made)


@cache
def bound_indexed(name: str, picked: int, layers: int = 4) -> PreTrainedModel:
    """The same, attached."""
    return windlass.attach(made(name, picked, **({} if layers == 4 else {"num_hidden_layers": layers})))


def mistral_large(picked: int) -> PreTrainedModel:
    """One of whose every two layers one does not rotate, nor does its indexer."""
    config = AutoConfig.for_model("mistral_large4")
    text = {**OPTIONS, "index_topk": picked, "no_rope_layers": [1, 0, 1, 0]}
    text["indexer_types"] = ["full"] * 4
    config.text_config = type(config.text_config)(**text)
    sizes = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    for option, size in {**sizes, "head_dim": 8}.items():
        setattr(config.vision_config, option, size)
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
