"""What travels through a step: the limits, the step itself, the model's call, and the way back."""

from dataclasses import dataclass

from torch import Tensor

from windlass.kernels.reference import Mass
from windlass.shapes import ObservedColumns, Queries, RowCounts, SlotIndex

SPARE = 16  # free slots of a layer in decode: the longest step it takes without growing


@dataclass(frozen=True)
class Limits:
    """What the cache asks of every layer; see `KVCache`."""

    budget: int | None
    sinks: int
    window: int
    chunk: int
    rollback: int


@dataclass(frozen=True)
class Standing:
    """Where the texts of a cache stand between two steps: one number per row, and columns fed."""

    tokens_seen: list[int]
    next_positions: list[int]
    prompt_ends: list[int]
    columns_seen: int
    tokens: list[list[int]] | None


@dataclass(frozen=True)
class Step:
    """One forward pass, as every layer sees it.

    `positions` are those of the step's tokens, EMPTY where padding. `lengths` counts the real ones
    per row, `next_positions` and `end` tell where the rows go on after the step.
    """

    positions: Tensor  # (batch, tokens) int32
    lengths: tuple[int, ...]
    next_positions: RowCounts
    prompt_ends: RowCounts
    end: int


@dataclass(frozen=True)
class Record:
    """What is needed to take a step back, whole or in part.

    `step` counts the tokens that still stand, `undone` those already taken back, per row.
    """

    step: Step
    undone: tuple[int, ...]
    most_held: int
    written: SlotIndex
    state: dict[str, Tensor]
    observed: ObservedColumns | None
    mass: Mass | None
    queries: Queries
    evicted: Tensor | None = None  # (batch, ranked, evicted) slots
    evicted_positions: Tensor | None = None


@dataclass(frozen=True)
class AttentionCall:
    """What the model passes to attention beside queries, keys and values."""

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sink_logits: Tensor | None = None
