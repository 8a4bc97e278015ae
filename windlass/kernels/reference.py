"""Attention over slots in plain PyTorch: the truth that every other backend must match."""

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn import functional

from windlass.core.attention import AttentionInput, EvictionInput, Mass, Visibility, Writes
from windlass.core.linear import LinearInput, Nibbles
from windlass.core.packed import PackedStates
from windlass.core.rotary_index import EMPTY, RESERVED, RotaryBranch
from windlass.core.rotate import rotate
from windlass.core.shapes import (
    Attended,
    LinearOutputs,
    ObservedColumns,
    PerSlot,
    QueryPositions,
    RotaryTable,
    SlotIndex,
    SlotPositions,
)
from windlass.kernels.ranking import total_order

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
    """Unscaled logits of one branch, a block of queries at a time; keys are rotated once."""

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
    """Whether each query sees each slot: (batch, score_heads, tokens, slots)."""
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
    """Softmax over slots; zeros where nothing is visible. Learned sinks, if any, join the sum of exponentials."""
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
    if isinstance(layer.weights, Nibbles):
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
    # A key times its scale is its direction; the directions themselves, a copy of all keys, are never written.
    scales = (positions >= 0) / vector_norm(floats, dim=-1).clamp(min=MIN_NORM)
    anchor = functional.normalize(scales.unsqueeze(2) @ floats, dim=-1, eps=MIN_NORM)
    cosines: PerSlot = (anchor @ floats.mT).squeeze(2) * scales
    return cosines


def first_free(positions: SlotPositions, count: int) -> SlotIndex:
    """The first `count` free slots of each row and head, then, where these are too few, the first others."""
    return (positions == EMPTY).to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :count]


def argsort_positions(positions: SlotPositions) -> SlotIndex:
    """The slots of each row and head in the order of their positions; slots that hold no token come last."""
    return torch.where(positions >= 0, positions, torch.iinfo(positions.dtype).max).argsort(dim=-1, stable=True)


def lowest(call: EvictionInput) -> SlotIndex:
    """The `call.count` slots of each row and head that come first in `ranking.total_order`, in any order.

    Of tokens that are equal there, because they share a position, those in the lower slots.
    """
    return total_order(call).argsort(dim=-1, stable=True)[..., : call.count]


def evict(call: EvictionInput) -> tuple[SlotIndex, SlotIndex]:
    """Mark the `lowest` slots as RESERVED; free slots among them stay as they are. Changes `call.positions`.

    Returns the slots, in any order, and the positions that they held before.
    """
    index = lowest(call)
    return index, reserve(call.positions, index)


def reserve(positions: SlotPositions, index: SlotIndex) -> SlotIndex:
    """Mark the slots at `index` as RESERVED, but for free ones; returns the positions that stood there."""
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


def encode(states: Tensor, means: Tensor | None, bits: int) -> tuple[Tensor, Tensor]:
    """Codes of 8 or 4 bits for `states` (batch, kv_heads, tokens, width), and their float16 scales (..., 1).

    A number is about code * scale + mean, the mean (kv_heads, width) being that of its channel. The number of
    largest magnitude gets the lowest code. Bytes are laid out as `Format.INT8` and `Format.INT4` say.
    """
    numbers = states.float()
    if means is not None:
        numbers = numbers - means.float()[:, None]
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


def read(states: Tensor, index: SlotIndex) -> Tensor:
    """A copy of the slots of `states` (batch, kv_heads, slots, width) at `index`."""
    batch, kv_heads, slots, width = states.shape
    starts = torch.arange(0, batch * kv_heads * slots, slots, device=states.device).view(batch, kv_heads, 1)
    # Whole rows are copied: a gather would look up every channel by itself.
    return states.flatten(0, 2).index_select(0, (index + starts).flatten()).view(batch, kv_heads, -1, width)
