"""The records that kernels take and return, the same for every backend."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum, unique
from functools import cached_property
from typing import Final, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float32, Int32, Int64
from torch import Tensor
from torch.nn.functional import pad

from windlass.core.parse import PAGE
from windlass.core.positions import ReadRule, RotaryIndex
from windlass.core.types import (
    Attended,
    Bias,
    CodeScales,
    GroupPairs,
    Hidden,
    KeyMeans,
    LinearInputs,
    LinearWeights,
    ListedSlots,
    NewKeys,
    NewValues,
    NormWeights,
    ObservedColumns,
    PackedCodes,
    PerSlot,
    PickedSlots,
    PinnedRanges,
    Queries,
    QueryPositions,
    RotaryTable,
    RowCounts,
    Scales,
    Scores,
    SlotIndex,
    SlotPositions,
    SuperPairs,
)

SUPER: Final = 256
"""Number of inputs that share a super-scale."""


@dataclass(frozen=True)
class GroupCodes:
    """Weights of 4 or 8 bits, with a scale and perhaps a zero point for each `group` of inputs, in blocks of outputs.

    A block has `block` outputs and stores its inputs one after the other. The last block is padded. With 4 bits, byte j
    of an input has the code of output j in its low nibble and that of output j + block / 2 in its high one, as PyTorch
    packs them for a CPU. A code then stands for (code - middle) * scale + zero point. With 8 bits a code has a sign and
    stands for code * scale + zero point. `pairs` holds scale and zero point, or the scale alone in one column: group by
    group, as PyTorch packs them, or block by block (`is_by_block`). Those of int8 lie by block and are multiplied by
    the float16 of `supers`, one for SUPER inputs.

    Those of several experts have a dimension more, the first. A layer has those of one.
    """

    codes: PackedCodes
    pairs: GroupPairs
    group: int
    block: int
    out_features: int
    bits: int = 4
    middle: int = 8
    supers: SuperPairs | None = None

    @cached_property
    def in_features(self) -> int:
        """Number of inputs of the layer."""
        return self.codes.shape[-1] * 8 // self.bits

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors of which it is made."""
        return (self.codes, self.pairs) if self.supers is None else (self.codes, self.pairs, self.supers)

    @cached_property
    def is_by_block(self) -> bool:
        """Return True if `pairs` has blocks of outputs first, then groups."""
        return self.pairs.ndim == self.codes.ndim + 2

    @cached_property
    def columns(self) -> int:
        """2 with a zero point beside each scale, else 1."""
        return self.pairs.shape[-2 if self.is_by_block else -1]

    @cached_property
    def is_whole(self) -> bool:
        """Return True if the parts have the shapes that the sizes ask for, and lie contiguously."""
        pairs, supers, rows = self.pairs, self.supers, -(-self.out_features // self.block) * self.block
        blocks, groups = rows // self.block, self.in_features // self.group
        shape = (blocks, groups, self.columns, self.block) if self.is_by_block else (groups, rows, self.columns)
        is_whole = self.columns in (1, 2) and pairs.shape == shape and groups * self.group == self.in_features
        is_whole = is_whole and self.codes.shape[0] == rows and self.codes.numel() > 0
        if supers is not None:
            has_shape = supers.shape == (blocks, self.in_features // SUPER, self.columns, self.block)
            has_types = pairs.dtype == torch.int8 and supers.dtype == torch.float16
            is_whole = is_whole and has_shape and has_types and self.is_by_block and self.in_features % SUPER == 0
        return is_whole and all(each.is_contiguous() for each in self.parts)

    def floats(self, dtype: torch.dtype, outputs: Tensor | None = None) -> LinearWeights:
        """The weights that the codes stand for, or those of some `outputs`, whose numbers these are."""
        if outputs is None:
            outputs = torch.arange(self.out_features, device=self.codes.device)
        packed = self.codes.view(-1, self.in_features, self.block * self.bits // 8)
        blocks, places = outputs // self.block, outputs % self.block
        if self.bits == 4:
            half = self.block // 2
            packed = packed[blocks, :, places % half]
            codes = torch.where((places < half)[:, None], packed & 15, packed >> 4).to(dtype) - self.middle
        else:
            codes = packed[blocks, :, places].to(dtype)
        if self.is_by_block:
            pairs = self.pairs[blocks, :, :, places].to(dtype)
        else:
            pairs = self.pairs[:, outputs].transpose(0, 1).to(dtype)
        if self.supers is not None:
            supers = self.supers[blocks, :, :, places].to(dtype)
            pairs = pairs * supers.repeat_interleave(SUPER // self.group, 1)
        scales, *zeros = pairs.repeat_interleave(self.group, 1).unbind(-1)
        weights = codes * scales
        return weights + zeros[0] if zeros else weights


@dataclass(frozen=True)
class LinearLayer:
    """Weights, and a bias (None: 0).

    `weights` are floats of the inputs' dtype, int8 codes with a scale for each output, or codes in groups.
    """

    weights: LinearWeights | GroupCodes
    bias: Bias | None = None
    scales: CodeScales | None = None  # of int8 codes

    @property
    def addresses(self) -> list[int]:
        """Addresses of the memory that a kernel reads."""
        return [each.data_ptr() for each in (*self._parts, self.bias, self.scales) if each is not None]

    @property
    def nbytes(self) -> int:
        """Bytes of the weights."""
        return sum(each.nbytes for each in self._parts)

    @property
    def _parts(self) -> tuple[Tensor, ...]:
        return self.weights.parts if isinstance(self.weights, GroupCodes) else (self.weights,)

    @property
    def is_coded(self) -> bool:
        """True if the weights are codes and not floats."""
        return self.scales is not None or isinstance(self.weights, GroupCodes)

    @property
    def in_features(self) -> int:
        """Number of features of an input."""
        return self.weights.in_features if isinstance(self.weights, GroupCodes) else self.weights.shape[1]

    @property
    def out_features(self) -> int:
        """Number of features of an output."""
        return self.weights.out_features if isinstance(self.weights, GroupCodes) else self.weights.shape[0]


@dataclass(frozen=True)
class LinearInput:
    """Inputs times the transposed weights of a layer, plus its bias."""

    inputs: LinearInputs
    layer: LinearLayer

    @property
    def rows(self) -> int:
        """Number of inputs, all leading dimensions multiplied."""
        return self.inputs.numel() // self.inputs.shape[-1]


@unique
class Rounding(IntEnum):
    """How a norm of 16-bit numbers rounds. The numbers are those of `Norm::Kind` in `call.hpp`."""

    NARROW = 0  # numbers are rounded, then multiplied with the weights, and rounded
    ONE_MORE = 1  # they are multiplied with weights + 1, then rounded
    WIDE = 2  # they are multiplied with the weights, then rounded


@unique
class Activation(IntEnum):
    """Activation of the gate. The numbers are those of `DecoderLayer::Activation` in `call.hpp`."""

    SILU = 0
    GELU_TANH = 1


@dataclass(frozen=True, eq=False)
class Norm:
    """Numbers over the root of the mean of their squares plus `epsilon`, times weights."""

    weights: NormWeights
    epsilon: float
    rounding: Rounding


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """Attention and gated feed-forward layers, each behind a norm and added to its input.

    `query_norm` and `key_norm` are norms over the channels of a head (None: no norm).
    """

    first_norm: Norm
    query: LinearLayer
    key: LinearLayer
    value: LinearLayer
    query_norm: Norm | None
    key_norm: Norm | None
    output: LinearLayer
    second_norm: Norm
    gate: LinearLayer
    up: LinearLayer
    down: LinearLayer
    activation: Activation
    head_dim: int  # channels of a head, the same of queries, keys and values

    @property
    def linears(self) -> tuple[LinearLayer, ...]:
        """In the order in which they are read."""
        return self.query, self.key, self.value, self.output, self.gate, self.up, self.down

    @property
    def norms(self) -> tuple[Norm | None, ...]:
        """Norms before attention and before the feed-forward layer, and those of queries and keys."""
        return self.first_norm, self.second_norm, self.query_norm, self.key_norm


class Format(Enum):
    """How a number is stored. Kernels decode the formats named here and no others.

    A store with a format of its own hands over decoded floats: slower to read, and correct.
    """

    FLOAT = "float"  # the tensor's own dtype
    INT8 = "int8"  # one signed byte for each channel
    INT4 = "int4"  # channel j, plus 8, in the low half of byte j, channel j + channels / 2 in its high half


@dataclass(frozen=True)
class PackedStates:
    """Keys or values of all slots: `data` (batch, kv_heads, slots, width) in a `format`.

    A number of INT8 is code * scale + mean: one scale for each slot and head, one mean for each channel (None: 0). A
    number of INT4 is code * scale + offset + mean: `scales` has, side by side, the scale and the offset of each `group`
    channels, and the last group is short where they do not divide. Some slots are also held at full precision and are
    read from there: slot s at entry `ring_index[s]` of `full_precision`, -1 for none.

    `last`: the number of channels at the end that count, as in values that are a part of their keys (None: all).
    """

    data: Tensor
    format: Format = Format.FLOAT
    scales: Scales | None = None
    means: KeyMeans | None = None
    full_precision: Tensor | None = None  # (batch, kv_heads, entries, channels)
    ring_index: Tensor | None = None  # (batch, kv_heads, slots) int32
    last: int | None = None
    group: int = 0  # channels of INT4 that share a scale and an offset, a power of two. 0: one scale for all

    @property
    def held_channels(self) -> int:
        """Numbers per slot and head that lie in memory."""
        return self.data.shape[-1] * (2 if self.format is Format.INT4 else 1)

    @property
    def channels(self) -> int:
        """Numbers per slot and head."""
        return self.held_channels if self.last is None else self.last

    @property
    def first(self) -> int:
        """The first of the channels that are meant."""
        return self.held_channels - self.channels

    @property
    def bits(self) -> int:
        """Bits per number."""
        return 4 if self.format is Format.INT4 else 8 * self.data.itemsize

    def floats(self) -> Tensor:
        """The decoded numbers, in float32. Floats are returned unchanged."""
        return self._held()[..., self.first :]

    def _held(self) -> Tensor:
        if self.scales is None:
            return self.data
        codes: Tensor = self.data
        if self.format is Format.INT4:
            codes = torch.cat((codes & 15, codes >> 4), -1).to(torch.int8) - 8
            spread = self.scales.float().unflatten(-1, (-1, 2)).repeat_interleave(self.group, -2)
            scales, offsets = spread[..., : self.held_channels, :].unbind(-1)
            floats: Tensor = codes.float() * scales + offsets
        else:
            floats = codes.float() * self.scales.float()
        if self.means is not None:
            floats = floats + self.means[:, None]
        if self.full_precision is None or self.ring_index is None:
            return floats
        entries = self.ring_index.long().clamp(min=0)[..., None].expand_as(floats)
        return torch.where(self.ring_index[..., None] >= 0, self.full_precision.float().gather(2, entries), floats)


# A tensor to overwrite, (batch, heads, slots) or (batch, heads, slots, width), and its new content: a tensor with
# tokens in the place of slots, or one number for all of them.
Writes = Sequence[tuple[Tensor, Tensor | float]]


@dataclass(frozen=True)
class Visibility:
    """Limits on the earlier tokens that a query may see. None lifts a limit.

    `sliding_window`: only keys at distances below it (the model's own window).
    `reach`: the same, but the first `sinks` positions of the text are exempt.
    `attention_chunk`: only keys of the same chunk of so many positions, counted from 0.
    """

    sliding_window: int | None = None
    reach: int | None = None
    sinks: int = 0
    attention_chunk: int | None = None


def most_visible(sliding_window: int | None, attention_chunk: int | None) -> int | None:
    """The most tokens of a text that a query sees under the model's own limits, its own token among them."""
    return min((each for each in (sliding_window, attention_chunk) if each is not None), default=None)


@dataclass(frozen=True)
class AttentionInput:
    """One call of `attend`: queries, the slots they read, and how.

    Queries and keys come un-rotated. `rotary_index` gives the rotary position of each, which are rows of `tables` (cos,
    sin). Where either is None nothing is rotated. A query sees slots at or before its own position, as far as
    `visibility` allows. A slot with a negative position is never seen. `query_gain` (head_dim) multiplies each query
    once it is rotated: weights of the model's norms after RoPE.

    Logits are multiplied by `scale`, then capped: `softcap * tanh(logit / softcap)`. `log_counts` are added to the
    logits of their slots: a slot that stands for n tokens counts n times. `sink_logits` (one per head) join each
    softmax and take their share away.

    `sees_to` is the last position that each query sees, where some see later ones than their own (in a picture, say).
    It lies nowhere before a query's own. Distances within `visibility` are still those from its own position.

    `seen_until` is the position of the last query that sees each slot, or None where all later queries do.

    `picked`: the only slots that each query reads, of those that it sees (None: all of these).

    `observed` names the query columns whose attention mass is returned row by row (-1: none, a row of zeros).
    `is_rest_wanted` asks for the sum over all other queries, too.
    """

    queries: Queries
    keys: PackedStates
    values: PackedStates
    slot_positions: SlotPositions
    query_positions: QueryPositions
    rotary_index: RotaryIndex | None
    tables: tuple[RotaryTable, RotaryTable] | None
    scale: float
    visibility: Visibility
    softcap: float | None = None
    sink_logits: Tensor | None = None
    log_counts: Scores | None = None
    observed: ObservedColumns | None = None
    is_rest_wanted: bool = False
    sees_to: QueryPositions | None = None
    query_gain: Tensor | None = None
    picked: PickedSlots | None = None
    seen_until: SlotPositions | None = None


@dataclass(frozen=True)
class Mass:
    """Attention probability per slot, summed over the query heads that share a kv head.

    `rows` holds one entry per observed query, `rest` the sum over all other queries, or None when
    it was not asked for. Both are float32 and 0 in free slots.
    """

    rows: Tensor  # (batch, kv_heads, observed, slots)
    rest: PerSlot | None

    def plus(self, other: "Mass") -> "Mass":
        """The mass of both."""
        rest = None if self.rest is None or other.rest is None else self.rest + other.rest
        return Mass(self.rows + other.rows, rest)


@dataclass(frozen=True)
class EvictionInput:
    """One call of `evict`: free `count` slots of each row and head, those of the lowest `score`.

    The first `sinks` tokens of the text and the newest `window` tokens before `next_positions` (the position of each
    row's next token) come last, whatever their score. `row_sinks` are the `sinks` of each row, where these differ.
    Tokens that no later query sees, because of the model's own `sliding_window` or `attention_chunk`, come first. None
    means no such limit.
    """

    score: Scores
    positions: SlotPositions
    next_positions: RowCounts
    sinks: int
    window: int
    sliding_window: int | None
    count: int
    attention_chunk: int | None = None
    row_sinks: RowCounts | None = None


TILE: Final = 16
"""Tokens whose keys are interleaved by words, so that a vector of a kernel holds the same channels of all of them."""
WORD: Final = 4  # bytes
WORTH_STEPS: Final = 256
"""Steps of a page's worth, a logarithm, to 1: two shares of attention that differ by less may count as equal."""

Tiles = Int32[Tensor, "batch kv_heads tiles words 16"]
Remembered = Int32[Tensor, "batch remembered"]


def words_of(rows: Tensor) -> Tensor:
    """Rows (batch, kv_heads, tokens, width) as words (batch, kv_heads, tokens, words), the last one filled up by 0."""
    per_word = WORD // rows.itemsize
    return pad(rows, (0, -rows.shape[3] % per_word)).contiguous().view(torch.int32)


def rows_of(words: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The inverse of `words_of`, for rows of this width and dtype."""
    return words.new_empty(words.shape).copy_(words).view(dtype)[..., :width]  # strides as `view` wants them


@dataclass(frozen=True)
class TiledKeys:
    """Un-rotated keys in tiles: those of `states` but for its data, which has no slots, and tells width and dtype."""

    tiles: Tiles
    states: PackedStates

    @property
    def tokens(self) -> int:
        """Tokens of each row and head."""
        return self.tiles.shape[2] * TILE

    @cached_property
    def addresses(self) -> tuple[int, int, int]:
        """Addresses of tiles and scales (0: there are none), and how many tiles there are."""
        scales = self.states.scales
        return self.tiles.data_ptr(), 0 if scales is None else scales.data_ptr(), self.tiles.shape[2]

    def packed(self) -> PackedStates:
        """The same, token by token."""
        data = self.states.data
        words = self.tiles.transpose(3, 4).flatten(2, 3)
        return replace(self.states, data=rows_of(words, data.shape[3], data.dtype))


@dataclass(frozen=True)
class Digests:
    """The largest and the least number of each channel among the keys of each page, both as keys are held.

    No token of a page has a larger product with a query than its positive numbers have with the largest and its
    negative ones with the least, apart from the rounding of codes.

    Source: Quest, Tang et al. 2024 (arXiv:2406.10774). Differs: keys are held before RoPE.
    """

    largest: TiledKeys
    least: TiledKeys


@dataclass(frozen=True)
class PageInput:
    """One call of `best_pages`: queries, the keys of a recall store, piece by piece, and excluded tokens.

    `is_query` marks the queries that count. `positions` are negative for tokens outside of the text. `kept_index` are
    the tokens in slots, by their number among all pieces' tokens, negative in free slots.

    `digests` are those of each page, with room for more behind the last one. Only the `candidates` pages with the best
    digests are scored exactly, at least `count` of them. Without digests all pages are.
    """

    queries: Queries
    is_query: Bool[Tensor, "batch tokens"]
    pieces: tuple[TiledKeys, ...]
    positions: Remembered
    kept_index: Scores
    count: int
    digests: tuple[Digests, ...] = ()
    candidates: int = 0


class BestPages(NamedTuple):
    """Pages, the best first, and which of the tokens in them are evicted and still part of the text."""

    pages: Int64[Tensor, "batch kv_heads count"]
    is_read: Bool[Tensor, "batch kv_heads recalled"]


def tokens_of(pages: Tensor) -> SlotIndex:
    """The numbers of the tokens of pages (batch, kv_heads, count), page by page."""
    return (pages[..., None] * PAGE + torch.arange(PAGE, device=pages.device)).flatten(2)


@dataclass(frozen=True)
class ReadInput:
    """One call of `read_tokens`: rows (batch, kv_heads, tokens, width) piece by piece, or their tiles, and an index."""

    pieces: tuple[Tensor, ...]
    index: SlotIndex
    is_tiled: bool


@dataclass(frozen=True)
class WriteInput:
    """One call of `write_tokens`: pieces as `ReadInput` has them, and the rows that tokens get there.

    Each token is written at its `index` in all heads of its batch row. Tokens with a negative index are not written.
    """

    pieces: tuple[Tensor, ...]
    index: Int64[Tensor, "batch tokens"]
    rows: Tensor
    is_tiled: bool


@dataclass(frozen=True)
class RecallPiece:
    """Keys and values of some tokens of a recall store."""

    keys: TiledKeys
    values: PackedStates


@dataclass(frozen=True, eq=False)
class RecallSlots:
    """A recall store that decode steps write to and read: the part that stays the same from step to step.

    `positions` are negative for tokens outside of the text. At most `count` pages are read. Each step that reads any
    writes their tokens' positions to `last_recalled`, EMPTY for skipped ones. `cos_sin` rotates queries before
    they are multiplied with keys (None: no rotation). `state` is the index of the slots' tensor that has the number of
    each slot's token. A page that gets a new token gets a new digest. Pages are chosen by digests where `candidates` is
    not 0.
    """

    pieces: tuple[RecallPiece, ...]
    positions: Remembered
    last_recalled: Int32[Tensor, "batch kv_heads recalled"]
    count: int
    cos_sin: tuple[Float32[Tensor, " pairs"], Float32[Tensor, " pairs"]] | None
    state: int
    digests: tuple[Digests, ...] = ()
    candidates: int = 0


@dataclass(frozen=True)
class Ranking:
    """How a policy observes one query per row and scores slots, where a kernel can do it.

    `observe`: how the mass of the query updates the policy's one tensor of state. It is added ("sum"), or takes its
    place, summed over kv heads ("last"), or the state is multiplied by `1 - share` and `share` of it added ("fade"). A
    padding query does nothing.

    `score`: the positions of the tokens, the state, the state pooled over `pool` neighbours in the text ("pooled". By
    the mean where `is_mean`, else by the most. That of the window counts as 0), or how little a key is like the mean
    direction of all ("novelty": minus `mean_key_cosine` in steps of 2**-16).
    """

    observe: Literal["nothing", "sum", "last", "fade"]
    score: Literal["position", "state", "pooled", "novelty"]
    share: float = 0.0
    pool: int = 1
    is_mean: bool = False


@dataclass(frozen=True)
class Retention:
    """Which tokens stay: at most `budget` per row and head, ranked by `ranking`. `sinks`, `window`: `EvictionInput`."""

    ranking: Ranking
    budget: int
    sinks: int
    window: int


@dataclass(frozen=True, eq=False)
class DecodeSlots:
    """Slots that decode steps write to and read: the part that stays the same from step to step.

    A slot that is written leaves the `ring_index` of `keys` and `values`. New tokens are encoded as theirs are.
    `tables` (cos, sin) have a row for each place that `rule` reads at (None: no rotation). `retention`: None where the
    kernel neither observes nor evicts. `recall`: None where nothing is recalled. The other fields are those of
    `AttentionInput`.
    """

    keys: PackedStates
    values: PackedStates
    score_heads: int
    tables: tuple[RotaryTable, RotaryTable] | None
    scale: float
    visibility: Visibility
    softcap: float | None = None
    retention: Retention | None = None
    recall: RecallSlots | None = None
    rule: ReadRule = field(default_factory=ReadRule)


@dataclass(frozen=True, eq=False)
class DecodeInput:
    """The queries, keys and values of one new token per row, at `positions`, which are negative for padding.

    `slot_positions` and `state`, which is 0 for new tokens, are of before the step, and are not changed. `is_observed`:
    return the mass of the queries. `is_evicting`: each row that is then over budget evicts the lowest of its tokens.
    `next_positions` are of after the step. `released`: pairs of slots and positions that an earlier step gave as
    `evicted`, which are free after this one. `remembered`: tokens of each row in the recall store, which the new one is
    added to. `is_recalling`: read the store's best pages beside the slots. `row_sinks`: see `EvictionInput`. Positions
    in `pins` rank above all others but sinks and the window.
    """

    queries: Queries
    keys: NewKeys
    values: NewValues
    positions: QueryPositions
    slot_positions: SlotPositions
    state: tuple[Scores, ...]
    next_positions: RowCounts
    is_observed: bool = False
    is_evicting: bool = False
    released: Sequence[tuple[ListedSlots, ListedSlots]] = ()
    remembered: RowCounts | None = None
    is_recalling: bool = False
    row_sinks: RowCounts | None = None
    pins: PinnedRanges | None = None


class DecodeOutput(NamedTuple):
    """Result of a decode step. `slot_positions` and `state` are in memory of their own.

    `written` and `evicted` (batch, score_heads, 1) are slots. `evicted_positions` are their former positions: negative,
    with an arbitrary slot, where nothing was evicted. Both are None in a step without eviction.
    """

    written: SlotIndex
    out: Attended
    mass: Mass | None
    slot_positions: SlotPositions
    state: tuple[Scores, ...]
    evicted: SlotIndex | None
    evicted_positions: SlotIndex | None


@dataclass(frozen=True, eq=False)
class TokenInput:
    """One token per row: (batch, 1) positions, EMPTY for padding, and the hidden states that the first layer takes.

    `starts` counts the tokens of each row in the recall stores. `longest` is 0 where all rows have padding.
    """

    hidden: Hidden
    positions: QueryPositions
    next_positions: RowCounts
    starts: RowCounts | None
    row_sinks: RowCounts | None
    pins: PinnedRanges | None
    longest: int
