"""Attention over slots in plain PyTorch: the truth that every other backend must match."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import normalize

from windlass.core.packed import Held
from windlass.core.rotary_index import EMPTY, RESERVED, Branch, Reading
from windlass.core.shapes import (
    Attended,
    ObservedColumns,
    PerSlot,
    Queries,
    QueryPositions,
    RotaryTable,
    RowCounts,
    Scores,
    SlotIndex,
    SlotPositions,
)
from windlass.kernels.ranking import total_order
from windlass.positions.rotary import rotate

# (batch, heads, slots) or (batch, heads, slots, width), and what comes: tokens in the place of slots, or one number
Writes = Sequence[tuple[Tensor, Tensor | float]]
SCORE_BYTES = 64 * 2**20  # most bytes of attention scores alive at once
LEAST_NORM = 1e-12  # a key of zeros has no direction


@dataclass(frozen=True)
class Visibility:
    """Which of the earlier tokens a query may see; None lifts a limit.

    `sliding_window`: only keys at distances below it (the model's own window).
    `reach`: likewise, but the first `sinks` positions of the text are exempt.
    """

    sliding_window: int | None = None
    reach: int | None = None
    sinks: int = 0


@dataclass(frozen=True)
class Mass:
    """Attention probability per slot, summed over the query heads that share a kv head.

    `rows` holds one entry per observed query, `rest` the sum over all other queries, or None when
    it was not asked for. Both are float32 and 0 in free slots.
    """

    rows: Tensor  # (batch, kv_heads, observed, slots)
    rest: PerSlot | None


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
    """Attention of each query over the slots at or before its own position.

    Queries and keys come un-rotated and are turned to the positions of `reading`; no rotation where
    `tables` is None. Accumulates in float32, or float64 if the queries are. Free slots are never
    seen; a query that sees nothing (padding) gives zeros. Changes nothing.

    `sink_logits` (one per head) join each softmax and take their share away. `log_counts` are added
    to the logits of their slots: a slot that stands for n tokens counts n times. `observed` names the
    query columns whose mass is returned row by row (-1: none, a row of zeros).

    Source: grouped queries, Ainslie et al. 2023 (arXiv:2305.13245).
    """
    batch, heads, tokens, _ = queries.shape
    exact = torch.promote_types(queries.dtype, torch.float32)
    all_keys, all_values = keys.floats().to(exact), values.floats().to(exact)
    kv_heads, slots = all_keys.shape[1], all_keys.shape[2]
    grouped = queries.to(exact).unflatten(1, (kv_heads, heads // kv_heads))

    near = _Logits(grouped, all_keys, None if reading is None else reading.near, tables)
    is_split = reading is not None and reading.far is not None and tables is not None
    far = _Logits(grouped, all_keys, reading.far, tables) if is_split and reading is not None else None

    outputs, masses = [], _MassSum(observed, query_positions.shape, is_rest_wanted)
    block = max(1, SCORE_BYTES // (batch * heads * slots * exact.itemsize))
    for start in range(0, tokens, block):
        span = slice(start, start + block)
        distance = query_positions[:, None, span, None] - slot_positions[:, :, None, :]
        scores = near.block(span)
        if far is not None and reading is not None:
            scores = torch.where((distance < reading.near_window)[:, :, None], scores, far.block(span))
        scores = scores * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if log_counts is not None:
            scores = scores + log_counts[:, :, None, None]
        seen = visible(distance, slot_positions, visibility)[:, :, None]
        probabilities = _softmax(scores.masked_fill(~seen, -torch.inf), sink_logits)
        outputs.append(probabilities @ all_values[:, :, None])
        masses.add(probabilities.sum(2), start)
    return torch.cat(outputs, 3).flatten(1, 2).to(queries.dtype), masses.total()


class _Logits:
    """Unscaled logits of one branch, a block of queries at a time; keys are turned once."""

    def __init__(
        self, queries: Tensor, keys: Tensor, branch: Branch | None, tables: tuple[RotaryTable, RotaryTable] | None
    ) -> None:
        if branch is not None and tables is not None:
            cos, sin = tables
            keys = rotate(keys, cos[branch.keys], sin[branch.keys])
            turns = cos[branch.queries][:, :, None], sin[branch.queries][:, :, None]
            queries = rotate(queries, *turns)
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


def visible(distance: Tensor, slots: SlotPositions, visibility: Visibility) -> Tensor:
    """Whether each query sees each slot: (batch, ranked, tokens, slots)."""
    seen = (distance >= 0) & (slots >= 0)[:, :, None, :]
    if visibility.reach is not None:
        seen &= (distance < visibility.reach) | (slots < visibility.sinks)[:, :, None, :]
    if visibility.sliding_window is not None:
        seen &= distance < visibility.sliding_window
    return seen


def _softmax(scores: Tensor, sink_logits: Tensor | None) -> Tensor:
    """Softmax over slots, with zeros where nothing is visible, and learned sinks in the divisor."""
    top = scores.amax(-1, keepdim=True)
    if sink_logits is None:
        weights = torch.exp(scores - top.where(top > -torch.inf, 0.0))
        return weights / weights.sum(-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)
    sinks = sink_logits.to(scores.dtype).reshape(1, *scores.shape[1:3], 1, 1)
    top = torch.maximum(top, sinks)
    weights = torch.exp(scores - top)
    return weights / (weights.sum(-1, keepdim=True) + torch.exp(sinks - top))


def typicality(keys: Held, positions: SlotPositions) -> PerSlot:
    """The cosine of every held key with the mean direction of all keys held of its row and head, float32.

    0 for a key of zeros, and in free slots. Changes nothing.

    Source: KeyDiff, Park et al. 2025 (arXiv:2504.15364), algorithm 1.
    """
    floats = keys.floats().float()
    # Directions are keys times these, which is less to write than directions are.
    scales = (positions >= 0) / vector_norm(floats, dim=-1).clamp(min=LEAST_NORM)
    anchor = normalize(scales.unsqueeze(2) @ floats, dim=-1, eps=LEAST_NORM)
    cosines: PerSlot = (anchor @ floats.mT).squeeze(2) * scales
    return cosines


def first_free(positions: SlotPositions, count: int) -> SlotIndex:
    """The first `count` slots of each row and head that hold nothing, then any; changes nothing."""
    return (positions == EMPTY).to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :count]


def text_order(positions: SlotPositions) -> SlotIndex:
    """The slots of each row and head in the order of their positions, free ones last."""
    return torch.where(positions >= 0, positions, torch.iinfo(positions.dtype).max).argsort(dim=-1, stable=True)


def lowest(
    score: Scores,
    positions: SlotPositions,
    next_positions: RowCounts,
    sinks: int,
    window: int,
    sliding_window: int | None,
    count: int,
) -> SlotIndex:
    """The `count` slots of each row and head that rank lowest, see `ranking.total_order`."""
    order = total_order(score, positions, next_positions, sinks, window, sliding_window)
    return order.topk(count, largest=False).indices


def evict(
    score: Scores,
    positions: SlotPositions,
    next_positions: RowCounts,
    sinks: int,
    window: int,
    sliding_window: int | None,
    count: int,
) -> tuple[SlotIndex, SlotIndex]:
    """Mark the `count` slots that rank lowest as RESERVED, but for free ones, which stay as they are.

    Returns which they are, in any order, and the positions that stood there. Changes `positions`.
    """
    index = lowest(score, positions, next_positions, sinks, window, sliding_window, count)
    return index, reserve(positions, index)


def reserve(positions: SlotPositions, index: SlotIndex) -> SlotIndex:
    """Mark the slots at `index` as RESERVED, but for free ones; returns the positions that stood there."""
    before = positions.gather(-1, index)
    positions.scatter_(-1, index, before.where(before < 0, RESERVED))
    return before


def write(held: Tensor, index: SlotIndex, new: Tensor | float) -> None:
    """Overwrite the slots of `held` at `index` with `new`, see `Writes`."""
    places = index.expand(-1, held.shape[1], -1)
    if held.ndim == 4:
        places = places[..., None].expand(-1, -1, -1, held.shape[3])
    held.scatter_(2, places, new.to(held.dtype) if isinstance(new, Tensor) else new)


def write_all(index: SlotIndex, writes: Writes) -> None:
    """Overwrite the slots at `index` of each of `writes`: what holds them, and what comes.

    Where `index` has one row of heads, it holds for all heads of a part.
    """
    for held, new in writes:
        write(held, index, new)


def encode(states: Tensor, centres: Tensor | None, bits: int) -> tuple[Tensor, Tensor]:
    """Codes of 8 or 4 bits for `states` (batch, kv_heads, tokens, width), and their float16 scales (..., 1).

    Code times scale is what is left of a number beside the centre (kv_heads, width) of its channel. The
    largest gets the lowest code. Codes of 4 bits, plus 8, lie two in a byte: channel j in its low half and
    channel j + width / 2 in its high half.
    """
    numbers = states.float()
    if centres is not None:
        numbers = numbers - centres.float()[:, None]
    least = -(2 ** (bits - 1))
    low, high = numbers.aminmax(dim=-1, keepdim=True)
    most = torch.finfo(torch.float16).max
    scales = (torch.where(-low > high, low, high) / least).clamp(-most, most).to(torch.float16)
    divisors = scales.float()
    codes = (numbers / divisors.where(divisors != 0, 1.0)).round().clamp(least, -least - 1)
    if bits == 8:
        return codes.to(torch.int8), scales
    first, second = (codes + 8).to(torch.uint8).chunk(2, -1)
    return first | second << 4, scales


def read(held: Tensor, index: SlotIndex) -> Tensor:
    """A copy of the slots of `held` (batch, kv_heads, slots, width) at `index`."""
    batch, kv_heads, slots, width = held.shape
    starts = torch.arange(0, batch * kv_heads * slots, slots, device=held.device).view(batch, kv_heads, 1)
    # Whole rows: a gather looks every channel up by itself.
    return held.flatten(0, 2).index_select(0, (index + starts).flatten()).view(batch, kv_heads, -1, width)
