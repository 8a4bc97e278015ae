"""What is read of the evicted tokens, in plain PyTorch: what every other backend must match."""

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from windlass.core.decode import DecodeInput, DecodeSlots
from windlass.core.limits import PAGE
from windlass.core.packed import Format, PackedStates
from windlass.core.recall import (
    TILE,
    WORTH_STEPS,
    BestPages,
    PageInput,
    ReadInput,
    RecallPiece,
    RecallSlots,
    TiledKeys,
    WriteInput,
    tokens_of,
    words_of,
)
from windlass.core.rotary_index import EMPTY
from windlass.core.rotate import rotate
from windlass.core.shapes import Scores, SlotPositions
from windlass.kernels import reference


def best_pages(call: PageInput) -> BestPages:
    """The pages that matter most to the queries of each kv head, and what may be read of them.

    A page counts to a query by its largest product with a token that may be recalled; its worth is its share in the
    softmax over these, and to a kv head the largest that it has for one of its queries. Shares above a half are told
    apart by their odds: in float32 many of them are all but 1, and which of these is largest would be rounding. Where
    there are digests, pages are ranked in the same way first, each by the most that its digest allows, and all but the
    first `candidates` count for nothing. Where keys are codes, queries are rounded to multiples of 1 / 127 of their
    largest number, which changes products less than codes do.

    Worths are compared in steps, and of equal ones the earlier page is the better, in the order in which tokens were
    written. So pages with the same token, whose products differ by rounding if at all, are chosen in a batch as they
    are alone, and the choice among them stays while the text grows.
    """
    keys = torch.cat([piece.packed().floats().float() for piece in call.pieces], 2)
    remembered = keys.shape[2]
    is_recallable, grouped = recallable(call), grouped_queries(call)
    products = products_of(grouped, keys).masked_fill(~is_recallable[:, :, None, None], -torch.inf)
    peaks: Tensor = products.unflatten(-1, (remembered // PAGE, PAGE)).amax(-1)
    if call.digests:
        is_page = is_recallable.unflatten(-1, (-1, PAGE)).any(-1)
        most = torch.zeros_like(peaks)
        largest, least = [each.largest for each in call.digests], [each.least for each in call.digests]
        for part, pieces in ((grouped.clamp(min=0), largest), (grouped.clamp(max=0), least)):
            keys = torch.cat([piece.packed().floats().float() for piece in pieces], 2)[:, :, : remembered // PAGE]
            most = most + products_of(part, keys)
        candidates = best_of(most.masked_fill(~is_page[:, :, None, None], -torch.inf), call.is_query, call.candidates)
        is_candidate = torch.zeros_like(is_page).scatter(-1, candidates, True)
        peaks = peaks.masked_fill(~is_candidate[:, :, None, None], -torch.inf)
    pages = best_of(peaks, call.is_query, call.count)
    return BestPages(pages, is_recallable.gather(-1, tokens_of(pages)))


def recallable(call: PageInput) -> Tensor:
    """(batch, kv_heads, remembered): whether a token is part of the text, and in no slot of its head."""
    kv_heads, remembered = call.pieces[0].tiles.shape[1], call.positions.shape[1]
    kept = call.kept_index.long().expand(-1, kv_heads, -1)
    is_text = pad(call.positions >= 0, (0, TILE))[:, None].expand(-1, kv_heads, -1)  # a place for what is in no slot
    return is_text.scatter(-1, kept.where(kept >= 0, remembered), False)[..., :remembered]


def grouped_queries(call: PageInput) -> Tensor:
    """(batch, kv_heads, members, tokens, channels): the queries as they are multiplied, each beside its kv head."""
    queries = call.queries.float()
    if call.pieces[0].states.format is not Format.FLOAT:
        steps = (queries.abs().amax(-1, keepdim=True) / 127).clamp(min=torch.finfo(torch.float32).tiny)
        queries = (queries / steps).round() * steps
    grouped: Tensor = queries.unflatten(1, (call.pieces[0].tiles.shape[1], -1))
    return grouped


def products_of(queries: Tensor, keys: Tensor) -> Tensor:
    """Products of queries (batch, kv_heads, members, tokens, channels) with keys (batch, kv_heads, n, channels).

    They are summed in float64: in float32 a matrix product rounds alike numbers otherwise by where they stand in it.
    """
    products: Tensor = queries.double() @ keys.double()[:, :, None].mT
    return products.float()


def best_of(peaks: Tensor, is_query: Tensor, count: int) -> Tensor:
    """The `count` pages that are worth most, of whose (batch, kv_heads, members, tokens, pages) peaks."""
    shares = peaks.log_softmax(-1).nan_to_num(nan=-torch.inf)
    top, page = peaks.max(-1, keepdim=True)
    odds = top - peaks.scatter(-1, page, -torch.inf).logsumexp(-1, keepdim=True)
    shares = shares.scatter(-1, page, torch.where(odds > 0, odds - math.log(2), shares.gather(-1, page)))
    worth = shares.masked_fill(~is_query[:, None, None, :, None], -torch.inf).flatten(2, 3).amax(2)
    worth = (worth * WORTH_STEPS).round()
    return worth.sort(dim=-1, descending=True, stable=True).indices[..., :count]


def digest_of(keys: Tensor, is_token: Tensor) -> tuple[Tensor, Tensor]:
    """The largest and the least number of each channel among the keys (batch, kv_heads, pages, 8, channels) of pages.

    Tokens that are none are left out, but for the first of a page, which is one wherever the digest is looked at.
    """
    keys = keys.where(is_token[..., None], keys[:, :, :, :1])
    return keys.amax(3), keys.amin(3)


def read_tokens(call: ReadInput) -> Tensor:
    """(batch, kv_heads, tokens, width): a copy of the rows at `index`."""
    rows = torch.cat([each.transpose(3, 4).flatten(2, 3) if call.is_tiled else each for each in call.pieces], 2)
    return rows.gather(2, call.index[..., None].expand(-1, -1, -1, rows.shape[3]))


def write_tokens(call: WriteInput) -> None:
    """Overwrite the rows at `index`; asks nothing of the device."""
    if not call.index.shape[1]:
        return
    rows, start = call.rows.transpose(1, 2), 0  # (batch, tokens, kv_heads, width)
    batch = torch.arange(len(rows), device=rows.device)[:, None]
    for piece in call.pieces:
        held = piece.permute(0, 2, 4, 1, 3) if call.is_tiled else piece.transpose(1, 2)
        size, at = held.shape[1] * (TILE if call.is_tiled else 1), call.index - start
        # In the place of what is elsewhere a token of this piece is written again; where there is none, what is there.
        is_here = (at >= 0) & (at < size)
        is_any, one = is_here.any(1, keepdim=True), is_here.int().argmax(1, keepdim=True)
        at = at.where(is_here, at.gather(1, one)).where(is_any, 0)
        place = (batch, at // TILE, at % TILE) if call.is_tiled else (batch, at)
        new = rows.where(is_here[..., None, None], rows.take_along_dim(one[..., None, None], 1))
        held[place] = new.where(is_any[..., None, None], held[place])
        start += size


def remember(store: RecallSlots, new: DecodeInput) -> None:
    """Write the new token of each row to the store, but for padding."""
    assert new.remembered is not None, "a recall store without its lengths"
    for row, index in enumerate(new.remembered.tolist()):
        if int(new.positions[row]) < 0:
            continue
        piece, at = _place(store, index)
        _put(piece.keys, row, at, new.keys[row : row + 1])
        codes, scales = _encoded(piece.values, new.values[row : row + 1])
        piece.values.data[row, :, at] = codes[0, :, 0]
        if piece.values.scales is not None:
            piece.values.scales[row, :, at] = scales[0, :, 0]
        if store.digests:
            _digest(store, row, index, new.keys.dtype)


def _digest(store: RecallSlots, row: int, newest: int, dtype: torch.dtype) -> None:
    """Write the digest of the page with the `newest` token of a row."""
    held = torch.cat([piece.keys.packed().floats() for piece in store.pieces], 2)[row : row + 1]
    at = newest // PAGE
    page = held[:, :, at * PAGE : newest + 1].to(dtype)
    largest, least = page.amax(2, keepdim=True), page.amin(2, keepdim=True)
    for piece in store.digests:
        if at < piece.largest.tokens:
            _put(piece.largest, row, at, largest)
            _put(piece.least, row, at, least)
            return
        at -= piece.largest.tokens


def _put(held: TiledKeys, row: int, at: int, key: Tensor) -> None:
    """Write a key (1, kv_heads, 1, channels) of a row."""
    codes, scales = _encoded(held.states, key)
    held.tiles[row, :, at // TILE, :, at % TILE] = words_of(codes)[0, :, 0]
    if held.states.scales is not None:
        held.states.scales[row, :, at] = scales[0, :, 0]


def recall(slots: DecodeSlots, new: DecodeInput, places: SlotPositions, kept: Scores) -> tuple[Tensor, Tensor]:
    """Put the tokens of the best pages into free slots, and note which.

    `kept` are the numbers of the tokens in all slots.
    Returns the positions (batch, kv_heads, slots) that are then read, and the slots (batch, kv_heads, count * 8) that
    were free.
    """
    store, kv_heads = slots.recall, slots.keys.shape[1]
    assert store is not None, "recall without a store"
    queries = new.queries.float()
    queries = (queries if store.turn is None else rotate(queries, *store.turn)) * slots.scale
    pieces = tuple(piece.keys for piece in store.pieces)
    is_query = torch.ones_like(new.positions, dtype=torch.bool)
    text = store.positions, kept.where(places >= 0, -1.0), store.count
    digests = store.digests if store.candidates else ()
    pages = PageInput(queries, is_query, pieces, *text, digests, store.candidates)
    best = best_pages(pages)
    index = tokens_of(best.pages)
    free = reference.first_free(places, index.shape[-1]).expand(-1, kv_heads, -1)
    keys = torch.cat([each.packed().floats() for each in pieces], 2)
    values = torch.cat([piece.values.floats() for piece in store.pieces], 2)
    for target, source in ((slots.keys, keys), (slots.values, values)):
        own = source.gather(2, index[..., None].expand(-1, -1, -1, source.shape[3])).to(target.dtype)
        at = free[..., None].expand_as(own)
        target.scatter_(2, at, own.where(best.is_read[..., None], target.gather(2, at)))
    positions = store.positions[:, None].expand(-1, kv_heads, -1).gather(-1, index).where(best.is_read, EMPTY)
    store.last_recalled.copy_(positions)
    return places.expand(-1, kv_heads, -1).scatter(-1, free, positions), free


def _encoded(held: PackedStates, states: Tensor) -> tuple[Tensor, Tensor]:
    """States as `held` has others, and their scales, which are none of floats."""
    if held.format is Format.FLOAT:
        return states, states
    return reference.encode(states, held.means, 4 if held.format is Format.INT4 else 8)


def _place(store: RecallSlots, index: int) -> tuple[RecallPiece, int]:
    """The piece that has a token, and its number in there."""
    for piece in store.pieces:
        if index < piece.keys.tokens:
            return piece, index
        index -= piece.keys.tokens
    raise AssertionError("a token behind the last piece")
