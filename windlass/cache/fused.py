"""The fused backend: steps that compiled kernels do all of, of one layer or of all layers of a decoder at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import Tensor

from windlass import kernels
from windlass.cache.decode import KernelHandle, LayerStep, Released, StepPlan, put_initial_state
from windlass.cache.history import History
from windlass.cache.layer_config import LayerConfig
from windlass.cache.recall import TOKEN_INDEX
from windlass.cache.shares import Heads
from windlass.cache.slot_table import SlotTable, free_reserved, reserve_again
from windlass.core.inputs import Mass, TokenInput
from windlass.core.parse import MAX_NUMBER
from windlass.core.step import Step, StepRecord
from windlass.core.types import Attended, Hidden, Queries
from windlass.policies.base import Initializer
from windlass.policies.calls import initial_state
from windlass.policies.wrapper import find
from windlass.positions.modes import PositionMode

if TYPE_CHECKING:
    from windlass.kernels.cpu.decode import FewTokens, StepMemory


def _record(
    step: Step,
    held: int,
    statistics: dict[str, Tensor],
    state: dict[str, Tensor],
    initial_state: dict[str, Tensor],
    written: Tensor,
    evicted: Tensor | None,
    evicted_positions: Tensor | None,
    observed: tuple[Mass, Queries] | None,
    is_continued: bool = False,
) -> StepRecord:
    """The record of a step that a kernel took, with `held` tokens before it."""
    mass, queries = observed or (None, None)
    return StepRecord(
        step=step,
        rolled_back=(0,) * len(step.lengths),
        occupancy_bound=held,
        statistics=statistics,
        written=written,
        state=state,
        initial_state=initial_state,
        observed=None if observed is None else step.first_columns,
        mass=mass,
        queries=queries,
        evicted=evicted,
        evicted_positions=evicted_positions,
        evicted_count=int(evicted is not None),
        is_continued=is_continued,
    )


def _is_kept(handle: KernelHandle, rows: int) -> bool:
    """Return True if a record keeps what is observed: one token of one row is rolled back as a whole."""
    return rows > 1 and handle.observes


@final
class FusedStep(StepPlan):
    """A step of one layer. The kernel leaves it in memory of its own, which the table has once it is recorded.

    What `released` steps evicted is free afterwards.
    """

    def __init__(
        self, handle: KernelHandle, asked: LayerStep, released: Released = (), is_continued: bool = False
    ) -> None:
        budget = asked.rules.budget
        self._handle, self._asked, self._is_continued = handle, asked, is_continued
        self._is_over = budget is not None and asked.bound > budget
        given = asked.given(_is_kept(handle, len(asked.step.lengths)), self._is_over, released)
        self._planned = handle.kernel.planned(given)

    def run(self) -> Attended:
        self._handle.kernel.take(self._planned)
        return self._planned.output.out

    def record(self) -> StepRecord:
        asked, done, table = self._asked, self._planned.output, self._asked.table
        record = _record(
            step=asked.step,
            held=table.occupancy_bound,
            statistics=table.statistics,
            state=table.state,
            initial_state=put_initial_state(asked, done),
            written=done.written,
            evicted=done.evicted,
            evicted_positions=done.evicted_positions,
            observed=None if done.mass is None else (done.mass, asked.states[0].detach()),
            is_continued=self._is_continued,
        )
        table.replace(done.slot_positions, done.state, asked.bound - int(self._is_over), asked.step)
        return record


class FusedLayer(NamedTuple):
    """A layer before its fused steps: a step like them, its kernel, and the steps that can be undone."""

    asked: LayerStep
    handle: KernelHandle
    history: History


@dataclass(frozen=True, eq=False)
class _Place:
    """A layer whose steps are fused, with `held` tokens of any row at most before the first of them."""

    table: SlotTable
    rules: LayerConfig
    index: int
    heads: Heads | None
    held: int

    def held_after(self, tokens: int) -> int:
        """Tokens of any row at most, once so many more are written."""
        held, budget = self.held + tokens, self.rules.budget
        return held if budget is None else min(held, budget)


@dataclass(frozen=True, eq=False)
class StepLog:
    """One step: what it was given, and the memory that undoes it.

    `taken` counts the tokens that steps of this object wrote before, in the longest row; `lengths` those of each row in
    a recall store. `initial` is, per layer, the state that the policy gave the new tokens.
    """

    step: Step
    token: TokenInput
    memory: StepMemory
    taken: int
    lengths: tuple[int, ...]
    initial: list[dict[str, Tensor]]

    @property
    def size(self) -> int:
        """Slots that it takes of the headroom."""
        return self.token.longest


@dataclass(frozen=True, eq=False)
class StepLogs:
    """The latest steps that can be undone, and per layer the history before them.

    `is_final`: none of them will be undone, and the next step frees what they reserve.
    """

    logs: tuple[StepLog, ...]
    starting: tuple[History, ...]
    taken: int
    lengths: tuple[int, ...]
    has_older: bool  # whether any of the histories has a step that can be undone
    is_final: bool = False


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """A step of all layers: the logs before and after it, and what it frees; `count` steps were taken before."""

    before: StepLogs
    after: StepLogs
    dropped: tuple[StepLog, ...]
    released: tuple[Released, ...]
    count: int

    @property
    def log(self) -> StepLog:
        return self.after.logs[-1]


@final
class FusedDecode:
    """Decode steps of all layers of a cache, for the `kernels` of one model's decoder: plan a step, then run it.

    Layers get the records of all steps when `histories` is called: until then their positions and states are those of
    now, and their histories and counts those of before.
    """

    def __init__(self, layers: Sequence[FusedLayer], decoder: Sequence[FewTokens], hidden: Hidden) -> None:
        from windlass.kernels.cpu.decode import LayerSlots  # late: it needs the compiled module

        first, self.decoder = layers[0].asked, decoder
        steps = [each.asked for each in layers]
        self._layers = [
            _Place(each.table, each.rules, each.layer, each.heads, each.table.occupancy_bound) for each in steps
        ]
        self._mode, self._shape, self._dtype = first.mode, hidden.shape, hidden.dtype
        handles = [each.handle for each in layers]
        self._tensors = [tensor for handle in handles for weak in handle.tensors if (tensor := weak()) is not None]
        self._end = min(handle.end for handle in handles)
        self._left = min(map(_steps_left, layers))
        self._has_sinks = first.rules.row_sinks(first.step) is not None
        self._limit = first.rules.limits.rollback
        self._initializes = find(first.rules.policy, Initializer) is not None  # type: ignore[type-abstract]  # none is made
        self._is_kept = any(_is_kept(handle, hidden.shape[0]) for handle in handles)
        self._steps = kernels.decoder_steps(
            [
                LayerSlots(
                    layer=kernel,
                    decode=handle.kernel,
                    positions=asked.table.positions,
                    state=tuple(asked.table.state.values()),
                    budget=asked.rules.budget,
                    held=asked.table.occupancy_bound,
                    has_evicted=asked.has_evicted,
                    is_observed=handle.observes,
                    recall_positions=None if asked.table.recall is None else asked.table.recall.positions,
                )
                for (asked, handle, _), kernel in zip(layers, decoder, strict=True)
            ],
            hidden,
            self._is_kept,
            self._initializes,
        )
        recall = first.table.recall
        self._first = StepLogs(
            logs=(),
            starting=tuple(each.history for each in layers),
            taken=0,
            lengths=() if recall is None else recall.lengths,
            has_older=any(each.history.records for each in layers),
        )
        self._plan: DecodePlan | None = None  # the latest

    @classmethod
    def of(cls, layers: Sequence[FusedLayer], decoder: Sequence[FewTokens], hidden: Hidden) -> FusedDecode | None:
        """Steps like those of these layers; None where no call takes them all. `hidden` has their shape and dtype."""
        return cls(layers, decoder, hidden) if _are_alike([each.asked for each in layers]) else None

    def serves(self, decoder: Sequence[FewTokens], hidden: Hidden, step: Step, mode: PositionMode) -> bool:
        """Return True if a step is one of those that this was made for."""
        is_like = decoder is self.decoder and mode is self._mode and step.end <= self._end
        is_like = is_like and hidden.shape == self._shape and hidden.dtype is self._dtype
        return is_like and self.has_room(1) and (step.sinks is not None) == self._has_sinks

    def has_room(self, tokens: int) -> bool:
        """Return True if no layer has to grow for so many tokens more."""
        return self._state.taken + tokens <= self._left

    @property
    def _state(self) -> StepLogs:
        plan = self._plan
        if plan is None:
            return self._first
        return plan.after if self._steps.count > plan.count else plan.before

    def took(self, step: Step) -> bool:
        """Return True if the latest step is this one."""
        plan = self._plan
        return plan is not None and plan.log.step is step and self._steps.count > plan.count

    def take(self, step: Step, hidden: Hidden) -> Hidden:
        """Take a step; returns the output of the decoder's last layer."""
        self._plan = self.plan(step, hidden)
        return self.run(self._plan)

    def plan(self, step: Step, hidden: Hidden) -> DecodePlan:
        """The plan of the next step; nothing has changed yet."""
        before = self._state
        kept, dropped, size = list(before.logs), list[StepLog](), sum([log.size for log in before.logs])
        limit = 0 if before.is_final else self._limit
        older = [history.split(limit - size) for history in before.starting] if before.has_older else []
        while kept and (size > limit or limit == 0):
            dropped.append(kept.pop(0))
            size -= dropped[-1].size
        longest, lengths = max(step.lengths), before.lengths
        token = TokenInput(
            hidden=hidden,
            positions=step.positions.to(torch.int64).contiguous(),
            next_positions=step.next_positions,
            starts=torch.tensor(lengths) if lengths else None,
            row_sinks=None if step.sinks is None or not self._has_sinks else step.sinks.tensor,
            longest=longest,
        )
        log = StepLog(step, token, self._steps.memory(), before.taken, lengths, [])
        after = StepLogs(
            logs=(*kept, log),
            starting=tuple(history for history, _ in older) or before.starting,
            taken=before.taken + longest,
            lengths=tuple([length + n for length, n in zip(lengths, step.lengths, strict=False)]),
            has_older=any(history.records for history, _ in older),
        )
        released = tuple(slots for _, slots in older)
        return DecodePlan(before, after, tuple(dropped), released, self._steps.count)

    def run(self, plan: DecodePlan) -> Hidden:
        """Take the step that was planned last; returns the output of the decoder's last layer."""
        log = plan.log
        result = self._steps.step(log.token, log.memory, [each.memory for each in plan.dropped])
        for layer, slots in zip(self._layers, plan.released, strict=False):
            for index, positions in slots:
                free_reserved(layer.table.positions, index, positions)
        if self._initializes:
            self._put_initial_state(log)
        return result

    def take_back(self) -> None:
        """Let the layers be as before the latest step."""
        plan = self._plan
        assert plan is not None, "no step to take back"
        for layer, slots in zip(self._layers, plan.released, strict=False):
            for index, positions in slots:
                reserve_again(layer.table.positions, index, positions)
        for layer in self._layers:
            if layer.table.recall is not None:
                layer.table.recall.forget_recalled()
        self._steps.take_back(plan.log.token, plan.log.memory, [each.memory for each in plan.dropped])

    @property
    def is_final(self) -> bool:
        """Return True if no step so far will be undone."""
        return self._state.is_final

    def forget(self) -> None:
        """Let no step so far be undone."""
        self._first, self._plan = replace(self._state, is_final=True), None

    def histories(self) -> list[History]:
        """The history of each layer, with a record for each step that can be undone. Tables have their counts."""
        state, histories = self._state, list[History]()
        for number, (layer, history) in enumerate(zip(self._layers, state.starting, strict=True)):
            table, budget = layer.table, layer.rules.budget
            states = table.copied_state() if state.logs else {}
            for log in state.logs:
                history = history.with_record(self._log_record(number, log, states))
            evicts = budget is not None and layer.held + state.taken > budget
            # No record may tell any more that tokens were evicted.
            histories.append(history._replace(has_evicted=history.has_evicted or evicts))
            table.occupancy_bound = layer.held_after(state.taken)
            if table.recall is not None:
                table.recall.lengths = state.lengths
        return histories

    def go_on(self, histories: Sequence[History]) -> None:
        """Go on from these histories, which the layers have."""
        state = self._state
        self._first = StepLogs(
            logs=(),
            starting=tuple(histories),
            taken=state.taken,
            lengths=state.lengths,
            has_older=any(history.records for history in histories),
        )
        self._plan = None

    def _log_record(self, number: int, log: StepLog, states: dict[str, Tensor]) -> StepRecord:
        """The record of a step in a layer. `states` are those of now, which differ in slots that are free before it."""
        memory, steps, layer = log.memory, self._steps, self._layers[number]
        held, budget = layer.held_after(log.taken), layer.rules.budget
        is_over = budget is not None and held + log.token.longest > budget
        observed, mass = steps.state(memory, number), steps.mass(memory, number)
        if observed is not None:
            states = states | {next(iter(states)): observed}
        initial = dict(log.initial[number]) if log.initial else {}
        evicted, evicted_positions = steps.evicted(memory, number) if is_over else (None, None)
        if log.token.starts is not None:
            initial[TOKEN_INDEX] = log.token.starts[:, None, None].float()
        return _record(
            step=log.step,
            held=held,
            statistics=layer.table.statistics,
            state=states,
            initial_state=initial,
            written=steps.written(memory, number),
            evicted=evicted,
            evicted_positions=evicted_positions,
            observed=None if mass is None else (mass, steps.queries(memory, number)),
        )

    def _put_initial_state(self, log: StepLog) -> None:
        """Let the new tokens have the state that the policy gives them; no kernel has ranked them yet."""
        for number, layer in enumerate(self._layers):
            queries, keys = self._steps.queries(log.memory, number), self._steps.keys(log.memory, number)
            initial = initial_state(layer.rules.policy, layer.index, layer.heads, queries, keys)
            written = self._steps.written(log.memory, number)
            for name, state in layer.table.state.items():
                if name in initial:
                    state.scatter_(-1, written, initial[name])
            log.initial.append(initial)


def _are_alike(steps: Sequence[LayerStep]) -> bool:
    """Return True if one count of tokens serves all recall stores, and one number of sinks all layers."""
    recalls = {each.table.recall.lengths for each in steps if each.table.recall is not None}
    have_recall = {each.table.recall is not None for each in steps}
    sinks = {each.rules.row_sinks(each.step) is not None for each in steps}
    return len(recalls) <= 1 and len(have_recall) == 1 and len(sinks) == 1


def _steps_left(layer: FusedLayer) -> int:
    """How many tokens a layer takes before it has to grow, or its policy has to be asked."""
    table, rules, limit = layer.asked.table, layer.asked.rules, layer.asked.rules.limits.rollback
    own, held = table.slots - rules.recall_room, table.occupancy_bound
    left = own - held - layer.history.reserved
    if rules.budget is not None:
        steady = own - rules.budget - limit - 1 > 0  # a budget's worth of tokens, and what may be rolled back
        left = MAX_NUMBER if steady and layer.handle.retention is not None else left
        if layer.handle.retention is None:
            left = min(left, rules.budget - held)
    if table.recall is not None:
        left = min(left, table.recall.room)
    return left
