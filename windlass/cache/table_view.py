"""What the queries of a step find in a layer's slots."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from windlass.cache.rules import LayerRules
from windlass.cache.slot_table import SlotTable
from windlass.core.limits import MAX_NUMBER
from windlass.core.packed import PackedStates
from windlass.core.places import SlotPlaces
from windlass.core.shapes import IndexKeys, Scores, SlotPositions
from windlass.core.step import Step
from windlass.merge import log_counts


@dataclass(frozen=True)
class TableView:
    """A layer's slots once the tokens of `step` are written, and before any token is evicted.

    It reads the memory of the layer, so it holds until that is written into; `kept` holds for the whole pass.
    """

    step: Step
    keys: PackedStates
    values: PackedStates
    positions: SlotPositions
    log_counts: Scores | None
    places: SlotPlaces | None  # in a text with pictures
    occupancy: int  # tokens of any row at most, or while a graph replays the step
    index_keys: IndexKeys | None = None  # of an indexer, un-rotated
    seen_until: SlotPositions | None = None  # see `AttentionInput`
    has_recalled: bool = False  # whether some free slots have recalled tokens, which the next step overwrites
    _tails: dict[int, Step] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(cls, table: SlotTable, rules: LayerRules, step: Step) -> TableView:
        """That of a table which holds the tokens of `step` already."""
        store, occupancy = table.store, min(table.occupancy_bound + step.graph_headroom, table.slots)
        counts = log_counts(rules.merge, table.state)
        return cls(step, *store.packed(), table.positions, counts, table.places, occupancy, store.index_keys)

    @property
    def counted(self) -> int:
        """Tokens of the fullest row and head; asks the device."""
        return int((self.positions >= 0).sum(-1).max())

    def within_reach(self, rules: LayerRules) -> TableView:
        """With the last query that sees each slot, in rows of different sinks that keep these and the newest tokens."""
        assert self.step.sinks is not None, "rows that are alike"
        assert rules.budget is not None, "a reach without a budget"
        sinks, positions = self.step.sinks.per_slot, self.positions
        until = (positions + rules.budget - sinks).where(positions >= sinks, MAX_NUMBER)
        return replace(self, seen_until=until.to(positions.dtype))

    def kept(self) -> TableView:
        """The same for the rest of the pass, whatever is written and evicted in it. Merges have to be undone first.

        An evicted token's slot is reserved until the pass ends, so keys and values are still there; what a store holds
        in full precision may be overwritten.
        """
        keys, values = (_apart(states, self.has_recalled) for states in (self.keys, self.values))
        return replace(self, keys=keys, values=values, positions=self.positions.clone())

    def tail(self, columns: int) -> TableView:
        """What the last `columns` queries of the step find; the step's `lengths` stay those of the whole."""
        if columns == self.step.positions.shape[1]:
            return self
        assert self.places is None, "a part of a pass with pictures"
        if columns not in self._tails:  # made once: a step asks the device about its columns
            self._tails[columns] = replace(self.step, positions=self.step.positions[:, -columns:].contiguous())
        return replace(self, step=self._tails[columns])


def _apart(states: PackedStates, has_recalled: bool) -> PackedStates:
    """With tokens in full precision in memory of their own; all others, too, where they are joined."""
    ring = states.full_precision
    if has_recalled:
        scales = None if states.scales is None else states.scales.clone()
        states = replace(states, data=states.data.clone(), scales=scales)
    return states if ring is None else replace(states, full_precision=ring.clone())
