"""What a kernel is asked for by a decode step of one layer, and what it gives back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from windlass.core.attention import Mass, Visibility
from windlass.core.recall import RecallSlots
from windlass.core.shapes import (
    Attended,
    NewKeys,
    NewValues,
    Queries,
    QueryPositions,
    RotaryTable,
    RowCounts,
    Scores,
    SlotIndex,
    SlotKeys,
    SlotPositions,
    SlotValues,
)


@dataclass(frozen=True)
class Ranking:
    """How a policy observes one query per row and scores slots, where a kernel can do it.

    `observe`: what the mass of the query does to the policy's one tensor of state. It is added ("sum"), or takes its
    place, summed over kv heads ("last"), or the state is multiplied by `1 - share` and `share` of it added ("fade").
    A padding query does nothing.

    `score`: the positions of the tokens, the state, the state pooled over `pool` neighbours in the text ("pooled"; by
    the mean where `is_mean`, else by the most; that of the window counts as 0), or how little a key is like the mean
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
    """Slots that decode steps write to and read: what stays the same from one step to the next.

    `tables` (cos, sin) have a row for each position of the text; None: nothing is rotated. `retention`: None where the
    kernel is to observe and evict nothing. `recall`: None where nothing is recalled. The other fields are those of
    `AttentionInput`.
    """

    keys: SlotKeys
    values: SlotValues
    score_heads: int
    tables: tuple[RotaryTable, RotaryTable] | None
    scale: float
    visibility: Visibility
    softcap: float | None = None
    retention: Retention | None = None
    recall: RecallSlots | None = None


@dataclass(frozen=True, eq=False)
class DecodeInput:
    """The queries, keys and values of one new token per row, at `positions`, which are negative for padding.

    `slot_positions` and `state`, which is 0 for new tokens, are of before the step, and stay as they are.
    `is_observed`: whether the mass of the queries is returned. `is_evicting`: whether each row that is then over budget
    evicts the lowest of its tokens; `next_positions` are of after the step. `released`: pairs of slots and positions
    that an earlier step gave as `evicted`; they are free after this one. `remembered`: tokens of each row in the recall
    store, which the new one is added to. `is_recalling`: whether the best pages of it are read beside the slots.
    `row_sinks`: see `EvictionInput`.
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
    released: Sequence[tuple[SlotIndex, SlotIndex]] = ()
    remembered: RowCounts | None = None
    is_recalling: bool = False
    row_sinks: RowCounts | None = None


class DecodeOutput(NamedTuple):
    """What a decode step leaves. `slot_positions` and `state` are in memory of their own.

    `written` and `evicted` (batch, score_heads, 1) are slots, `evicted_positions` what stood there: negative, and the
    slot any, where nothing was evicted; both are None where nothing was to be.
    """

    written: SlotIndex
    out: Attended
    mass: Mass | None
    slot_positions: SlotPositions
    state: tuple[Scores, ...]
    evicted: SlotIndex | None
    evicted_positions: SlotIndex | None
