"""What is chosen of the tokens that a layer has evicted and still remembers: pages of neighbours in the text."""

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch
from jaxtyping import Bool, Float32, Int32, Int64
from torch import Tensor
from torch.nn.functional import pad

from windlass.core.limits import PAGE
from windlass.core.packed import PackedStates
from windlass.core.shapes import Queries, Scores, SlotIndex

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

    def packed(self) -> PackedStates:
        """The same, token by token."""
        data = self.states.data
        words = self.tiles.transpose(3, 4).flatten(2, 3)
        return replace(self.states, data=rows_of(words, data.shape[3], data.dtype))


@dataclass(frozen=True)
class Digests:
    """The largest and the least number of each channel among the keys of each page, both as keys are held.

    No token of a page has a larger product with a query than its positive numbers have with the largest and its
    negative ones with the least, but for what rounding of codes adds.

    Source: Quest, Tang et al. 2024 (arXiv:2406.10774). Differs: keys are held before RoPE.
    """

    largest: TiledKeys
    least: TiledKeys


@dataclass(frozen=True)
class PageInput:
    """One call of `best_pages`: queries, the keys of a recall store, piece by piece, and what is left out of them.

    `is_query` tells which of the queries count. `positions` are negative where a token is no part of the text.
    `kept_index` are the tokens in slots, by their number among all pieces' tokens, negative in the slots of none.

    `digests` are those of each page, with room for more behind the last one; only the `candidates` pages whose digests
    promise most are looked at then, which are at least `count`. Without digests all are.
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

    Each token is written at its `index` in all heads of its batch row; nowhere where that is negative.
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
    """A recall store that decode steps write to and read: what stays the same from one step to the next.

    `positions` are negative where a token is no part of the text. `count` pages are read at most. Each step that reads
    any writes their tokens' positions to `last_recalled`, EMPTY for those it left out. `turn` (cos, sin) is
    what queries are rotated by before they are multiplied with keys; None: not at all. `state`: which of the slots'
    tensors has the number of each slot's token. Of a page that gets a new token the digest is written anew; pages are
    chosen by digests where `candidates` is not 0.
    """

    pieces: tuple[RecallPiece, ...]
    positions: Remembered
    last_recalled: Int32[Tensor, "batch kv_heads recalled"]
    count: int
    turn: tuple[Float32[Tensor, " pairs"], Float32[Tensor, " pairs"]] | None
    state: int
    digests: tuple[Digests, ...] = ()
    candidates: int = 0
