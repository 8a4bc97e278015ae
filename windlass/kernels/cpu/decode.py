"""A decode step of one layer in one call of the compiled module."""

from typing import final

import torch
from torch import Tensor

import windlass.kernels.cpu._native as _native
from windlass.core.attention import Mass
from windlass.core.decode import DecodeInput, DecodeSlots
from windlass.core.packed import PackedStates
from windlass.core.shapes import Attended, Queries, SlotIndex
from windlass.kernels import cpu
from windlass.kernels.cpu.arguments import FLOATS, address, state_arguments, visibility_arguments
from windlass.kernels.cpu.steady import steady_arguments


@final
class Decode:
    """`reference.decode` for the same slots, step after step: addresses and sizes are looked up once.

    `queries` are those of any such step. Only while the slots and the tables have the memory that they
    had is it to be called.
    """

    def __init__(self, slots: DecodeSlots, queries: Queries) -> None:
        batch, heads = queries.shape[:2]
        kv_heads, held, width = slots.values.shape[1:]
        score_heads = slots.positions.shape[1]
        self._out, self._written, self._mass = (
            (batch, 1, heads, width),
            (batch, score_heads, 1),
            (batch, kv_heads, 1, held),
        )
        self._native = _native.Decode(
            (batch, heads, kv_heads, score_heads, 1, held),
            FLOATS[slots.keys.dtype],
            FLOATS[queries.dtype],
            state_arguments(PackedStates(slots.keys), None),
            state_arguments(PackedStates(slots.values), None),
            slots.positions.data_ptr(),
            steady_arguments(slots.tables, _native.is_steady),
            slots.scale,
            slots.softcap or 0.0,
            visibility_arguments(slots.visibility),
            [(tensor.data_ptr(), initial) for tensor, initial in slots.state],
            cpu.instruction_set(),
        )

    def __call__(self, new: DecodeInput) -> tuple[SlotIndex, Attended, Mass | None]:
        """See `reference.decode`."""
        queries, positions = new.queries, new.positions.to(torch.int64).contiguous()
        out, written = queries.new_empty(self._out), torch.empty(self._written, dtype=torch.int64)
        rows = torch.empty(self._mass) if new.is_observed else None
        addresses = positions.data_ptr(), written.data_ptr(), out.data_ptr(), address(rows)
        row_stride, head_stride = queries.stride()[:2]
        self._native.step(
            (queries.data_ptr(), row_stride, head_stride),
            _new(new.keys),
            _new(new.values),
            *addresses,
            torch.get_num_threads(),
        )
        return written, out.transpose(1, 2), None if rows is None else Mass(rows, None)


def _new(states: Tensor) -> tuple[int, int, int]:
    """`NewStates` of `_native.pyi`."""
    row, head = states.stride()[:2]
    return states.data_ptr(), row * states.itemsize, head * states.itemsize
