"""Tiny models of any class of transformers, by one procedure.

The default config is shrunk name by name, in its sub-configs too, so that a layer of every type stays. Exceptions
from the procedure are in `EXCEPTIONS`. Weights are sampled again: transformers' own would leave attention all but
uniform, norms 1 and biases 0, and so hide most faults.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import transformers
from families.exceptions import EXCEPTIONS
from families.variants import VARIANTS
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

VOCABULARY = 160
WORDS = 120  # ids below are words, the others stand for pictures, padding and the like
WINDOW = 11
LAYERS, MOST_LAYERS = 4, 6

_MAPPINGS: Final[dict[str, Mapping[str, str]]] = {
    "causal LM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "image-text": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}

# The first that matches a whole name decides. A size never grows.
_SIZES: Final[Sequence[tuple[str, int]]] = (
    (r"(linear|mamba)_(num|n)_(key_)?heads", 2),
    (r"type_vocab_size|.*vocab_size_(base)?", VOCABULARY),
    (r".*vocab_size.*", VOCABULARY),
    (r"(.*_)?qk_rope_head_dim|rotary_dim", 8),
    (r"qk_head_dim", 24),
    (r"qk_nope_head_dim|v_head_dim|.*head_dim|d_kv|kv_channels|attention_head_size|d_head|dim_head|mamba_d_head", 16),
    (r"[qkvo]_lora_rank|.*_rank", 32),
    (r"(n|moe_num)_shared_experts|num_shared_experts", 1),
    (r".*(num|n_routed|num_local)_experts|num_experts|zero_expert_num", 8),
    (r".*num_experts_per_tok(en)?|moe_k|moe_top_?k|top_k_experts", 2),
    (r"n_group|num_expert_group", 2),
    (r"topk_group", 1),
    (r"moe.*intermediate_size.*|expert_ffn_hidden_size|share_expert_dim", 48),
    (r".*intermediate_size.*|.*ffn_dim|d_ff|dff|dim_ff|n_inner|ffn_hidden_size|mlp_dim|d_inner|feed_forward_size", 96),
    (r"index_n_heads|indexer_n_heads", 2),
    (r"index_topk", 512),  # more than any text has, as the 2,048 of real models are more than a budget
    (r"index_topk_blocks", 4),
    (r"index_block_size", 16),
    (r".*(hidden_size|hidden_dim|embed_dim)(_global)?|d_model|n_embd|emb_dim|embedding_size|embedding_dim", 64),
    (r".*projection_dim|out(put)?_dim|word_embed_proj_dim|lru_width|resampler_.*dim", 64),
    (r".*attention_heads|num_heads|n_heads?|linear_num_value_heads|resampler_n?_?heads|mamba_(n|num)_heads", 4),
    (r"(mamba_)?d_state|ssm_state_size|state_size", 16),
    (r"n_groups|mamba_n_?groups", 1),
    (r"sliding_window(_size)?|window_size|attention_window_size", WINDOW),
    (r"attention_chunk_size", 16),
    (r"first_k_dense_replace|num_dense_layers", 1),
    (r"hidden_size_per_layer_input", 16),
    (r"altup_num_inputs", 4),
    (r"num_mtp_layers|num_nextn_predict_layers", 0),
    (r"resampler_depth|depth", 2),
)
_LAYER_COUNTS = ("num_hidden_layers", "n_layers", "n_layer", "num_layers", "decoder_layers", "encoder_layers")
_MISSING = {"num_key_value_heads": 4, "head_dim": 16}  # in place of None
_KV_HEADS = r".*num_key_value_heads|num_kv_heads|kv_n_heads|num_query_groups"
_INDICES = re.compile(r".*(index(es)?|idxs?|indices|layer_ids|_layers|feature_layer)")


@dataclass(frozen=True)
class Family:
    """A model type of transformers, the class that a mapping gives it, and what is not as in its default config."""

    mapping: str
    model_type: str
    class_name: str
    variant: str = ""


def families() -> list[Family]:
    """All classes of both mappings of the installed transformers, and the variants."""
    decoders = _MAPPINGS["causal LM"]
    return [
        Family(mapping, model_type, class_name)
        for mapping, names in _MAPPINGS.items()
        for model_type, class_name in sorted(names.items())
    ] + [
        Family("variant", model_type, decoders[model_type], variant)
        for model_type, variant in VARIANTS
        if model_type in decoders
    ]


def tiny(family: Family, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A small random model of the class: eager attention, in eval mode, the same at every call."""
    changes = EXCEPTIONS.get(family.model_type, {}) | VARIANTS.get((family.model_type, family.variant), {})
    config = CONFIG_MAPPING[family.model_type](**changes.get("init", {}))
    shrink(config, changes.get("sizes", {}))
    for path, value in changes.items():
        if path not in ("init", "sizes"):
            _assign(config, path, value)
    kind = getattr(transformers, family.class_name)
    text = config.get_text_config(decoder=True)
    if isinstance(text, kind.config_class) and not isinstance(config, kind.config_class):
        config = text
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = kind._from_config(config, dtype=dtype, attn_implementation="eager")
        redraw(model)
    model.eval()
    return model


def redraw(model: nn.Module) -> None:
    """Weights with which attention is far from uniform, and norms, biases and learned sinks are not constant."""
    for name, parameter in model.named_parameters():
        if re.search(r"A_log|dt_bias|\.D$|time_(decay|first)", name):
            continue  # a recurrence: other values may explode
        if parameter.ndim < 2:
            parameter.data.add_(torch.randn_like(parameter), alpha=0.3)
        elif parameter.is_floating_point():
            parameter.data.normal_(0, 0.18)


def shrink(config: PreTrainedConfig, sizes: Mapping[str, int]) -> None:
    """Make a config and its sub-configs small, in place. `sizes` are sizes of one model type, by name."""
    values = vars(config)
    spec = values.pop("_heterogeneity_spec", None)
    overrides = spec.per_layer_overrides if spec else {}
    bases = {name: values[name] for layer in overrides.values() for name in layer if name in values}
    kept = _kept_layers(config, overrides)
    heads = getattr(config, "num_attention_heads", None)
    before = _layer_count(config)
    rope_dim = values.get("qk_rope_head_dim")
    for name, value in list(values.items()):
        if isinstance(value, PreTrainedConfig):
            shrink(value, sizes)
        elif name.startswith("_"):
            continue
        elif name in _LAYER_COUNTS and isinstance(value, int):
            _set(config, name, len(kept) if value == before else min(value, 2))
        elif isinstance(value, list | tuple) and before and len(value) == before and before > 1:
            _set(config, name, _shrunk_list(name, [value[layer] for layer in kept]))
        elif isinstance(value, list | tuple) and value and _INDICES.fullmatch(name) and _are_ints(value):
            _set(config, name, [index for index in value if index < len(kept)] or [len(kept) - 1])
        elif re.fullmatch(_KV_HEADS, name) and isinstance(value, int) and not isinstance(value, bool):
            _set(config, name, 1 if value == 1 else 4 if value == heads else 2)
        elif name == "head_dim" and rope_dim is not None and value == rope_dim:
            _set(config, name, 8)
        elif name in sizes:
            _set(config, name, sizes[name])
        elif name in _MISSING and value is None:
            _set(config, name, _MISSING[name])
        elif name == "num_kv_shared_layers" and value and before:
            _set(config, name, max(1, value * len(kept) // before))
        elif re.fullmatch(r".*token_(id|index)", name) and isinstance(value, int):
            _set(config, name, _special(name))
        elif name == "rope_parameters" and isinstance(value, dict):
            _shrink_rope(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            _set(config, name, _size(name, value))
    if overrides:
        config.per_layer_config = {
            new: {name: _in_ratio(value, bases.get(name), values.get(name)) for name, value in overrides[old].items()}
            for new, old in enumerate(kept)
            if old in overrides
        }


def _in_ratio(value: Any, base: Any, small: Any) -> Any:
    """The value of one layer in place of `base`, when the others now have `small`."""
    if not _are_ints([value, base, small]) or not base:
        return value
    return max(1, small * value // base)


def _shrunk_list(name: str, values: list[Any]) -> list[Any]:
    if not _are_ints(values):
        return values
    return [_size(name.removesuffix("_per_layer"), value) for value in values]


def _size(name: str, value: int) -> int:
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, name):
            return min(value, size)
    return value


def _special(name: str) -> int:
    """An id that no text of words holds."""
    return WORDS + sum(name.encode()) % (VOCABULARY - WORDS)


def _shrink_rope(parameters: dict[str, Any]) -> None:
    for scheme in [parameters, *(each for each in parameters.values() if isinstance(each, dict))]:
        if "mrope_section" in scheme:
            scheme["mrope_section"] = [2, 3, 3]
        for factors in ("short_factor", "long_factor"):
            if scheme.get(factors):
                scheme[factors] = scheme[factors][:8]


def _layer_count(config: PreTrainedConfig) -> int:
    for name in _LAYER_COUNTS:
        count = getattr(config, name, None)
        if isinstance(count, int):
            return count
    return 0


def _kept_layers(config: PreTrainedConfig, overrides: Mapping[int, object]) -> list[int]:
    """Layers to keep: the first of each combination of what is told per layer, then others from the front."""
    count = _layer_count(config)
    told = [list(v) for k, v in vars(config).items() if isinstance(v, list | tuple) and len(v) == count]
    first: dict[str, int] = {}
    for layer in range(count):
        first.setdefault(repr([overrides.get(layer), *(each[layer] for each in told)]), layer)
    kept = sorted(first.values())[:MOST_LAYERS]
    more = (layer for layer in range(count) if layer not in kept)
    while len(kept) < min(LAYERS, count):
        kept.append(next(more))
    return sorted(kept)


def _are_ints(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)


def _set(config: PreTrainedConfig, name: str, value: Any) -> None:
    if getattr(config, name) != value:
        setattr(config, name, value)


def _assign(config: PreTrainedConfig, path: str, value: Any) -> None:
    parent: Any = config
    *parents, name = path.split(".")
    for step in parents:
        parent = getattr(parent, step)
    if isinstance(parent, dict):
        parent[name] = copy.deepcopy(value)
    else:
        setattr(parent, name, copy.deepcopy(value))
