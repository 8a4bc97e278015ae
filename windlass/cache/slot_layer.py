"""One attention layer's four steps over its slots: write, attend, observe, evict."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import final

import torch
from torch import Tensor

from windlass import kernels
from windlass.cache.eviction import evict, merge_evicted
from windlass.cache.history import Checkpoint, History
from windlass.cache.layer import Layer
from windlass.cache.observation import observation, observed_columns, slots_view
from windlass.cache.rules import LayerRules
from windlass.cache.slot_table import SlotTable
from windlass.core.attention import AttentionInput, Mass
from windlass.core.record import StepRecord
from windlass.core.rotary_index import EMPTY
from windlass.core.shapes import Attended, NewKeys, NewValues, ObservedColumns, Queries, SlotIndex
from windlass.core.step import HEADROOM, AttentionCall, Limits, Step
from windlass.merge import Merge, log_counts
from windlass.policies.base import Policy, Slots
from windlass.policies.calls import UNKNOWN_STATE, policy_errors, preprocess, scores_of
from windlass.positions.modes import PositionMode
from windlass.positions.rotary import Rotary, Rotation
from windlass.stores.base import Store


@final
class SlotLayer(Layer):
    """Slots of one attention layer; sized from the first keys it sees."""

    def __init__(
        self,
        index: int,
        limits: Limits,
        policy: Policy,
        rotary: Rotary | None,
        store: Store,
        merge: Merge | None = None,
        layers: int = 1,
    ) -> None:
        self.index, self.layers, self.rotary = index, layers, rotary
        self.table = SlotTable(store)
        self.configured_policy, self.configured_merge = policy, merge
        self.rules = LayerRules(policy, merge, limits, limits.budget)
        self.reserve_hint = 0  # slots that are known to be needed soon, so that a layer without budget grows once
        self.history = History()
        self.checkpoint: Checkpoint | None = None

    @property
    def is_empty(self) -> bool:
        return self.table.is_empty

    @property
    def store(self) -> Store:
        """How keys and values are held."""
        return self.table.store

    @property
    def positions(self) -> Tensor:
        """(batch, score_heads, slots): per slot the token's index in its text, negative in free slots."""
        return self.table.positions

    @property
    def policy(self) -> Policy:
        """Which tokens the layer keeps at this moment."""
        return self.rules.policy

    @property
    def budget(self) -> int | None:
        """Most tokens at rest."""
        return self.rules.budget

    @property
    def sliding_window(self) -> int | None:
        """The model's own."""
        return self.rules.sliding_window

    def step(
        self, queries: Queries, keys: NewKeys, values: NewValues, step: Step, mode: PositionMode, call: AttentionCall
    ) -> Attended:
        """Write, attend, observe, evict; returns what the queries read. Until `commit`, `take_back` undoes it."""
        before = None if step.is_captured else self.protect(step)
        if self.is_empty or call.sliding_window != self.sliding_window:  # an import may not have known it
            self.use_sliding_window(call.sliding_window)
        self.make_room(keys, values, step.defer_eviction)
        table, state = self.table, self.table.copied_state()
        if before is not None:
            before.table.copies.extend(zip(table.state.values(), state.values(), strict=True))
        queries, keys, initial_state = preprocess(self.configured_policy, self.index, queries, keys, step.ids)
        positions = step.positions[:, None].expand(-1, table.score_heads, -1)
        written = kernels.first_free(table.positions, keys.shape[2])
        held, statistics, ring = table.occupancy_bound, dict(table.statistics), table.store.full_precision.tensors
        table.write(written, keys, values, positions, initial_state)
        table.occupancy_bound += max(step.lengths)
        observed = observed_columns(step, self.policy.observed_queries)
        out, mass = self.attend(queries, step, mode, call, observed)
        record = StepRecord(
            step,
            (0,) * len(step.lengths),
            held,
            statistics,
            written,
            state,
            ring,
            initial_state,
            observed,
            mass,
            queries.detach() if mass is not None else None,
        )
        self.observe_and_evict(record)
        return out

    def protect(self, step: Step) -> Checkpoint:
        """Note what the layer is before anything changes, so that `take_back` finds it again."""
        table, history = self.table.snapshot(), self.history
        if step.positions.shape[1] > HEADROOM:  # a long step forgets earlier ones, which may be large
            history = History(has_evicted=history.has_evicted)
            table.copies[0][1].clamp_(min=EMPTY)
        self.checkpoint = Checkpoint(step, table, self.rules, history, [])
        return self.checkpoint

    def commit(self) -> None:
        self.checkpoint = None

    def take_back(self, step: Step) -> None:
        checkpoint, records = self.checkpoint, self.history.records
        if checkpoint is not None and checkpoint.step is step:
            checkpoint.restore(self.table)
            self.rules, self.history, self.checkpoint = checkpoint.rules, checkpoint.history, None
        elif records and records[-1].step is step:
            self.store.full_precision.tensors = records[-1].ring
            self.history.undo_last(self.table)
            self.history = self.history.without_last()

    def observe_and_evict(self, record: StepRecord) -> None:
        """The second half of a step; the record is kept so that the step can be rolled back."""
        if record.mass is not None:
            seen = observation(record, self.policy.observed_queries)
            with policy_errors(self.policy, self.index):
                self.policy.observe(self.slots_at(record.step), seen)
        self.history = self.history.with_record(self._evicted(record))
        is_short = record.step.positions.shape[1] <= HEADROOM
        self.forget_steps(self.rules.rollback if is_short else 0, newest=1)

    def use_sliding_window(self, sliding_window: int | None) -> None:
        """Hold just the sliding window, where that fits in the budget."""
        rules = self.rules.with_sliding_window(sliding_window)
        if rules.is_whole_window:
            self.table.state, self.table.statistics = {}, {}
        self.rules = rules

    def restore_policy(self) -> None:
        """Go by the cache's own policy, which has observed nothing yet, where just the sliding window was held."""
        self.rules = replace(self.rules, policy=self.configured_policy, merge=self.configured_merge)
        if self.policy.needs.per_head:
            self.table.split_heads()
        self.table.keep_state(self.rules.state, UNKNOWN_STATE)

    def append(self, keys: NewKeys, values: NewValues, positions: Tensor, sliding_window: int | None) -> SlotIndex:
        """Write tokens that attend to nothing: (batch, score_heads, tokens) `positions`, EMPTY for none.

        Returns the slots they got. What exceeds the budget is evicted at the next step.
        """
        if self.is_empty:
            self.use_sliding_window(sliding_window)
        self.make_room(keys, values, defer_eviction=False)
        positions = positions.expand(-1, self.table.score_heads, -1)
        written = kernels.first_free(self.positions, keys.shape[2])
        self.table.write(written, keys, values, positions, {})
        self.table.occupancy_bound += int((positions >= 0).sum(-1).max())
        self.forget_steps(0)
        return written

    def make_room(self, keys: NewKeys, values: NewValues, defer_eviction: bool) -> None:
        """Slots for the new tokens: allocate, grow, or pack once decode begins."""
        rules, table, tokens = self.rules, self.table, keys.shape[2]
        is_decode = tokens <= HEADROOM
        if not is_decode or table.slots - table.occupancy_bound - self.history.reserved < tokens:
            self.forget_steps(rules.rollback if is_decode else 0)
        wanted = rules.slots_for(tokens, table.slots, table.occupancy_bound, self.reserve_hint, defer_eviction)
        if self.is_empty:
            table.allocate(keys, values, wanted, self.policy.needs.per_head, HEADROOM + rules.limits.rollback)
            table.keep_state(rules.state, {})
        elif wanted != table.slots:
            self.resize(wanted)

    def resize(self, slots: int) -> None:
        """Pack the held tokens into the first of `slots` slots; earlier steps can't be rolled back."""
        self.forget_steps(0)
        self.table.resize(slots)

    def attend(
        self, queries: Queries, step: Step, mode: PositionMode, call: AttentionCall, observed: ObservedColumns | None
    ) -> tuple[Attended, Mass | None]:
        """What the queries read of the slots, and the attention that each slot got from the `observed` ones."""
        table, tables, index, tokens = self.table, None, None, queries.shape[2]
        if self.rotary is not None:
            index = mode.rotary_index(table.positions, step.positions)
            held = min(table.occupancy_bound + step.graph_headroom, table.slots)
            length = mode.bound(step.end, held, tokens)
            tables = self.rotary.tables(length, queries.device, kernels.table_dtype(queries))
        wanted = self.policy.observed_queries
        return kernels.attend(
            AttentionInput(
                queries,
                table.store.packed_keys(),
                table.store.packed_values(),
                table.positions,
                step.positions,
                index,
                tables,
                call.scale,
                self.rules.visibility,
                softcap=call.softcap,
                sink_logits=call.sink_logits,
                log_counts=log_counts(self.rules.merge, table.state),
                observed=observed,
                is_rest_wanted=wanted is None and observed is not None and observed.shape[1] < tokens,
            )
        )

    def _evicted(self, record: StepRecord) -> StepRecord:
        """Free the tokens over budget that rank lowest; returns the record with what was freed."""
        rules, step = self.rules, record.step
        if rules.budget is None or step.defer_eviction or self.table.occupancy_bound <= rules.budget:
            return record
        record = evict(self.table, rules, record, scores_of(rules.policy, self.index, self.slots_at(step)))
        return record if rules.merge is None else merge_evicted(self.table, rules, record, self.checkpoint)

    def slots_at(self, step: Step) -> Slots:
        """The layer as a policy sees it after `step`."""
        rotation = Rotation(self.rotary, step.end, self.positions.device)
        return slots_view(self.table, self.rules.limits, rotation, step, self.index, self.layers)

    @property
    def is_lossless(self) -> bool:
        """Whether nothing but the tokens' own slots remembers that they were written."""
        return not self.history.has_evicted and self.rules.is_lossless

    def forget_steps(self, tokens: int, newest: int = 0) -> None:
        """Let only the `newest` steps, and before them those of `tokens` tokens or fewer, be rolled back."""
        self.history = self.history.forgotten(tokens, newest, self.table)

    def can_roll_back(self, counts: Sequence[int]) -> bool:
        return self.is_lossless or self.history.can_roll_back(counts)

    def holds_full_precision(self, counts: Sequence[int]) -> bool:
        """Whether the store still holds in full precision what it is to hold so without the newest `counts` tokens."""
        return self.history.is_last_step(counts) or self.store.full_precision.can_roll_back(counts)

    def roll_back(self, counts: Sequence[int], here: Step) -> None:
        if self.history.is_last_step(counts):
            self.store.full_precision.tensors = self.history.records[-1].ring
        else:
            self.store.full_precision.roll_back(counts)
        if self.is_lossless:
            self.edit(lambda positions: torch.where(positions >= here.next_positions[:, None, None], EMPTY, positions))
            return
        while any(counts):
            record = self.history.undo_last(self.table)
            self.history = self.history.without_last()
            kept, counts = record.split(counts)
            if any(kept):  # observe and evict again, as if only these had come
                record = record.cut_to(kept, here)
                positions = record.step.positions[:, None].expand_as(record.written)
                self.table.rewrite(record.written, positions, record.initial_state)
                self.table.occupancy_bound += max(kept)
                self.observe_and_evict(record)

    def edit(self, change: Callable[[Tensor], Tensor], row: int | None = None) -> None:
        """Replace the positions of one row, or of all; earlier steps can't be rolled back after it."""
        if self.is_empty:
            return
        self.forget_steps(0)
        rows = slice(None) if row is None else slice(row, row + 1)
        self.positions[rows] = change(self.positions[rows]).to(torch.int32)
        self.table.count()

    def load(self, tensors: dict[str, Tensor], sliding_window: int | None, has_evicted: bool) -> None:
        """Take what `tensors` gave into a layer that is empty."""
        self.use_sliding_window(sliding_window)
        self.table.load(tensors, self.rules.state)
        self.history = History(has_evicted=has_evicted)

    def select_rows(self, rows: Tensor) -> None:
        if not self.is_empty:
            self.forget_steps(0)
            self.table.select_rows(rows)

    def copy_row(self, source: int, target: int) -> None:
        if not self.is_empty:
            self.forget_steps(0)
            self.table.copy_row(source, target)

    def tensors(self) -> dict[str, Tensor]:
        return self.table.tensors()
