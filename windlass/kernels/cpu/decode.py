"""A decode step of a layer, and a decoder layer for few tokens, in C++."""

from collections.abc import Sequence
from typing import Final, NamedTuple, final

import torch
from torch import Tensor

import windlass.kernels.cpu._native as _native
from windlass.core.inputs import (
    DecodeInput,
    DecodeOutput,
    DecoderLayer,
    DecodeSlots,
    Mass,
    Norm,
    PackedStates,
    RecallSlots,
    Retention,
)
from windlass.core.types import AttendedTokens, Hidden, NewKeys, NewValues, Queries
from windlass.kernels import cpu
from windlass.kernels.cpu.slots import digest_arguments
from windlass.kernels.cpu.tensors import (
    FLOATS,
    address,
    format_of,
    linear_arguments,
    state_arguments,
    steady_arguments,
    visibility_arguments,
)

OBSERVED: Final = {"nothing": 0, "sum": 1, "last": 2, "fade": 3}
SCORES: Final = {"position": 0, "state": 1, "pooled": 2, "novelty": 3}


class Planned(NamedTuple):
    """A step of `Decode`: what the compiled module is given, what it will give, and tensors that it reads."""

    given: "_native.DecodeStep"
    output: DecodeOutput
    kept: tuple[object, ...]


@final
class Decode:
    """`reference_decode.decode` for the same slots, step after step: addresses and sizes are looked up once.

    `queries` are those of any such step. Only while keys, values and tables have the memory that they had is it to be
    called.
    """

    def __init__(self, slots: DecodeSlots, queries: Queries) -> None:
        batch, heads = queries.shape[:2]
        kv_heads, held, width = slots.values.shape[1:]
        self._out, self._index, self._mass = (
            (batch, 1, heads, width),
            (batch, slots.score_heads, 1),
            (batch, kv_heads, 1, held),
        )
        recall = slots.recall  # of which the compiled module has addresses
        self._kept = None if recall is None else (recall.turn, recall.pieces[0].keys.states.means, recall.last_recalled)
        self.native = _native.Decode(
            (batch, heads, kv_heads, slots.score_heads, 1, held),
            FLOATS[slots.keys.dtype],
            FLOATS[queries.dtype],
            state_arguments(PackedStates(slots.keys), None),
            state_arguments(PackedStates(slots.values), None),
            steady_arguments(slots.tables, _native.is_steady),
            slots.scale,
            slots.softcap or 0.0,
            visibility_arguments(slots.visibility),
            None if slots.retention is None else _retention(slots.retention),
            None if slots.recall is None else _recall(slots.recall),
            cpu.instruction_set(),
        )

    def __call__(self, new: DecodeInput) -> DecodeOutput:
        """See `reference_decode.decode`."""
        planned = self.planned(new)
        self.take(planned)
        return planned.output

    def take(self, planned: "Planned") -> None:
        """Do what is planned; its output then holds what `reference_decode.decode` gives."""
        self.native.step(planned.given, torch.get_num_threads())

    def planned(self, new: DecodeInput) -> "Planned":
        """A step that is still to be taken, with memory for what it gives."""
        queries, positions, ends = new.queries, new.positions, new.next_positions
        if positions.dtype is not torch.int64 or not positions.is_contiguous():
            positions = positions.to(torch.int64).contiguous()
        out, slot_positions = queries.new_empty(self._out), torch.empty_like(new.slot_positions)
        state = tuple(map(torch.empty_like, new.state))
        written, evicted, before, mass, gone = torch.empty(self._index, dtype=torch.int64), None, None, None, (0, 0)
        if new.is_evicting:
            evicted, before = torch.empty_like(written), torch.empty(self._index, dtype=torch.int32)
            gone = evicted.data_ptr(), before.data_ptr()
        if new.is_observed:
            mass = torch.empty(self._mass)
        released = [(index.contiguous(), stood.contiguous()) for index, stood in new.released]
        row_stride, head_stride = queries.stride()[:2]
        given = _native.DecodeStep(
            (queries.data_ptr(), row_stride, head_stride),
            _new(new.keys),
            _new(new.values),
            (positions.data_ptr(), ends.data_ptr()),
            (new.slot_positions.data_ptr(), slot_positions.data_ptr()),
            [(old.data_ptr(), its.data_ptr()) for old, its in zip(new.state, state, strict=True)],
            written.data_ptr(),
            out.data_ptr(),
            0 if mass is None else mass.data_ptr(),
            gone,
            [(index.data_ptr(), stood.data_ptr(), index.shape[2]) for index, stood in released],
            (0 if new.remembered is None else new.remembered.data_ptr(), new.is_recalling),
            address(new.row_sinks),
        )
        masses = None if mass is None else Mass(mass, None)
        output = DecodeOutput(written, out.transpose(1, 2), masses, slot_positions, state, evicted, before)
        return Planned(given, output, (new, positions, released))


def _new(states: Tensor) -> tuple[int, int, int]:
    """`NewStates` of `_native.pyi`."""
    row, head = states.stride()[:2]
    return states.data_ptr(), row * states.itemsize, head * states.itemsize


def _retention(retention: Retention) -> tuple[int, int, float, int, bool, int, int, int]:
    """`RetainArguments` of `_native.pyi`."""
    ranking = retention.ranking
    numbers = OBSERVED[ranking.observe], SCORES[ranking.score], ranking.share, ranking.pool, ranking.is_mean
    return *numbers, retention.budget, retention.sinks, retention.window


def _recall(store: RecallSlots) -> "_native.RecallArguments":
    """`RecallArguments` of `_native.pyi`."""
    keys, values = store.pieces[0].keys, store.pieces[0].values
    sizes = keys.tiles.shape[3], keys.states.channels, values.data.shape[3] * values.data.itemsize, values.channels
    digests = list(map(digest_arguments, store.digests)), store.candidates
    pieces = [
        (
            piece.keys.tiles.data_ptr(),
            address(piece.keys.states.scales),
            piece.values.data.data_ptr(),
            address(piece.values.scales),
            piece.keys.tiles.shape[2],
        )
        for piece in store.pieces
    ]
    turn = 0, 0, 0
    if store.turn is not None:
        cos, sin = store.turn
        turn = cos.data_ptr(), sin.data_ptr(), cos.shape[0]
    positions = store.positions.data_ptr(), store.positions.shape[1], store.last_recalled.data_ptr()
    return (
        (*sizes, format_of(keys.states)),
        address(keys.states.means),
        pieces,
        digests,
        positions,
        turn,
        (store.count, store.state),
    )


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
