"""Attention over slots on a GPU.

A program serves one row and kv head, a block of queries (all heads that share the kv head, so that its keys are read
once) and one split of the slots. Keys are rotated in registers on the way in. A prompt has enough programs to read all
slots in one split. A single token reads them in many, and a second kernel joins their softmaxes.

Source: online softmax over blocks, Dao et al. 2022 (arXiv:2205.14135), and splits that are joined at the end,
Flash-Decoding, Dao et al. 2023.
"""

from typing import Final, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources

from windlass.core.inputs import AttentionInput, Mass, PackedStates
from windlass.core.types import Attended, ObservedColumns, PerSlot, Queries, SlotPositions
from windlass.kernels import reference
from windlass.kernels.triton import tiles
from windlass.kernels.triton.tiles import (
    FLOATS,
    LogitArgs,
    PackedTensors,
    Plan,
    StridedQueries,
    as_plane,
    at_head,
    compute_logits,
    knows,
    load_keys,
    load_queries,
    load_states,
    pack_logit_args,
    packed_tensors,
    product,
    seen_by_any,
    with_sinks,
)


@triton.jit
@no_type_check
def mass_kernel(
    queries,
    keys,
    logit_args,
    lse,  # (batch, heads, tokens)
    logits_buf,  # (batch, kv_heads, tokens x group, slots) logits, or None: they are computed again
    observed,  # (batch, columns)
    is_other,  # (batch, tokens), or None
    rows,  # (batch, kv_heads, columns, slots)
    rest,  # (batch, kv_heads, slots), or None
    batch,
    kv_heads,
    tokens,
    slots,
    columns,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    CODES: tl.constexpr,
    NUMBER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program serves one block of slots of a row and kv head."""
    i = tl.program_id(0)
    i_head = i % kv_heads
    i_batch = (i // kv_heads % batch).to(tl.int64)
    index = i_batch * kv_heads + i_head
    o_slots = i // kv_heads // batch * BLOCK + tl.arange(0, BLOCK)
    m_slots = o_slots < slots
    positions = tl.load(at_head(logit_args.slots, i_batch, i_head) + o_slots, mask=m_slots, other=-1).to(tl.int32)
    k = positions
    if logits_buf is None:
        m_held = m_slots & (positions >= 0)
        k = load_keys(
            keys, logit_args, index, i_batch, i_head, o_slots, m_held, slots, WIDTH, PAIRS, HALF, REST, CODES, NUMBER
        )

    # A row is a column of queries and one of its heads. Heads are padded to a power of two.
    o_rows = tl.arange(0, COLUMNS * PADDED)
    o_columns = tl.arange(0, COLUMNS)
    m_heads = o_rows % PADDED < GROUP
    for start in range(0, columns, COLUMNS):
        column = start + o_rows // PADDED
        o_tokens = tl.load(observed + i_batch * columns + column, mask=m_heads & (column < columns), other=-1)
        mass = column_mass(
            queries, k, logit_args, lse, logits_buf, index, i_batch, i_head, o_tokens.to(tl.int32), o_rows % PADDED,
            positions, o_slots, m_slots, kv_heads, tokens, slots,
            GROUP, PADDED, COLUMNS, WIDTH, PAIRS, HALF, REST, NUMBER, BLOCK,
        )  # fmt: skip
        at = index * columns + start + o_columns
        m_rows = (start + o_columns < columns)[:, None] & m_slots[None, :]
        tl.store(rows + at[:, None] * slots + o_slots[None, :], mass, mask=m_rows)
    if rest is not None:
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, tokens, COLUMNS):
            column = start + o_rows // PADDED
            other = tl.load(is_other + i_batch * tokens + column, mask=m_heads & (column < tokens), other=0)
            mass = column_mass(
                queries, k, logit_args, lse, logits_buf, index, i_batch, i_head, tl.where(other != 0, column, -1),
                o_rows % PADDED, positions, o_slots, m_slots, kv_heads, tokens, slots,
                GROUP, PADDED, COLUMNS, WIDTH, PAIRS, HALF, REST, NUMBER, BLOCK,
            )  # fmt: skip
            total += tl.sum(mass, 0)
        tl.store(rest + index * slots + o_slots, total, mask=m_slots)


@triton.jit
@no_type_check
def column_mass(
    queries,
    k,
    logit_args,
    lse,
    logits_buf,
    index,
    i_batch,
    i_head,
    o_tokens,
    o_group,
    positions,
    o_slots,
    m_slots,
    kv_heads,
    tokens,
    slots,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    NUMBER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(columns, slots): attention of some columns of queries, summed over the heads of the group."""
    m_rows = o_tokens >= 0
    o_heads = i_head * GROUP + o_group
    q_positions = tl.load(at_head(logit_args.queries, i_batch, i_head) + o_tokens, mask=m_rows, other=-1).to(tl.int32)
    mass = tl.zeros((COLUMNS * PADDED, BLOCK), tl.float32)
    m_seen = seen_by_any(q_positions, positions, logit_args) & m_slots
    if tl.max(m_seen.to(tl.int32), 0) > 0:
        if logits_buf is not None:
            at = (index * tokens * GROUP + o_tokens * GROUP + o_group)[:, None] * slots + o_slots[None, :]
            logits = tl.load(logits_buf + at, mask=m_rows[:, None] & m_seen[None, :], other=float("-inf"))
        else:
            q = load_queries(
                queries, logit_args, i_batch, i_head, o_tokens, o_heads, m_rows, WIDTH, PAIRS, HALF, REST, NUMBER
            )
            rows: tl.constexpr = COLUMNS * PADDED
            logits = compute_logits(
                q, k, logit_args, i_batch, i_head, q_positions, positions, o_slots, m_seen, PAIRS, REST, rows, BLOCK
            )
        at = (i_batch * kv_heads * GROUP + o_heads) * tokens + o_tokens
        row_lse = tl.load(lse + at, mask=m_rows, other=0)
        mass = tl.exp(logits - row_lse[:, None])
    return tl.sum(tl.reshape(mass, (COLUMNS, PADDED, BLOCK)), 1)


JOINED: Final = 8192  # numbers of splits that a program joins at once
MIN_TILE: Final = 16  # channels or rows that a tensor core takes at once


class _QueriesAndKeys(NamedTuple):
    """The parts of every logit, as kernels take them."""

    queries: StridedQueries
    keys: PackedTensors
    logit_args: LogitArgs


def can_read(queries: Queries, keys: PackedStates, values: PackedStates) -> bool:
    """Return True if the kernel knows the types."""
    return queries.dtype in FLOATS and knows(keys) and knows(values)


def attend(call: AttentionInput) -> tuple[Attended, Mass | None]:
    """See `reference.attend`.

    Never waits for the device, so that a CUDA graph can hold it. Tables are of any float type.

    Raises: OutOfResources where not even the smallest blocks fit into a multiprocessor.
    """
    queries, keys, values = call.queries, call.keys, call.values
    batch, heads, tokens, _ = queries.shape
    kv_heads, slots = keys.data.shape[1:3]
    load = batch * kv_heads * slots // tiles.multiprocessors(queries.device)
    width, bits = max(keys.channels, values.channels), keys.bits
    *plans, smallest = tiles.ever_smaller(
        tiles.attend_plan(tokens * heads // kv_heads, width, queries.itemsize, bits, load)
    )
    for at in plans:
        try:
            return _attend(call, at)
        except OutOfResources:  # raised before anything is launched
            continue
    return _attend(call, smallest)


def _attend(call: AttentionInput, at: Plan) -> tuple[Attended, Mass | None]:
    queries, keys, values, observed = call.queries, call.keys, call.values, call.observed
    batch, heads, tokens, _ = queries.shape
    kv_heads, slots = keys.data.shape[1:3]
    group = heads // kv_heads
    rows = tokens * group
    row_blocks = -(-rows // at.rows)
    programs = batch * kv_heads * row_blocks
    splits, each = tiles.splits(programs, slots, at, queries.device)

    logit_args = pack_logit_args(call)
    pairs = 0 if logit_args.cos is None else logit_args.cos.shape[1]
    inputs = _QueriesAndKeys(StridedQueries(queries, *queries.stride()), packed_tensors(keys), logit_args)
    channels: dict[str, object] = {
        "GROUP": group,
        "WIDTH": keys.held_channels,
        "PAIRS": pairs,
        "HALF": _padded(pairs),
        "REST": _padded(keys.channels - 2 * pairs),
        "CODES": (keys.bits, keys.group),
        # The interpreter knows no bfloat16: it multiplies the bits as whole numbers, and truncates instead of rounding.
        "NUMBER": tl.float32 if triton.knobs.runtime.interpret else FLOATS[queries.dtype],
    }

    def scratch(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=queries.device)

    out = queries.new_empty(batch, tokens, heads, values.channels)
    lse = logits_buf = partials = partial_softmax = None
    if observed is not None:
        lse = scratch(batch, heads, tokens)
        # The choice moves fewer bytes: each logit out and in again, or the keys once more.
        if 2 * 4 * rows <= keys.data.shape[-1] * keys.data.itemsize:
            logits_buf = scratch(batch, kv_heads, rows, slots)
    if splits > 1:
        partials = scratch(batch, kv_heads, splits, rows, values.channels)
        partial_softmax = scratch(batch, kv_heads, splits, rows, 2)
    # Of values narrower than 64 channels and than the keys, ptxas 12.8 loses the addresses of all but 16 slots.
    width = max(_padded(values.channels), min(64, _padded(keys.channels)) if at.rows > MIN_TILE else 0)
    with torch.cuda.device_of(queries):
        attend_kernel[(programs * splits,)](
            inputs.queries, inputs.keys, logit_args, packed_tensors(values), call.sink_logits, out, lse, partials,
            partial_softmax, logits_buf, batch, kv_heads, tokens, slots, splits, each, **channels,
            VALUE_FIRST=values.first, VALUE_WIDTH=values.channels, VALUES=width,
            VALUE_CODES=(values.bits, values.group), ROWS=at.rows, BLOCK=at.block,
            SKIPS=tokens > 1 and splits == 1 and logits_buf is None, num_warps=at.warps, num_stages=at.stages,
        )  # fmt: skip
        if splits > 1:
            join_kernel[(batch * kv_heads * rows,)](
                partials, partial_softmax, call.sink_logits, out, lse, kv_heads, tokens, splits, GROUP=group,
                VALUE_WIDTH=values.channels, VALUES=width, SPLITS=triton.next_power_of_2(splits),
                SOME=max(1, min(JOINED // width, triton.next_power_of_2(splits))),
            )  # fmt: skip
        mass = None
        if observed is not None and lse is not None:
            mass = _mass(inputs, lse, logits_buf, observed, call.is_rest_wanted, channels, keys.channels)
    return out.transpose(1, 2), mass


def _mass(
    inputs: _QueriesAndKeys,
    lse: Tensor,
    logits_buf: Tensor | None,
    observed: ObservedColumns,
    is_rest_wanted: bool,
    channels: dict[str, object],
    width: int,
) -> Mass:
    batch, heads, tokens = lse.shape
    kv_heads, slots = inputs.keys.data.shape[1:3]
    at = tiles.mass_plan(tokens * heads // kv_heads, width, inputs.queries.start.itemsize)
    padded = triton.next_power_of_2(heads // kv_heads)
    rows = lse.new_empty(batch, kv_heads, observed.shape[1], slots)
    rest = is_other = None
    if is_rest_wanted:
        rest = lse.new_empty(batch, kv_heads, slots)
        is_other = torch.ones(batch, tokens + 1, dtype=torch.int8, device=observed.device)
        is_other = is_other.scatter(1, observed.where(observed >= 0, tokens), 0)[:, :-1].contiguous()
    mass_kernel[(batch * kv_heads * -(-slots // at.block),)](
        inputs.queries, inputs.keys, inputs.logit_args, lse, logits_buf, observed.contiguous(), is_other, rows, rest,
        batch, kv_heads, tokens, slots, observed.shape[1], **channels, PADDED=padded,
        COLUMNS=max(1, at.rows // padded), BLOCK=at.block, num_warps=at.warps, num_stages=at.stages,
    )  # fmt: skip
    return Mass(rows, rest)


def _padded(channels: int) -> int:
    """The width of a tile that holds so many channels, or 0 where there are none."""
    return max(MIN_TILE, triton.next_power_of_2(channels)) if channels else 0


@triton.jit
@no_type_check
def attend_kernel(
    queries,
    keys,
    logit_args,
    values,
    sink_logits,  # (heads), or None
    out,  # (batch, tokens, heads, channels)
    lse,  # (batch, heads, tokens) log-sum-exp of logits, or None
    partials,  # (batch, kv_heads, splits, rows, channels) sums of values, or None: all slots are read in one split
    partial_softmax,  # (batch, kv_heads, splits, rows, 2): greatest logit and sum of exponentials, or None
    logits_buf,  # (batch, kv_heads, rows, slots) logits, or None
    batch,
    kv_heads,
    tokens,
    slots,
    splits,
    each,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    CODES: tl.constexpr,
    NUMBER: tl.constexpr,
    VALUE_FIRST: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    VALUE_CODES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SKIPS: tl.constexpr,
):
    """A block of queries over one split of the slots."""
    # Heads of the same slots run side by side: they share rows of the rotary table, which the cache then holds.
    i = tl.program_id(0)
    i_head = i % kv_heads
    i_batch = (i // kv_heads % batch).to(tl.int64)
    i_split = i // kv_heads // batch % splits
    # The last queries see most, so they come first.
    i_rows = (tokens * GROUP - 1) // ROWS - i // kv_heads // batch // splits
    index = i_batch * kv_heads + i_head

    o_rows = i_rows * ROWS + tl.arange(0, ROWS)
    m_rows = o_rows < tokens * GROUP
    o_tokens = o_rows // GROUP
    o_heads = i_head * GROUP + o_rows % GROUP
    q_positions = tl.load(at_head(logit_args.queries, i_batch, i_head) + o_tokens, mask=m_rows, other=-1).to(tl.int32)
    q = load_queries(queries, logit_args, i_batch, i_head, o_tokens, o_heads, m_rows, WIDTH, PAIRS, HALF, REST, NUMBER)

    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, VALUES), tl.float32)
    last = tl.minimum(i_split * each + each, slots)
    for start in range(i_split * each, last, BLOCK):
        o_slots = start + tl.arange(0, BLOCK)
        m_slots = o_slots < last
        positions = tl.load(at_head(logit_args.slots, i_batch, i_head) + o_slots, mask=m_slots, other=-1).to(tl.int32)
        m_seen = seen_by_any(q_positions, positions, logit_args) & m_slots
        # A branch prevents prefetching of the next block. For few queries masks alone are faster.
        is_read = True
        if SKIPS:
            is_read = tl.max(m_seen.to(tl.int32), 0) > 0
        if is_read:
            k = load_keys(
                keys, logit_args, index, i_batch, i_head, o_slots, m_seen, slots,
                WIDTH, PAIRS, HALF, REST, CODES, NUMBER,
            )  # fmt: skip
            logits = compute_logits(
                q, k, logit_args, i_batch, i_head, q_positions, positions, o_slots, m_seen, PAIRS, REST, ROWS, BLOCK
            )
            if logits_buf is not None:
                at = (index * tokens * GROUP + o_rows)[:, None] * slots + o_slots[None, :]
                tl.store(logits_buf + at, logits, mask=m_rows[:, None] & m_slots[None, :])
            highest = tl.maximum(top, tl.max(logits, 1))
            base = tl.where(highest == float("-inf"), 0.0, highest)
            weights = tl.exp(logits - base[:, None])
            shrink = tl.exp(top - base)
            held: tl.constexpr = VALUE_FIRST + VALUE_WIDTH
            v = load_states(values, index, i_head, o_slots, m_seen, slots, VALUE_FIRST, held, VALUES, held, VALUE_CODES)
            total = total * shrink + tl.sum(weights, 1)
            sums = product(weights.to(NUMBER), v.to(NUMBER), sums * shrink[:, None])
            top = highest

    o_channels = tl.arange(0, VALUES)
    mask = m_rows[:, None] & (o_channels < VALUE_WIDTH)[None, :]
    if partials is not None:
        at = (index * splits + i_split) * tokens * GROUP + o_rows
        tl.store(partials + at[:, None] * VALUE_WIDTH + o_channels[None, :], sums, mask=mask)
        tl.store(partial_softmax + at * 2, top, mask=m_rows)
        tl.store(partial_softmax + at * 2 + 1, total, mask=m_rows)
    else:
        factor, total_lse = with_sinks(top, total, sink_logits, o_heads, m_rows)
        at = (i_batch * tokens + o_tokens) * (kv_heads * GROUP) + o_heads
        result = (sums * factor[:, None]).to(out.dtype.element_ty)
        tl.store(out + at[:, None] * VALUE_WIDTH + o_channels[None, :], result, mask=mask)
        if lse is not None:
            tl.store(lse + (i_batch * kv_heads * GROUP + o_heads) * tokens + o_tokens, total_lse, mask=m_rows)


@triton.jit
@no_type_check
def join_kernel(
    partials,
    partial_softmax,
    sink_logits,
    out,
    lse,
    kv_heads,
    tokens,
    splits,
    GROUP: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUES: tl.constexpr,
    SPLITS: tl.constexpr,
    SOME: tl.constexpr,
):
    """One query's softmax over all splits of the slots."""
    rows = tokens * GROUP
    i_row = tl.program_id(0) % rows
    index = (tl.program_id(0) // rows).to(tl.int64)
    i_head = index % kv_heads * GROUP + i_row % GROUP
    o_splits = tl.arange(0, SPLITS)
    at = (index * splits + o_splits) * rows + i_row
    tops = tl.load(partial_softmax + at * 2, mask=o_splits < splits, other=float("-inf"))
    totals = tl.load(partial_softmax + at * 2 + 1, mask=o_splits < splits, other=0)
    top = tl.max(tops, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(totals * tl.exp(tops - base), 0)

    o_channels = tl.arange(0, VALUES)
    m_channels = o_channels < VALUE_WIDTH
    sums = tl.zeros((VALUES,), tl.float32)
    for start in range(0, splits, SOME):
        o_some = start + tl.arange(0, SOME)
        m_some = o_some < splits
        at_some = (index * splits + o_some) * rows + i_row
        shares = tl.exp(tl.load(partial_softmax + at_some * 2, mask=m_some, other=float("-inf")) - base)
        mask = m_some[:, None] & m_channels[None, :]
        some = tl.load(partials + at_some[:, None] * VALUE_WIDTH + o_channels[None, :], mask=mask, other=0)
        sums += tl.sum(some * shares[:, None], 0)

    factor, total_lse = with_sinks(top, total, sink_logits, i_head, True)
    at = (index // kv_heads * tokens + i_row // GROUP) * (kv_heads * GROUP) + i_head
    tl.store(out + at * VALUE_WIDTH + o_channels, (sums * factor).to(out.dtype.element_ty), mask=m_channels)
    if lse is not None:
        i_batch = index // kv_heads
        tl.store(lse + (i_batch * kv_heads * GROUP + i_head) * tokens + i_row // GROUP, total_lse)


MIN_NORM = tl.constexpr(reference.MIN_NORM)


def mean_key_cosine(keys: PackedStates, positions: SlotPositions) -> PerSlot:
    """See `reference.mean_key_cosine`. Never waits for the device, so that a CUDA graph can hold it."""
    batch, kv_heads, slots = keys.data.shape[:3]
    at = tiles.stream_plan(keys.channels)
    splits, each = tiles.splits(batch * kv_heads, slots, at, positions.device)
    out = torch.empty(batch, kv_heads, slots, dtype=torch.float32, device=positions.device)
    partials = torch.empty(batch, kv_heads, splits, keys.channels, dtype=torch.float32, device=positions.device)
    tensors, grid = packed_tensors(keys), (batch * kv_heads * splits,)
    sizes = {
        "WIDTH": keys.channels,
        "CHANNELS": triton.next_power_of_2(keys.channels),
        "CODES": (keys.bits, keys.group),
    }
    with torch.cuda.device_of(positions):
        sums_kernel[grid](
            tensors, as_plane(positions), partials, out, kv_heads, slots, splits, each, **sizes, BLOCK=at.block,
            num_warps=at.warps, num_stages=at.stages,
        )  # fmt: skip
        cosines_kernel[grid](
            tensors, partials, out, kv_heads, slots, splits, each, **sizes, BLOCK=at.block,
            SOME=min(16, triton.next_power_of_2(splits)), num_warps=at.warps, num_stages=at.stages,
        )  # fmt: skip
    return out


@triton.jit
@no_type_check
def sums_kernel(
    keys,
    positions,
    partials,  # (batch, kv_heads, splits, channels)
    scales,  # (batch, kv_heads, slots)
    kv_heads,
    slots,
    splits,
    each,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    CODES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum of the directions of one split of the slots. A key times its scale is its direction."""
    index = (tl.program_id(0) // splits).to(tl.int64)
    i_split = tl.program_id(0) % splits
    i_batch, i_head = index // kv_heads, index % kv_heads
    o_channels = tl.arange(0, CHANNELS)
    m_channels = o_channels < WIDTH
    sums = tl.zeros((BLOCK, CHANNELS), tl.float32)
    last = tl.minimum(i_split * each + each, slots)
    for start in range(i_split * each, last, BLOCK):
        o_slots = start + tl.arange(0, BLOCK)
        m_slots = o_slots < last
        m_held = tl.load(at_head(positions, i_batch, i_head) + o_slots, mask=m_slots, other=-1) >= 0
        k = load_states(keys, index, i_head, o_slots, m_held, slots, 0, WIDTH, CHANNELS, WIDTH, CODES).to(tl.float32)
        norms = tl.maximum(tl.sqrt(tl.sum(k * k, 1)), MIN_NORM)
        b_scales = tl.where(m_held, 1 / norms, 0.0)
        tl.store(scales + index * slots + o_slots, b_scales, mask=m_slots)
        sums += k * b_scales[:, None]
    tl.store(partials + (index * splits + i_split) * WIDTH + o_channels, tl.sum(sums, 0), mask=m_channels)


@triton.jit
@no_type_check
def cosines_kernel(
    keys,
    partials,
    out,  # scales, overwritten by the cosines
    kv_heads,
    slots,
    splits,
    each,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    CODES: tl.constexpr,
    BLOCK: tl.constexpr,
    SOME: tl.constexpr,
):
    """The cosines of one split of the slots with the sum over all splits."""
    index = (tl.program_id(0) // splits).to(tl.int64)
    i_split = tl.program_id(0) % splits
    i_head = index % kv_heads
    o_channels = tl.arange(0, CHANNELS)
    m_channels = o_channels < WIDTH
    sums = tl.zeros((SOME, CHANNELS), tl.float32)
    for start in range(0, splits, SOME):
        o_some = start + tl.arange(0, SOME)
        mask = (o_some < splits)[:, None] & m_channels[None, :]
        sums += tl.load(partials + (index * splits + o_some)[:, None] * WIDTH + o_channels[None, :], mask=mask, other=0)
    anchor = tl.sum(sums, 0)
    anchor = anchor / tl.maximum(tl.sqrt(tl.sum(anchor * anchor, 0)), MIN_NORM)
    last = tl.minimum(i_split * each + each, slots)
    for start in range(i_split * each, last, BLOCK):
        o_slots = start + tl.arange(0, BLOCK)
        m_slots = o_slots < last
        scales = tl.load(out + index * slots + o_slots, mask=m_slots, other=0)
        m_held = scales != 0
        k = load_states(keys, index, i_head, o_slots, m_held, slots, 0, WIDTH, CHANNELS, WIDTH, CODES).to(tl.float32)
        tl.store(out + index * slots + o_slots, tl.sum(k * anchor[None, :], 1) * scales, mask=m_slots)
