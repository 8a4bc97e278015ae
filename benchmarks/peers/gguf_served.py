"""The model of `benchmarks/serving.py` as a GGUF file for llama-server: same weights, same tokens.

    PYTHONPATH=benchmarks python -m peers.gguf_served FOLDER FILE

`gguf` must be installed; torch is not needed.
"""

import argparse
import json
from pathlib import Path

from gguf import GGUFWriter, LlamaFileType, TokenType
from peers.gguf_weights import write_tensors


def is_ascii(token: str) -> bool:
    """Whether a token's bytes are, which it has as the letters of byte-level BPE."""
    return all(0x20 < ord(letter) < 0x7F or 0x100 <= ord(letter) <= 0x121 for letter in token)


def write_tokenizer(writer: GGUFWriter, folder: Path, vocabulary: int) -> None:
    """The byte-level BPE of `tokenizer.json`, for prompts in ASCII.

    Other tokens have names, because random weights put their bytes together in ways that are no text, and
    llama-server ends an answer that is none.
    """
    whole = json.loads((folder / "tokenizer.json").read_text())
    tokens = {number: text for text, number in whole["model"]["vocab"].items()}
    special = {each["id"]: each["content"] for each in whole["added_tokens"]}
    numbers = range(vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    known = {number: token for number, token in tokens.items() if is_ascii(token)}
    writer.add_token_list([special.get(number) or known.get(number) or f"[unused {number}]" for number in numbers])
    writer.add_token_types([TokenType.CONTROL if number in special else TokenType.NORMAL for number in numbers])
    merges = whole["model"]["merges"]
    pairs = [each.split(" ") if isinstance(each, str) else each for each in merges]
    writer.add_token_merges([" ".join(pair) for pair in pairs if is_ascii("".join(pair))])


def write_model(folder: Path, file: Path) -> None:
    """Write the model of `folder`, of the Llama family in bfloat16, to `file`."""
    config = json.loads((folder / "config.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = GGUFWriter(file, "llama")
    writer.add_name(folder.name)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(LlamaFileType.MOSTLY_BF16)
    write_tokenizer(writer, folder, config["vocab_size"])
    write_tensors(writer, folder / "model.safetensors", heads, kv_heads)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("file", type=Path)
    options = parser.parse_args()
    write_model(options.folder, options.file)
