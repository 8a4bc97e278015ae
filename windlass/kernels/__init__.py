"""The arithmetic over slots. `reference` says what each function means; each call takes the fastest that fits.

On a CPU that is the compiled module, see `cpu`; elsewhere, and for types it does not know, plain
PyTorch. What runs where is decided by the arguments alone.
"""

import warnings
from functools import cache

from torch import Tensor

from windlass.held import Held
from windlass.kernels import blocks, cpu, reference
from windlass.kernels.reference import Mass, Visibility
from windlass.reading import Reading
from windlass.shapes import (
    Attended,
    ObservedColumns,
    Queries,
    QueryPositions,
    RotaryTable,
    RowCounts,
    Scores,
    SlotIndex,
    SlotPositions,
)


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


def first_free(positions: SlotPositions, count: int) -> SlotIndex:
    """See `reference.first_free`."""
    kernel = cpu.first_free if _is_compiled(positions.device.type) else reference.first_free
    return kernel(positions, count)


def text_order(positions: SlotPositions) -> SlotIndex:
    """See `reference.text_order`."""
    kernel = cpu.text_order if _is_compiled(positions.device.type) else reference.text_order
    return kernel(positions)


def lowest(
    score: Scores,
    positions: SlotPositions,
    next_positions: RowCounts,
    sinks: int,
    window: int,
    sliding_window: int | None,
    count: int,
) -> SlotIndex:
    """See `reference.lowest`."""
    kernel = cpu.lowest if _is_compiled(positions.device.type) else reference.lowest
    return kernel(score, positions, next_positions, sinks, window, sliding_window, count)


def write(held: Tensor, index: SlotIndex, new: Tensor) -> None:
    """See `reference.write`."""
    kernel = cpu.write if _is_compiled(held.device.type) else reference.write
    kernel(held, index, new)


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
