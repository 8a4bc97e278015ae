"""Slots, codes and recalled tokens in C++. `kernels.reference` defines each function's result."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from windlass.core.inputs import (
    TILE,
    WORD,
    BestPages,
    Digests,
    EvictionInput,
    PageInput,
    ReadInput,
    RecallSlots,
    TiledKeys,
    WriteInput,
    Writes,
)
from windlass.core.parse import PAGE
from windlass.core.types import SlotIndex, SlotPositions
from windlass.kernels import reference
from windlass.kernels.cpu import GROUPS, MAX_CHANNELS, instruction_set, knows, native
from windlass.kernels.cpu.tensors import FLOATS, NO_LIMIT, address, format_of, group_bits


def first_free(positions: SlotPositions, count: int) -> SlotIndex:
    """See `reference.first_free`."""
    batch, score_heads, slots = positions.shape
    out = torch.empty(batch, score_heads, count, dtype=torch.int64)
    native.first_free(positions.data_ptr(), batch * score_heads, slots, count, out.data_ptr())
    return out


def argsort_positions(positions: SlotPositions) -> SlotIndex:
    """See `reference.argsort_positions`."""
    batch, score_heads, slots = positions.shape
    out = torch.empty(batch, score_heads, slots, dtype=torch.int64)
    positions = positions.contiguous()
    threads = torch.get_num_threads()
    native.argsort_positions(positions.data_ptr(), batch * score_heads, slots, out.data_ptr(), threads)
    return out


def lowest(call: EvictionInput) -> SlotIndex:
    """See `reference.lowest`."""
    score, positions = call.score.float().contiguous(), call.positions
    ends = call.next_positions.to(torch.int64).contiguous()
    out = torch.empty(*positions.shape[:2], call.count, dtype=torch.int64)
    limits = (call.sinks, call.window, call.sliding_window or 0, call.attention_chunk or NO_LIMIT)
    row_sinks = None if call.row_sinks is None else call.row_sinks.to(torch.int64).contiguous()
    native.lowest(
        tuple(positions.shape),
        score.data_ptr(),
        positions.data_ptr(),
        ends.data_ptr(),
        limits,
        address(row_sinks),
        call.count,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def evict(call: EvictionInput) -> tuple[SlotIndex, SlotIndex]:
    """See `reference.evict`."""
    index = lowest(call)
    return index, reference.reserve(call.positions, index)


def write_all(index: SlotIndex, writes: Writes) -> None:
    """See `reference.write_all`."""
    for states, new in writes:
        if isinstance(new, Tensor) and states.ndim == 4:
            write(states, index, new)
        else:
            reference.write(states, index, new)


def write(states: Tensor, index: SlotIndex, new: Tensor) -> None:
    """Overwrite the slots of `states` (batch, kv_heads, slots, width) at `index` with `new`."""
    new = new.to(states.dtype)
    if new.stride(-1) != 1:
        new = new.contiguous()
    index = index.contiguous()
    batch, kv_heads, slots, width = states.shape
    sizes = (batch, kv_heads, index.shape[1], index.shape[2], slots, width * states.itemsize)
    strides = tuple(stride * new.itemsize for stride in new.stride()[:3])
    native.write(sizes, strides, index.data_ptr(), new.data_ptr(), states.data_ptr())


def can_encode(states: Tensor, group: int) -> bool:
    """Return True if `encode` knows the type of these numbers, which are in a CPU's memory, and how many there are."""
    width = states.shape[-1]
    has_group = group in GROUPS and (group == 0 or width % 2 == 0)
    return states.dtype in FLOATS and 0 < width <= MAX_CHANNELS and has_group


def encode(states: Tensor, means: Tensor | None, group: int) -> tuple[Tensor, Tensor]:
    """See `reference.encode`."""
    batch, kv_heads, tokens, width = states.shape
    if states.stride(-1) != 1:
        states = states.contiguous()
    means = None if means is None else means.float().contiguous()
    if group:
        codes = states.new_empty(batch, kv_heads, tokens, width // 2, dtype=torch.uint8)
    else:
        codes = states.new_empty(batch, kv_heads, tokens, width, dtype=torch.int8)
    numbers = 2 * -(-width // group) if group else 1
    scales = states.new_empty(batch, kv_heads, tokens, numbers, dtype=torch.float16)
    native.encode(
        (batch, kv_heads, tokens, width, group),
        FLOATS[states.dtype],
        states.data_ptr(),
        states.stride()[:3],
        address(means),
        codes.data_ptr(),
        scales.data_ptr(),
        instruction_set(),
        torch.get_num_threads(),
    )
    return codes, scales


def can_scan(pieces: Sequence[TiledKeys]) -> bool:
    """Return True if `best_pages` knows these keys, which are in a CPU's memory, all in the format of the first.

    It takes two tiles at a time.
    """
    if not pieces:
        return True
    first = pieces[0].states
    is_known = format_of(first) >= 0 and first.first == 0 and first.full_precision is None
    return is_known and first.held_channels <= MAX_CHANNELS and all(piece.addresses[2] % 2 == 0 for piece in pieces)


def can_recall(store: RecallSlots) -> bool:
    """Return True if a decode step knows this recall store."""
    keys, values = [piece.keys for piece in store.pieces], [piece.values for piece in store.pieces]
    is_known = [knows(each) and each.full_precision is None for each in values]
    has_groups = [each.group in GROUPS for each in (*values, *(each.states for each in keys))]
    return can_scan([*keys, *keys_of(store.digests)]) and all(is_known) and all(has_groups)


def keys_of(digests: Sequence[Digests]) -> list[TiledKeys]:
    """The keys of digests."""
    return [keys for each in digests for keys in (each.largest, each.least)]


def digest_arguments(digests: Digests) -> tuple[int, int, int, int, int]:
    """The addresses of both, which have as many tiles."""
    return *digests.largest.addresses[:2], *digests.least.addresses


def best_pages(call: PageInput) -> BestPages:
    """See `reference_recall.best_pages`."""
    queries, is_query, positions = (
        call.queries.float().contiguous(),
        call.is_query.contiguous(),
        call.positions.to(torch.int32).contiguous(),
    )
    kept, states = call.kept_index.contiguous(), call.pieces[0].states
    (batch, heads, tokens, channels), (_, score_heads, slots) = queries.shape, kept.shape
    kv_heads, words = call.pieces[0].tiles.shape[1], call.pieces[0].tiles.shape[3]
    pages = torch.empty(batch, kv_heads, call.count, dtype=torch.int64)
    is_read = torch.empty(batch, kv_heads, call.count * PAGE, dtype=torch.bool)
    native.best_pages(
        (batch, kv_heads, score_heads, heads // kv_heads * tokens, tokens, channels, words, slots, call.count),
        (format_of(states), group_bits(states)),
        (queries.data_ptr(), is_query.data_ptr()),
        [piece.addresses for piece in call.pieces],
        list(map(digest_arguments, call.digests)),
        call.candidates,
        (positions.data_ptr(), kept.data_ptr()),
        (pages.data_ptr(), is_read.data_ptr()),
        instruction_set(),
        torch.get_num_threads(),
    )
    return BestPages(pages, is_read)


def read_tokens(call: ReadInput) -> Tensor:
    """See `reference_recall.read_tokens`."""
    first, index = call.pieces[0], call.index.contiguous()
    width = first.shape[3]
    out = first.new_empty(*index.shape, width)
    tokens = [each.shape[2] * (TILE if call.is_tiled else 1) for each in call.pieces]
    native.read_tokens(
        (
            index.shape[0] * index.shape[1],
            index.shape[2],
            width * (WORD if call.is_tiled else first.itemsize),
            call.is_tiled,
        ),
        [(each.data_ptr(), count) for each, count in zip(call.pieces, tokens, strict=True)],
        index.data_ptr(),
        out.data_ptr(),
        instruction_set(),
        torch.get_num_threads(),
    )
    return out


def write_tokens(call: WriteInput) -> None:
    """See `reference_recall.write_tokens`."""
    told = call.index.tolist()
    is_alike = all(each == told[0] for each in told)
    groups = [(slice(None), told[0])] if is_alike else [(slice(row, row + 1), each) for row, each in enumerate(told)]
    for rows, index in groups:
        for first, last in _runs(index):
            _write_run(call, rows, call.rows[rows, :, first:last], index[first])


def _runs(index: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the [first, stop) of each run of consecutive numbers in `index`. Negative numbers are left out."""
    if index and index[0] >= 0 and index == list(range(index[0], index[0] + len(index))):
        yield 0, len(index)
        return
    first = 0
    for at in range(1, len(index) + 1):
        if at == len(index) or index[at] != index[at - 1] + 1 or index[at - 1] < 0:
            if index[first] >= 0:
                yield first, at
            first = at


def _write_run(call: WriteInput, rows: slice, new: Tensor, index: int) -> None:
    """Write tokens of some rows that stand side by side, from `index` on."""
    count, start = new.shape[2], 0
    for piece in call.pieces:
        size = piece.shape[2] * (TILE if call.is_tiled else 1)
        first, last = max(index, start), min(index + count, start + size)
        if first < last:
            own, part = piece[rows], new[:, :, first - index : last - index]
            if not call.is_tiled:
                own[:, :, first - start : last - start] = part
            elif last - first == 1:
                own[:, :, (first - start) // TILE, :, (first - start) % TILE] = part[:, :, 0]
            else:
                at = torch.arange(first - start, last - start)
                own.permute(2, 4, 0, 1, 3)[at // TILE, at % TILE] = part.permute(2, 0, 1, 3)
        start += size
