"""Random weights of a shape, written once as a folder that transformers and mlx-lm load."""

import torch
from peers.shape import CONTEXT, NORM_EPS, ROPE_THETA, Shape
from transformers import LlamaConfig, LlamaForCausalLM


def config_of(shape: Shape) -> LlamaConfig:
    """The shape as transformers knows it."""
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.mlp,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=NORM_EPS,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_THETA},
        dtype=torch.bfloat16,
    )


def write_weights(shape: Shape, seed: int = 0) -> None:
    """Write `shape.folder`, unless it is there."""
    if (shape.folder / "model.safetensors").exists():
        return
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    model = LlamaForCausalLM(config_of(shape))
    torch.set_default_dtype(torch.float32)
    model.save_pretrained(shape.folder)
