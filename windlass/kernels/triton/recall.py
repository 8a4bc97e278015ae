"""Recall of evicted tokens on a GPU. `kernels.reference_recall` defines the meaning of each function.

Digests are in the GPU's memory, where all pages are ranked. Tokens are in the host's memory, page-locked, so that a
program reads and writes them in place: the candidates' keys, and the tokens of the best pages. Nothing waits for the
host.
"""

from dataclasses import replace
from typing import Any, Final, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from windlass.core.inputs import (
    TILE,
    BestPages,
    PageInput,
    ReadInput,
    TiledKeys,
    WriteInput,
    rows_of,
    tokens_of,
)
from windlass.core.parse import PAGE
from windlass.kernels.reference import best_of, grouped_queries, products_of, recallable
from windlass.kernels.triton.tiles import product

ELEMENTS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # dtypes as which rows are moved
MOVED: Final = 2048  # elements of rows that a program moves, a power of two
MOST_MOVED: Final = 64  # rows that a program moves
MULTIPLIED: Final = 2048  # numbers of digests that a program multiplies, a power of two
ROWS: Final = 16  # queries per program: the least for a tensor core, as these are float32
TILE_TOKENS = tl.constexpr(TILE)


def best_pages(call: PageInput) -> BestPages:
    """See `reference_recall.best_pages`: of the keys it reads those of the candidates, or all where there are none."""
    is_recallable, queries = recallable(call), grouped_queries(call)
    pages = is_recallable.shape[-1] // PAGE
    if call.digests:
        is_page = is_recallable.unflatten(-1, (-1, PAGE)).any(-1)
        most = _allowed(queries, call, pages).masked_fill(~is_page[:, :, None, None], -torch.inf)
        listed = best_of(most, call.is_query, call.candidates).sort(-1).values  # among equal ones the earlier is better
    else:
        listed = torch.arange(pages, device=queries.device).expand(*queries.shape[:2], -1)
    index = tokens_of(listed)
    keys = _numbers(call.pieces, index)
    is_read = is_recallable.gather(-1, index)
    products = products_of(queries, keys).masked_fill(~is_read[:, :, None, None], -torch.inf)
    best = best_of(products.unflatten(-1, (-1, PAGE)).amax(-1), call.is_query, call.count)
    return BestPages(listed.gather(-1, best), is_read.gather(-1, tokens_of(best)))


def read_tokens(call: ReadInput) -> Tensor:
    """See `reference_recall.read_tokens`."""
    index, first = call.index.contiguous(), call.pieces[0]
    batch, kv_heads, tokens = index.shape
    width = first.shape[3]
    out = torch.empty(batch, kv_heads, tokens, width, dtype=first.dtype, device=index.device)
    if out.numel():
        block, padded = _block(width)
        with torch.cuda.device_of(index):
            _read[(triton.cdiv(tokens, block), batch * kv_heads)](
                *_pieces(call.pieces, call.is_tiled), index, _elements(out), tokens, width, call.is_tiled, padded, block
            )
    return out


def write_tokens(call: WriteInput) -> None:
    """See `reference_recall.write_tokens`."""
    index, rows = call.index.contiguous(), call.rows.contiguous()
    batch, kv_heads, tokens, width = rows.shape
    if rows.numel():
        block, padded = _block(width)
        with torch.cuda.device_of(index):
            _write[(triton.cdiv(tokens, block), batch * kv_heads)](
                *_pieces(call.pieces, call.is_tiled), index, _elements(rows), kv_heads, tokens, width, call.is_tiled,
                padded, block,
            )  # fmt: skip


def _block(width: int) -> tuple[int, int]:
    """The number of rows that a program moves, and the power of two that has room for one."""
    padded = triton.next_power_of_2(width)
    return max(1, min(MOST_MOVED, MOVED // padded)), padded


def _pieces(pieces: tuple[Tensor, ...], is_tiled: bool) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """The pieces as whole numbers, and how many tokens each has."""
    return tuple(map(_elements, pieces)), tuple(piece.shape[2] * (TILE if is_tiled else 1) for piece in pieces)


def _elements(tensor: Tensor) -> Tensor:
    return tensor.view(ELEMENTS[tensor.itemsize])


def _numbers(pieces: tuple[TiledKeys, ...], index: Tensor) -> Tensor:
    """The keys at `index` (batch, kv_heads, tokens), float32."""
    first = pieces[0].states
    words = read_tokens(ReadInput(tuple(piece.tiles for piece in pieces), index, is_tiled=True))
    scales = tuple(piece.states.scales for piece in pieces if piece.states.scales is not None)
    read = read_tokens(ReadInput(scales, index, is_tiled=False)) if scales else None
    data = rows_of(words, first.data.shape[3], first.data.dtype)
    return replace(first, data=data, scales=read).floats().float()


def _allowed(queries: Tensor, call: PageInput, pages: int) -> Tensor:
    """The most that a token's product with each query may be, by page: (batch, kv_heads, members, tokens, pages)."""
    batch, kv_heads, members, tokens, channels = queries.shape
    rows, states = members * tokens, call.pieces[0].states
    out = torch.empty(batch, kv_heads, rows, pages, dtype=torch.float32, device=queries.device)
    width = max(16, triton.next_power_of_2(channels))
    block, start = max(16, MULTIPLIED // width), 0
    options: dict[str, Any] = {"CHANNELS": channels, "WIDTH": width, "ROWS": ROWS, "GROUP": states.group}
    for each in call.digests:
        size = min(each.largest.tokens, pages - start)
        if size > 0:
            with torch.cuda.device_of(queries):
                _allow[(triton.cdiv(size, block), batch * kv_heads, triton.cdiv(rows, ROWS))](
                    queries.contiguous(), each.largest.tiles, each.largest.states.scales, each.least.tiles,
                    each.least.states.scales, states.means, out, kv_heads, rows, each.largest.tokens, size, start,
                    pages, **options, WORDS=each.largest.tiles.shape[3], BITS=states.bits,
                    IS_BFLOAT16=states.data.dtype == torch.bfloat16, BLOCK=block,
                )  # fmt: skip
        start += each.largest.tokens
    return out.view(batch, kv_heads, members, tokens, pages)


@triton.jit
@no_type_check
def _offsets(i_row, at, size, o_width, width, IS_TILED: tl.constexpr):
    """Offsets in a piece of the numbers of tokens `at` of a row and head."""
    if IS_TILED:
        tiles = i_row * (size // TILE_TOKENS) + at // TILE_TOKENS
        return (tiles[:, None] * width + o_width[None, :]) * TILE_TOKENS + (at % TILE_TOKENS)[:, None]
    return (i_row * size + at)[:, None] * width + o_width[None, :]


@triton.jit
@no_type_check
def _read(
    p_pieces, sizes, p_index, p_out, tokens, width, IS_TILED: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Some tokens of one row and head, out of all pieces."""
    i_block, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_tokens, o_width = i_block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    m_tokens, m_width = o_tokens < tokens, o_width < width
    index = tl.load(p_index + i_row * tokens + o_tokens, mask=m_tokens, other=-1)
    found = tl.zeros((BLOCK, WIDTH), p_out.dtype.element_ty)
    start = 0
    for part in tl.static_range(len(p_pieces)):
        at, size = index - start, sizes[part]
        m_here = (at >= 0) & (at < size)
        p_part = p_pieces[part] + _offsets(i_row, at, size, o_width, width, IS_TILED)
        rows = tl.load(p_part, mask=m_here[:, None] & m_width[None, :], other=0)
        found = tl.where(m_here[:, None], rows, found)
        start += size
    p_out += (i_row * tokens + o_tokens)[:, None] * width + o_width[None, :]
    tl.store(p_out, found, mask=m_tokens[:, None] & m_width[None, :])


@triton.jit
@no_type_check
def _write(
    p_pieces,
    sizes,
    p_index,
    p_rows,
    kv_heads,
    tokens,
    width,
    IS_TILED: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some tokens of one row and head, into the pieces that have their places."""
    i_block, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_tokens, o_width = i_block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    m_tokens, m_width = o_tokens < tokens, o_width < width
    index = tl.load(p_index + i_row // kv_heads * tokens + o_tokens, mask=m_tokens, other=-1)
    p_rows += (i_row * tokens + o_tokens)[:, None] * width + o_width[None, :]
    rows = tl.load(p_rows, mask=m_tokens[:, None] & m_width[None, :], other=0)
    start = 0
    for part in tl.static_range(len(p_pieces)):
        at, size = index - start, sizes[part]
        m_here = (at >= 0) & (at < size)
        p_part = p_pieces[part] + _offsets(i_row, at, size, o_width, width, IS_TILED)
        tl.store(p_part, rows, mask=m_here[:, None] & m_width[None, :])
        start += size


@triton.jit
@no_type_check
def _digest_numbers(
    p_tiles,
    p_scales,
    means,
    i_row,
    o_pages,
    m_pages,
    held,
    o_channels,
    m_channels,
    WORDS: tl.constexpr,
    CHANNELS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_BFLOAT16: tl.constexpr,
):
    """(channels, pages) float32, out of tiles of words."""
    if BITS == 4:
        half: tl.constexpr = CHANNELS // 2
        byte = o_channels % half
        word, shift = byte // 4, byte % 4 * 8 + tl.where(o_channels < half, 0, 4)
    elif BITS == 8:
        word, shift = o_channels // 4, o_channels % 4 * 8
    elif BITS == 16:
        word, shift = o_channels // 2, o_channels % 2 * 16
    else:
        word, shift = o_channels, o_channels * 0
    tiles = i_row * (held // TILE_TOKENS) + o_pages // TILE_TOKENS
    at = (tiles[None, :] * WORDS + word[:, None]) * TILE_TOKENS + (o_pages % TILE_TOKENS)[None, :]
    bits = tl.load(p_tiles + at, mask=m_channels[:, None] & m_pages[None, :], other=0) >> shift[:, None]
    if BITS == 4:
        numbers = ((bits & 15) - 8).to(tl.float32)
    elif BITS == 8:
        numbers = (((bits & 255) ^ 128) - 128).to(tl.float32)
    elif BITS == 16:
        if IS_BFLOAT16:
            numbers = (bits << 16).to(tl.float32, bitcast=True)
        else:
            numbers = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        numbers = bits.to(tl.float32, bitcast=True)
    if BITS == 4:
        pairs: tl.constexpr = 2 * ((CHANNELS + GROUP - 1) // GROUP)
        p_pairs = p_scales + (i_row * held + o_pages)[None, :] * pairs + 2 * (o_channels // GROUP)[:, None]
        mask = m_channels[:, None] & m_pages[None, :]
        offsets = tl.load(p_pairs + 1, mask=mask, other=0).to(tl.float32)
        numbers = numbers * tl.load(p_pairs, mask=mask, other=0).to(tl.float32) + offsets + means[:, None]
    elif BITS == 8:
        scales = tl.load(p_scales + i_row * held + o_pages, mask=m_pages, other=0).to(tl.float32)
        numbers = numbers * scales[None, :] + means[:, None]
    return numbers


@triton.jit
@no_type_check
def _allow(
    p_queries,  # (batch, kv_heads, rows, channels) float32
    p_largest,
    p_largest_scales,
    p_least,
    p_least_scales,
    p_means,  # (kv_heads, channels), or None
    p_out,  # (batch, kv_heads, rows, pages)
    kv_heads,
    rows,
    held,  # pages that the digests have room for
    size,
    start,
    pages,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    WORDS: tl.constexpr,
    BITS: tl.constexpr,
    IS_BFLOAT16: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some queries of one row and head with the digests of some pages."""
    i_block, i_row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    o_pages, o_channels = i_block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    o_rows = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    m_pages, m_rows, m_channels = o_pages < size, o_rows < rows, o_channels < CHANNELS
    p_queries += (i_row * rows + o_rows)[:, None] * CHANNELS + o_channels[None, :]
    q = tl.load(p_queries, mask=m_rows[:, None] & m_channels[None, :], other=0)
    means = tl.zeros((WIDTH,), tl.float32)
    if p_means is not None:
        means = tl.load(p_means + i_row % kv_heads * CHANNELS + o_channels, mask=m_channels, other=0).to(tl.float32)
    largest = _digest_numbers(
        p_largest, p_largest_scales, means, i_row, o_pages, m_pages, held, o_channels, m_channels, WORDS, CHANNELS,
        BITS, GROUP, IS_BFLOAT16,
    )  # fmt: skip
    most = product(tl.maximum(q, 0), largest, tl.zeros((ROWS, BLOCK), tl.float32))
    least = _digest_numbers(
        p_least, p_least_scales, means, i_row, o_pages, m_pages, held, o_channels, m_channels, WORDS, CHANNELS,
        BITS, GROUP, IS_BFLOAT16,
    )  # fmt: skip
    most = product(tl.minimum(q, 0), least, most)
    p_out += (i_row * rows + o_rows)[:, None] * pages + (start + o_pages)[None, :]
    tl.store(p_out, most, mask=m_rows[:, None] & m_pages[None, :])
