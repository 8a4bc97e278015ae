"""The kernels in C++, for tensors in a CPU's memory; what each means is told in `kernels.reference`."""

import os
from functools import cache
from typing import Final

import torch
from torch import Tensor

from windlass.core.errors import UsageError
from windlass.core.packed import Held
from windlass.core.rotary_index import Branch, Reading
from windlass.core.shapes import (
    Attended,
    ObservedColumns,
    PerSlot,
    Queries,
    QueryPositions,
    RotaryKeys,
    RotaryTable,
    RowCounts,
    Scores,
    SlotIndex,
    SlotPositions,
)
from windlass.kernels import reference
from windlass.kernels.reference import Mass, Visibility, Writes, reserve

WHY_MISSING = ""
try:
    import windlass.kernels.cpu._native as _native
except ImportError as error:  # installed without a compiler, or built for another system
    _native = None  # type: ignore[assignment]
    WHY_MISSING = str(error)

MOST_TOKENS: Final = 16  # queries per row
MOST_CHANNELS: Final = 1024
NEVER: Final = 2**31 - 1
FLOATS: Final = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
CODES: Final = {8: 3, 4: 4}


def chosen() -> str | None:
    """What WINDLASS_CPU asks for: avx512_bf16, avx512, avx2, plain, or none for plain PyTorch."""
    return os.environ.get("WINDLASS_CPU") or None


def instruction_sets() -> tuple[str, ...]:
    """Those that this CPU runs, best first; none without the compiled module."""
    return () if _native is None else tuple(_native.instruction_sets().split())


@cache
def instruction_set() -> str:
    """The one in use; "none" where plain PyTorch does the work.

    Raises: UsageError when WINDLASS_CPU asks for one that this CPU does not run.
    """
    if _native is None:
        return "none"
    wanted, known = chosen(), (*instruction_sets(), "none")
    if wanted is not None and wanted not in known:
        raise UsageError(
            f"WINDLASS_CPU={wanted!r} is not an instruction set of this CPU; use one of: {', '.join(known)}"
        )
    return wanted or known[0]


def can_read(queries: Queries, keys: Held, values: Held) -> bool:
    """Whether these kernels know the types."""
    return (
        instruction_set() != "none"
        and queries.device.type == "cpu"
        and queries.dtype in FLOATS
        and knows(keys)
        and knows(values)
        and _format(keys) == _format(values)
    )


def knows(held: Held) -> bool:
    """Whether these kernels can read it."""
    return _format(held) >= 0 and held.channels <= MOST_CHANNELS


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
    """Attention of up to MOST_TOKENS queries per row."""
    batch, heads, tokens, _ = queries.shape
    kv_heads, slots = keys.codes.shape[1:3]
    if queries.stride(-1) != 1:
        queries = queries.contiguous()
    out = queries.new_empty(batch, tokens, heads, values.channels)
    is_turned = reading is not None and tables is not None
    near, far = (_Places(reading.near), _Places(reading.far)) if is_turned and reading else (_Places(None),) * 2
    rows = rest = None
    if observed is not None:
        observed = observed.contiguous()
        rows = torch.empty(batch, kv_heads, observed.shape[1], slots)
        rest = torch.empty(batch, kv_heads, slots) if is_rest_wanted else None
    query_positions = query_positions.to(torch.int64).contiguous()
    sink_logits = None if sink_logits is None else sink_logits.float().contiguous()
    log_counts = None if log_counts is None else log_counts.float().contiguous()
    key_centres = _contiguous_centres(keys)
    _native.attend(
        (batch, heads, kv_heads, slot_positions.shape[1], tokens, slots),
        _format(keys),
        FLOATS[queries.dtype],
        queries.data_ptr(),
        queries.stride()[:3],
        _held(keys, key_centres),
        _held(values, None),
        slot_positions.data_ptr(),
        query_positions.data_ptr(),
        (*near.addresses, *far.addresses, reading.near_window if reading is not None else 0),
        _tables(tables),
        scale,
        softcap or 0.0,
        (visibility.sliding_window or NEVER, visibility.reach or NEVER, visibility.sinks),
        _address(sink_logits),
        _address(log_counts),
        (_address(observed), 0 if observed is None else observed.shape[1], _address(rows), _address(rest)),
        out.data_ptr(),
        instruction_set(),
        torch.get_num_threads(),
    )
    return out.transpose(1, 2), None if rows is None else Mass(rows, rest)


def turned(
    held: Held,
    positions: RotaryKeys | None,
    tables: tuple[RotaryTable, RotaryTable] | None,
    used: int,
    dtype: torch.dtype,
) -> Tensor:
    """The first `used` slots as floats, keys turned to `positions` (None: not turned)."""
    batch, kv_heads, slots = held.codes.shape[:3]
    out = torch.empty(batch, kv_heads, used, held.channels, dtype=dtype)
    places = None if positions is None else positions.to(torch.int32).contiguous()
    centres = _contiguous_centres(held)
    _native.turn(
        (batch, kv_heads, 1 if places is None else places.shape[1], slots, used),
        _format(held),
        FLOATS[dtype],
        _held(held, centres),
        _address(places),
        _tables(tables),
        out.data_ptr(),
        instruction_set(),
        torch.get_num_threads(),
    )
    return out


def typicality(keys: Held, positions: SlotPositions) -> PerSlot:
    """See `reference.typicality`."""
    batch, kv_heads, slots = keys.codes.shape[:3]
    out = torch.empty(batch, kv_heads, slots)
    places, centres = positions.to(torch.int32).contiguous(), _contiguous_centres(keys)
    _native.typicality(
        (batch, kv_heads, places.shape[1], slots),
        _format(keys),
        _held(keys, centres),
        places.data_ptr(),
        out.data_ptr(),
        instruction_set(),
        torch.get_num_threads(),
    )
    return out


def first_free(positions: SlotPositions, count: int) -> SlotIndex:
    """The first `count` slots of each row and head that hold nothing, then any."""
    batch, ranked, slots = positions.shape
    out = torch.empty(batch, ranked, count, dtype=torch.int64)
    _native.first_free(positions.data_ptr(), batch * ranked, slots, count, out.data_ptr())
    return out


def text_order(positions: SlotPositions) -> SlotIndex:
    """Slots in the order of their positions, free ones last."""
    batch, ranked, slots = positions.shape
    out = torch.empty(batch, ranked, slots, dtype=torch.int64)
    positions = positions.contiguous()
    _native.text_order(positions.data_ptr(), batch * ranked, slots, out.data_ptr(), torch.get_num_threads())
    return out


def lowest(
    score: Scores,
    positions: SlotPositions,
    next_positions: RowCounts,
    sinks: int,
    window: int,
    sliding_window: int | None,
    count: int,
) -> SlotIndex:
    """The `count` slots of each row and head that rank lowest."""
    score = score.float().contiguous()
    ends = next_positions.to(torch.int64).contiguous()
    out = torch.empty(*positions.shape[:2], count, dtype=torch.int64)
    limits = (sinks, window, sliding_window or 0)
    addresses = score.data_ptr(), positions.data_ptr(), ends.data_ptr()
    _native.lowest(tuple(positions.shape), *addresses, limits, count, out.data_ptr(), torch.get_num_threads())
    return out


def evict(
    score: Scores,
    positions: SlotPositions,
    next_positions: RowCounts,
    sinks: int,
    window: int,
    sliding_window: int | None,
    count: int,
) -> tuple[SlotIndex, SlotIndex]:
    """The `count` lowest slots, marked RESERVED, and the positions that stood there."""
    index = lowest(score, positions, next_positions, sinks, window, sliding_window, count)
    return index, reserve(positions, index)


def write_all(index: SlotIndex, writes: Writes) -> None:
    """Overwrite the slots at `index` of each of `writes`."""
    for held, new in writes:
        if isinstance(new, Tensor) and held.ndim == 4:
            write(held, index, new)
        else:
            reference.write(held, index, new)


def write(held: Tensor, index: SlotIndex, new: Tensor) -> None:
    """Overwrite the slots of `held` at `index` with `new`."""
    new = new.to(held.dtype)
    if new.stride(-1) != 1:
        new = new.contiguous()
    index = index.contiguous()
    batch, kv_heads, slots, width = held.shape
    sizes = (batch, kv_heads, index.shape[1], index.shape[2], slots, width * held.itemsize)
    strides = tuple(stride * new.itemsize for stride in new.stride()[:3])
    _native.write(sizes, strides, index.data_ptr(), new.data_ptr(), held.data_ptr())


class _Places:
    """A branch's positions, kept alive while their addresses are in use."""

    def __init__(self, branch: Branch | None) -> None:
        self.addresses = (0, 0)
        if branch is not None:
            self._queries = branch.queries.to(torch.int64).contiguous()
            self._keys = branch.keys.to(torch.int32).contiguous()
            self.addresses = self._queries.data_ptr(), self._keys.data_ptr()


def _format(held: Held) -> int:
    """As in `call.hpp`; -1 for a type that is not known there."""
    if held.exact is not None and held.exact.dtype not in FLOATS:
        return -1
    return FLOATS.get(held.codes.dtype, -1) if held.scales is None else CODES[held.bits]


def _contiguous_centres(held: Held) -> Tensor | None:
    return None if held.centres is None else held.centres.float().contiguous()


def _held(held: Held, centres: Tensor | None) -> tuple[int, int, int, int, int, int, int, int, int]:
    codes, exact = held.codes, held.exact
    copies = (0, 0, 0, 0)
    if exact is not None and held.places is not None:
        copies = exact.data_ptr(), held.places.data_ptr(), exact.shape[2], FLOATS[exact.dtype]
    row_bytes = codes.shape[-1] * codes.itemsize
    return codes.data_ptr(), _address(held.scales), _address(centres), held.channels, row_bytes, *copies


def _tables(tables: tuple[RotaryTable, RotaryTable] | None) -> tuple[int, int, int]:
    if tables is None:
        return 0, 0, 0
    cos, sin = tables
    return cos.data_ptr(), sin.data_ptr(), cos.shape[1]


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
