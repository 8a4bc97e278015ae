"""The weights of a shape as a GGUF file, from the folder that `weights` wrote. Runs in the environment of llama.cpp.

    PYTHONPATH=benchmarks python -m peers.gguf_weights 1b

There is no tokenizer in it: ids are fed.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType
from peers.shape import CONTEXT, NORM_EPS, ROPE_THETA, Shape, shape_of

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    """The name in llama.cpp of a tensor of transformers."""
    stem = name.removesuffix(".weight")
    inner = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    return f"{NAMES[stem]}.weight" if inner is None else f"blk.{inner[1]}.{NAMES[inner[2]]}.weight"


def tensors_in(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of a safetensors file, bfloat16 as the integers of its bits."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header: dict[str, dict[str, Any]] = json.loads(file.read(length))
    whole = np.memmap(path, np.uint8, "r", offset=8 + length)
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise ValueError(f"{path}: {name} is {entry['dtype']}, expected BF16. Delete the folder to write it again")
        start, end = entry["data_offsets"]
        yield name, whole[start:end].view(np.uint16).reshape(entry["shape"])


def paired(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection for llama.cpp, which rotates neighbours where transformers rotates halves."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, rows.shape[1])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_tensors(writer: GGUFWriter, path: Path, heads: int, kv_heads: int) -> None:
    """Write the writer's metadata and the tensors of a safetensors file, then close it."""
    for name, bits in tensors_in(path):
        if bits.ndim == 1:
            writer.add_tensor(gguf_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
            continue
        if "q_proj" in name or "k_proj" in name:
            bits = paired(bits, heads if "q_proj" in name else kv_heads)
        octets = np.ascontiguousarray(bits).view(np.uint8)
        writer.add_tensor(gguf_name(name), octets, raw_dtype=GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_gguf(shape: Shape) -> None:
    """Write `model.gguf` into the folder of the shape, unless it is there."""
    path = shape.folder / "model.gguf"
    if path.exists():
        return
    unfinished = path.with_suffix(".unfinished")
    writer = GGUFWriter(unfinished, "llama")
    writer.add_name(shape.name)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.mlp)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_dimension_count(shape.head_dim)
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_layer_norm_rms_eps(NORM_EPS)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("no_vocab")
    write_tensors(writer, shape.folder / "model.safetensors", shape.heads, shape.kv_heads)
    unfinished.rename(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape")
    parser.add_argument("--layers", type=int)
    options = parser.parse_args()
    write_gguf(shape_of(options.shape, options.layers))
