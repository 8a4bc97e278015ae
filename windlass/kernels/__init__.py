"""The arithmetic over slots. `reference` says what each function means; each call takes the fastest that fits.

On a CPU that is the compiled module, see `cpu`; on a GPU, Triton's; elsewhere, and for types that
these do not know, plain PyTorch. What runs where is decided by the arguments alone.
"""

import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from windlass.core.packed import Held
from windlass.core.rotary_index import Reading
from windlass.core.shapes import (
    Attended,
    ObservedColumns,
    PerSlot,
    Queries,
    QueryPositions,
    RotaryTable,
    RowCounts,
    Scores,
    SlotIndex,
    SlotPositions,
)
from windlass.kernels import cpu, reference
from windlass.kernels import sdpa as blocks
from windlass.kernels.reference import Mass, Visibility, Writes


def attend(
    queries: Queries,
    keys: Held,
    values: Held,
    slot_positions: SlotPositions,
    query_positions: QueryPositions,
    *,
    reading: Reading | None,
    tables: tuple[RotaryTable, RotaryTable] | None,
    scale: float,
    visibility: Visibility,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
    log_counts: Scores | None = None,
    observed: ObservedColumns | None = None,
    is_rest_wanted: bool = False,
) -> tuple[Attended, Mass | None]:
    """See `reference.attend`."""
    kernel = reference.attend
    if _is_compiled(queries.device.type) and cpu.can_read(queries, keys, values):
        if queries.shape[2] <= cpu.MOST_TOKENS:
            kernel = cpu.attend
        elif softcap is None:
            kernel = blocks.attend
    elif _has_triton(queries.device.type):
        from windlass.kernels import triton  # late: where there is no GPU, Triton itself is not imported

        if triton.can_read(queries, keys, values):
            kernel = triton.attend
    return kernel(
        queries,
        keys,
        values,
        slot_positions,
        query_positions,
        reading=reading,
        tables=tables,
        scale=scale,
        visibility=visibility,
        softcap=softcap,
        sink_logits=sink_logits,
        log_counts=log_counts,
        observed=observed,
        is_rest_wanted=is_rest_wanted,
    )


def table_dtype(queries: Queries) -> torch.dtype:
    """The type of the rotary tables that `attend` should be given.

    On a GPU a row of cos and sin is read with every key, and float32 ones would be as many bytes as a
    key and a value of 16 bits.
    """
    return torch.float16 if queries.device.type == "cuda" and queries.itemsize == 2 else torch.float32


def typicality(keys: Held, positions: SlotPositions) -> PerSlot:
    """See `reference.typicality`."""
    kernel = reference.typicality
    if _is_compiled(positions.device.type) and cpu.knows(keys):
        kernel = cpu.typicality
    elif _has_triton(positions.device.type):
        from windlass.kernels import triton  # late, as above

        if triton.knows(keys):
            kernel = triton.typicality
    return kernel(keys, positions)


def first_free(positions: SlotPositions, count: int) -> SlotIndex:
    """See `reference.first_free`."""
    free: SlotIndex = _slots_of(positions).first_free(positions, count)
    return free


def text_order(positions: SlotPositions) -> SlotIndex:
    """See `reference.text_order`."""
    order: SlotIndex = _slots_of(positions).text_order(positions)
    return order


def evict(
    score: Scores,
    positions: SlotPositions,
    next_positions: RowCounts,
    sinks: int,
    window: int,
    sliding_window: int | None,
    count: int,
) -> tuple[SlotIndex, SlotIndex]:
    """See `reference.evict`."""
    kernel = _slots_of(positions).evict
    index, before = kernel(score, positions, next_positions, sinks, window, sliding_window, count)
    return index, before


def write_all(index: SlotIndex, writes: Writes) -> None:
    """See `reference.write_all`."""
    _slots_of(index).write_all(index, writes)


def encode(states: Tensor, centres: Tensor | None, bits: int) -> tuple[Tensor, Tensor]:
    """See `reference.encode`."""
    has_triton = _has_triton(states.device.type)
    backend = import_module("windlass.kernels.triton.codes") if has_triton else reference
    codes, scales = backend.encode(states, centres, bits)
    return codes, scales


def read(held: Tensor, index: SlotIndex) -> Tensor:
    """See `reference.read`."""
    return reference.read(held, index)


@cache
def _is_compiled(device: str) -> bool:
    """Whether the compiled kernels serve this kind of device; says once what is missing."""
    if device != "cpu" or cpu.chosen() == "none":
        return False
    if cpu.instruction_set() == "none":
        warnings.warn(
            "windlass was installed without its compiled kernels (no C++ compiler was found), so attention runs in "
            f"plain PyTorch, which is slower; install a compiler, then windlass again ({cpu.WHY_MISSING})",
            stacklevel=3,
        )
        return False
    if cpu.instruction_set() == "plain" and cpu.chosen() is None:
        warnings.warn(
            "this CPU has neither AVX2 nor AVX-512: attention runs in plain C++, which is slower", stacklevel=3
        )
    return True


def _slots_of(tensor: Tensor) -> ModuleType:
    """Where the book-keeping of slots is done for tensors beside this one."""
    device = tensor.device.type
    if _has_triton(device):
        return import_module("windlass.kernels.triton.slots")
    return cpu if _is_compiled(device) else reference


@cache
def _has_triton(device: str) -> bool:
    """Whether Triton's kernels serve this kind of device; says once where they are missing."""
    if device != "cuda":
        return False
    if find_spec("triton") is None:
        warnings.warn(
            "Triton is not installed, so on this GPU attention runs in plain PyTorch, which is slower; "
            "install it: pip install triton",
            stacklevel=3,
        )
        return False
    return True
