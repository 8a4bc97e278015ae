"""One forward pass with a cache: its limits, positions, and the record that undoes it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Final, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from windlass.core.inputs import Mass
from windlass.core.parse import MAX_NUMBER
from windlass.core.positions import EMPTY, Places, pinned
from windlass.core.types import (
    ObservedColumns,
    Picker,
    PinnedRanges,
    Queries,
    QueryPositions,
    RowCounts,
    SlotIndex,
    SlotPositions,
    TokenIds,
)

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

HEADROOM: Final = 16  # free slots of a layer in decode: the longest step it takes without growing


def no_inference_mode(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """`function`, whose tensors may be changed later even if it is called under `torch.inference_mode`."""
    outside: Callable[Arguments, Result] = torch.inference_mode(False)(torch.no_grad()(function))

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        # Modes are changed only if needed, because each layer of a decode step calls this.
        is_outside = not (torch.is_grad_enabled() or torch.is_inference_mode_enabled())
        return function(*args, **kwargs) if is_outside else outside(*args, **kwargs)

    return call


@dataclass(frozen=True)
class RowSinks:
    """How many of its first positions each row never evicts, on the host and on the device.

    `pins` are ranges [start, stop) of further positions that it never evicts (None: no row has any).
    """

    counts: tuple[int, ...]
    tensor: RowCounts
    pins: PinnedRanges | None = None

    def repeated(self, times: int) -> "RowSinks":
        """The same rows, so many times one after the other."""
        pins = None if self.pins is None else self.pins.repeat(times, 1, 1)
        return RowSinks(self.counts * times, self.tensor.repeat(times), pins)

    @property
    def per_slot(self) -> Tensor:
        """(batch, 1, 1), beside the positions of slots."""
        return self.tensor[:, None, None]

    def pinned(self, positions: SlotPositions) -> Tensor:
        """A mask of the positions (batch, score_heads, slots) that are pinned."""
        return torch.zeros_like(positions, dtype=torch.bool) if self.pins is None else pinned(positions, self.pins)

    def kept_before(self, positions: SlotPositions) -> Tensor:
        """The number of sinks and pinned positions before each of these, which are no sinks."""
        count = self.per_slot.expand_as(positions)
        for bounds in () if self.pins is None else self.pins.unbind(1):
            start, stop = (each[:, None, None] for each in bounds.unbind(1))
            count = count + (torch.minimum(positions, stop) - start).clamp(min=0)
        return count


@dataclass(frozen=True)
class Limits:
    """Limits that the cache sets for every layer: see `KVCache`. A step may have other `sinks` for each row."""

    budget: int | None
    sinks: int
    window: int
    chunk: int
    rollback: int
    recall: int = 0


@dataclass(frozen=True)
class Step:
    """The tokens of one forward pass, as every layer sees them.

    `positions` are those of the step's tokens, EMPTY where padding, and `ids` their ids, if known. `lengths`
    counts the tokens per row. `next_positions` and `end` tell where the rows go on after the step. The last
    `drafts` columns may turn out wrong and be rolled back: they belong to no prompt.
    """

    positions: Tensor  # (batch, tokens) int32 or int64
    lengths: tuple[int, ...]
    next_positions: RowCounts
    prompt_ends: RowCounts
    end: int
    ids: TokenIds | None = None
    is_second_pass: bool = False
    """True if the pass reads a text again for the policy to observe. The layers then keep their tokens as they are."""
    defer_eviction: bool = False
    """True if no token is evicted until `compress.cut_to_budget`, at any budget."""
    graph_headroom: int = 0
    """Number of further decode steps for which a graph may replay this step. `end` includes them."""
    is_captured: bool = False
    """True if the step is recorded as a graph. Recording runs nothing, so it needs no rollback."""
    drafts: int = 0
    is_prompt: bool = False
    """True if the step is a chunk of a prompt of any length. Its rows may have few tokens."""
    places: Places | None = None
    """Places of the tokens in a text with pictures (None: their positions)."""
    is_rewrite: bool = False
    """True if the tokens are part of the text already. They overwrite the tokens at their positions."""
    is_insert: bool = False
    """True if the tokens fill a gap of the text, which goes on behind them."""
    sinks: RowSinks | None = None
    """Sinks of each row (None: all rows have the sinks of the limits)."""
    may_have_gaps: bool = False
    """True if edits may have left gaps between the positions of a row's tokens, or put them closer together."""

    def repeated(self, times: int) -> "Step":
        """A step of the same rows, so many times one after the other."""
        if times == 1:
            return self
        return replace(
            self,
            positions=self.positions.repeat(times, 1),
            lengths=self.lengths * times,
            next_positions=self.next_positions.repeat(times),
            prompt_ends=self.prompt_ends.repeat(times),
            ids=None,
            sinks=None if self.sinks is None else self.sinks.repeated(times),
        )

    @cached_property
    def known_places(self) -> Places:
        """Where the tokens are read, in any text."""
        return self.places or Places.of_text(self.positions, 0, self.end)

    @cached_property
    def prompt_lengths(self) -> tuple[int, ...]:
        """Per row, the tokens that belong to a prompt: all of several columns, but for drafts."""
        columns = self.positions.shape[1] - self.drafts
        if columns <= 1:
            return (0,) * len(self.lengths)
        return tuple((self.positions[:, :columns] >= 0).sum(-1).tolist()) if self.drafts else self.lengths

    @property
    def is_decode(self) -> bool:
        """Return True if no part of the step is a chunk of a prompt, except a short one."""
        return self.positions.shape[1] - self.drafts <= HEADROOM

    @cached_property
    def is_token(self) -> bool:
        """Return True if it is at most one token per row, without exceptions: a step for a decode kernel."""
        is_plain = not (self.is_captured or self.is_second_pass or self.is_rewrite or self.is_insert)
        return is_plain and not self.defer_eviction and self.positions.shape[1] == 1 and self.places is None

    @cached_property
    def is_decode_token(self) -> bool:
        """Return True if it is at most one token per row, behind all others, before which every row was cut."""
        is_last = not (self.is_second_pass or self.is_rewrite or self.is_insert)
        return is_last and not self.defer_eviction and self.positions.shape[1] == 1

    @cached_property
    def first_columns(self) -> ObservedColumns:
        """In a step of one column: that column of each row, -1 where it is padding."""
        return self.positions.clamp(max=0)

    @cached_property
    def column_spans(self) -> list[tuple[int, int]]:
        """Per column the lowest and the highest position of its tokens.

        Where it has none, the first is above all positions. Asks the device, once for all layers.
        """
        lowest = self.positions.where(self.positions >= 0, MAX_NUMBER).amin(0)
        return list(zip(lowest.tolist(), self.positions.amax(0).tolist(), strict=True))

    @cached_property
    def parts(self) -> tuple["Step", ...]:
        """The step as steps of one column each, the chunk of a prompt that it begins with in one piece.

        Asks the device which columns are padding, once for all layers.
        """
        columns = self.positions.shape[1]
        first = 1 if self.is_decode and not self.is_prompt else columns - self.drafts
        if columns == first:
            return (self,)
        counts = (self.positions >= 0).cumsum(1)  # (batch, columns): tokens up to and with each column
        ends = (self.next_positions - counts[:, -1])[:, None] + counts
        highest, told = ends.amax(0).tolist(), counts.T.tolist()
        parts, start, before = [], 0, [0] * len(self.lengths)
        for stop in range(first, columns + 1):
            last = stop - 1
            parts.append(
                Step(
                    positions=self.positions[:, start:stop].contiguous(),  # as kernels read them
                    lengths=tuple(now - was for now, was in zip(told[last], before, strict=True)),
                    next_positions=ends[:, last].contiguous(),
                    prompt_ends=self.prompt_ends.minimum(ends[:, last]),
                    end=highest[last],
                    ids=None if self.ids is None else self.ids[:, start:stop],
                    places=None if self.places is None else self.places.columns(start, stop),
                    sinks=self.sinks,
                )
            )
            start, before = stop, told[last]
        return tuple(parts)


@dataclass(frozen=True)
class Pass:
    """How the next forward pass is taken. By default it reads the tokens it is fed, and evicts.

    `step` was prepared by the caller, who knows the `token_ids` of each row, if they are on the host already:
    then nothing is read back from the device. The other fields are those of the `Step` that is made without one.
    `drafts` is the most of them: a pass has at least one column before its drafts.
    """

    step: Step | None = None
    token_ids: Sequence[Sequence[int]] | None = None
    is_second_pass: bool = False
    defer_eviction: bool = False
    is_prompt: bool = False
    drafts: int = 0


READ: Final = Pass()
PROMPT: Final = Pass(is_prompt=True)


@dataclass(frozen=True)
class AttentionCall:
    """Arguments that the model passes to attention beside queries, keys and values.

    `sliding_window`, `attention_chunk`: see `Visibility`. `sees_to`: see `AttentionInput`, for all columns of the step.
    `picker`: the indexer that picks which slots each query reads (None: it reads all that it sees).
    """

    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    sink_logits: Tensor | None = None
    sees_to: QueryPositions | None = None
    attention_chunk: int | None = None
    picker: Picker | None = None

    @property
    def index_keys(self) -> Tensor | None:
        """(batch, tokens, channels): the new tokens' keys of the indexer, un-rotated."""
        return None if self.picker is None else self.picker.keys

    def split(self, columns: Sequence[int]) -> list["AttentionCall"]:
        """The calls of a step's parts, of so many columns each."""
        if self.sees_to is None and self.picker is None:
            return [self] * len(columns)
        parts, start = [], 0
        for count in columns:
            stop = start + count
            sees_to = None if self.sees_to is None else self.sees_to[:, start:stop]
            picker = None if self.picker is None else self.picker.columns(start, stop)
            parts.append(replace(self, sees_to=sees_to, picker=picker))
            start = stop
        return parts


class PolicyCheckpoint(NamedTuple):
    """State of a policy after it had observed all queries of a step but those of the record."""

    state: dict[str, Tensor]
    statistics: dict[str, Tensor]


@dataclass(frozen=True)
class StepRecord:
    """Changes of one step in a layer, and the values before it.

    `step` counts the tokens that still stand, `rolled_back` those that no longer do, per row. The tensors of
    `state`, `statistics` and `ring` are of before the step: nobody writes to them.
    """

    step: Step
    rolled_back: tuple[int, ...]
    occupancy_bound: int  # before the step
    statistics: dict[str, Tensor]
    written: SlotIndex
    state: dict[str, Tensor] = field(default_factory=dict)
    ring: dict[str, Tensor] = field(default_factory=dict)  # of the store's full-precision tokens
    initial_state: dict[str, Tensor] = field(default_factory=dict)  # of the step's tokens
    observed: ObservedColumns | None = None
    mass: Mass | None = None
    queries: Queries | None = None  # the observed queries, newest first (None: the policy observes nothing)
    settled: PolicyCheckpoint | None = None
    evicted: Tensor | None = None  # (batch, score_heads, evicted) slots
    evicted_positions: Tensor | None = None
    evicted_count: int = 0  # maximum over rows
    merged_into: Tensor | None = None  # (batch, score_heads, evicted) slots that took evicted tokens
    merged_before: dict[str, Tensor] | None = None  # the store's parts there
    taken_in: tuple[tuple[Tensor, Tensor], ...] = ()  # slots of tokens that joined newer ones, and their positions
    is_continued: bool = False  # whether it belongs to the same pass as the record before it

    @property
    def size(self) -> int:
        """Tokens written or slots reserved, whichever is more: the headroom that the record takes."""
        return max(self.evicted_count, *self.step.lengths)

    def split(self, counts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Split `counts` tokens to roll back: how many of each row stay, and how many are left for earlier steps."""
        pairs = list(zip(self.step.lengths, counts, strict=True))
        return [max(was - n, 0) for was, n in pairs], [max(n - was, 0) for was, n in pairs]

    def cut_to(self, kept: Sequence[int], here: Step) -> "StepRecord":
        """The record of a step of only the first `kept` tokens of each row, which has evicted nothing yet."""
        positions = self.step.positions
        positions = positions.where(positions < here.next_positions[:, None], EMPTY)
        triples = zip(self.rolled_back, self.step.lengths, kept, strict=True)
        ends = self.step.next_positions.minimum(here.next_positions)
        prompt_ends = self.step.prompt_ends.minimum(here.prompt_ends)
        return replace(
            self,
            step=replace(here, positions=positions, lengths=tuple(kept), next_positions=ends, prompt_ends=prompt_ends),
            rolled_back=tuple(done + was - n for done, was, n in triples),
            evicted=None,
            evicted_positions=None,
            evicted_count=0,
            merged_into=None,
            merged_before=None,
            taken_in=(),
        )
