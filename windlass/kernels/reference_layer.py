"""What the kernels of a decoder layer mean, in plain PyTorch."""

import torch
from torch import Tensor
from torch.nn import functional

from windlass.core.decoder_layer import Activation, DecoderLayer, Norm, Rounding
from windlass.core.linear import LinearInput
from windlass.core.shapes import AttendedTokens, Hidden, NewKeys, NewValues, Queries
from windlass.kernels import reference


def norm(states: Tensor, norm: Norm) -> Tensor:
    """`states` (..., width), computed in float32, or float64 if they are, and rounded as `norm` says."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.epsilon)
    if norm.rounding is Rounding.NARROW:
        return norm.weights * wide.to(states.dtype)
    weights = norm.weights.to(wide.dtype)
    return (wide * (weights + 1 if norm.rounding is Rounding.ONE_MORE else weights)).to(states.dtype)


def before_attention(layer: DecoderLayer, hidden: Hidden) -> tuple[Queries, NewKeys, NewValues]:
    """Queries, keys and values of new tokens, before any rotation."""
    normed = norm(hidden, layer.first_norm)
    heads = (*hidden.shape[:2], -1, layer.head_dim)
    queries, keys, values = (
        reference.linear(LinearInput(normed, each)).view(heads) for each in (layer.query, layer.key, layer.value)
    )
    queries = queries if layer.query_norm is None else norm(queries, layer.query_norm)
    keys = keys if layer.key_norm is None else norm(keys, layer.key_norm)
    return queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)


def after_attention(layer: DecoderLayer, hidden: Hidden, attended: AttendedTokens) -> Hidden:
    """What the layer returns: `hidden` is what it was given, `attended` what attention gave."""
    hidden = hidden + reference.linear(LinearInput(attended.flatten(2), layer.output))
    normed = norm(hidden, layer.second_norm)
    gate, up = (reference.linear(LinearInput(normed, each)) for each in (layer.gate, layer.up))
    gate = functional.silu(gate) if layer.activation is Activation.SILU else functional.gelu(gate, approximate="tanh")
    return hidden + reference.linear(LinearInput(gate * up, layer.down))
