"""A step of one layer, before it is taken."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.cache.recall import TOKEN_INDEX
from windlass.cache.rules import LayerRules
from windlass.cache.shares import Heads
from windlass.cache.slot_table import SlotTable
from windlass.core.decode import DecodeInput
from windlass.core.limits import MAX_NUMBER
from windlass.core.shapes import SlotIndex
from windlass.core.step import AttentionCall, Step
from windlass.positions.base import PositionMode
from windlass.positions.rotary import Rotary

Released = tuple[tuple[SlotIndex, SlotIndex], ...]  # slots that are to be free, and what stood there


class LayerStep(NamedTuple):
    """A step of a layer, or of some kv heads: slots and rules, new queries, keys and values, and how they are read.

    `has_evicted`: whether any token of any row may have left its slot before the step.
    """

    table: SlotTable
    rules: LayerRules
    rotary: Rotary | None
    states: tuple[Tensor, Tensor, Tensor]
    step: Step
    mode: PositionMode
    call: AttentionCall
    layer: int
    heads: Heads | None
    has_evicted: bool

    @property
    def bound(self) -> int:
        """Tokens of any row at most once the new ones are written."""
        return self.table.occupancy_bound + max(self.step.lengths)

    @property
    def is_recalling(self) -> bool:
        """Whether tokens are to be looked for that were evicted, of whichever row.

        The lengths of rows do not tell: slots that one row fills hide how many tokens another one has lost. A row that
        has lost none finds none.
        """
        # A graph serves steps before and after the first eviction: until then all that it finds is in slots. The step
        # that comes before a graph is recorded recalls as well, so that all kernels are there.
        is_recorded = self.step.is_captured or self.step.graph_headroom > 0
        recall = self.table.recall
        if recall is None or not (is_recorded or self.has_evicted):
            return False
        # Tokens that joined have left their slots, too, and are in those of others until the budget evicts.
        return not self.rules.joins or max(recall.lengths, default=0) > (self.rules.budget or MAX_NUMBER)

    def split(self, parts: Sequence[Step]) -> list["LayerStep"]:
        """The step in parts of it, one after the other."""
        if len(parts) == 1:
            return [self._replace(step=parts[0])]
        columns = [part.positions.shape[1] for part in parts]
        pieces = zip(*(each.split(columns, 2) for each in self.states), strict=True)
        each = zip(pieces, parts, self.call.split(columns), strict=True)
        return [self._replace(states=states, step=step, call=call) for states, step, call in each]

    def fits(self, reserved: int, reserve_hint: int, longest_decode: int) -> bool:
        """Whether it is one token per row, and the table, with so many slots reserved, is as it should be for it."""
        table, rules = self.table, self.rules
        slots, held = table.slots, table.occupancy_bound
        if not self.step.is_token or slots - held - reserved <= rules.recall_room or not rules.knows(self.call):
            return False
        return slots == rules.slots_for(1, slots, held, reserve_hint, longest_decode, False)

    def given(self, is_observed: bool, is_evicting: bool = False, released: Released = ()) -> DecodeInput:
        """What a kernel is given."""
        (queries, keys, values), table, step = self.states, self.table, self.step
        recall, sinks = table.recall, self.rules.row_sinks(step)
        return DecodeInput(
            queries,
            keys,
            values,
            step.positions,
            table.positions,
            tuple(table.state.values()),
            step.next_positions,
            is_observed=is_observed,
            is_evicting=is_evicting,
            released=released,
            remembered=None if recall is None else torch.tensor(recall.lengths),
            is_recalling=self.is_recalling,
            row_sinks=None if sinks is None else sinks.tensor,
        )

    def remembered(self) -> dict[str, Tensor]:
        """What a kernel tells the slots of the new tokens of the recall store."""
        recall = self.table.recall
        if recall is None:
            return {}
        return {TOKEN_INDEX: torch.tensor(recall.lengths)[:, None, None].float()}
