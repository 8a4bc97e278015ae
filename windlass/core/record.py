"""What a layer keeps of a step, so that its tokens can be rolled back."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from windlass.core.attention import Mass
from windlass.core.rotary_index import EMPTY
from windlass.core.shapes import ObservedColumns, Queries, SlotIndex
from windlass.core.step import Step


class Settled(NamedTuple):
    """What a policy had noted of a step when it had observed all queries but those of the record."""

    state: dict[str, Tensor]
    statistics: dict[str, Tensor]


@dataclass(frozen=True)
class StepRecord:
    """What one step changed in a layer, and what was there before.

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
    initial_state: dict[str, Tensor] = field(default_factory=dict)  # that the step's tokens came with
    observed: ObservedColumns | None = None
    mass: Mass | None = None
    queries: Queries | None = None  # the observed ones, newest first; None for a policy that observes nothing
    settled: Settled | None = None
    evicted: Tensor | None = None  # (batch, score_heads, evicted) slots
    evicted_positions: Tensor | None = None
    evicted_count: int = 0  # the most of any row
    merged_into: Tensor | None = None  # (batch, score_heads, evicted) slots that took evicted tokens
    merged_before: dict[str, Tensor] | None = None  # the store's parts there
    taken_in: tuple[tuple[Tensor, Tensor], ...] = ()  # slots of tokens that newer ones took in, their positions
    is_continued: bool = False  # whether it is of the same pass as the record before it

    @property
    def size(self) -> int:
        """Tokens written or slots reserved, whichever is more: what the record takes of the headroom."""
        return max(self.evicted_count, *self.step.lengths)

    def split(self, counts: Sequence[int]) -> tuple[list[int], list[int]]:
        """Of `counts` tokens to roll back: how many of each row stay, and how many are left for earlier steps."""
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
