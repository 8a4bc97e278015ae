"""One attention layer's four steps over its slots: write, attend, observe, evict."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final, final

import torch
from torch import Tensor

from windlass import kernels
from windlass.cache.attention import (
    WriteResult,
    attend,
    observation,
    observed_columns,
    queries_at,
    reserve_joined,
    settle,
    slots_view,
    slots_wanted,
    write_and_attend,
)
from windlass.cache.decode import (
    Backend,
    DecodeKernel,
    FusedStep,
    KernelHandle,
    LayerCall,
    LayerStep,
    StepPart,
    StepPlan,
    put_initial_state,
)
from windlass.cache.history import Checkpoint, History, written_again
from windlass.cache.layer_config import Layer, LayerConfig
from windlass.cache.merging import LayerView, Merge, plan_merge
from windlass.cache.recall import RecallStore
from windlass.cache.shares import Heads
from windlass.cache.slot_table import SlotTable, TableView
from windlass.core.errors import UsageError
from windlass.core.inputs import EvictionInput
from windlass.core.positions import rank_pinned
from windlass.core.step import HEADROOM, AttentionCall, Limits, Step, StepRecord
from windlass.core.types import Attended, NewKeys, NewValues, Queries, Scores, SlotIndex
from windlass.policies.base import Policy, Slots
from windlass.policies.calls import observe, scores_of
from windlass.positions.modes import PositionMode
from windlass.positions.rotary import Rotary, Rotation
from windlass.stores.base import Parts, Store
from windlass.stores.formats import PlainRows


@final
class SlotLayer(Layer):
    """Slots of one attention layer, sized from the first keys it sees."""

    def __init__(
        self,
        index: int,
        limits: Limits,
        policy: Policy,
        rotary: Rotary | None,
        store: Store,
        merge: Merge | None = None,
        layers: int = 1,
        is_shared: bool = False,
        recall: RecallStore | None = None,
        heads: Heads | None = None,
    ) -> None:
        self.index, self.layers, self.heads, self.rotary, self.is_shared = index, layers, heads, rotary, is_shared
        self.table = SlotTable(store, recall)
        self.configured_policy, self.configured_merge = policy, merge
        self.rules = LayerConfig(policy, merge, limits, limits.budget)
        self.longest_decode = HEADROOM  # tokens of one pass
        self.reserve_hint = 0  # slots that are known to be needed soon, so that a layer without budget grows once
        self.history = History()
        self.checkpoint: Checkpoint | None = None
        self.decode_kernel = DecodeKernel(policy)
        self.views: list[TableView] = []  # of the parts of the pass that runs, for the layers that share the slots

    @property
    def is_empty(self) -> bool:
        return self.table.is_empty

    @property
    def store(self) -> Store:
        """The format of keys and values."""
        return self.table.store

    @property
    def positions(self) -> Tensor:
        """(batch, score_heads, slots): per slot the token's index in its text, negative in free slots."""
        return self.table.positions

    @property
    def policy(self) -> Policy:
        """The policy that decides at this moment which tokens the layer keeps."""
        return self.rules.policy

    @property
    def budget(self) -> int | None:
        """Most tokens at rest."""
        return self.rules.budget

    @property
    def sliding_window(self) -> int | None:
        """The model's sliding window in this layer. None: it has none."""
        return self.rules.sliding_window

    def step(self, call: LayerCall) -> Attended:
        """Write, attend, observe, evict. Returns the attention output. Until `commit`, `take_back` undoes the step."""
        layer_step, step = self.layer_step(call), call.step
        if (handle := self.whole_step(layer_step)) is not None:
            self.checkpoint = Checkpoint(step, self.table.unwritten(), self.rules, self.history, [])
            self.history, released = self.history.split(self.rules.limits.rollback)
            return self._taken("fused", StepPart(layer_step, handle, released))
        self._begin(layer_step)
        layer_step = layer_step._replace(rules=self.rules)
        parts = layer_step.split(_parts_of(self.table, self.rules, step, layer_step.is_recalling))
        outs = [self._part_taken(part, is_continued=part is not parts[0]) for part in parts]
        self.forget_steps(self.rules.limits.rollback if step.is_decode else 0, newest=len(parts))
        return outs[0] if len(outs) == 1 else torch.cat(outs, 2)

    def _part_taken(self, layer_step: LayerStep, is_continued: bool) -> Attended:
        layer_step = layer_step._replace(has_evicted=self.history.has_evicted)  # an earlier part may have evicted
        handle = None if self.is_shared else self.decode_kernel.of(layer_step)
        part = StepPart(layer_step, handle, is_continued=is_continued)
        return self._taken(part.backend, part)

    def _taken(self, backend: Backend, part: StepPart) -> Attended:
        """Plan, run, record: the order of every backend."""
        plan = BACKENDS[backend](self, part)
        out = plan.run()
        self.keep_record(plan.record())
        return out

    def _begin(self, layer_step: LayerStep) -> None:
        """Note how to undo the step, and prepare rules and slots for it."""
        step, call, (_, keys, values) = layer_step.step, layer_step.call, layer_step.states
        if not step.is_captured:
            self.protect(step)
        if self.is_empty or not self.rules.knows(call):  # an import may not have known its window
            self.use_sliding_window(call.sliding_window, call.attention_chunk)
        if step.places is not None and not self.rules.has_places:
            self.rules = replace(self.rules, has_places=True)
            if not self.is_empty:
                self.forget_steps(0)
                self.table.keep_places()
        self.longest_decode = max(self.longest_decode, step.positions.shape[1] if step.drafts else 0)
        self.make_room(keys, values, step.is_decode, step.defer_eviction)

    def layer_step(self, call: LayerCall) -> LayerStep:
        """A step of this layer with these queries, keys and values."""
        return LayerStep(
            table=self.table,
            rules=self.rules,
            rotary=self.rotary,
            states=(call.queries, call.keys, call.values),
            step=call.step,
            mode=call.mode,
            call=call.attention,
            layer=self.index,
            heads=self.heads,
            has_evicted=self.history.has_evicted,
        )

    def whole_step(self, layer_step: LayerStep) -> KernelHandle | None:
        """The kernel that does all of a step. None: a kernel alone can't take it."""
        if self.store.full_precision.tensors:
            return None
        prepared = self.token_step(layer_step)
        return prepared if prepared is not None and prepared.is_all(layer_step) else None

    def token_step(self, layer_step: LayerStep) -> KernelHandle | None:
        """The kernel that at least writes and attends in a step of one token per row. None: it needs more room."""
        if self.is_shared or not layer_step.fits(self.history.reserved, self.reserve_hint, self.longest_decode):
            return None
        return self.decode_kernel.of(layer_step, beside_sinks=True)

    def as_rows(self, others: Sequence["SlotLayer"]) -> "SlotLayer":
        """A layer for this one's policy, with the rows of this layer and of `others`. It has no tokens yet."""
        store = PlainRows([each.store for each in (self, *others)]) if others else self.store
        limits, table = self.rules.limits, self.table
        joined = SlotLayer(self.index, limits, self.policy, self.rotary, store, layers=self.layers, heads=self.heads)
        joined.rules, statistics = self.rules, [each.table.statistics for each in (self, *others)]
        joined.table.statistics = {name: torch.cat([each[name] for each in statistics]) for name in table.statistics}
        return joined

    def protect(self, step: Step) -> Checkpoint:
        """Make a checkpoint of the layer before anything changes, for `take_back`."""
        table = self.table.snapshot()
        history = self._history_left(step.positions.shape[1], step.is_decode, table.copies[0][1])
        self.checkpoint = Checkpoint(step, table, self.rules, history, [])
        return self.checkpoint

    def commit(self) -> None:
        self.checkpoint, self.views = None, []

    def take_back(self, step: Step) -> None:
        checkpoint, records, self.views = self.checkpoint, self.history.records, []
        if checkpoint is not None and checkpoint.step is step:
            checkpoint.restore(self.table)
            self.rules, self.history, self.checkpoint = checkpoint.rules, checkpoint.history, None
        elif records and any(records[-1].step is part for part in (step, step.parts[-1])):
            self.history, ring = self.history.without_last_pass(self.table)
            self.store.full_precision.tensors = ring
            self.table.roll_back_recall(step.lengths)

    def observe_and_evict(self, record: StepRecord) -> StepRecord:
        """Take the second half of a step. Returns its record with the evicted tokens."""
        table, rules = self.table, self.rules
        record = reserve_joined(table, rules, record)
        if record.queries is not None:
            seen = observation(record, self.policy.observed_queries)
            observe(self.policy, self.index, self.slots_at(record.step), seen)
        if rules.budget is not None and not record.step.defer_eviction and table.occupancy_bound > rules.budget:
            score = _scores_over_budget(table, rules, self.index, self.slots_at(record.step))
            record = _evict(table, rules, record, score, self.checkpoint)
        return record

    def keep_record(self, record: StepRecord) -> None:
        """Add the record of a step to the history, so that the step can be rolled back."""
        if record.queries is not None and record.written.shape[-1] == len(record.step.lengths) == 1:
            record = replace(record, mass=None, queries=None)  # it is rolled back as a whole
        self.history = self.history.with_record(record)

    def use_sliding_window(self, sliding_window: int | None, attention_chunk: int | None = None) -> None:
        """Hold just the sliding window, or a chunk of attention, where that fits in the budget."""
        rules = self.rules.with_sliding_window(sliding_window, attention_chunk)
        if rules.is_whole_window and not self.is_empty:
            self.table.forget_state()
        self.rules, self.table.recall = rules, self.table.recall if rules.recalls else None

    def make_room(self, keys: NewKeys, values: NewValues, is_decode: bool, defer_eviction: bool) -> None:
        """Provide slots for the new tokens: allocate, grow, or pack once decode begins."""
        rules, table, tokens = self.rules, self.table, keys.shape[2]
        self.history = self._history_left(tokens, is_decode, table.positions)
        decode = self.longest_decode if is_decode else 0
        wanted = slots_wanted(table, rules, self.history, tokens, self.reserve_hint, decode, defer_eviction)
        if self.is_empty:
            table.allocate(keys, values, wanted, self.policy.needs.per_head, HEADROOM + rules.limits.rollback)
            table.keep_state(rules.state, {})
        elif wanted != table.slots:
            self.resize(wanted)

    def _history_left(self, tokens: int, is_decode: bool, positions: Tensor) -> History:
        """The history of steps that can be undone once `tokens` more are written into the free or reserved slots."""
        free = self.table.slots - self.table.occupancy_bound - self.history.reserved - self.rules.recall_room
        if is_decode and free >= tokens:
            return self.history
        return self.history.forgotten(self.rules.limits.rollback if is_decode else 0, 0, positions)

    def resize(self, slots: int) -> None:
        """Pack the held tokens into the first of `slots` slots. Earlier steps can't be rolled back."""
        self.forget_steps(0)
        self.table.resize(slots)

    def slots_at(self, step: Step) -> Slots:
        """The layer as a policy sees it after `step`."""
        rotation = Rotation(self.rotary, step.end, self.positions.device)
        return slots_view(self.table, self.rules.limits, rotation, step, self.index, self.layers, self.heads)

    @property
    def is_lossless(self) -> bool:
        """Return True if a written token has changed nothing but its own slot."""
        return not self.history.has_evicted and self.rules.is_lossless

    def forget_steps(self, tokens: int, newest: int = 0) -> None:
        """Let only the `newest` steps, and before them those of `tokens` tokens or fewer, be rolled back."""
        self.history = self.history.forgotten(tokens, newest, self.positions)

    def can_roll_back(self, counts: Sequence[int]) -> bool:
        """Return True if the newest `counts` tokens of each row can be rolled back, with all their effects."""
        return self.is_lossless or self.history.can_roll_back(counts)

    def holds_full_precision(self, counts: Sequence[int]) -> bool:
        """Return True if the store has all tokens that it would hold in full precision without the newest `counts`."""
        ring = self.store.full_precision
        return ring.can_roll_back(counts) or self.history.ring_before(counts, ring) is not None

    def roll_back(self, counts: Sequence[int], here: Step) -> None:
        """Roll back the newest `counts` tokens of each row. `here` tells where the rows then end.

        Evictions that these tokens caused are undone. Evictions by earlier tokens are not.
        """
        ring, before = self.store.full_precision, self.history.ring_before(counts, self.store.full_precision)
        ring.roll_back(counts)
        self.table.roll_back_recall(counts)
        if before is not None:
            ring.tensors = before
        if self.is_lossless and not self.history.can_roll_back(counts):
            if not self.is_empty:
                self.forget_steps(0)
                self.table.cut(here.next_positions, counts)
            return
        self.history, kept = self.history.rolled_back(counts, here, self.table)  # kept: to be taken again
        ring.roll_back([sum(record.step.lengths[row] for record in kept) for row in range(len(counts))])
        for record in kept:
            ring.roll_back([-n for n in record.step.lengths])
            self.keep_record(self.observe_and_evict(written_again(record, self.table)))

    def lacks_window(self, row: int, end: int) -> bool:
        """Return True if it has evicted tokens of a row that its sliding window would see from `end` on."""
        window = self.sliding_window
        if self.is_empty or window is None or not (self.rules.is_whole_window and self.history.has_evicted):
            return False
        positions = self.table.positions_of(row)
        held = positions[positions >= 0]
        first = int(held.min()) if held.numel() else end
        return end > 0 and first > max(end - window + 1, 0)

    def edit(self, change: Callable[[Tensor], Tensor], row: int | None = None) -> None:
        """Replace the positions of one row, or of all. Earlier steps can't be rolled back after it."""
        if self.is_empty:
            return
        self.forget_steps(0)
        self.table.edit(change, slice(None) if row is None else slice(row, row + 1))

    def load(self, tensors: dict[str, Tensor], rules: LayerConfig, has_evicted: bool, seen: Sequence[int]) -> None:
        """Load the `tensors` of a layer that has `seen` tokens and kept them by `rules` into this empty layer."""
        self.rules, self.table.recall = rules, self.table.recall if rules.recalls else None
        self.table.load(tensors, rules.state, seen)
        self.history = History(has_evicted=has_evicted)

    def select_rows(self, rows: Tensor) -> None:
        if not self.is_empty:
            self.forget_steps(0)
            self.table.select_rows(rows)

    def arrange_rows(self, rows: Sequence[int | None]) -> None:
        """See `SlotTable.arrange_rows`. Earlier steps can't be rolled back after it."""
        if not self.is_empty:
            self.forget_steps(0)
            self.table.arrange_rows(rows)

    def copy_row(self, source: int, target: int) -> None:
        if not self.is_empty:
            self.forget_steps(0)
            self.table.copy_row(source, target)

    def tensors(self) -> dict[str, Tensor]:
        return self.table.tensors()


@final
class GenericStep(StepPlan):
    """A step whose four verbs are taken one by one. With a `handle`, its kernel writes and attends."""

    def __init__(self, layer: SlotLayer, part: StepPart) -> None:
        layer_step, self._layer = part.layer_step, layer
        self._layer_step, self._handle, self._is_continued = layer_step, part.handle, part.is_continued
        self._observed = observed_columns(layer_step.step, layer.policy.observed_queries)
        self._held, self._statistics = layer_step.table.occupancy_bound, dict(layer_step.table.statistics)
        self._state, self._ring = layer_step.table.state, layer_step.table.store.full_precision.tensors
        self._written: WriteResult | None = None

    def run(self) -> Attended:
        layer, layer_step, handle, table = self._layer, self._layer_step, self._handle, self._layer_step.table
        weighed = self._observed if layer.policy.needs.mass else None
        if handle is not None and handle.retention is None:
            done = handle.kernel(layer_step.kernel_input(weighed is not None, False))
            initial = put_initial_state(layer_step, done)
            table.replace(done.slot_positions, done.state, layer_step.bound, layer_step.step)
            self._written = WriteResult(done.written, done.out, done.mass, layer_step.states[0], initial)
            return done.out
        self._state = table.copied_state()
        if layer.checkpoint is not None and not self._is_continued:
            layer.checkpoint.table.copies.extend(zip(table.state.values(), self._state.values(), strict=True))
        table.occupancy_bound = layer_step.bound
        self._written, view = write_and_attend(layer_step, layer.configured_policy, weighed)
        if layer.is_shared:
            layer.views.append(view.kept())
        return self._written.out

    def record(self) -> StepRecord:
        layer, step, written, observed = self._layer, self._layer_step.step, self._written, self._observed
        assert written is not None, "a record of a step that was not run"
        seen = None if observed is None else queries_at(written.queries, observed)
        settled = settle(layer.policy, layer.index, lambda: layer.slots_at(step), written.queries, step)
        record = StepRecord(
            step=step,
            rolled_back=(0,) * len(step.lengths),
            occupancy_bound=self._held,
            statistics=self._statistics,
            written=written.slots,
            state=self._state,
            ring=self._ring,
            initial_state=written.initial_state,
            observed=observed,
            mass=written.mass,
            queries=seen,
            settled=settled,
            is_continued=self._is_continued,
        )
        return layer.observe_and_evict(record)


BACKENDS: Final[Mapping[Backend, Callable[[SlotLayer, StepPart], StepPlan]]] = {
    "fused": lambda _, part: FusedStep(part),
    "generic": GenericStep,
}


def append(
    layer: SlotLayer, keys: NewKeys, values: NewValues, positions: Tensor, state: Parts | None = None
) -> SlotIndex:
    """Write tokens that attend to nothing, at (batch, score_heads, tokens) `positions`. Returns their slots.

    `state` is the tokens' initial state (default: the recall index, if the layer recalls). Tokens over the budget are
    evicted at the next step.
    """
    layer.make_room(keys, values, is_decode=keys.shape[2] <= HEADROOM, defer_eviction=False)
    positions = positions.expand(-1, layer.table.score_heads, -1)
    written = kernels.first_free(layer.positions, keys.shape[2])
    if state is None:
        state = layer.table.remember(keys, values, positions[:, 0], (positions[:, 0] >= 0).sum(-1).tolist())
    layer.table.write(written, keys, values, positions, state)
    layer.table.occupancy_bound += int((positions >= 0).sum(-1).max())
    layer.forget_steps(0)
    return written


def attend_shared(layer: SlotLayer, queries: Queries, mode: PositionMode, call: AttentionCall) -> Attended:
    """Attention of the pass's last columns to a layer that has taken its step. The layer does not change.

    `call.sees_to` is for all columns of the step.

    Raises: UsageError for another sliding window than the layer's own, beyond which its tokens are gone.
    """
    assert layer.views, "a layer comes before the layers that share its slots"
    if call.sliding_window != layer.sliding_window:
        raise UsageError(
            f"keys and values of slots {layer.index} are shared through a sliding window of {call.sliding_window}, and "
            f"their own layer has {layer.sliding_window}. A KVCache needs the same in both"
        )
    views, outs, left, merges = list(layer.views), list[Tensor](), queries.shape[2], list[_MergeUndo]()
    widths = [view.step.positions.shape[1] for view in views]
    calls = call.split(widths)
    while left:  # newest part first, so that each merge is undone on the way
        view, its, width = views.pop(), calls.pop(), widths.pop()
        merges.extend(_MergeUndo(layer, record) for record in layer.history.records if record.step is view.step)
        columns = min(left, width)
        piece = queries[:, :, left - columns : left]
        if its.sees_to is not None:
            its = its.split([width - columns, columns])[1]
        outs.append(attend(view.tail(columns), layer.rules, layer.rotary, piece, mode, its, None)[0])
        left -= columns
    for merge in reversed(merges):
        merge.redo()
    return outs[0] if len(outs) == 1 else torch.cat(outs[::-1], 2)


class _MergeUndo:
    """A layer without the merges of a step, until `redo`. After an interrupt in between the checkpoint restores it."""

    def __init__(self, layer: SlotLayer, record: StepRecord) -> None:
        self._store, self._targets = layer.store, record.merged_into
        if self._targets is not None and record.merged_before is not None:
            self._merged = self._store.take_all(self._targets)
            self._store.put(self._targets, record.merged_before)

    def redo(self) -> None:
        if self._targets is not None:
            self._store.put(self._targets, self._merged)


def _parts_of(table: SlotTable, rules: LayerConfig, step: Step, is_recalling: bool) -> tuple[Step, ...]:
    """`step.parts`, or the whole step if it evicts, recalls, observes and holds in full precision no token.

    `is_recalling` tells whether the step searches for evicted tokens.
    """
    is_evicting = rules.budget is not None and table.occupancy_bound + max(step.lengths) > rules.budget
    is_observing = rules.policy.observed_queries != 0 or table.store.full_precision.newest > 0
    return step.parts if (is_evicting or is_recalling or is_observing) and not step.defer_eviction else (step,)


def _scores_over_budget(table: SlotTable, rules: LayerConfig, layer: int, slots: Slots) -> Scores:
    """The policy's scores of a layer in which some row is over budget.

    A policy may change state as it scores. Rows within the budget get their state back: alone, they would not be
    scored.
    """
    assert rules.budget is not None, "scores without a budget"
    before = table.copied_state() if len(slots.next_positions) > 1 else {}
    score = scores_of(rules.policy, layer, slots)
    if before:
        is_over = (table.positions >= 0).sum(-1, keepdim=True).amax(1, keepdim=True) > rules.budget
        for name, tensor in table.state.items():
            tensor.copy_(tensor.where(is_over, before[name]))
    return score


def _evict(
    table: SlotTable, rules: LayerConfig, record: StepRecord, score: Scores, checkpoint: Checkpoint | None
) -> StepRecord:
    """Reserve the slots of the tokens over budget whose `score` is lowest, and merge the tokens if the rules say so.

    Returns the record with the evicted tokens and, after a merge, the former contents of the slots that took them.
    """
    assert rules.budget is not None, "eviction without a budget"
    count, evicted_count = table.slots - rules.budget, table.occupancy_bound - rules.budget
    (sinks, window), row_sinks = rules.protected, rules.row_sinks(record.step)
    # All pinned tokens fit in the budget, so it is enough that no other score is as high.
    pins = None if row_sinks is None else row_sinks.pins
    evicted, before = kernels.evict(
        EvictionInput(
            score=rank_pinned(score, table.positions, pins),
            positions=table.positions,
            next_positions=record.step.next_positions,
            sinks=sinks,
            window=window,
            sliding_window=rules.sliding_window,
            count=count,
            attention_chunk=rules.attention_chunk,
            row_sinks=None if row_sinks is None else row_sinks.tensor,
        )
    )
    table.occupancy_bound = rules.budget
    record = replace(record, evicted=evicted, evicted_positions=before, evicted_count=evicted_count)
    return record if rules.merge is None else _merged(table, rules, record, checkpoint)


def _merged(table: SlotTable, rules: LayerConfig, record: StepRecord, checkpoint: Checkpoint | None) -> StepRecord:
    """Merge the tokens that `record` evicted into kept slots. `checkpoint` gets the plan before it is applied."""
    assert rules.merge is not None, "a merge without a rule"
    assert record.evicted is not None, "a merge without an eviction"
    assert record.evicted_positions is not None, "evicted tokens without positions"
    ends, limits = record.step.next_positions, rules.limits
    view = LayerView(
        store=table.store,
        positions=table.positions,
        state=table.state,
        next_positions=ends,
        sinks=limits.sinks if record.step.sinks is None else record.step.sinks.per_slot,
        window=limits.window,
        sliding_window=rules.sliding_window,
        attention_chunk=rules.attention_chunk,
    )
    plan = plan_merge(rules.merge, view, record.evicted, record.evicted_positions)
    if checkpoint is not None:
        checkpoint.merged.append(plan)
    plan.apply(table.store, table.state)
    return replace(record, merged_into=plan.targets, merged_before=plan.before.parts)


def check_windows(
    layers: Sequence[SlotLayer], rows: Sequence[int], now: Sequence[int], ends: Sequence[int], edit: str
) -> None:
    """Raises: UsageError for an edit that moves the end of a text back from `now`, where a sliding window would see
    tokens that its layer has evicted."""
    for row in [each for each in rows if ends[each] < now[each]]:
        wrong = next((each.index for each in layers if each.lacks_window(row, ends[row])), None)
        if wrong is not None:
            raise UsageError(
                f"{edit} moves the end of the text back to {ends[row]}, and layer {wrong} has evicted tokens that its "
                "sliding window would see from there. Read it again, or use rollback in a KVCache that allows more"
            )
