"""What travels through a step: the limits, the step itself, the model's call, and the way back."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from windlass.core.errors import UsageError
from windlass.core.shapes import ObservedColumns, Queries, RowCounts, SlotIndex, TokenIds
from windlass.kernels.reference import Mass

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MOST = 2**30  # positions are 32-bit
MOST_WINDOW = 64  # of the default window
SPARE = 16  # free slots of a layer in decode: the longest step it takes without growing


def outlasting(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Let what `function` keeps be changed later, though it is called under `torch.inference_mode`."""
    return torch.inference_mode(False)(torch.no_grad()(function))


@dataclass(frozen=True)
class Limits:
    """What the cache asks of every layer; see `KVCache`."""

    budget: int | None
    sinks: int
    window: int
    chunk: int
    rollback: int


def checked_limits(budget: int | None, sinks: int, window: int | None, chunk: int, batch: int, rollback: int) -> Limits:
    """The limits, with a window where None was given. Raises: UsageError, see `KVCache`."""
    least = {"budget": 1, "sinks": 0, "window": 1, "chunk": 1, "batch": 1, "rollback": 0}
    given = {"budget": budget, "sinks": sinks, "window": window, "chunk": chunk, "batch": batch, "rollback": rollback}
    for name, value in given.items():
        if value is not None and not least[name] <= value <= MOST:
            raise UsageError(f"{name} must be from {least[name]} to {MOST}, got {value}")
    if window is None:
        window = MOST_WINDOW if budget is None else max(1, min(MOST_WINDOW, (budget - sinks) // 4))
    if budget is not None and budget < sinks + window + 1:
        raise UsageError(
            f"budget ({budget} tokens) must be at least sinks ({sinks}) + window ({window}) + 1, "
            f"which is {sinks + window + 1}; raise budget, or lower sinks or window"
        )
    return Limits(budget, sinks, window, chunk, rollback)


@dataclass(frozen=True)
class Step:
    """One forward pass, as every layer sees it.

    `positions` are those of the step's tokens, EMPTY where padding, and `ids` their ids, if known. `lengths`
    counts the real ones per row, `next_positions` and `end` tell where the rows go on after the step. A step
    that `is_reread` shows a text to the policy for a second time and leaves nothing behind. `ahead` is how many
    more tokens may come before anyone looks at these numbers again: `end` counts them.
    """

    positions: Tensor  # (batch, tokens) int32
    lengths: tuple[int, ...]
    next_positions: RowCounts
    prompt_ends: RowCounts
    end: int
    ids: TokenIds | None = None
    is_reread: bool = False
    ahead: int = 0


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
    statistics: dict[str, Tensor]  # the tensors of before the step: none is ever written to
    copies: dict[str, Tensor]  # of the store, see `Exact`
    observed: ObservedColumns | None
    mass: Mass | None
    queries: Queries | None  # kept only if a policy is shown them, or a merge asks
    scale: float = 1.0  # of their logits
    born: dict[str, Tensor] = field(default_factory=dict)  # state that its tokens came with
    cells: Tensor | None = None  # (batch, kv_heads, evicted) slots that evicted tokens joined, and what was there
    cells_before: dict[str, Tensor] | None = None
    evicted: Tensor | None = None  # (batch, ranked, evicted) slots
    evicted_positions: Tensor | None = None
    freed: int = 0  # most tokens of a row that were evicted

    @property
    def size(self) -> int:
        """Tokens written or slots reserved, whichever is more: what the record takes of the spare slots."""
        return max(self.freed, *self.step.lengths)


@dataclass(frozen=True)
class AttentionCall:
    """What the model passes to attention beside queries, keys and values."""

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sink_logits: Tensor | None = None
