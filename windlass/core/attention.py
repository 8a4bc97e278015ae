"""What one call of a kernel is given and what it gives back: the same records for every backend."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from windlass.core.packed import PackedStates
from windlass.core.rotary_index import RotaryIndex
from windlass.core.shapes import (
    ObservedColumns,
    PerSlot,
    PickedSlots,
    Queries,
    QueryPositions,
    RotaryTable,
    RowCounts,
    Scores,
    SlotPositions,
)

# What to overwrite, (batch, heads, slots) or (batch, heads, slots, width), and the new content: a tensor with
# tokens in the place of slots, or one number for all of them.
Writes = Sequence[tuple[Tensor, Tensor | float]]


@dataclass(frozen=True)
class Visibility:
    """Which of the earlier tokens a query may see; None lifts a limit.

    `sliding_window`: only keys at distances below it (the model's own window).
    `reach`: likewise, but the first `sinks` positions of the text are exempt.
    `attention_chunk`: only keys of the same chunk of the text, which are so many positions, the first from 0 on.
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

    Queries and keys come un-rotated. `rotary_index` gives the rotary position of each, which are rows of
    `tables` (cos, sin); where either is None nothing is rotated. A query sees slots at or before its own
    position, as far as `visibility` allows; a slot with a negative position is never seen.
    `query_gain` (head_dim) multiplies each query once it is rotated: weights of the model's norms after RoPE.

    Logits are multiplied by `scale`, then capped: `softcap * tanh(logit / softcap)`. `log_counts` are added
    to the logits of their slots: a slot that stands for n tokens counts n times. `sink_logits` (one per head)
    join each softmax and take their share away.

    `sees_to` is the last position that each query sees, where some see later ones than their own (in a picture, say);
    it lies nowhere before a query's own. Distances within `visibility` are still those from its own position.

    `seen_until` is the position of the last query that sees each slot; None: all later ones do.

    `picked`: the only slots that each query reads, of those that it sees; None: all of these.

    `observed` names the query columns whose attention mass is returned row by row (-1: none, a row of zeros);
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


@dataclass(frozen=True)
class EvictionInput:
    """One call of `evict`: free `count` slots of each row and head, those of the lowest `score`.

    The first `sinks` tokens of the text and the newest `window` tokens before `next_positions` (the position of each
    row's next token) come last, whatever their score; `row_sinks` are the `sinks` of each row, where these differ.
    Tokens that no later query sees, because of the model's own `sliding_window` or `attention_chunk` (None: there is
    none), come first.
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
