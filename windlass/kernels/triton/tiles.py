"""What the kernels share: blocks of queries and keys at their rotary positions, and their logits.

A block of queries or keys is five tiles: both halves of the channel pairs turned for the near branch,
the same for the far branch, and the channels that never turn. A tile that a model has no use for
repeats another one; nobody reads it, so the compiler drops it.

Names: `i_` one number, `o_` numbers along a tile's axis, `m_` a mask.
"""

from typing import no_type_check

import triton
import triton.language as tl


@triton.jit
@no_type_check
def product(a, b, total):
    """`total` and the product of two tiles; float32 is multiplied as such."""
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
@no_type_check
def at_head(plane, i_batch, i_head):
    """Where the numbers of one row and head begin."""
    return plane.start + i_batch * plane.batch + i_head * plane.head


@triton.jit
@no_type_check
def visible(newest, oldest, slots, sight):
    """Whether slots are seen: distances to the newest and to the oldest of those who may see them."""
    seen = (newest >= 0) & (slots >= 0)
    if sight.reach is not None:
        seen = seen & ((oldest < sight.reach) | (slots < sight.sinks))
    if sight.sliding_window is not None:
        seen = seen & (oldest < sight.sliding_window)
    return seen


@triton.jit
@no_type_check
def seen_by_any(o_positions, positions, sight):
    """Which slots any query may see; a negative position is nobody's. More than what they see one by one."""
    newest = tl.max(o_positions, 0)
    oldest = tl.min(tl.where(o_positions >= 0, o_positions, 1 << 30), 0)
    return visible(newest - positions, oldest - positions, positions, sight)


@triton.jit
@no_type_check
def numbers_of(
    held, index, i_head, o_slots, m_slots, o_channels, m_channels, slots, WIDTH: tl.constexpr, BITS: tl.constexpr
):
    """Channels of some slots; codes come as float32. 0 where masked, but for a centre."""
    mask = m_slots[:, None] & m_channels[None, :]
    places = index * slots + o_slots
    if BITS == 4:
        half: tl.constexpr = WIDTH // 2
        byte = tl.load(held.codes + places[:, None] * half + (o_channels % half)[None, :], mask=mask, other=0x88)
        shift = tl.where(o_channels < half, 0, 4)[None, :]
        numbers = ((byte.to(tl.int32) >> shift) & 15).to(tl.float32) - 8.0
    else:
        numbers = tl.load(held.codes + places[:, None] * WIDTH + o_channels[None, :], mask=mask, other=0)
    if BITS <= 8:
        scales = tl.load(held.scales + places, mask=m_slots, other=0).to(tl.float32)
        numbers = numbers.to(tl.float32) * scales[:, None]
        if held.centres is not None:
            numbers += tl.load(held.centres + i_head * WIDTH + o_channels, mask=m_channels, other=0)[None, :]
        if held.exact is not None:
            exact = tl.load(held.places + places, mask=m_slots, other=-1)
            at = (index * held.exact_places + exact)[:, None] * WIDTH + o_channels[None, :]
            copies = tl.load(held.exact + at, mask=mask & (exact >= 0)[:, None], other=0).to(tl.float32)
            numbers = tl.where((exact >= 0)[:, None], copies, numbers)
    return numbers


@triton.jit
@no_type_check
def turned(first, second, sight, places, m_rows, PAIRS: tl.constexpr, HALF: tl.constexpr):
    """Both halves of the channel pairs, turned to `places`."""
    o_pairs = tl.arange(0, HALF)
    mask = m_rows[:, None] & (o_pairs < PAIRS)[None, :]
    at = places.to(tl.int64)[:, None] * PAIRS + o_pairs[None, :]
    cos = tl.load(sight.cos + at, mask=mask, other=0).to(tl.float32)
    sin = tl.load(sight.sin + at, mask=mask, other=0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
@no_type_check
def keys_of(
    keys,
    sight,
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
    BITS: tl.constexpr,
    NUMBER: tl.constexpr,
):
    """The keys of some slots as five tiles of (slots, channels)."""
    if REST > 0:
        o_rest = 2 * PAIRS + tl.arange(0, REST)
        rest = numbers_of(keys, index, i_head, o_slots, m_slots, o_rest, o_rest < WIDTH, slots, WIDTH, BITS).to(NUMBER)
        near_first, near_second, far_first, far_second = rest, rest, rest, rest
    if PAIRS > 0:
        o_pairs = tl.arange(0, HALF)
        m_pairs = o_pairs < PAIRS
        first = numbers_of(keys, index, i_head, o_slots, m_slots, o_pairs, m_pairs, slots, WIDTH, BITS).to(tl.float32)
        second = numbers_of(keys, index, i_head, o_slots, m_slots, PAIRS + o_pairs, m_pairs, slots, WIDTH, BITS).to(
            tl.float32
        )
        # Asked of all slots: a mask that waits for positions would put rows of the table one load further off.
        places = tl.load(at_head(sight.near_keys, i_batch, i_head) + o_slots, mask=o_slots < slots, other=0)
        near_first, near_second = turned(first, second, sight, places, m_slots, PAIRS, HALF)
        near_first, near_second = near_first.to(NUMBER), near_second.to(NUMBER)
        far_first, far_second = near_first, near_second
        if sight.far_keys is not None:
            places = tl.load(at_head(sight.far_keys, i_batch, i_head) + o_slots, mask=o_slots < slots, other=0)
            far_first, far_second = turned(first, second, sight, places, m_slots, PAIRS, HALF)
            far_first, far_second = far_first.to(NUMBER), far_second.to(NUMBER)
        if REST == 0:
            rest = near_first
    return near_first, near_second, far_first, far_second, rest


@triton.jit
@no_type_check
def queries_of(
    queries,
    sight,
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
    """Rows of queries as five tiles of (rows, channels); a row is a token and one of its query heads."""
    rows = queries.start + i_batch * queries.batch + o_heads.to(tl.int64) * queries.head + o_tokens * queries.token
    if REST > 0:
        o_rest = 2 * PAIRS + tl.arange(0, REST)
        mask = m_rows[:, None] & (o_rest < WIDTH)[None, :]
        rest = tl.load(rows[:, None] + o_rest[None, :] * queries.channel, mask=mask, other=0).to(NUMBER)
        near_first, near_second, far_first, far_second = rest, rest, rest, rest
    if PAIRS > 0:
        o_pairs = tl.arange(0, HALF)
        mask = m_rows[:, None] & (o_pairs < PAIRS)[None, :]
        at = rows[:, None] + o_pairs[None, :] * queries.channel
        first = tl.load(at, mask=mask, other=0).to(tl.float32)
        second = tl.load(at + PAIRS * queries.channel, mask=mask, other=0).to(tl.float32)
        places = tl.load(at_head(sight.near_queries, i_batch, i_head) + o_tokens, mask=m_rows, other=0)
        near_first, near_second = turned(first, second, sight, places, m_rows, PAIRS, HALF)
        near_first, near_second = near_first.to(NUMBER), near_second.to(NUMBER)
        far_first, far_second = near_first, near_second
        if sight.far_queries is not None:
            places = tl.load(at_head(sight.far_queries, i_batch, i_head) + o_tokens, mask=m_rows, other=0)
            far_first, far_second = turned(first, second, sight, places, m_rows, PAIRS, HALF)
            far_first, far_second = far_first.to(NUMBER), far_second.to(NUMBER)
        if REST == 0:
            rest = near_first
    return near_first, near_second, far_first, far_second, rest


@triton.jit
@no_type_check
def logits_of(
    q,
    k,
    sight,
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
        if sight.far_keys is not None:
            far = product(q[2], tl.trans(k[2]), tl.zeros((ROWS, BLOCK), tl.float32))
            far = product(q[3], tl.trans(k[3]), far)
            logits = tl.where(distance < sight.near_window, logits, far)
    if REST > 0:
        logits = product(q[4], tl.trans(k[4]), logits)
    logits = logits * sight.scale
    if sight.softcap is not None:
        # tanh, of which there is none that runs everywhere.
        logits = sight.softcap - 2 * sight.softcap / (tl.exp(logits * (2 / sight.softcap)) + 1)
    if sight.log_counts is not None:
        counts = tl.load(at_head(sight.log_counts, i_batch, i_head) + o_slots, mask=m_slots, other=0)
        logits += counts.to(tl.float32)[None, :]
    seen = visible(distance, distance, positions[None, :], sight) & m_slots[None, :]
    return tl.where(seen, logits, float("-inf"))


@triton.jit
@no_type_check
def with_sinks(top, total, sink_logits, o_heads, m_rows):
    """What a running softmax comes to: the factor of its sum of values, and the logarithm of its divisor.

    Learned sinks, if any, join the divisor. Where nothing was seen the factor is 0, and so is the logarithm.
    """
    if sink_logits is not None:
        sinks = tl.load(sink_logits + o_heads, mask=m_rows, other=0).to(tl.float32)
        highest = tl.maximum(top, sinks)
        divisor = total * tl.exp(top - highest) + tl.exp(sinks - highest)
        return tl.exp(top - highest) / divisor, highest + tl.log(divisor)
    is_any = total > 0
    divisor = tl.where(is_any, total, 1.0)
    return tl.where(is_any, 1 / divisor, 0.0), tl.where(is_any, top + tl.log(divisor), 0.0)
