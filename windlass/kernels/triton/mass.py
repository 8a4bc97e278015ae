"""Attention mass per slot, from the log-sum-exp that attention leaves for each query."""

from typing import no_type_check

import triton
import triton.language as tl

from windlass.kernels.triton.tiles import at_head, compute_logits, load_keys, load_queries, seen_by_any


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
    BITS: tl.constexpr,
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
            keys, logit_args, index, i_batch, i_head, o_slots, m_held, slots, WIDTH, PAIRS, HALF, REST, BITS, NUMBER
        )

    # A row is a column of queries and one of its heads; heads are filled up to a power of two.
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
