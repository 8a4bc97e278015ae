"""The latest steps of a layer, and how they are taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from windlass.cache.rules import LayerRules
from windlass.cache.slot_table import SlotTable, TableSnapshot
from windlass.core.record import StepRecord
from windlass.core.step import HEADROOM, Step
from windlass.merge import MergePlan


class Checkpoint(NamedTuple):
    """What a layer was before `step`. A merge is noted in `merged` before it overwrites slots."""

    step: Step
    table: TableSnapshot
    rules: LayerRules
    history: History
    merged: list[MergePlan]

    def restore(self, table: SlotTable) -> None:
        """Let `table` be what it was."""
        for plan in self.merged:
            plan.revert(table.store, table.state)
        table.restore(self.table)


class History(NamedTuple):
    """Records of the latest steps, the newest last. A change gives another history.

    `size` is the sum of the records' sizes, and `reserved` the most slots of a row that are reserved for the
    tokens that they evicted.
    """

    records: tuple[StepRecord, ...] = ()
    has_evicted: bool = False
    size: int = 0
    reserved: int = 0

    def with_record(self, record: StepRecord) -> History:
        """With one more step."""
        return History(
            (*self.records, record),
            self.has_evicted or record.evicted is not None,
            self.size + record.size,
            self.reserved + record.evicted_count,
        )

    def without_last(self) -> History:
        """Without the newest step."""
        last = self.records[-1]
        return History(self.records[:-1], self.has_evicted, self.size - last.size, self.reserved - last.evicted_count)

    def forgotten(self, tokens: int, newest: int, table: SlotTable) -> History:
        """With its `newest` records and, before them, those of `tokens` tokens or fewer.

        What the others reserved in `table` is freed.
        """
        kept = len(self.records) - newest
        older = self.size - sum(record.size for record in self.records[max(kept, 0) :])
        at, size, reserved = 0, self.size, self.reserved
        while at < kept and older > tokens:
            record = self.records[at]
            if record.evicted is not None and record.evicted_positions is not None:
                table.free_reserved(record.evicted, record.evicted_positions)
            at, older, size = at + 1, older - record.size, size - record.size
            reserved -= record.evicted_count
        return self if at == 0 else History(self.records[at:], self.has_evicted, size, reserved)

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
