"""A decode step of a layer, and a decoder layer for few tokens, in C++."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Final, NamedTuple, final

import torch
from jaxtyping import Int32, Int64
from torch import Tensor

import windlass.kernels.cpu._native as _native
from windlass.core.inputs import (
    DecodeInput,
    DecodeOutput,
    DecoderLayer,
    DecodeSlots,
    Mass,
    Norm,
    RecallSlots,
    Retention,
    TokenInput,
)
from windlass.core.positions import EMPTY, ReadRule
from windlass.core.types import (
    AttendedTokens,
    Hidden,
    NewKeys,
    NewValues,
    Queries,
    SlotIndex,
    SlotPositions,
)
from windlass.kernels import cpu
from windlass.kernels.cpu.slots import digest_arguments
from windlass.kernels.cpu.tensors import (
    FLOATS,
    address,
    contiguous_means,
    format_of,
    group_bits,
    linear_arguments,
    norm_arguments,
    pin_arguments,
    state_arguments,
    steady_arguments,
    visibility_arguments,
)

OBSERVED: Final = {"nothing": 0, "sum": 1, "last": 2, "fade": 3}
Watch = _native.Watch  # watches Python objects for changes
SCORES: Final = {"position": 0, "state": 1, "pooled": 2, "novelty": 3}


class Planned(NamedTuple):
    """A step of `Decode`: the arguments of the compiled module, its output, and tensors that it reads."""

    given: "_native.DecodeStep"
    output: DecodeOutput
    kept: tuple[object, ...]


@final
class Decode:
    """`reference_decode.decode` for the same slots, step after step: addresses and sizes are looked up once.

    `queries` are those of any such step. Call it only while keys, values and tables have the memory that they had.
    """

    def __init__(self, slots: DecodeSlots, queries: Queries) -> None:
        batch, heads = queries.shape[:2]
        kv_heads, held = slots.values.data.shape[1:3]
        self._out, self._index, self._mass = (
            (batch, 1, heads, slots.values.channels),
            (batch, slots.score_heads, 1),
            (batch, kv_heads, 1, held),
        )
        recall, means = slots.recall, tuple(map(contiguous_means, (slots.keys, slots.values)))
        # The compiled module holds these addresses, and those of the recall store.
        self._kept = *means, slots.keys.ring_index, slots.values.ring_index
        self._recall = (
            None if recall is None else (recall.cos_sin, recall.pieces[0].keys.states.means, recall.last_recalled)
        )
        self.native = _native.Decode(
            (batch, heads, kv_heads, slots.score_heads, 1, held),
            format_of(slots.keys),
            FLOATS[queries.dtype],
            state_arguments(slots.keys, means[0]),
            state_arguments(slots.values, means[1]),
            steady_arguments(slots.tables, _native.is_steady),
            _rule(slots.rule),
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
        """Take a planned step. Its output then equals that of `reference_decode.decode`."""
        self.native.step(planned.given, torch.get_num_threads())

    def planned(self, new: DecodeInput) -> "Planned":
        """A step that is still to be taken, with memory for its output."""
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
            pin_arguments(new.pins),
        )
        masses = None if mass is None else Mass(mass, None)
        output = DecodeOutput(written, out.transpose(1, 2), masses, slot_positions, state, evicted, before)
        return Planned(given, output, (new, positions, released))


def _new(states: Tensor) -> tuple[int, int, int]:
    """`NewStates` of `_native.pyi`."""
    row, head = states.stride()[:2]
    return states.data_ptr(), row * states.itemsize, head * states.itemsize


def _rule(rule: ReadRule) -> tuple[int, int, int, int, int]:
    """`ReadRule` of `read_positions.hpp`."""
    return rule.ranked_from, rule.group, rule.near, -1 if rule.limit is None else rule.limit, rule.trained or 0


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
    if store.cos_sin is not None:
        cos, sin = store.cos_sin
        turn = cos.data_ptr(), sin.data_ptr(), cos.shape[0]
    positions = store.positions.data_ptr(), store.positions.shape[1], store.last_recalled.data_ptr()
    return (
        (*sizes, format_of(keys.states), group_bits(keys.states), group_bits(values)),
        address(keys.states.means),
        pieces,
        digests,
        positions,
        turn,
        (store.count, store.state),
    )


TRIAL: Final = 5  # steps by which a number of threads is judged
CLEAR: Final = 3.0  # ratio of two times that decides at once
PAUSES: Final = (32, 1024)  # steps between trials, at first and at most


@final
class ThreadChoice:
    """The number of threads of a decoder's steps, by which the latest steps were fastest.

    Threads meet after each matrix. In a small model, or on a busy machine, they may lose more time there than they
    save. The number changes no bit of a result.
    """

    def __init__(self) -> None:
        self._most = self._best = self._more = 1
        self._taken: tuple[list[float], list[float]] = [], []  # seconds with more threads and with half as many
        self._left, self._pause = 0, PAUSES[0]  # steps until the next trial, and from that one to another

    def of(self, most: int) -> int:
        """The threads of the next step, `most` at most."""
        if most != self._most:
            self._most = self._best = most
            self._pause = PAUSES[0]
            self._compare(most)
        if self._left or most == 1:
            return self._best
        more, fewer = self._taken
        return self._more if len(more) == len(fewer) else self._more // 2

    def took(self, seconds: float) -> None:
        """Note the time of a step.

        In a trial, steps with more threads and with half as many take turns. It begins with the most threads, and goes
        on with fewer as long as these are faster.
        """
        if self._most == 1:
            return
        if self._left:
            self._left -= 1
            if not self._left:
                self._compare(self._most)
            return
        more, fewer = self._taken
        (more if len(more) == len(fewer) else fewer).append(seconds)
        if len(more) > len(fewer):
            return
        ratio = median(more) / median(fewer)
        if len(more) < TRIAL and 1 / CLEAR < ratio < CLEAR:
            return
        if ratio > 1 and self._more // 2 > 1:
            self._compare(self._more // 2)
            return
        best = self._more // 2 if ratio > 1 else self._more
        self._pause = min(2 * self._pause, PAUSES[1]) if best == self._best else PAUSES[0]
        self._best, self._left = best, self._pause

    def _compare(self, more: int) -> None:
        self._more, self._taken, self._left = more, ([], []), 0


@final
class FewTokens:
    """`reference_layer` for the same layer, pass after pass, for up to `most_tokens` of all rows (None: any number).

    Call it only while the layer's weights have the memory that they had. The result of a token does not depend on the
    other tokens, but on whether there are more than MAX_ROWS where `cpu.has_panels`.
    """

    def __init__(self, layer: DecoderLayer, dtype: torch.dtype) -> None:
        scales = [None if each.scales is None else each.scales.contiguous() for each in layer.linears]
        self._kept = scales  # the compiled module reads their memory
        self.threads = defaultdict[int, ThreadChoice](ThreadChoice)  # by the number of rows
        self.head_dim = layer.head_dim
        bounds = [cpu.FLOAT_ROWS if dtype is torch.bfloat16 else cpu.MAX_ROWS]
        if all(each.is_coded or cpu.has_panels(each, dtype) for each in layer.linears):
            most = (cpu.most_rows(each, dtype) for each in layer.linears)
            bounds = [each for each in most if each is not None]
        self.most_tokens = min(bounds, default=None)
        self._at_once = min(cpu.rows_at_once(each, dtype) for each in layer.linears)
        self.heads = [each.out_features // layer.head_dim for each in (layer.query, layer.key, layer.value)]
        linears = zip(layer.linears, scales, strict=True)
        first, second, of_queries, of_keys = (norm_arguments(each) for each in layer.norms)
        self.native = _native.DecoderLayer(
            FLOATS[dtype],
            (first, second, of_queries, of_keys),
            tuple(linear_arguments(each, dtype, scale) for each, scale in linears),
            layer.activation,
            cpu.instruction_set(),
        )

    def takes(self, hidden: Hidden) -> bool:
        """Return True if it computes so many tokens."""
        return self.most_tokens is None or hidden.shape[:-1].numel() <= self.most_tokens

    def norm(self, which: int, states: Tensor) -> Tensor:
        """`states` (..., width) after the layer's norm of this number, in the order of `DecoderLayer.norms`.

        That of any number of tokens, for a pass whose products are PyTorch's.
        """
        result = torch.empty_like(states := states.contiguous())
        self.native.norm(
            which, states.shape[:-1].numel(), states.data_ptr(), result.data_ptr(), torch.get_num_threads()
        )
        return result

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        """Overwrite `gate` with its activation times `up`, for such a pass. Both are contiguous."""
        self.native.gate(gate.numel(), gate.data_ptr(), up.data_ptr(), torch.get_num_threads())
        return gate

    def states(self, hidden: Hidden) -> tuple[Queries, NewKeys, NewValues]:
        """Memory for the output of `before_attention`."""
        batch, tokens, _ = hidden.shape
        queries, keys, values = (hidden.new_empty(batch, tokens, heads, self.head_dim) for heads in self.heads)
        return queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)

    def before_attention(self, hidden: Hidden) -> tuple[Queries, NewKeys, NewValues]:
        """See `reference_layer.before_attention`. `hidden` is contiguous."""
        states, threads = self.states(hidden), torch.get_num_threads()
        for tokens, (own, *to) in self._slices([hidden, *(each.transpose(1, 2) for each in states)]):
            self.native.before(tokens, own, (to[0], to[1], to[2]), threads)
        return states

    def after_attention(self, hidden: Hidden, attended: AttendedTokens) -> Hidden:
        """See `reference_layer.after_attention`. Both are contiguous."""
        result, threads = torch.empty_like(hidden), torch.get_num_threads()
        for tokens, (own, its, to) in self._slices([hidden, attended, result]):
            self.native.after(tokens, own, its, to, threads)
        return result

    def _slices(self, tensors: Sequence[Tensor]) -> Iterator[tuple[int, list[int]]]:
        """Tokens that the compiled module takes at once, and the addresses of the slices of contiguous tensors (batch,
        tokens, ...) that they have."""
        batch, tokens = tensors[0].shape[:2]
        sizes = [each.nbytes // (batch * tokens) for each in tensors]
        for first, count in cpu.even_parts(batch * tokens, self._at_once):
            yield count, [each.data_ptr() + first * size for each, size in zip(tensors, sizes, strict=True)]


@dataclass(frozen=True, eq=False)
class LayerSlots:
    """A decoder layer, the kernel of its decode steps, and its slots, which the steps change in place.

    `held` are tokens of any row at most, and `budget` is the most of them at rest. `is_observed`: a step changes the
    state of all slots. `recall_positions` (batch, tokens) are those of the recall store, which all rows share. `heads`
    are the kv heads of the decoder layer that have these slots (None: all), in a layer whose heads lie apart.
    """

    layer: FewTokens
    decode: Decode
    positions: SlotPositions
    state: tuple[Tensor, ...]
    budget: int | None
    held: int
    has_evicted: bool
    is_observed: bool
    recall_positions: Tensor | None
    heads: tuple[int, ...] | None

    @property
    def kv_heads(self) -> int:
        """Number of kv heads that have these slots."""
        return self.layer.heads[1] if self.heads is None else len(self.heads)

    @property
    def rows(self) -> int:
        """Rows of slots, over the batch and the heads that hold tokens of their own."""
        return self.positions.shape[0] * self.positions.shape[1]


@dataclass(frozen=True, eq=False)
class StepMemory:
    """Tensors of one step for all layers, one layer after the other: those that undo it, and those that a record keeps.

    `state` is that of observed layers before the step. `mass` and `queries` are None where nobody asks for them later,
    and so are `keys`.
    """

    written: Int64[Tensor, " rows"]
    evicted: Int64[Tensor, " rows"]
    evicted_positions: Int32[Tensor, " rows"]
    state: Tensor | None
    mass: Tensor | None
    queries: Tensor | None
    keys: Tensor | None

    @property
    def addresses(self) -> tuple[int, int, int, int, int, int, int]:
        """`UndoArguments` of `_native.pyi`."""
        first = self.written.data_ptr(), self.evicted.data_ptr(), self.evicted_positions.data_ptr()
        return (*first, address(self.state), address(self.mass), address(self.queries), address(self.keys))


@final
class DecoderSteps:
    """Decode steps of all layers of a decoder, each in one call, and the latest of them taken back.

    Weights, slots and tables must have the memory that they had when it was made. `is_kept`: mass and queries of
    each step are kept. `keeps_keys`: its keys are kept too.
    """

    def __init__(self, layers: Sequence[LayerSlots], hidden: Hidden, is_kept: bool, keeps_keys: bool) -> None:
        self._layers, self._batch, self._dtype = tuple(layers), hidden.shape[0], hidden.dtype
        first = layers[0].layer
        self._heads, self._kv_heads, self._head_dim = *first.heads[:2], first.head_dim
        self._is_kept, self._keeps_keys = is_kept, keeps_keys
        self._rows = sum(each.rows for each in layers)
        self._state_sizes = [each.positions.numel() if each.is_observed else 0 for each in layers]
        self._masses = [self._batch * each.kv_heads * each.positions.shape[2] for each in layers]
        self._kept_heads = [each.kv_heads for each in layers]
        self._starts = [sum(each.rows for each in layers[:at]) for at in range(len(layers))]
        self._native = _native.DecoderSteps(
            (self._batch, self._heads, self._kv_heads, self._head_dim, hidden.shape[2], hidden.itemsize),
            [
                _slots_arguments(
                    each,
                    before is None or before.layer is not each.layer,
                    after is None or after.layer is not each.layer,
                )
                for before, each, after in zip((None, *layers[:-1]), layers, (*layers[1:], None), strict=True)
            ],
        )

    @property
    def count(self) -> int:
        """Steps that were taken, and not taken back."""
        return self._native.count

    def memory(self) -> StepMemory:
        """New memory for a step."""
        state, mass = sum(self._state_sizes), sum(self._masses)
        keys = self._batch * self._head_dim * sum(self._kept_heads)
        queries = keys * self._heads // self._kv_heads
        keeps_queries = self._is_kept or self._keeps_keys
        return StepMemory(
            written=torch.empty(self._rows, dtype=torch.int64),
            evicted=torch.empty(self._rows, dtype=torch.int64),
            evicted_positions=torch.full((self._rows,), EMPTY, dtype=torch.int32),
            state=torch.empty(state) if state else None,
            mass=torch.empty(mass) if self._is_kept else None,
            queries=torch.empty(queries, dtype=self._dtype) if keeps_queries else None,
            keys=torch.empty(keys, dtype=self._dtype) if self._keeps_keys else None,
        )

    def step(self, token: TokenInput, memory: StepMemory, released: Sequence[StepMemory]) -> Hidden:
        """Take a step. Returns the last layer's output. Slots that `released` steps evicted are free afterwards."""
        result = torch.empty_like(token.hidden)
        given, choice = _token_arguments(token, result.data_ptr()), self._layers[0].layer.threads[self._batch]
        threads, started = choice.of(torch.get_num_threads()), perf_counter()
        self._native.step(given, memory.addresses, _released(released), threads)
        choice.took(perf_counter() - started)
        return result

    def take_back(self, token: TokenInput, memory: StepMemory, released: Sequence[StepMemory]) -> None:
        """Undo the latest step, which was given these."""
        self._native.take_back(_token_arguments(token, 0), memory.addresses, _released(released))

    def free(self, released: Sequence[StepMemory]) -> None:
        """Free the slots that these steps evicted."""
        self._native.free(_released(released))

    def written(self, memory: StepMemory, layer: int) -> SlotIndex:
        """The slots that a step wrote in a layer."""
        return self._part(memory.written, layer)

    def evicted(self, memory: StepMemory, layer: int) -> tuple[SlotIndex, SlotIndex]:
        """The slots that a step evicted in a layer, and their positions."""
        return self._part(memory.evicted, layer), self._part(memory.evicted_positions, layer)

    def state(self, memory: StepMemory, layer: int) -> Tensor | None:
        """The observed state of a layer before a step."""
        if memory.state is None or not self._layers[layer].is_observed:
            return None
        state: Tensor = memory.state.split(self._state_sizes)[layer]
        return state.view(self._layers[layer].positions.shape)

    def mass(self, memory: StepMemory, layer: int) -> Mass | None:
        """The attention that the slots of a layer got in a step."""
        if memory.mass is None or not self._layers[layer].is_observed:
            return None
        own: Tensor = memory.mass.split(self._masses)[layer]
        return Mass(own.view(self._batch, self._kept_heads[layer], 1, -1), None)

    def masses(self, memory: StepMemory, layers: Sequence[int]) -> Mass:
        """The attention that the slots of some layers got in a step, as rows of one batch."""
        assert memory.mass is not None, "attention that nobody kept"
        own, heads = memory.mass.split(self._masses), self._kept_heads[layers[0]]
        return Mass(torch.cat([own[layer].view(self._batch, heads, 1, -1) for layer in layers]), None)

    def joined_queries(self, memory: StepMemory, layers: Sequence[int]) -> Queries:
        """The queries of a step in some layers, as rows of one batch."""
        assert memory.queries is not None, "queries that nobody kept"
        own: Sequence[Tensor] = memory.queries.view(sum(self._kept_heads), -1).split(self._kept_heads)
        return torch.cat([own[layer].reshape(self._batch, -1, 1, self._head_dim) for layer in layers])

    def set_evicted(self, memory: StepMemory, layers: Sequence[int], slots: SlotIndex, positions: SlotIndex) -> None:
        """Note the slots that a policy chose in some layers, given as rows of one batch, and their positions."""
        for layer, its_slots, its_positions in zip(
            layers, slots.chunk(len(layers)), positions.chunk(len(layers)), strict=True
        ):
            self._part(memory.evicted, layer).copy_(its_slots)
            self._part(memory.evicted_positions, layer).copy_(its_positions)

    def queries(self, memory: StepMemory, layer: int) -> Queries:
        """The queries of a step in a layer."""
        assert memory.queries is not None, "queries that nobody kept"
        return self._states(memory.queries, layer)

    def keys(self, memory: StepMemory, layer: int) -> NewKeys:
        """The keys of a step in a layer."""
        assert memory.keys is not None, "keys that nobody kept"
        return self._states(memory.keys, layer)

    def _states(self, states: Tensor, layer: int) -> Tensor:
        """The states of a layer's heads, out of those of all layers."""
        own: Tensor = states.view(sum(self._kept_heads), -1).split(self._kept_heads)[layer]
        return own.reshape(self._batch, -1, 1, self._head_dim)

    def _part(self, tensor: Tensor, layer: int) -> Tensor:
        start, rows = self._starts[layer], self._layers[layer].rows
        return tensor[start : start + rows].view(self._batch, -1, 1)


def _slots_arguments(slots: LayerSlots, is_first: bool, is_last: bool) -> "_native.LayerArguments":
    recall = slots.recall_positions
    budget = -1 if slots.budget is None else slots.budget
    return (
        slots.layer.native,
        slots.decode.native,
        (slots.positions.data_ptr(), [each.data_ptr() for each in slots.state]),
        (slots.rows, slots.positions.shape[2]),
        (budget, slots.held, slots.has_evicted),
        slots.is_observed,
        (0, 0) if recall is None else (recall.data_ptr(), recall.shape[1]),
        (list(slots.heads or ()), is_first, is_last),
    )


def _token_arguments(token: TokenInput, result: int) -> "_native.GivenArguments":
    return (
        token.hidden.data_ptr(),
        result,
        token.positions.data_ptr(),
        token.next_positions.data_ptr(),
        address(token.starts),
        address(token.row_sinks),
        pin_arguments(token.pins),
        token.longest,
    )


def _released(steps: Sequence[StepMemory]) -> list[tuple[int, int]]:
    return [(each.evicted.data_ptr(), each.evicted_positions.data_ptr()) for each in steps]


def can_serve(layer: DecoderLayer, dtype: torch.dtype) -> bool:
    """Return True if `FewTokens` knows this layer, whose weights are in a CPU's memory, for numbers of this dtype."""
    norms = [norm.weights for norm in layer.norms if norm is not None]
    are_norms = all(weights.dtype == dtype and weights.is_contiguous() for weights in norms)
    return are_norms and all(cpu.knows_linear(each, dtype) for each in layer.linears) and _fits(layer)


def _fits(layer: DecoderLayer) -> bool:
    """Return True if the output width of each part is the input width of the next one."""
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
    """The number of a norm's weights. 0 for none."""
    return 0 if norm is None else norm.weights.numel()
