"""A decoder layer for few tokens, by two calls of the compiled module."""

from collections.abc import Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

import windlass.kernels.cpu._native as _native
from windlass.core.decoder_layer import DecoderLayer, Norm
from windlass.core.shapes import AttendedTokens, Hidden, NewKeys, NewValues, Queries
from windlass.kernels import cpu
from windlass.kernels.cpu.arguments import FLOATS, linear_arguments
from windlass.kernels.cpu.decode import Decode, Planned


@final
class FewTokens:
    """`reference_layer` for the same layer, pass after pass, for up to MAX_ROWS tokens, all rows counted.

    Only while the layer's weights have the memory that they had is it to be called. The result of a token does not
    depend on the other tokens.
    """

    def __init__(self, layer: DecoderLayer, dtype: torch.dtype) -> None:
        scales = [None if each.scales is None else each.scales.contiguous() for each in layer.linears]
        self._kept = scales  # whose memory the compiled module reads
        self._head_dim = layer.head_dim
        self._heads = [each.out_features // layer.head_dim for each in (layer.query, layer.key, layer.value)]
        linears = zip(layer.linears, scales, strict=True)
        first, second, of_queries, of_keys = (_norm_arguments(each) for each in layer.norms)
        self.native = _native.DecoderLayer(
            FLOATS[dtype],
            (first, second, of_queries, of_keys),
            tuple(linear_arguments(each, dtype, scale) for each, scale in linears),
            layer.activation,
            cpu.instruction_set(),
        )

    def states(self, hidden: Hidden) -> tuple[Queries, NewKeys, NewValues]:
        """Memory for what `before_attention` gives."""
        batch, tokens, _ = hidden.shape
        queries, keys, values = (hidden.new_empty(batch, tokens, heads, self._head_dim) for heads in self._heads)
        return queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)

    def before_attention(self, hidden: Hidden) -> tuple[Queries, NewKeys, NewValues]:
        """See `reference_layer.before_attention`; `hidden` is contiguous."""
        states, tokens = self.states(hidden), hidden.shape[0] * hidden.shape[1]
        self.native.before(tokens, hidden.data_ptr(), _addresses(states), torch.get_num_threads())
        return states

    def planned(
        self, states: tuple[Queries, NewKeys, NewValues], decode: Decode, step: Planned, result: Hidden
    ) -> "PlannedLayer":
        """The whole layer, with a step in the cache that takes `states`, and writes its result there."""
        return PlannedLayer(self, states, decode, step, result)

    def after_attention(self, hidden: Hidden, attended: AttendedTokens) -> Hidden:
        """See `reference_layer.after_attention`; both are contiguous."""
        result = torch.empty_like(hidden)
        rows = hidden.shape[0] * hidden.shape[1]
        addresses = hidden.data_ptr(), attended.data_ptr(), result.data_ptr()
        self.native.after(rows, *addresses, torch.get_num_threads())
        return result


class PlannedLayer(NamedTuple):
    """A decoder layer, memory for its queries, keys and values, its step in the cache, and memory for its result."""

    kernel: FewTokens
    states: tuple[Queries, NewKeys, NewValues]
    decode: Decode
    step: Planned
    result: Hidden


def decode_layers(layers: Sequence[PlannedLayer], hidden: Hidden) -> None:
    """See `kernels.decode_layers`."""
    steps = [
        (each.kernel.native, _addresses(each.states), each.decode.native, each.step.given, each.result.data_ptr())
        for each in layers
    ]
    tokens = hidden.shape[0] * hidden.shape[1]
    _native.decode_layers(steps, tokens, hidden.data_ptr(), torch.get_num_threads())


def can_serve(layer: DecoderLayer, dtype: torch.dtype) -> bool:
    """Whether `FewTokens` knows this layer, whose weights are in a CPU's memory, for numbers of this dtype."""
    norms = [norm.weights for norm in layer.norms if norm is not None]
    are_norms = all(weights.dtype == dtype and weights.is_contiguous() for weights in norms)
    return are_norms and all(cpu.knows_linear(each, dtype) for each in layer.linears) and _fits(layer)


def _fits(layer: DecoderLayer) -> bool:
    """Whether what one part gives is what the next one takes."""
    width, inner = layer.query.in_features, layer.down.in_features
    heads = [each.out_features % layer.head_dim == 0 for each in (layer.query, layer.key, layer.value)]
    takes = [each.in_features == width for each in (layer.key, layer.value, layer.gate, layer.up)]
    gives = layer.output.out_features == layer.down.out_features == width
    of_heads = [_width(each) in (0, layer.head_dim) for each in (layer.query_norm, layer.key_norm)]
    is_gated = layer.gate.out_features == layer.up.out_features == inner
    is_normed = _width(layer.first_norm) == _width(layer.second_norm) == width
    of_values = layer.output.in_features == layer.query.out_features
    return all((*heads, *takes, *of_heads, gives, is_gated, is_normed, of_values))


def _width(norm: Norm | None) -> int:
    """Numbers of which a norm is; 0 for none."""
    return 0 if norm is None else norm.weights.numel()


def _addresses(states: tuple[Tensor, Tensor, Tensor]) -> tuple[int, int, int]:
    queries, keys, values = states
    return queries.data_ptr(), keys.data_ptr(), values.data_ptr()


def _norm_arguments(norm: Norm | None) -> tuple[int, int, float, int]:
    """`Norm` of `_native.pyi`."""
    if norm is None:
        return 0, 0, 0.0, 0
    weights: Tensor = norm.weights
    return weights.data_ptr(), weights.numel(), norm.epsilon, norm.rounding
