"""The latest steps of a layer, and how they are taken back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from windlass.cache.rules import LayerRules
from windlass.cache.slot_table import SlotTable, TableSnapshot
from windlass.core.record import StepRecord
from windlass.core.step import HEADROOM, Step
from windlass.merge import MergePlan


@dataclass(frozen=True)
class Checkpoint:
    """What a layer was before `step`. A merge is noted in `merged` before it overwrites slots."""

    step: Step
    table: TableSnapshot
    rules: LayerRules
    history: History
    merged: list[MergePlan] = field(default_factory=list)

    def restore(self, table: SlotTable) -> None:
        """Let `table` be what it was."""
        for plan in self.merged:
            plan.revert(table.store, table.state)
        table.restore(self.table)


@dataclass(frozen=True)
class History:
    """Records of the latest steps, the newest last. A change gives another history."""

    records: tuple[StepRecord, ...] = ()
    has_evicted: bool = False

    @property
    def reserved(self) -> int:
        """The most slots of a row that are reserved for evicted tokens."""
        return sum(record.evicted_count for record in self.records)

    def with_record(self, record: StepRecord) -> History:
        """With one more step."""
        return History((*self.records, record), self.has_evicted or record.evicted is not None)

    def without_last(self) -> History:
        """Without the newest step."""
        return History(self.records[:-1], self.has_evicted)

    def forgotten(self, tokens: int, newest: int, table: SlotTable) -> History:
        """With its `newest` records and, before them, those of `tokens` tokens or fewer.

        What the others reserved in `table` is freed.
        """
        at, held = max(len(self.records) - newest, 0), 0
        while at > 0 and held + self.records[at - 1].size <= tokens:
            at -= 1
            held += self.records[at].size
        for record in self.records[:at]:
            if record.evicted is not None and record.evicted_positions is not None:
                table.free_reserved(record.evicted, record.evicted_positions)
        return self if at == 0 else History(self.records[at:], self.has_evicted)

    def is_last_step(self, counts: Sequence[int]) -> bool:
        """Whether these many tokens of each row are those of the newest step."""
        return bool(self.records) and self.records[-1].step.lengths == tuple(counts)

    def can_roll_back(self, counts: Sequence[int]) -> bool:
        """Whether the records tell how to roll these many tokens of each row back."""
        for record in reversed(self.records):
            kept, left = record.split(counts)
            if any(kept):
                gone = max(done + n for done, n in zip(record.rolled_back, counts, strict=True))
                return not any(left) and (record.mass is None or gone <= HEADROOM)
            counts = left
        return not any(counts)

    def undo_last(self, table: SlotTable) -> StepRecord:
        """Take the newest step out of `table`, but for what its store holds in full precision."""
        record = self.records[-1]
        if record.evicted is not None and record.evicted_positions is not None:
            table.put_back(record.evicted, record.evicted_positions)
        if record.merged_into is not None and record.merged_before is not None:
            table.store.put(record.merged_into, record.merged_before)
        table.free(record.written)
        table.put_state_back(record.state, record.statistics, record.occupancy_bound)
        return record
