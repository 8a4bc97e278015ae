"""Shared parts of the kernels: loading blocks of queries and keys, rotated, and computing their logits.

A block of queries or keys is five tiles: the first and the second channels of its rotary pairs, rotated to the
positions of the near branch, the same two for the far branch, and the channels that are not rotated. Unused tiles alias
another one, so that every return has five values. The compiler drops unused ones.

Names: `i_` one number, `o_` numbers along a tile's axis, `m_` a mask.
"""

from dataclasses import dataclass, replace
from functools import cache
from typing import Final, NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.core.inputs import AttentionInput, Format, PackedStates
from windlass.core.positions import RotaryBranch

BESIDE = tl.constexpr(float(2**23))
FLOAT_BESIDE = tl.constexpr(0x4B000000)  # its bits
WORD_128 = tl.constexpr(-0x7F7F7F80)  # 128 in each of the four bytes of an int32


@triton.jit
@no_type_check
def product(a, b, total):
    """`total` plus the product of two tiles. Products of float32 are not rounded to TF32."""
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
@no_type_check
def at_head(plane, i_batch, i_head):
    """The address of the first number of one row and head."""
    return plane.start + i_batch * plane.batch + i_head * plane.head


@triton.jit
@no_type_check
def visible(newest, oldest, slots, logit_args):
    """Return True if some query sees a slot. `newest` and `oldest` are distances to the newest and oldest query."""
    seen = (newest >= 0) & (slots >= 0)
    if logit_args.reach is not None:
        seen = seen & ((oldest < logit_args.reach) | (slots < logit_args.sinks))
    if logit_args.sliding_window is not None:
        seen = seen & (oldest < logit_args.sliding_window)
    if logit_args.attention_chunk is not None:
        position = oldest + slots  # of the oldest query
        seen = seen & (slots >= position - position % logit_args.attention_chunk)
    return seen


@triton.jit
@no_type_check
def seen_by_any(o_positions, positions, logit_args):
    """Slots that any of the queries may see, perhaps some more. A query at a negative position sees none."""
    newest = tl.max(o_positions, 0)
    oldest = tl.min(tl.where(o_positions >= 0, o_positions, 1 << 30), 0)
    return visible(newest - positions, oldest - positions, positions, logit_args)


@triton.jit
@no_type_check
def load_states(
    states,
    index,
    i_head,
    o_slots,
    m_slots,
    slots,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    CODES: tl.constexpr,
):
    """Load the channels FIRST to LAST of some slots, padded, INT8 and INT4 as float32.

    Masked ones are 0, plus the mean if there is one. CODES: the bits of a number, and how many channels share a scale
    and an offset (0: a slot has one scale).
    """
    o_channels = FIRST + tl.arange(0, PADDED)
    m_channels = o_channels < LAST
    mask = m_slots[:, None] & m_channels[None, :]
    at_slots = index * slots + o_slots
    if CODES[0] <= 8:
        numbers = load_codes(states, at_slots, m_slots, FIRST, LAST, PADDED, WIDTH, CODES)
        if CODES[1] > 0:
            numbers = scaled_groups(states, numbers, at_slots, m_slots, FIRST, LAST, PADDED, WIDTH, CODES)
        else:
            numbers = numbers * tl.load(states.scales + at_slots, mask=m_slots, other=0).to(tl.float32)[:, None]
        if states.means is not None:
            numbers += tl.load(states.means + i_head * WIDTH + o_channels, mask=m_channels, other=0)[None, :]
        if states.full_precision is not None:
            entries = tl.load(states.ring_index + at_slots, mask=m_slots, other=-1)
            at = (index * states.ring_entries + entries)[:, None] * WIDTH + o_channels[None, :]
            copies = tl.load(states.full_precision + at, mask=mask & (entries >= 0)[:, None], other=0).to(tl.float32)
            numbers = tl.where((entries >= 0)[:, None], copies, numbers)
    else:
        numbers = tl.load(states.data + at_slots[:, None] * WIDTH + o_channels[None, :], mask=mask, other=0)
    return numbers


@triton.jit
@no_type_check
def load_codes(
    states,
    at_slots,
    m_slots,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    CODES: tl.constexpr,
):
    """The codes of some channels, float32. Whole words of them are loaded where channels begin and end with words."""
    held: tl.constexpr = WIDTH * CODES[0] // 8  # bytes of a slot
    first: tl.constexpr = FIRST % held
    is_whole: tl.constexpr = first % 4 == 0 and LAST % 4 == 0 and held % 4 == 0 and PADDED >= 8
    is_both: tl.constexpr = CODES[0] == 4 and FIRST == 0 and LAST == PADDED and LAST == WIDTH  # halves of each byte
    if is_whole and (CODES[0] == 8 or is_both or first + LAST - FIRST <= held):
        count: tl.constexpr = PADDED // 8 if is_both else PADDED // 4
        o_words = tl.arange(0, count)
        m_words = m_slots[:, None] & (o_words < (count if is_both else (LAST - FIRST) // 4))[None, :]
        at = at_slots[:, None] * (held // 4) + (first // 4 + o_words)[None, :]
        words = tl.load(states.data.to(tl.pointer_type(tl.int32)) + at, mask=m_words, other=0)
        if CODES[0] == 8:
            numbers = words_to_floats(words ^ WORD_128, 255, 128, PADDED)
        elif is_both:
            halves = tl.join(words_to_floats(words, 15, 8, held), words_to_floats(words >> 4, 15, 8, held))
            numbers = tl.reshape(tl.permute(halves, (0, 2, 1)), (words.shape[0], PADDED))
        else:
            numbers = words_to_floats(words >> (0 if held > FIRST else 4), 15, 8, PADDED)
    else:
        o_channels = FIRST + tl.arange(0, PADDED)
        mask = m_slots[:, None] & (o_channels < LAST)[None, :]
        codes = tl.load(states.data + at_slots[:, None] * held + (o_channels % held)[None, :], mask=mask, other=0)
        if CODES[0] == 4:
            codes = ((codes.to(tl.int32) >> tl.where(o_channels < held, 0, 4)[None, :]) & 15) - 8
        numbers = codes.to(tl.float32)
    return numbers


@triton.jit
@no_type_check
def words_to_floats(words, MASK: tl.constexpr, ZERO: tl.constexpr, PADDED: tl.constexpr):
    """The code in each byte of some words, less ZERO, as (slots, codes) float32.

    A whole number below 2^23 is the fraction of a float32 beside it: an addition replaces the slow conversion.
    """
    even = tl.join((words & MASK) | FLOAT_BESIDE, ((words >> 16) & MASK) | FLOAT_BESIDE)
    odd = tl.join(((words >> 8) & MASK) | FLOAT_BESIDE, ((words >> 24) & MASK) | FLOAT_BESIDE)
    codes = tl.reshape(tl.join(even, odd), (words.shape[0], PADDED))
    return codes.to(tl.float32, bitcast=True) - (BESIDE + ZERO)


@triton.jit
@no_type_check
def scaled_groups(
    states,
    numbers,
    at_slots,
    m_slots,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    CODES: tl.constexpr,
):
    """Codes times the scale of their group, plus its offset. One word holds both."""
    group: tl.constexpr = CODES[1]
    pairs: tl.constexpr = (WIDTH + group - 1) // group
    words = states.scales.to(tl.pointer_type(tl.int32)) + at_slots[:, None] * pairs
    if FIRST % group == 0 and PADDED % group == 0:
        count: tl.constexpr = PADDED // group
        o_groups = FIRST // group + tl.arange(0, count)
        mask = m_slots[:, None] & (o_groups * group < LAST)[None, :]
        word = tl.load(words + o_groups[None, :], mask=mask, other=0)
        word = tl.reshape(tl.broadcast_to(word[:, :, None], (numbers.shape[0], count, group)), numbers.shape)
    else:
        o_channels = FIRST + tl.arange(0, PADDED)
        mask = m_slots[:, None] & (o_channels < LAST)[None, :]
        word = tl.load(words + (o_channels // group)[None, :], mask=mask, other=0)
    scale = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    offset = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    numbers = numbers * scale + offset
    if PADDED > LAST - FIRST:  # the last group has a scale and an offset for them
        numbers = tl.where((FIRST + tl.arange(0, PADDED) < LAST)[None, :], numbers, 0.0)
    return numbers


@triton.jit
@no_type_check
def rotated(first, second, logit_args, positions, m_rows, PAIRS: tl.constexpr, HALF: tl.constexpr):
    """The first and second channels of the rotary pairs, rotated to `positions`."""
    o_pairs = tl.arange(0, HALF)
    mask = m_rows[:, None] & (o_pairs < PAIRS)[None, :]
    at = positions.to(tl.int64)[:, None] * PAIRS + o_pairs[None, :]
    cos = tl.load(logit_args.cos + at, mask=mask, other=0).to(tl.float32)
    sin = tl.load(logit_args.sin + at, mask=mask, other=0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
@no_type_check
def with_gain(states, logit_args, o_channels, m_channels):
    """Rotated queries times the gain of their channels, if there is one."""
    if logit_args.query_gain is not None:
        states = states.to(tl.float32) * tl.load(logit_args.query_gain + o_channels, mask=m_channels, other=0)[None, :]
    return states


@triton.jit
@no_type_check
def load_keys(
    keys,
    logit_args,
    index,
    i_batch,
    i_head,
    o_slots,
    m_slots,
    slots,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    CODES: tl.constexpr,
    NUMBER: tl.constexpr,
):
    """The keys of some slots as five tiles of (slots, channels)."""
    if REST > 0:
        rest = load_states(keys, index, i_head, o_slots, m_slots, slots, 2 * PAIRS, WIDTH, REST, WIDTH, CODES).to(
            NUMBER
        )
        near_first, near_second, far_first, far_second = rest, rest, rest, rest
    if PAIRS > 0:
        first = load_states(keys, index, i_head, o_slots, m_slots, slots, 0, PAIRS, HALF, WIDTH, CODES).to(tl.float32)
        second = load_states(keys, index, i_head, o_slots, m_slots, slots, PAIRS, 2 * PAIRS, HALF, WIDTH, CODES).to(
            tl.float32
        )
        # Asked of all slots: a mask that waits for slot positions would put rows of the table one load further off.
        positions = tl.load(at_head(logit_args.near_keys, i_batch, i_head) + o_slots, mask=o_slots < slots, other=0)
        near_first, near_second = rotated(first, second, logit_args, positions, m_slots, PAIRS, HALF)
        near_first, near_second = near_first.to(NUMBER), near_second.to(NUMBER)
        far_first, far_second = near_first, near_second
        if logit_args.far_keys is not None:
            positions = tl.load(at_head(logit_args.far_keys, i_batch, i_head) + o_slots, mask=o_slots < slots, other=0)
            far_first, far_second = rotated(first, second, logit_args, positions, m_slots, PAIRS, HALF)
            far_first, far_second = far_first.to(NUMBER), far_second.to(NUMBER)
        if REST == 0:
            rest = near_first
    return near_first, near_second, far_first, far_second, rest


@triton.jit
@no_type_check
def load_queries(
    queries,
    logit_args,
    i_batch,
    i_head,
    o_tokens,
    o_heads,
    m_rows,
    WIDTH: tl.constexpr,
    PAIRS: tl.constexpr,
    HALF: tl.constexpr,
    REST: tl.constexpr,
    NUMBER: tl.constexpr,
):
    """Rows of queries as five tiles of (rows, channels). A row is a token and one of its query heads."""
    rows = queries.start + i_batch * queries.batch + o_heads.to(tl.int64) * queries.head + o_tokens * queries.token
    if REST > 0:
        o_rest = 2 * PAIRS + tl.arange(0, REST)
        mask = m_rows[:, None] & (o_rest < WIDTH)[None, :]
        rest = tl.load(rows[:, None] + o_rest[None, :] * queries.channel, mask=mask, other=0)
        rest = with_gain(rest, logit_args, o_rest, o_rest < WIDTH).to(NUMBER)
        near_first, near_second, far_first, far_second = rest, rest, rest, rest
    if PAIRS > 0:
        o_pairs = tl.arange(0, HALF)
        mask = m_rows[:, None] & (o_pairs < PAIRS)[None, :]
        at = rows[:, None] + o_pairs[None, :] * queries.channel
        first = tl.load(at, mask=mask, other=0).to(tl.float32)
        second = tl.load(at + PAIRS * queries.channel, mask=mask, other=0).to(tl.float32)
        positions = tl.load(at_head(logit_args.near_queries, i_batch, i_head) + o_tokens, mask=m_rows, other=0)
        near_first, near_second = rotated(first, second, logit_args, positions, m_rows, PAIRS, HALF)
        near_first = with_gain(near_first, logit_args, o_pairs, o_pairs < PAIRS).to(NUMBER)
        near_second = with_gain(near_second, logit_args, PAIRS + o_pairs, o_pairs < PAIRS).to(NUMBER)
        far_first, far_second = near_first, near_second
        if logit_args.far_queries is not None:
            positions = tl.load(at_head(logit_args.far_queries, i_batch, i_head) + o_tokens, mask=m_rows, other=0)
            far_first, far_second = rotated(first, second, logit_args, positions, m_rows, PAIRS, HALF)
            far_first = with_gain(far_first, logit_args, o_pairs, o_pairs < PAIRS).to(NUMBER)
            far_second = with_gain(far_second, logit_args, PAIRS + o_pairs, o_pairs < PAIRS).to(NUMBER)
        if REST == 0:
            rest = near_first
    return near_first, near_second, far_first, far_second, rest


@triton.jit
@no_type_check
def compute_logits(
    q,
    k,
    logit_args,
    i_batch,
    i_head,
    q_positions,
    positions,
    o_slots,
    m_slots,
    PAIRS: tl.constexpr,
    REST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The logits of rows of queries over some slots, -inf where one is not seen."""
    distance = q_positions[:, None] - positions[None, :]
    logits = tl.zeros((ROWS, BLOCK), tl.float32)
    if PAIRS > 0:
        logits = product(q[0], tl.trans(k[0]), logits)
        logits = product(q[1], tl.trans(k[1]), logits)
        if logit_args.far_keys is not None:
            far = product(q[2], tl.trans(k[2]), tl.zeros((ROWS, BLOCK), tl.float32))
            far = product(q[3], tl.trans(k[3]), far)
            logits = tl.where(distance < logit_args.near_window, logits, far)
    if REST > 0:
        logits = product(q[4], tl.trans(k[4]), logits)
    logits = logits * logit_args.scale
    if logit_args.softcap is not None:
        # tanh, because no built-in one runs everywhere.
        logits = logit_args.softcap - 2 * logit_args.softcap / (tl.exp(logits * (2 / logit_args.softcap)) + 1)
    if logit_args.log_counts is not None:
        counts = tl.load(at_head(logit_args.log_counts, i_batch, i_head) + o_slots, mask=m_slots, other=0)
        logits += counts.to(tl.float32)[None, :]
    seen = visible(distance, distance, positions[None, :], logit_args) & m_slots[None, :]
    return tl.where(seen, logits, float("-inf"))


@triton.jit
@no_type_check
def with_sinks(top, total, sink_logits, o_heads, m_rows):
    """The end of a running softmax: the factor of its sum of values, and the log-sum-exp of its logits.

    Learned sinks, if any, join the sum. Where nothing was seen both are 0.
    """
    if sink_logits is not None:
        sinks = tl.load(sink_logits + o_heads, mask=m_rows, other=0).to(tl.float32)
        highest = tl.maximum(top, sinks)
        total_exp = total * tl.exp(top - highest) + tl.exp(sinks - highest)
        return tl.exp(top - highest) / total_exp, highest + tl.log(total_exp)
    is_any = total > 0
    total_exp = tl.where(is_any, total, 1.0)
    return tl.where(is_any, 1 / total_exp, 0.0), tl.where(is_any, top + tl.log(total_exp), 0.0)


FLOATS: Final = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
LOW_BIT: Final = (Format.INT8, Format.INT4)
MAX_CHANNELS: Final = 1024


class StridedTensor(NamedTuple):
    """A tensor (batch, heads, n) with a stride of 1 along n, and of 0 along heads where they share it."""

    start: Tensor
    batch: int
    head: int


class StridedQueries(NamedTuple):
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
    """Arguments of logits beside queries and keys, see `AttentionInput`.

    No argument of a kernel may be called `params`: Triton's own launcher has a variable of that name.
    """

    slots: StridedTensor  # positions
    queries: StridedTensor  # positions
    cos: Tensor | None
    sin: Tensor | None
    query_gain: Tensor | None
    near_keys: StridedTensor | None
    near_queries: StridedTensor | None
    far_keys: StridedTensor | None
    far_queries: StridedTensor | None
    near_window: int
    log_counts: StridedTensor | None
    scale: float
    softcap: float | None
    sliding_window: int | None
    reach: int | None
    sinks: int
    attention_chunk: int | None


def knows(states: PackedStates) -> bool:
    """Return True if the kernels can read it."""
    is_known = states.data.dtype in FLOATS if states.format is Format.FLOAT else states.format in LOW_BIT
    return is_known and states.channels <= MAX_CHANNELS


def as_plane(tensor: Tensor) -> StridedTensor:
    """A tensor of (batch, 1 or as many heads, n), as kernels take it."""
    if tensor.shape[2] > 1 and tensor.stride(2) != 1:
        tensor = tensor.contiguous()
    return StridedTensor(tensor, tensor.stride(0), 0 if tensor.shape[1] == 1 else tensor.stride(1))


def packed_tensors(states: PackedStates) -> PackedTensors:
    """Keys or values, as kernels take them."""
    scales, means, ring, ring_index = (
        None if part is None else part.contiguous()
        for part in (states.scales, states.means, states.full_precision, states.ring_index)
    )
    entries = 0 if ring is None else ring.shape[2]
    return PackedTensors(states.data.contiguous(), scales, means, ring, ring_index, entries)


def pack_logit_args(call: AttentionInput) -> LogitArgs:
    """Arguments of the logits of `call` beside its queries and keys, as kernels take them."""
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


MIN_BLOCK: Final = 16  # slots or queries of a program
FEW_SLOTS: Final = 128  # for a multiprocessor: with fewer, warps that share a block are faster than warps of their own
DEFAULT_MULTIPROCESSORS = 132  # of an H200, used for unknown devices


@dataclass(frozen=True)
class Plan:
    """A program's rows of queries and block of slots, with the compiler's layout of them."""

    rows: int
    block: int
    warps: int
    stages: int
    programs: int = 1  # programs that fit on a multiprocessor at once


def attend_plan(rows: int, width: int, itemsize: int, bits: int, load: int) -> Plan:
    """A plan for `rows` queries (heads of a group x tokens) of `width` channels, stored in `bits` each.

    `load`: slots for each multiprocessor, those of all rows and heads counted.
    """
    wide = width * itemsize
    if width > 256:  # latents, not tuned
        return Plan(16, 16, 8, 1) if itemsize == 4 else Plan(16 if rows <= 16 else 32, 32, 8, 2)
    if rows <= 32:
        # Bound by bytes: as many as possible are in flight. Keys and rows of the table wait for positions, so five
        # stages hold two blocks of them.
        padded = 16 if rows <= 16 else 32
        if wide > 512:
            return Plan(padded, 16, 8, 3)
        if rows <= 16 and itemsize == 2 and wide <= 256 and load >= FEW_SLOTS:
            return _decode_plan(wide, bits)
        return Plan(padded, 64 if wide <= 128 else 32, 4, 5, 4 if bits == 16 and wide <= 256 else 2)
    if itemsize == 4:
        # No tensor core multiplies float32 as such, and its tiles take twice the room.
        return Plan(32, 32, 4, 2, 2) if width <= 64 else Plan(16, 32 if width <= 128 else 16, 8, 1)
    if width > 128:
        return Plan(32, 32, 4, 2, 2)
    # Bound by products: keys are rotated once per block of rows, so rows are as many as eight warps' registers hold.
    return Plan(128 if rows > 64 else 64, 64, 8, 2)


def ever_smaller(at: Plan) -> list[Plan]:
    """The plan, and others that take ever less of a multiprocessor's shared memory.

    Plans were made for the 227 KiB of an H200. Most GPUs at home have 99 KiB, those of Turing 64.
    """
    plans = [at]
    for stages in (3, 1):
        if plans[-1].stages > stages:
            plans.append(replace(plans[-1], stages=stages))
    while plans[-1].block > MIN_BLOCK:
        plans.append(replace(plans[-1], block=plans[-1].block // 2))
    while plans[-1].rows > MIN_BLOCK:
        plans.append(replace(plans[-1], rows=plans[-1].rows // 2))
    return plans


def _decode_plan(wide: int, bits: int) -> Plan:
    """A plan for a token of each row. Programs of few warps seldom wait for each other.

    On an H200 those of plain slots, and of int8 ones of 64 channels, were the fastest of a sweep. int4 slots of 64
    channels were timed with this plan alone, and low-bit slots of more with none.
    """
    if bits < 16 and wide > 128:
        return Plan(16, 32, 4, 5, 2)
    if wide > 128:
        return Plan(16, 64, 2, 3, 4)
    return Plan(16, 32, 2, 5, 4) if bits == 4 else Plan(16, 32, 1, 5, 8)


def mass_plan(rows: int, width: int, itemsize: int) -> Plan:
    """A plan for the mass of some slots. Blocks of `rows` queries come one by one, and keys stay in registers."""
    wide = width * itemsize
    return Plan(16 if rows <= 32 or wide > 256 else 64, 64 if wide <= 128 else 32, 4 if wide <= 256 else 8, 2)


def stream_plan(width: int) -> Plan:
    """A plan for keys of `width` channels read one by one. No program fetches ahead: others run while it waits."""
    return Plan(1, max(8, 4096 // triton.next_power_of_2(width)), 4, 1, 4)


def splits(programs: int, slots: int, at: Plan, device: torch.device) -> tuple[int, int]:
    """The number of splits in which slots are read, and the slots of each, where `programs` would read them all."""
    blocks = -(-slots // at.block)
    # No more than run at once: a few that are left over would take as long as all before them. And where all
    # multiprocessors have work, no split of a single block: it takes nearly the time of two, and is joined later.
    units = multiprocessors(device)
    wanted = max(1, at.programs * units // programs)
    each = -(-blocks // min(wanted, max(-(-blocks // 2), -(-units // programs))))
    return -(-blocks // each), each * at.block


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device, or the number of a usual one."""
    if device.type != "cuda":
        return DEFAULT_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
