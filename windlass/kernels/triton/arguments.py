"""What the kernels are given: tensors with their strides, as tuples that Triton takes apart."""

from typing import Final, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from windlass.core.packed import Held
from windlass.core.rotary_index import Branch, Reading
from windlass.core.shapes import QueryPositions, RotaryTable, Scores, SlotPositions
from windlass.kernels.reference import Visibility

FLOATS: Final = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
MOST_CHANNELS: Final = 256


class Plane(NamedTuple):
    """Numbers of (batch, heads, n), n next to each other; a stride of 0 where heads share them."""

    start: Tensor
    batch: int
    head: int


class Strided(NamedTuple):
    """Queries, however they lie."""

    start: Tensor
    batch: int
    head: int
    token: int
    channel: int


class Numbers(NamedTuple):
    """Keys or values as they lie in memory, see `Held`; all are contiguous."""

    codes: Tensor
    scales: Tensor | None
    centres: Tensor | None
    exact: Tensor | None
    places: Tensor | None
    exact_places: int


class Sight(NamedTuple):
    """Where slots and queries stand, and what that means for their logits."""

    slots: Plane
    queries: Plane
    cos: Tensor | None
    sin: Tensor | None
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


def knows(held: Held) -> bool:
    """Whether the kernels can read it."""
    return (held.scales is not None or held.codes.dtype in FLOATS) and held.channels <= MOST_CHANNELS


def as_plane(tensor: Tensor) -> Plane:
    """A tensor of (batch, 1 or as many heads, n), as kernels take it."""
    if tensor.shape[2] > 1 and tensor.stride(2) != 1:
        tensor = tensor.contiguous()
    return Plane(tensor, tensor.stride(0), 0 if tensor.shape[1] == 1 else tensor.stride(1))


def as_numbers(held: Held) -> Numbers:
    """Keys or values, as kernels take them."""
    scales, centres, exact, places = (
        None if part is None else part.contiguous() for part in (held.scales, held.centres, held.exact, held.places)
    )
    return Numbers(held.codes.contiguous(), scales, centres, exact, places, 0 if exact is None else exact.shape[2])


def as_sight(
    slot_positions: SlotPositions,
    query_positions: QueryPositions,
    reading: Reading | None,
    tables: tuple[RotaryTable, RotaryTable] | None,
    scale: float,
    visibility: Visibility,
    softcap: float | None,
    log_counts: Scores | None,
) -> Sight:
    """Where queries and slots stand, and how they are read, as kernels take it; see `reference.attend`."""
    near: Branch | None = None
    far: Branch | None = None
    cos = sin = None
    if reading is not None and tables is not None:
        near, far = reading.near, reading.far
        cos, sin = (table.contiguous() for table in tables)
    return Sight(
        as_plane(slot_positions),
        as_plane(query_positions[:, None]),
        cos,
        sin,
        None if near is None else as_plane(near.keys),
        None if near is None else as_plane(near.queries),
        None if far is None else as_plane(far.keys),
        None if far is None else as_plane(far.queries),
        0 if reading is None else reading.near_window,
        None if log_counts is None else as_plane(log_counts),
        scale,
        softcap,
        visibility.sliding_window,
        visibility.reach,
        visibility.sinks,
    )
