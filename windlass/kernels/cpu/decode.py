"""A decode step of one layer in one call of the compiled module."""

from typing import Final, NamedTuple, final

import torch
from torch import Tensor

import windlass.kernels.cpu._native as _native
from windlass.core.attention import Mass
from windlass.core.decode import DecodeInput, DecodeOutput, DecodeSlots, Retention
from windlass.core.packed import PackedStates
from windlass.core.recall import RecallSlots
from windlass.core.shapes import Queries
from windlass.kernels import cpu
from windlass.kernels.cpu.arguments import FLOATS, address, format_of, state_arguments, visibility_arguments
from windlass.kernels.cpu.recall import digest_arguments
from windlass.kernels.cpu.steady import steady_arguments

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
