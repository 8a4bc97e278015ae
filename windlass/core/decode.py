"""What a kernel is asked for by a decode step of one layer."""

from dataclasses import dataclass

from windlass.core.attention import Visibility
from windlass.core.shapes import (
    NewKeys,
    NewValues,
    Queries,
    QueryPositions,
    RotaryTable,
    Scores,
    SlotKeys,
    SlotPositions,
    SlotValues,
)


@dataclass(frozen=True, eq=False)
class DecodeSlots:
    """Slots that decode steps write to and read: what stays the same from one step to the next.

    `state` are tensors per slot, each with what new tokens start with. `tables` (cos, sin) have a row for each
    position of the text; None: nothing is rotated. The other fields are those of `AttentionInput`.
    """

    keys: SlotKeys
    values: SlotValues
    positions: SlotPositions
    state: tuple[tuple[Scores, float], ...]
    tables: tuple[RotaryTable, RotaryTable] | None
    scale: float
    visibility: Visibility
    softcap: float | None = None


@dataclass(frozen=True, eq=False)
class DecodeInput:
    """The queries, keys and values of one new token per row, at `positions`, which are negative for padding.

    `is_observed`: whether the attention mass of the queries is returned.
    """

    queries: Queries
    keys: NewKeys
    values: NewValues
    positions: QueryPositions
    is_observed: bool
