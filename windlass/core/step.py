"""One forward pass with a cache: its limits, how it is taken, and what the model asks of its attention."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, ParamSpec, TypeVar

import torch
from torch import Tensor

from windlass.core.shapes import RowCounts, TokenIds

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

MAX_NUMBER: Final = 2**30  # positions are 32-bit
MAX_DEFAULT_WINDOW: Final = 64
HEADROOM: Final = 16  # free slots of a layer in decode: the longest step it takes without growing


def no_inference_mode(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`function`, whose tensors may be changed later even if it is called under `torch.inference_mode`."""
    return torch.inference_mode(False)(torch.no_grad()(function))


@dataclass(frozen=True)
class Limits:
    """What the cache asks of every layer; see `KVCache`."""

    budget: int | None
    sinks: int
    window: int
    chunk: int
    rollback: int


@dataclass(frozen=True)
class Step:
    """The tokens of one forward pass, as every layer sees them.

    `positions` are those of the step's tokens, EMPTY where padding, and `ids` their ids, if known. `lengths`
    counts the tokens per row. `next_positions` and `end` tell where the rows go on after the step.
    """

    positions: Tensor  # (batch, tokens) int32 or int64
    lengths: tuple[int, ...]
    next_positions: RowCounts
    prompt_ends: RowCounts
    end: int
    ids: TokenIds | None = None
    is_second_pass: bool = False
    """Whether the policy observes a text that was read before; the layers then hold what they held."""
    defer_eviction: bool = False
    """Whether all tokens are held, whatever the budget, until `compress.cut_to_budget`."""
    graph_headroom: int = 0
    """Further decode steps for which this step must stay valid when a graph replays it; included in `end`."""
    is_captured: bool = False
    """Whether the step is being recorded as a graph: nothing is done then, so nothing has to be taken back."""


@dataclass(frozen=True)
class Pass:
    """How the next forward pass is taken. By default it reads the tokens it is fed, and evicts.

    `step` was prepared by the caller, who knows the `token_ids` of each row, if they are on the host already:
    then nothing is read back from the device. The other fields are those of the `Step` that is made without one.
    """

    step: Step | None = None
    token_ids: Sequence[Sequence[int]] | None = None
    is_second_pass: bool = False
    defer_eviction: bool = False


READ: Final = Pass()


@dataclass(frozen=True)
class AttentionCall:
    """What the model passes to attention beside queries, keys and values."""

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sink_logits: Tensor | None = None
