"""Small GGUF files of random weights."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCABULARY = 264  # the bytes, two words and some control tokens: a multiple of no block
WIDTH, INNER, HEADS, KV_HEADS, LAYERS = 256, 512, 4, 2, 2
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "head_dim": WIDTH // HEADS,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig),
    "phi3": (Phi3ForCausalLM, Phi3Config),
    "qwen3moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig),
}
# Where the numbers of float16 stand in a block.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "IQ4_NL": (0,),
}
DIVISORS = {"Q6_K": 20000, "Q5_K": 4000, "Q4_K": 2000}


def model_of(family: str, **options: Any) -> PreTrainedModel:
    """A small model in float32."""
    kind, config = FAMILIES[family]
    torch.manual_seed(0)
    own: dict[str, Any] = {"tie_word_embeddings": family in ("gemma3", "qwen3")} | options
    if family.startswith("qwen3"):
        own["head_dim"] = 128  # sizes of its experts and of a head are not read from a file
    if family == "qwen3moe":
        own |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
    if family == "gemma3":
        own["sliding_window"] = 512
    model: PreTrainedModel = kind(config(**(SIZES | own))).eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim > 1:
                weights.mul_(3)  # so that the layers count
            elif name.endswith("bias"):
                weights.normal_()
    return model


def blocks(kind: str, rows: int, width: int, seed: int = 0) -> np.ndarray:
    """Random bytes of a type, of scales such that the numbers are small."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    inputs, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    random = np.random.default_rng(seed)
    found = random.integers(0, 256, (rows, width // inputs, size), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = random.standard_normal((rows, width // inputs, 1)) / {"Q6_K": 20000, "Q4_K": 2000, "Q5_K": 4000}.get(
            kind, 100
        )
        found[..., at : at + 2] = scales.astype(np.float16).view(np.uint8)
    return found.reshape(rows, -1)


def write(
    path: Path,
    family: str,
    kind: str = "Q8_0",
    own: dict[str, str] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    metadata: dict[str, int | float | str] | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Write a small model to a file and return it. Matrices have one type, except those that `own` names.

    `metadata` are further fields of the architecture.
    """
    from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, quantize
    from gguf.constants import MODEL_ARCH, MODEL_ARCH_NAMES
    from gguf.tensor_mapping import get_tensor_name_map

    model = model_of(family, **options)
    writer = GGUFWriter(path, family)
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(INNER)
    writer.add_block_count(LAYERS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_key_length(model.config.head_dim)
    for name, value in ({"rope.dimension_count": model.config.head_dim} | (metadata or {})).items():
        adders = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}
        adders[type(value)](f"{family}.{name}", value)
    writer.add_vocab_size(VOCABULARY)
    if family == "gemma3":
        writer.add_sliding_window(512)
    if family == "qwen3moe":
        writer.add_expert_count(4)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(768)
    file_type = next((each for each in LlamaFileType if each.name.endswith(f"_{kind}")), LlamaFileType.MOSTLY_Q4_K_M)
    writer.add_file_type(file_type)
    add_tokenizer(writer)
    arch: MODEL_ARCH = next(key for key, name in MODEL_ARCH_NAMES.items() if name == family)
    names, done = get_tensor_name_map(arch, LAYERS), set()
    for name, tensor in model.state_dict().items():
        stem, _, ending = name.rpartition(".")
        if tensor.data_ptr() in done:
            continue
        done.add(tensor.data_ptr())
        numbers = tensor.numpy()
        if name.endswith("mlp.experts.gate_up_proj"):
            layer, (gate, up) = name.split(".")[2], np.split(numbers, 2, axis=1)
            parts = {f"blk.{layer}.ffn_gate_exps.weight": gate, f"blk.{layer}.ffn_up_exps.weight": up}
        elif name.endswith("mlp.experts.down_proj"):
            parts = {f"blk.{name.split('.')[2]}.ffn_down_exps.weight": numbers}
        else:
            parts = {f"{names.get_name(stem)}.{ending}": _stored(family, name, numbers)}
        for stored, part in parts.items():
            is_float = part.ndim == 1 or "ffn_gate_inp" in stored  # routers of experts are floats in all files
            type_name = "F32" if is_float else (own or {}).get(stored, kind)
            if type_name in ("F32", "F16"):
                writer.add_tensor(stored, part.astype(np.float32 if type_name == "F32" else np.float16))
                continue
            try:
                raw = quantize(np.ascontiguousarray(part, np.float32), GGMLQuantizationType[type_name])
            except NotImplementedError:
                raw = blocks(type_name, part[..., 0].size, part.shape[-1], seed=len(done)).reshape(*part.shape[:-1], -1)
            writer.add_tensor(stored, raw, raw_dtype=GGMLQuantizationType[type_name])
    for name, numbers in (extra or {}).items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _stored(family: str, name: str, numbers: np.ndarray) -> np.ndarray:
    """The numbers as llama.cpp stores them: queries and keys of a Llama in another order, norms of a Gemma plus 1."""
    if family == "llama" and ("q_proj" in name or "k_proj" in name):
        heads = HEADS if "q_proj" in name else KV_HEADS
        return numbers.reshape(heads, 2, -1, *numbers.shape[1:]).swapaxes(1, 2).reshape(numbers.shape)
    return numbers + 1 if family == "gemma3" and name.endswith("norm.weight") else numbers


def add_tokenizer(writer: Any) -> None:
    """Bytes, each a token, and control tokens."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    control = ["<|end|>", "<|user|>", "<|model|>", "<|a|>", "<|b|>", "<|c|>"]
    tokens = [*bytes_to_unicode().values(), "th", "the", *control]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 258 + [3] * len(control))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(258)
    writer.add_eos_token_id(258)
    writer.add_eot_token_id(260)
    writer.add_pad_token_id(258)
    writer.add_chat_template("{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}<|model|>")
