"""Tensors as arguments of the compiled module, see `_native.pyi` and `call.hpp`."""

from collections.abc import Callable
from typing import Final, final
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from windlass.core.inputs import Format, GroupCodes, LinearLayer, Norm, PackedStates, Visibility
from windlass.core.positions import RotaryBranch
from windlass.core.types import PinnedRanges, RotaryTable

NO_LIMIT: Final = 2**31 - 1  # a distance that no token reaches
FLOATS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
LOW_BIT: Final = {Format.INT8: 3, Format.INT4: 4}
INT8: Final = LOW_BIT[Format.INT8]  # a look-up calls the hash of an Enum, which is Python's
INT4: Final = LOW_BIT[Format.INT4]
GroupArguments = tuple[int, int, int, int, int, bool, int, int]
NO_GROUPS: Final = 0, 0, 0, 0, 0, False, 0, 0


def branch_positions(branch: RotaryBranch | None) -> tuple[Tensor | None, Tensor | None]:
    """Rotary positions of queries and keys, as `call.hpp` wants them."""
    if branch is None:
        return None, None
    return branch.queries.to(torch.int64).contiguous(), branch.keys.to(torch.int32).contiguous()


def format_of(states: PackedStates) -> int:
    """The number of a format in `call.hpp`. -1 where it is not known there."""
    if states.full_precision is not None and states.full_precision.dtype not in FLOATS:
        return -1
    if states.format is Format.FLOAT:
        return FLOATS.get(states.data.dtype, -1)
    return LOW_BIT.get(states.format, -1)


def group_bits(states: PackedStates) -> int:
    """The logarithm of the channels of a group, 0 where a slot and head has one scale."""
    return states.group.bit_length() - 1 if states.group else 0


def contiguous_means(states: PackedStates) -> Tensor | None:
    return None if states.means is None else states.means.float().contiguous()


def state_arguments(
    states: PackedStates, means: Tensor | None
) -> tuple[int, int, int, int, int, int, int, int, int, int, int, int]:
    """`PackedStates` of `_native.pyi`. `means` are those of `states`, contiguous."""
    data, ring = states.data, states.full_precision
    in_ring = (0, 0, 0, 0)
    if ring is not None and states.ring_index is not None:
        in_ring = ring.data_ptr(), states.ring_index.data_ptr(), ring.shape[2], FLOATS[ring.dtype]
    row_bytes = data.shape[-1] * data.itemsize
    channels = states.channels, states.first, states.held_channels
    return data.data_ptr(), address(states.scales), address(means), *channels, row_bytes, *in_ring, group_bits(states)


def table_arguments(tables: tuple[RotaryTable, RotaryTable] | None) -> tuple[int, int, int]:
    if tables is None:
        return 0, 0, 0
    cos, sin = tables
    return cos.data_ptr(), sin.data_ptr(), cos.shape[1]


def address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def pin_arguments(pins: PinnedRanges | None) -> tuple[int, int]:
    """The address of pinned ranges, which are contiguous, and their number in a row."""
    return (0, 0) if pins is None else (pins.data_ptr(), pins.shape[1])


def visibility_arguments(visibility: Visibility) -> tuple[int, int, int, int]:
    """Limits of visibility, NO_LIMIT for none."""
    return (
        visibility.sliding_window or NO_LIMIT,
        visibility.reach or NO_LIMIT,
        visibility.sinks,
        visibility.attention_chunk or NO_LIMIT,
    )


def linear_arguments(
    layer: LinearLayer, dtype: torch.dtype, scales: Tensor | None
) -> tuple[int, int, int, int, int, int, GroupArguments, int]:
    """`LinearLayer` of `_native.pyi`, for inputs of this dtype. `scales` are those of `layer`, contiguous."""
    weights, groups, format, scaled = layer.weights, NO_GROUPS, FLOATS[dtype], FLOATS[dtype]
    if isinstance(weights, GroupCodes):
        pairs = INT8 if weights.supers is not None else FLOATS[weights.pairs.dtype]
        shape = weights.group, weights.block, pairs, weights.columns, weights.is_by_block, weights.middle
        groups = weights.pairs.data_ptr(), *shape, address(weights.supers)
        format = INT4 if weights.bits == 4 else INT8
        weights = weights.codes
    elif scales is not None:
        format, scaled = INT8, FLOATS[scales.dtype]
    sizes = layer.in_features, layer.out_features
    return *sizes, format, weights.data_ptr(), address(scales), scaled, groups, address(layer.bias)


def norm_arguments(norm: Norm | None) -> tuple[int, int, float, int]:
    """`Norm` of `_native.pyi`."""
    if norm is None:
        return 0, 0, 0.0, 0
    weights: Tensor = norm.weights
    return weights.data_ptr(), weights.numel(), norm.epsilon, norm.rounding


Look = Callable[[int, int, int, int], bool]  # the compiled module's `is_steady`


@final
class SteadyTables:
    """Tells which tables are steady, and looks at each once. A table is never written to once it is built."""

    def __init__(self) -> None:
        self._known = WeakIdKeyDictionary()  # keys are cos, values a reference to sin and the result

    def __call__(self, tables: tuple[RotaryTable, RotaryTable], look: Look) -> bool:
        """Return True if the first rows of `tables` may rotate a few keys at consecutive positions."""
        cos, sin = tables
        known: tuple[ReferenceType[Tensor], bool] | None = self._known.get(cos)
        if known is None or known[0]() is not sin:
            known = ref(sin), look(cos.data_ptr(), sin.data_ptr(), *cos.shape)
            self._known[cos] = known
        return known[1]


are_steady: Final = SteadyTables()


def steady_arguments(tables: tuple[RotaryTable, RotaryTable] | None, look: Look) -> tuple[int, int, int, bool]:
    """The arguments of `table_arguments`, and whether the tables are steady."""
    return *table_arguments(tables), tables is not None and are_steady(tables, look)
