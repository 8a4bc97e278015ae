"""What the kernels are given: tensors with their strides, as tuples that Triton takes apart."""

from typing import Final, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from windlass.core.attention import AttentionInput
from windlass.core.packed import Format, PackedStates
from windlass.core.rotary_index import RotaryBranch

FLOATS: Final = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
LOW_BIT: Final = (Format.INT8, Format.INT4)
MAX_CHANNELS: Final = 1024


class Plane(NamedTuple):
    """A tensor (batch, heads, n) with a stride of 1 along n, and of 0 along heads where they share it."""

    start: Tensor
    batch: int
    head: int


class Strided(NamedTuple):
    """Queries with any strides."""

    start: Tensor
    batch: int
    head: int
    token: int
    channel: int


class PackedTensors(NamedTuple):
    """The tensors of `PackedStates`, all contiguous."""

    data: Tensor
    scales: Tensor | None
    means: Tensor | None
    full_precision: Tensor | None
    ring_index: Tensor | None
    ring_entries: int


class LogitArgs(NamedTuple):
    """What logits depend on beside queries and keys, see `AttentionInput`.

    No argument of a kernel may be called `params`: Triton's own launcher has a variable of that name.
    """

    slots: Plane  # positions
    queries: Plane  # positions
    cos: Tensor | None
    sin: Tensor | None
    query_gain: Tensor | None
    near_keys: Plane | None
    near_queries: Plane | None
    far_keys: Plane | None
    far_queries: Plane | None
    near_window: int
    log_counts: Plane | None
    scale: float
    softcap: float | None
    sliding_window: int | None
    reach: int | None
    sinks: int
    attention_chunk: int | None


def knows(states: PackedStates) -> bool:
    """Whether the kernels can read it."""
    is_known = states.data.dtype in FLOATS if states.format is Format.FLOAT else states.format in LOW_BIT
    return is_known and states.channels <= MAX_CHANNELS


def as_plane(tensor: Tensor) -> Plane:
    """A tensor of (batch, 1 or as many heads, n), as kernels take it."""
    if tensor.shape[2] > 1 and tensor.stride(2) != 1:
        tensor = tensor.contiguous()
    return Plane(tensor, tensor.stride(0), 0 if tensor.shape[1] == 1 else tensor.stride(1))


def packed_tensors(states: PackedStates) -> PackedTensors:
    """Keys or values, as kernels take them."""
    scales, means, ring, ring_index = (
        None if part is None else part.contiguous()
        for part in (states.scales, states.means, states.full_precision, states.ring_index)
    )
    entries = 0 if ring is None else ring.shape[2]
    return PackedTensors(states.data.contiguous(), scales, means, ring, ring_index, entries)


def pack_logit_args(call: AttentionInput) -> LogitArgs:
    """What the logits of `call` depend on beside its queries and keys, as kernels take it."""
    near: RotaryBranch | None = None
    far: RotaryBranch | None = None
    cos = sin = None
    if call.rotary_index is not None and call.tables is not None:
        near, far = call.rotary_index.near, call.rotary_index.far
        cos, sin = (table.contiguous() for table in call.tables)
    return LogitArgs(
        as_plane(call.slot_positions),
        as_plane(call.query_positions[:, None]),
        cos,
        sin,
        None if call.query_gain is None else call.query_gain.float().contiguous(),
        None if near is None else as_plane(near.keys),
        None if near is None else as_plane(near.queries),
        None if far is None else as_plane(far.keys),
        None if far is None else as_plane(far.queries),
        0 if call.rotary_index is None else call.rotary_index.near_window,
        None if call.log_counts is None else as_plane(call.log_counts),
        call.scale,
        call.softcap,
        call.visibility.sliding_window,
        call.visibility.reach,
        call.visibility.sinks,
        call.visibility.attention_chunk,
    )
