"""Attention over slots in plain PyTorch: the truth that every other backend must match."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn import functional

from windlass.core.inputs import (
    TILE,
    WORTH_STEPS,
    Activation,
    AttentionInput,
    BestPages,
    DecodeInput,
    DecodeOutput,
    DecoderLayer,
    DecodeSlots,
    EvictionInput,
    Format,
    GroupCodes,
    LinearInput,
    Mass,
    Norm,
    PackedStates,
    PageInput,
    Ranking,
    ReadInput,
    RecallPiece,
    RecallSlots,
    Retention,
    Rounding,
    TiledKeys,
    Visibility,
    WriteInput,
    Writes,
    tokens_of,
    words_of,
)
from windlass.core.parse import PAGE
from windlass.core.positions import EMPTY, RESERVED, RotaryBranch, RotaryIndex, rank_pinned, rotate
from windlass.core.types import (
    Attended,
    AttendedTokens,
    Hidden,
    LinearOutputs,
    NewKeys,
    NewValues,
    ObservedColumns,
    PerSlot,
    Queries,
    QueryPositions,
    RotaryTable,
    Scores,
    SlotIndex,
    SlotPositions,
)


def total_order(call: EvictionInput) -> Tensor:
    """Order slots as `call` asks, by a whole number per slot, the first to evict lowest.

    Free slots are lowest, then those whose score is NaN and tokens that no later token can see. Sinks and the newest
    `window` tokens are highest. Of equal scores the newer token is higher. Tokens are equal only where they share a
    position. Does not use `call.count`.
    """
    least, most = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
    positions, ends = call.positions, call.next_positions[:, None, None]
    score = call.score.float().nan_to_num(nan=least, posinf=most, neginf=least)
    sinks = call.sinks if call.row_sinks is None else call.row_sinks[:, None, None]
    score = score.masked_fill((positions >= ends - call.window) | (positions < sinks), torch.inf)
    if call.sliding_window is not None:
        score = score.masked_fill(positions <= ends - call.sliding_window, least)
    if call.attention_chunk is not None:
        score = score.masked_fill(positions < ends - ends % call.attention_chunk, least)
    score = score.masked_fill(positions < 0, -torch.inf) + 0.0  # adding 0.0 turns -0.0 into 0.0
    bits = score.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # compares as the float does
    return (ordered.long() << 32) + positions


SCORE_BYTES = 64 * 2**20  # most bytes of attention scores alive at once
MIN_NORM = 1e-12  # a key of zeros has no direction


def attend(call: AttentionInput) -> tuple[Attended, Mass | None]:
    """Attention of each query over the slots that it sees, and the mass that `call` asks for.

    Accumulates in float32, or float64 if the queries are. A query that sees nothing (padding) gives zeros.
    Changes nothing.

    Source: grouped queries, Ainslie et al. 2023 (arXiv:2305.13245).
    """
    queries, index, tables = call.queries, call.rotary_index, call.tables
    batch, heads, tokens, _ = queries.shape
    dtype = torch.promote_types(queries.dtype, torch.float32)
    keys, values = call.keys.floats().to(dtype), call.values.floats().to(dtype)
    kv_heads, slots = keys.shape[1], keys.shape[2]
    grouped = queries.to(dtype).unflatten(1, (kv_heads, heads // kv_heads))

    gain = None if call.query_gain is None else call.query_gain.to(dtype)
    near = _Logits(grouped, keys, None if index is None else index.near, tables, gain)
    has_far = index is not None and index.far is not None and tables is not None
    far = _Logits(grouped, keys, index.far, tables, gain) if has_far and index is not None else None

    outputs, masses = [], _MassSum(call.observed, call.query_positions.shape, call.is_rest_wanted)
    block = max(1, SCORE_BYTES // (batch * heads * slots * dtype.itemsize))
    for start in range(0, tokens, block):
        span = slice(start, start + block)
        distance = call.query_positions[:, None, span, None] - call.slot_positions[:, :, None, :]
        scores = near.block(span)
        if far is not None and index is not None:
            scores = torch.where((distance < index.near_window)[:, :, None], scores, far.block(span))
        scores = scores * call.scale
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        if call.log_counts is not None:
            scores = scores + call.log_counts[:, :, None, None]
        sees_to = None if call.sees_to is None else call.sees_to[:, span]
        seen = visible(distance, call.slot_positions, call.visibility, sees_to)[:, :, None]
        if call.seen_until is not None:
            until = call.seen_until[:, :, None, None, :]
            seen = seen & (call.query_positions[:, None, None, span, None] <= until)
        if call.picked is not None:
            seen = seen & call.picked[:, None, None, span]
        probabilities = _softmax(scores.masked_fill(~seen, -torch.inf), call.sink_logits)
        outputs.append(probabilities @ values[:, :, None])
        masses.add(probabilities.sum(2), start)
    return torch.cat(outputs, 3).flatten(1, 2).to(queries.dtype), masses.total()


class _Logits:
    """Unscaled logits of one branch, a block of queries at a time. Keys are rotated once."""

    def __init__(
        self,
        queries: Tensor,
        keys: Tensor,
        branch: RotaryBranch | None,
        tables: tuple[RotaryTable, RotaryTable] | None,
        gain: Tensor | None,
    ) -> None:
        if branch is not None and tables is not None:
            cos, sin = tables
            keys = rotate(keys, cos[branch.keys], sin[branch.keys])
            queries = rotate(queries, cos[branch.queries][:, :, None], sin[branch.queries][:, :, None])
        queries = queries if gain is None else queries * gain
        self._queries, self._keys = queries, keys[:, :, None].transpose(-1, -2)

    def block(self, span: slice) -> Tensor:
        return self._queries[..., span, :] @ self._keys


class _MassSum:
    """Gathers the mass of observed queries over blocks of queries."""

    def __init__(self, observed: ObservedColumns | None, shape: torch.Size, is_rest_wanted: bool) -> None:
        self._observed, self._is_rest_wanted = observed, is_rest_wanted
        self._rows: list[Tensor] = []
        self._rest: list[Tensor] = []
        if observed is not None and is_rest_wanted:
            counted = torch.ones(shape[0], shape[1] + 1, dtype=torch.bool, device=observed.device)
            self._others = counted.scatter(1, observed.where(observed >= 0, shape[1]), False)[:, :-1]

    def add(self, mass: Tensor, start: int) -> None:
        """Take in the mass (batch, kv_heads, tokens, slots) of the queries from column `start` on."""
        if self._observed is None:
            return
        tokens = mass.shape[2]
        local = self._observed - start
        is_here = (local >= 0) & (local < tokens) & (self._observed >= 0)
        places = local.clamp(0, tokens - 1)[:, None, :, None].expand(-1, mass.shape[1], -1, mass.shape[3])
        self._rows.append(mass.gather(2, places) * is_here[:, None, :, None])
        if self._is_rest_wanted:
            others = self._others[:, start : start + tokens].to(mass.dtype)
            self._rest.append(torch.einsum("bhts,bt->bhs", mass, others))

    def total(self) -> Mass | None:
        if self._observed is None:
            return None
        rest = torch.stack(self._rest).sum(0).float() if self._is_rest_wanted else None
        return Mass(torch.stack(self._rows).sum(0).float(), rest)


def visible(
    distance: Tensor, slots: SlotPositions, visibility: Visibility, sees_to: QueryPositions | None = None
) -> Tensor:
    """Return True if each query sees each slot: (batch, score_heads, tokens, slots)."""
    is_before = distance >= 0 if sees_to is None else slots[:, :, None, :] <= sees_to[:, None, :, None]
    seen = is_before & (slots >= 0)[:, :, None, :]
    if visibility.reach is not None:
        seen &= (distance < visibility.reach) | (slots < visibility.sinks)[:, :, None, :]
    if visibility.sliding_window is not None:
        seen &= distance < visibility.sliding_window
    if (chunk := visibility.attention_chunk) is not None:
        held = slots[:, :, None, :]
        seen &= (distance + held) // chunk == held // chunk
    return seen


def _softmax(scores: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Softmax over slots, with zeros where nothing is visible. Learned sinks, if any, join the sum of exponentials."""
    top = scores.amax(-1, keepdim=True)
    if sink_logits is None:
        weights = torch.exp(scores - top.where(top > -torch.inf, 0.0))
        return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
    sinks = sink_logits.to(scores.dtype).reshape(1, *scores.shape[1:3], 1, 1)
    top = torch.maximum(top, sinks)
    weights = torch.exp(scores - top)
    return weights / (weights.sum(-1, keepdim=True) + torch.exp(sinks - top))


def linear(call: LinearInput) -> LinearOutputs:
    """A linear layer. Codes are multiplied in float32, or float64 if the inputs are, and scaled after that."""
    inputs, layer = call.inputs, call.layer
    dtype = torch.promote_types(inputs.dtype, torch.float32)
    if isinstance(layer.weights, GroupCodes):
        outputs = functional.linear(inputs.to(dtype), layer.weights.floats(dtype))
    elif layer.scales is None:
        return functional.linear(inputs, layer.weights, layer.bias)
    else:
        outputs = functional.linear(inputs.to(dtype), layer.weights.to(dtype)) * layer.scales.to(dtype)
    return (outputs if layer.bias is None else outputs + layer.bias.to(dtype)).to(inputs.dtype)


def mean_key_cosine(keys: PackedStates, positions: SlotPositions) -> PerSlot:
    """The cosine of each key with the mean direction (of keys scaled to length 1) of its row and head, float32.

    Free slots do not count. 0 for a key of zeros and in free slots. Changes nothing.

    Source: KeyDiff, Park et al. 2025 (arXiv:2504.15364), algorithm 1.
    """
    floats = keys.floats().float()
    # A key times its scale is its direction. The directions, a copy of all keys, are never written.
    scales = (positions >= 0) / vector_norm(floats, dim=-1).clamp(min=MIN_NORM)
    anchor = functional.normalize(scales.unsqueeze(2) @ floats, dim=-1, eps=MIN_NORM)
    cosines: PerSlot = (anchor @ floats.mT).squeeze(2) * scales
    return cosines


def first_free(positions: SlotPositions, count: int) -> SlotIndex:
    """The first `count` free slots of each row and head, then, where these are too few, the first others."""
    return (positions == EMPTY).to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :count]


def argsort_positions(positions: SlotPositions) -> SlotIndex:
    """The slots of each row and head in the order of their positions, with free slots last."""
    return torch.where(positions >= 0, positions, torch.iinfo(positions.dtype).max).argsort(dim=-1, stable=True)


def lowest(call: EvictionInput) -> SlotIndex:
    """The `call.count` slots of each row and head that come first in `ranking.total_order`, in any order.

    Of tokens that are equal there, because they share a position, those in the lower slots.
    """
    return total_order(call).argsort(dim=-1, stable=True)[..., : call.count]


def evict(call: EvictionInput) -> tuple[SlotIndex, SlotIndex]:
    """Mark the `lowest` slots as RESERVED, except free ones. Changes `call.positions`.

    Returns the slots, in any order, and the positions that they held before.
    """
    index = lowest(call)
    return index, reserve(call.positions, index)


def reserve(positions: SlotPositions, index: SlotIndex) -> SlotIndex:
    """Mark the slots at `index` as RESERVED, except free ones. Returns their former positions."""
    before = positions.gather(-1, index)
    positions.scatter_(-1, index, before.where(before < 0, RESERVED))
    return before


def write(states: Tensor, index: SlotIndex, new: Tensor | float) -> None:
    """Overwrite the slots of `states` at `index` with `new`, see `Writes`."""
    index = index.expand(-1, states.shape[1], -1)
    if states.ndim == 4:
        index = index[..., None].expand(-1, -1, -1, states.shape[3])
    states.scatter_(2, index, new.to(states.dtype) if isinstance(new, Tensor) else new)


def write_all(index: SlotIndex, writes: Writes) -> None:
    """Overwrite the slots at `index` of each tensor of `writes`.

    Where `index` has one row of heads, it serves all heads.
    """
    for states, new in writes:
        write(states, index, new)


STEPS = 4  # in which int4 fits the scale and the offset of a group to its codes, and rounds again


def encode(states: Tensor, means: Tensor | None, group: int) -> tuple[Tensor, Tensor]:
    """Codes for `states` (batch, kv_heads, tokens, width), and their float16 scales (batch, kv_heads, tokens, scales).

    Codes of 4 bits have a scale and an offset, side by side, for each `group` channels, see `PackedStates`. At first
    the least and the largest number of a group get the codes -8 and 7. Then each step takes the scale and the offset of
    the least squared error for these codes, and rounds to new codes, until the error stops to fall. Where `group` is 0,
    codes have 8 bits and one scale, and the number of largest magnitude gets the lowest code. The mean (kv_heads,
    width) of its channel is subtracted from a number first.
    """
    numbers = states.float() if means is None else states.float() - means.float()[:, None]
    width, most = numbers.shape[-1], torch.finfo(torch.float16).max
    if not group:
        low, high = numbers.aminmax(dim=-1, keepdim=True)
        scales = _float16(torch.where(-low > high, low, high) / -128)
        codes = (numbers / scales.float().where(scales != 0, 1.0)).round().clamp(-128, 127)
        return codes.to(torch.int8), scales
    groups = -(-width // group)
    channels = torch.arange(groups * group, device=states.device).view(groups, group)
    blocks, is_own = numbers[..., channels.clamp(max=width - 1)], channels < width  # the last one fills its group
    low, high = (each.clamp(-7.5 * most, 7.5 * most) for each in blocks.aminmax(dim=-1, keepdim=True))
    scales = _float16((high - low) / 15)
    pairs = torch.cat((scales, _float16((low + high) * 0.5 + scales.float() * 0.5)), -1)
    codes, errors = _coded(blocks, is_own, pairs)
    for _ in range(STEPS):
        new_pairs = _fitted(blocks, is_own, codes)
        new_codes, new_errors = _coded(blocks, is_own, new_pairs)
        is_better = new_errors < errors
        pairs, codes = new_pairs.where(is_better, pairs), new_codes.where(is_better, codes)
        errors = new_errors.where(is_better, errors)
    first, second = (codes.flatten(-2)[..., :width] + 8).to(torch.uint8).chunk(2, -1)
    return first | second << 4, pairs.flatten(-2)


def _coded(blocks: Tensor, is_own: Tensor, pairs: Tensor) -> tuple[Tensor, Tensor]:
    """Codes of groups by their scales and offsets, and the sum of the squared errors of each group."""
    scales, offsets = pairs.float().split(1, -1)
    codes = ((blocks - offsets) / scales.where(scales != 0, 1.0)).round().clamp(-8, 7)
    errors = (blocks - (codes * scales + offsets)).double()
    return codes, _sum(errors * errors * is_own)


def _fitted(blocks: Tensor, is_own: Tensor, codes: Tensor) -> Tensor:
    """The scale and the offset of each group with which its codes have the least squared error."""
    numbers, own, count = blocks.double() * is_own, codes.double() * is_own, is_own.sum(-1, keepdim=True)
    total = _sum(own)
    spread = count * _sum(own * own) - total * total
    scales = _float16(_sum((count * own - total) * numbers) / spread.where(spread != 0, 1.0))
    return torch.cat((scales, _float16((_sum(numbers) - scales.double() * total) / count)), -1)


def _sum(numbers: Tensor) -> Tensor:
    """The sum of a power of two of numbers. Backends add halves as here, and may fuse products, which are exact."""
    while numbers.shape[-1] > 1:
        numbers = torch.add(*numbers.chunk(2, -1))
    return numbers


def _float16(numbers: Tensor) -> Tensor:
    most = torch.finfo(torch.float16).max
    return numbers.float().clamp(-most, most).to(torch.float16)


def read(states: Tensor, index: SlotIndex) -> Tensor:
    """A copy of the slots of `states` (batch, kv_heads, slots, width) at `index`."""
    batch, kv_heads, slots, width = states.shape
    starts = torch.arange(0, batch * kv_heads * slots, slots, device=states.device).view(batch, kv_heads, 1)
    # Whole rows are copied: a gather would look up every channel by itself.
    return states.flatten(0, 2).index_select(0, (index + starts).flatten()).view(batch, kv_heads, -1, width)


def norm(states: Tensor, norm: Norm) -> Tensor:
    """`states` (..., width), computed in float32, or float64 if they are, and rounded as `norm` says."""
    wide = states.to(torch.promote_types(states.dtype, torch.float32))
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.epsilon)
    if norm.rounding is Rounding.NARROW:
        return norm.weights * wide.to(states.dtype)
    weights = norm.weights.to(wide.dtype)
    return (wide * (weights + 1 if norm.rounding is Rounding.ONE_MORE else weights)).to(states.dtype)


def before_attention(layer: DecoderLayer, hidden: Hidden) -> tuple[Queries, NewKeys, NewValues]:
    """Queries, keys and values of new tokens, before any rotation."""
    normed = norm(hidden, layer.first_norm)
    heads = (*hidden.shape[:2], -1, layer.head_dim)
    queries, keys, values = (
        linear(LinearInput(normed, each)).view(heads) for each in (layer.query, layer.key, layer.value)
    )
    queries = queries if layer.query_norm is None else norm(queries, layer.query_norm)
    keys = keys if layer.key_norm is None else norm(keys, layer.key_norm)
    return queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)


def after_attention(layer: DecoderLayer, hidden: Hidden, attended: AttendedTokens) -> Hidden:
    """The output of the layer. `hidden` is its input, `attended` the output of its attention."""
    hidden = hidden + linear(LinearInput(attended.flatten(2), layer.output))
    normed = norm(hidden, layer.second_norm)
    gate, up = (linear(LinearInput(normed, each)) for each in (layer.gate, layer.up))
    gate = functional.silu(gate) if layer.activation is Activation.SILU else functional.gelu(gate, approximate="tanh")
    return hidden + linear(LinearInput(gate * up, layer.down))


def best_pages(call: PageInput) -> BestPages:
    """The pages that matter most to the queries of each kv head, and the readable tokens in them.

    A page counts to a query by its largest product with a token that may be recalled. Its worth to the query is its
    share in the softmax over pages. Its worth to a kv head is the largest over the head's queries. Shares above a half
    are told apart by their odds: in float32 many of them are all but 1, and which of these is largest would be
    rounding. Where there are digests, pages are first ranked in the same way by the bounds that their digests give, and
    only the first `candidates` count. Where keys are codes, queries are rounded to multiples of 1 / 127 of their
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
    is_text = functional.pad(call.positions >= 0, (0, TILE))  # a place for tokens in no slot
    is_text = is_text[:, None].expand(-1, kv_heads, -1)
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
    """Overwrite the rows at `index`. Never waits for the device."""
    if not call.index.shape[1]:
        return
    rows, start = call.rows.transpose(1, 2), 0  # (batch, tokens, kv_heads, width)
    batch = torch.arange(len(rows), device=rows.device)[:, None]
    for piece in call.pieces:
        held = piece.permute(0, 2, 4, 1, 3) if call.is_tiled else piece.transpose(1, 2)
        size, at = held.shape[1] * (TILE if call.is_tiled else 1), call.index - start
        # A token of another piece is replaced by one of this piece, written twice. A piece without tokens rewrites
        # its old contents.
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
        for held, content in _writes(piece.values, new.values[row : row + 1]):
            held[row, :, at] = content[0, :, 0]
        if store.digests:
            _digest(store, row, index, new.keys.dtype)


def _digest(store: RecallSlots, row: int, newest: int, dtype: torch.dtype) -> None:
    """Write the digest of the page with the `newest` token of a row."""
    held, at = torch.cat([piece.keys.packed().floats() for piece in store.pieces], 2)[row : row + 1], newest // PAGE
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
    (_, codes), *others = _writes(held.states, key)
    held.tiles[row, :, at // TILE, :, at % TILE] = words_of(codes)[0, :, 0]
    for scales, content in others:
        scales[row, :, at] = content[0, :, 0]


def recall(slots: DecodeSlots, new: DecodeInput, places: SlotPositions, kept: Scores) -> tuple[Tensor, Tensor]:
    """Put the tokens of the best pages into free slots, and note which.

    `kept` are the numbers of the tokens in all slots. Returns the positions (batch, kv_heads, slots) that are then
    read, and the slots (batch, kv_heads, count * 8) that were free.
    """
    store, kv_heads = slots.recall, slots.keys.data.shape[1]
    assert store is not None, "recall without a store"
    queries = new.queries.float()
    queries = (queries if store.cos_sin is None else rotate(queries, *store.cos_sin)) * slots.scale
    pieces = tuple(piece.keys for piece in store.pieces)
    best = best_pages(
        PageInput(
            queries=queries,
            is_query=torch.ones_like(new.positions, dtype=torch.bool),
            pieces=pieces,
            positions=store.positions,
            kept_index=kept.where(places >= 0, -1.0),
            count=store.count,
            digests=store.digests if store.candidates else (),
            candidates=store.candidates,
        )
    )
    index = tokens_of(best.pages)
    free = first_free(places, index.shape[-1]).expand(-1, kv_heads, -1)
    keys, values = [each.packed() for each in pieces], [piece.values for piece in store.pieces]
    for held, stored in ((slots.keys, keys), (slots.values, values)):
        for target, source in _recalled(held, stored, index, new.keys.dtype):
            at = free[..., None].expand_as(source)
            target.scatter_(2, at, source.where(best.is_read[..., None], target.gather(2, at)))
    positions = store.positions[:, None].expand(-1, kv_heads, -1).gather(-1, index).where(best.is_read, EMPTY)
    store.last_recalled.copy_(positions)
    return places.expand(-1, kv_heads, -1).scatter(-1, free, positions), free


def _writes(held: PackedStates, states: Tensor) -> list[tuple[Tensor, Tensor]]:
    """The tensors of slots, and their new content, which stands for these states."""
    if held.scales is None:
        return [(held.data, states)]
    (codes, scales), ring = encode(states, held.means, held.group), held.ring_index
    beside = [] if ring is None else [(ring, torch.full_like(ring[..., :1], EMPTY))]
    return [(held.data, codes), (held.scales, scales), *beside]


def _recalled(
    held: PackedStates, pieces: Sequence[PackedStates], index: SlotIndex, dtype: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """The tensors of slots, and the content that stands for the stored tokens at `index`: their codes, if alike."""
    if held.format is not pieces[0].format:
        return _writes(held, read(torch.cat([each.floats() for each in pieces], 2), index).to(dtype))
    found = [(held.data, read(torch.cat([each.data for each in pieces], 2), index))]
    scales = [each.scales for each in pieces if each.scales is not None]
    return found if held.scales is None else [*found, (held.scales, read(torch.cat(scales, 2), index))]


def _place(store: RecallSlots, index: int) -> tuple[RecallPiece, int]:
    """The piece that has a token, and its number in there."""
    for piece in store.pieces:
        if index < piece.keys.tokens:
            return piece, index
        index -= piece.keys.tokens
    raise AssertionError("a token behind the last piece")


def decode(slots: DecodeSlots, new: DecodeInput) -> DecodeOutput:
    """Write one token per row to a free slot, let its query read the slots by `slots.rule`, and evict.

    Changes nothing but the keys and values of free slots, and of a recall store behind its last token. The slot of a
    padding token stays free.
    """
    places, state = new.slot_positions.clone(), tuple(tensor.clone() for tensor in new.state)
    index, retention = first_free(places, 1), slots.retention
    positions = new.positions[:, None].expand(-1, slots.score_heads, -1)
    beside: Writes = [(places, positions), *((tensor, 0.0) for tensor in state)]
    write_all(index, [*_writes(slots.keys, new.keys), *_writes(slots.values, new.values), *beside])
    read, recalled = places, None
    if slots.recall is not None and new.remembered is not None:
        remember(slots.recall, new)
        numbers = state[slots.recall.state]
        numbers.scatter_(-1, index, new.remembered[:, None, None].float().expand_as(index))
        if new.is_recalling:
            read, recalled = recall(slots, new, places, numbers)
    at = slots.rule.branch(read, new.positions, argsort_positions(read), int(read.max()) + 1)
    is_observing = retention is not None and retention.ranking.observe != "nothing"
    out, mass = attend(
        AttentionInput(
            queries=new.queries,
            keys=slots.keys,
            values=slots.values,
            slot_positions=read,
            query_positions=new.positions,
            rotary_index=None if slots.tables is None else RotaryIndex(at),
            tables=slots.tables,
            scale=slots.scale,
            visibility=slots.visibility,
            softcap=slots.softcap,
            observed=new.positions.clamp(max=0) if is_observing or new.is_observed else None,
        )
    )
    if mass is not None and recalled is not None:
        mass = Mass(mass.rows.scatter(-1, recalled[:, :, None], 0.0), None)
    evicted = before = None
    if retention is not None and mass is not None and is_observing:
        _observe(retention.ranking, state[0], mass.rows[:, :, 0], new.positions)
    if retention is not None and new.is_evicting:
        evicted, before = _evict_lowest(slots, retention, new, places, state)
    for released, stood in new.released:
        places.scatter_(-1, released, places.gather(-1, released).masked_fill(stood >= 0, EMPTY))
    return DecodeOutput(index, out, mass if new.is_observed else None, places, state, evicted, before)


def _observe(ranking: Ranking, state: Scores, mass: PerSlot, positions: QueryPositions) -> None:
    """A policy's state after it observed a query of each row."""
    is_token = (positions >= 0)[..., None]
    if ranking.observe == "last":
        state.copy_(mass.sum(1, keepdim=True).where(is_token, state))
    elif ranking.observe == "sum":
        state += mass
    else:
        state.mul_(1 - is_token * torch.tensor(ranking.share)).add_(mass, alpha=ranking.share)


def _score(
    slots: DecodeSlots, ranking: Ranking, places: SlotPositions, state: tuple[Scores, ...], starts: Tensor
) -> Scores:
    """A policy's scores of slots. `starts`: where the rows' windows begin."""
    if ranking.score == "position":
        return places.float()
    if ranking.score == "novelty":
        return -(mean_key_cosine(slots.keys, places) * 2**16).round()
    if ranking.score == "state":
        return state[0]
    is_pooled = (places >= 0) & (places < starts)
    order = argsort_positions(places)
    votes = state[0].masked_fill(~is_pooled, 0.0).gather(-1, order)
    pool = functional.avg_pool1d if ranking.is_mean else functional.max_pool1d
    return torch.empty_like(votes).scatter_(-1, order, pool(votes, ranking.pool, stride=1, padding=ranking.pool // 2))


def _evict_lowest(
    slots: DecodeSlots, retention: Retention, new: DecodeInput, places: SlotPositions, state: tuple[Scores, ...]
) -> tuple[SlotIndex, SlotIndex]:
    """Reserve the lowest slot of each row that is over budget. Returns the slots and their former positions."""
    starts = (new.next_positions - retention.window)[:, None, None]
    order = EvictionInput(
        score=rank_pinned(_score(slots, retention.ranking, places, state, starts), places, new.pins),
        positions=places,
        next_positions=new.next_positions,
        sinks=retention.sinks,
        window=retention.window,
        sliding_window=slots.visibility.sliding_window,
        count=1,
        attention_chunk=slots.visibility.attention_chunk,
        row_sinks=new.row_sinks,
    )
    ranks = total_order(order).masked_fill(places < 0, torch.iinfo(torch.int64).max)
    is_over = (places >= 0).sum(-1, keepdim=True) > retention.budget
    lowest_slot = ranks.argsort(dim=-1, stable=True)[..., :1]
    before = places.gather(-1, lowest_slot).where(is_over, EMPTY)
    places.scatter_(-1, lowest_slot, torch.where(is_over, RESERVED, places.gather(-1, lowest_slot)))
    return lowest_slot, before
