"""The latest steps of a layer, and how they are taken back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from windlass.cache.layer_config import LayerConfig
from windlass.cache.merging import MergePlan
from windlass.cache.slot_table import SlotTable, TableSnapshot, free_reserved
from windlass.core.step import HEADROOM, Step, StepRecord
from windlass.core.types import ListedSlots
from windlass.stores.full_precision import FullPrecisionRing


class Checkpoint(NamedTuple):
    """A layer before `step`. A merge plan is added to `merged` before it overwrites slots."""

    step: Step
    table: TableSnapshot
    rules: LayerConfig
    history: History
    merged: list[MergePlan]

    def restore(self, table: SlotTable) -> None:
        """Restore `table` to this checkpoint."""
        for plan in reversed(self.merged):
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
        """The history with one more step."""
        return History(
            (*self.records, record),
            self.has_evicted or record.evicted is not None or bool(record.taken_in),
            self.size + record.size,
            self.reserved + record.evicted_count,
        )

    def without_last(self) -> History:
        """The history without the newest step."""
        last = self.records[-1]
        return History(self.records[:-1], self.has_evicted, self.size - last.size, self.reserved - last.evicted_count)

    def forgotten(self, tokens: int, newest: int, positions: Tensor) -> History:
        """The history with its `newest` records and, before them, those of `tokens` tokens or fewer.

        The slots that older records reserved in `positions`, those of a table's slots, are freed.
        """
        history, released = self.split(tokens, newest)
        for evicted, evicted_positions in released:
            free_reserved(positions, evicted, evicted_positions)
        return history

    def split(self, tokens: int, newest: int = 0) -> tuple[History, tuple[tuple[ListedSlots, ListedSlots], ...]]:
        """The history that `forgotten` returns, and the slots that it frees, with the positions of their tokens."""
        records = self.records
        kept = len(records) - newest
        older = self.size - sum([record.size for record in records[max(kept, 0) :]])
        at, size, reserved, released = 0, self.size, self.reserved, list[tuple[ListedSlots, ListedSlots]]()
        while at < kept and (older > tokens or tokens == 0):  # a step without tokens takes no room
            record = records[at]
            if record.evicted is not None and record.evicted_positions is not None:
                released.append((record.evicted, record.evicted_positions))
            released.extend(record.taken_in)
            at, older, size = at + 1, older - record.size, size - record.size
            reserved -= record.evicted_count
        return (self if at == 0 else History(records[at:], self.has_evicted, size, reserved)), tuple(released)

    def ring_before(self, counts: Sequence[int], ring: FullPrecisionRing) -> dict[str, Tensor] | None:
        """The contents of `ring` before the newest `counts` tokens of each row. None: no pass has set them aside."""
        for record in reversed(self.records):
            kept, counts = record.split(counts)
            if any(kept):
                break
            if not record.is_continued:
                return None if any(counts) or not ring.is_replaced(record.ring) else record.ring
        return None

    def can_roll_back(self, counts: Sequence[int]) -> bool:
        """Return True if the records are enough to roll back these many tokens of each row."""
        for record in reversed(self.records):
            if not any(counts):
                break
            kept, left = record.split(counts)
            if any(kept) and record.queries is not None:
                triples = zip(record.rolled_back, counts, record.step.lengths, strict=True)
                if max(done + min(n, was) for done, n, was in triples) > HEADROOM:
                    return False
            counts = left
        return not any(counts)

    def rolled_back(self, counts: Sequence[int], here: Step, table: SlotTable) -> tuple[History, list[StepRecord]]:
        """Undo in `table` every step with one of the newest `counts` tokens of each row. `here` tells where rows end.

        Returns the history without these steps. Of steps that some rows keep, it returns their records too, oldest
        first, cut to the tokens that have to be written again.
        """
        history, kept_records = self, []
        while any(counts):
            record = history.undo_last(table)
            history = history.without_last()
            kept, counts = record.split(counts)
            if any(kept):
                kept_records.append(record.cut_to(kept, here))
        return history, kept_records[::-1]

    def without_last_pass(self, table: SlotTable) -> tuple[History, dict[str, Tensor]]:
        """Undo the newest pass in `table`. Returns the history before it, and the full-precision tokens before it."""
        history = self
        while True:
            record = history.undo_last(table)
            history = history.without_last()
            if not record.is_continued:
                return history, record.ring

    def undo_last(self, table: SlotTable) -> StepRecord:
        """Undo the newest step in `table`, except for the store's full-precision tokens."""
        record = self.records[-1]
        if record.evicted is not None and record.evicted_positions is not None:
            table.put_back(record.evicted, record.evicted_positions)
            if record.merged_into is not None and record.merged_before is not None:
                table.put_parts_back(record.merged_into, record.merged_before, record.evicted_positions)
        for index, positions in record.taken_in:
            table.put_back(index, positions)
        table.free(record.written)
        table.put_state_back(record.state, record.statistics, record.occupancy_bound)
        return record


def written_again(record: StepRecord, table: SlotTable) -> StepRecord:
    """Write the tokens of an undone step into `table` again. Returns their record for the table as it is now."""
    again = replace(
        record,
        occupancy_bound=table.occupancy_bound,
        statistics=dict(table.statistics),
        state=table.copied_state(),
        ring=table.store.full_precision.tensors,
    )
    table.rewrite(record.written, record.step.positions, record.initial_state)
    table.occupancy_bound += max(record.step.lengths)
    if record.settled is not None:
        table.put_state_back(*record.settled, table.occupancy_bound)
    return again
