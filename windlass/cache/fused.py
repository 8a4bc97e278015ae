"""The fused backend for all layers of a cache: each decode step is one call of a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import Tensor

from windlass import kernels
from windlass.cache.decode import KernelHandle, LayerCall, LayerStep, Released
from windlass.cache.head_groups import HeadGroups
from windlass.cache.history import History
from windlass.cache.layer import SlotLayer
from windlass.cache.recall import TOKEN_INDEX
from windlass.cache.slot_table import free_reserved, reserve_again
from windlass.core.inputs import TokenInput
from windlass.core.parse import MAX_NUMBER
from windlass.core.step import AttentionCall, Step, StepRecord
from windlass.core.types import Hidden
from windlass.policies.base import Initializer
from windlass.policies.calls import initial_state
from windlass.policies.wrappers import find, ranks_layers_as_rows
from windlass.positions.modes import PositionMode
from windlass.stores.formats import Plain
from windlass.stores.full_precision import with_tokens

if TYPE_CHECKING:
    from windlass.kernels.cpu.decode import DecoderSteps, FewTokens, StepMemory


class PolicyState(NamedTuple):
    """A policy's state and statistics in some layers, as rows of one batch."""

    state: dict[str, Tensor]
    statistics: dict[str, Tensor]

    def part(self, number: int, of: int) -> PolicyState:
        """State and statistics of one layer, `of` so many, as views."""
        state, statistics = (
            {name: tensor.chunk(of)[number] for name, tensor in each.items()} for each in (self.state, self.statistics)
        )
        return PolicyState(state, statistics)


@final
class PolicyLayers:
    """Layers in which the policy itself observes and evicts, because no kernel knows how it ranks.

    It is asked once for all of them, as rows of one batch. A layer is alone where its policy has to know which layer it
    is, where keys and values are codes, and where no other layer has as many slots and tokens.
    """

    def __init__(self, numbers: Sequence[int], layers: Sequence[SlotLayer]) -> None:
        self.numbers, self.layers = tuple(numbers), tuple(layers)
        self._rows: SlotLayer | None = None

    @classmethod
    def groups(cls, layers: Sequence[SlotLayer], is_asked: Sequence[bool]) -> list[PolicyLayers]:
        """The asked ones of all `layers`, those together that may be asked together."""
        groups = list[tuple[tuple[object, ...], list[int]]]()
        for number, layer in enumerate(layers):
            if not is_asked[number]:
                continue
            as_rows = ranks_layers_as_rows(layer.policy) and layer.heads is None and type(layer.store) is Plain
            rotary, table = layer.rotary, layer.table
            kind = layer.rules, table.positions.shape, table.occupancy_bound, None if as_rows else number
            found = [members for each, members in groups if each == kind and layers[members[0]].rotary is rotary]
            if found:
                found[0].append(number)
            else:
                groups.append((kind, [number]))
        return [cls(members, [layers[each] for each in members]) for _, members in groups]

    @property
    def _joined(self) -> SlotLayer:
        """All of them as rows of one, with their present statistics, until these are given back."""
        if self._rows is None:
            self._rows = self.layers[0].as_rows(self.layers[1:])
        return self._rows

    def observe_and_evict(self, log: StepLog, steps: DecoderSteps, bound: int) -> None:
        """Take the second half of a step, in which rows have `bound` tokens at most. `log` notes how to undo it."""
        joined, tables, step = self._joined, [each.table for each in self.layers], log.step.repeated(len(self.layers))
        table, policy = joined.table, joined.policy
        table.positions = _as_rows([each.positions for each in tables])
        table.state = {name: _as_rows([each.state[name] for each in tables]) for name in tables[0].state}
        table.occupancy_bound = bound
        log.before.append(PolicyState(table.copied_state(), dict(table.statistics)))
        is_observed = policy.observed_queries != 0
        record = StepRecord(
            step=step,
            rolled_back=(0,) * len(step.lengths),
            occupancy_bound=bound,
            statistics=table.statistics,
            written=_as_rows([steps.written(log.memory, each) for each in self.numbers]),
            observed=step.first_columns if is_observed else None,
            mass=steps.masses(log.memory, self.numbers) if is_observed and policy.needs.mass else None,
            queries=steps.joined_queries(log.memory, self.numbers) if is_observed else None,
        )
        record = joined.observe_and_evict(record)
        self._put_state(table.state)
        if record.evicted is not None and record.evicted_positions is not None:
            # Of the slots that were looked at one at most had a token.
            newest = record.evicted_positions.argmax(-1, keepdim=True)
            evicted, positions = record.evicted.gather(-1, newest), record.evicted_positions.gather(-1, newest)
            steps.set_evicted(log.memory, self.numbers, evicted, positions)
            for its, now in zip(tables, table.positions.chunk(len(tables)), strict=True):
                its.positions.copy_(now)

    def restore(self, before: PolicyState) -> None:
        """Let state and statistics be as they were before a step."""
        self._put_state(before.state)
        self._joined.table.statistics = dict(before.statistics)

    def settle(self) -> None:
        """Give each layer its statistics, and hold nothing."""
        if self._rows is None:
            return
        rows, self._rows = self._rows, None
        for number, layer in enumerate(self.layers):
            its = PolicyState({}, rows.table.statistics).part(number, len(self.layers)).statistics
            layer.table.statistics = {name: tensor.clone() for name, tensor in its.items()}

    def _put_state(self, state: dict[str, Tensor]) -> None:
        for name, tensor in state.items():
            for layer, its in zip(self.layers, tensor.chunk(len(self.layers)), strict=True):
                layer.table.state[name].copy_(its)


def _as_rows(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(tensors))


@dataclass(frozen=True, eq=False)
class StepLog:
    """One step: its inputs, and the memory that undoes it.

    `taken`: tokens that earlier steps of this `FusedDecode` wrote to the longest row. `tokens`: to each row.
    `lengths` are the rows' lengths in a recall store before the step. `initial` is, per layer, the state that the
    policy gave the new tokens. `before` is, per `PolicyLayers`, the state before the policy observed and evicted.
    """

    step: Step
    token: TokenInput
    memory: StepMemory
    taken: int
    lengths: tuple[int, ...]
    tokens: tuple[int, ...]
    initial: list[dict[str, Tensor]]
    before: list[PolicyState]


@dataclass(frozen=True, eq=False)
class StepLogs:
    """The latest steps that can be undone, and per layer the history before them."""

    logs: tuple[StepLog, ...]
    starting: tuple[History, ...]
    taken: int
    lengths: tuple[int, ...]
    tokens: tuple[int, ...]
    has_older: bool  # whether any of the histories has a step that can be undone


@dataclass(frozen=True, eq=False)
class DecodePlan:
    """A step of all layers: the logs before and after it, and the slots it frees.

    `count` is the number of steps taken before it.
    """

    before: StepLogs
    after: StepLogs
    dropped: tuple[StepLog, ...]
    released: tuple[Released, ...]
    count: int

    @property
    def log(self) -> StepLog:
        return self.after.logs[-1]


class FusedLayer(NamedTuple):
    """A decoder layer with its slots, or with those of some of its heads, and the kernels of both."""

    layer: SlotLayer
    decoder: FewTokens
    layer_step: LayerStep
    handle: KernelHandle


@final
class FusedDecode:
    """Decode steps of all layers of a cache, for the `kernels` of one model's decoder. Plan a step, then run it.

    Layers get the records of all steps when `settle` is called. Until then their positions and states are current, but
    their histories and counts are those from before the steps.
    """

    def __init__(self, parts: Sequence[FusedLayer], decoder: Sequence[FewTokens], hidden: Hidden) -> None:
        from windlass.kernels.cpu.decode import LayerSlots  # late: it needs the compiled module

        layers, handles = [each.layer for each in parts], [each.handle for each in parts]
        layer_step = parts[0].layer_step
        self._layers, self.decoder, first = tuple(layers), decoder, layers[0]
        self._mode, self._shape, self._dtype = layer_step.mode, hidden.shape, hidden.dtype
        # Never read: handles hold these tensors weakly, and the compiled steps only know their addresses.
        self._tensors = [tensor for handle in handles for weak in handle.tensors if (tensor := weak()) is not None]
        self._end = min(handle.end for handle in handles)
        self._left = min(map(_steps_left, layers))
        self._has_sinks = first.rules.row_sinks(layer_step.step) is not None
        self._limit = first.rules.limits.rollback
        self._initializes = find(first.policy, Initializer) is not None  # type: ignore[type-abstract]  # none is made
        is_asked = [handle.needs_policy(layer.rules) for layer, handle in zip(layers, handles, strict=True)]
        self._policy_layers = PolicyLayers.groups(layers, is_asked)
        self._asked_as = {
            number: (at, place)
            for at, group in enumerate(self._policy_layers)
            for place, number in enumerate(group.numbers)
        }
        is_shown = [asks and layer.policy.observed_queries != 0 for asks, layer in zip(is_asked, layers, strict=True)]
        self._is_kept = any(is_shown) or any(handle.keeps_observed(hidden.shape[0]) for handle in handles)
        self._steps = kernels.decoder_steps(
            [
                LayerSlots(
                    layer=kernel,
                    decode=handle.kernel,
                    heads=layer.heads,
                    positions=layer.table.positions,
                    state=tuple(layer.table.state.values()),
                    budget=layer.budget,
                    held=layer.table.occupancy_bound,
                    has_evicted=layer.history.has_evicted,
                    is_observed=handle.observes or (is_shown[number] and layer.policy.needs.mass),
                    recall_positions=None if layer.table.recall is None else layer.table.recall.positions,
                )
                for number, (layer, kernel, _, handle) in enumerate(parts)
            ],
            hidden,
            self._is_kept,
            self._initializes,
        )
        recall = first.table.recall
        rings = [layer.store.full_precision for layer in layers]
        self._rings = tuple(
            _Ring.of(layer) if ring.tensors else None for layer, ring in zip(layers, rings, strict=True)
        )
        filled = [ring.filled_rows for ring in rings if ring.tensors]
        # Per row, whether its token can be taken: a row whose full-precision sinks are not filled idles.
        self._takes = tuple(map(all, zip(*filled, strict=True))) or (True,) * hidden.shape[0]
        self._held = [layer.table.occupancy_bound for layer in layers]
        self._first = StepLogs(
            logs=(),
            starting=tuple(layer.history for layer in layers),
            taken=0,
            lengths=() if recall is None else recall.lengths,
            tokens=(0,) * hidden.shape[0],
            has_older=any(layer.history.records for layer in layers),
        )
        self._plan: DecodePlan | None = None  # the latest

    @classmethod
    def of(
        cls,
        layers: Sequence[HeadGroups],
        decoder: Sequence[FewTokens],
        hidden: Hidden,
        step: Step,
        mode: PositionMode,
        calls: Sequence[AttentionCall],
    ) -> FusedDecode | None:
        """A backend for this step and others like it. None: a kernel alone can't take them.

        `hidden` gives shape and dtype.
        """
        parts = list[FusedLayer]()
        for groups, kernel, attention in zip(layers, decoder, calls, strict=True):
            queries, keys, values = kernel.states(hidden)
            call = LayerCall(queries, keys, values, step, mode, attention)
            for layer, own in zip(groups.layers, groups.calls(call), strict=True):
                layer_step = layer.layer_step(own)
                if layer.is_empty or (handle := layer.token_step(layer_step)) is None or not layer_step.evicts_one:
                    return None
                parts.append(FusedLayer(layer, kernel, layer_step, handle))
        return cls(parts, decoder, hidden) if _are_alike([each.layer for each in parts], step) else None

    def serves(self, decoder: Sequence[FewTokens], hidden: Hidden, step: Step, mode: PositionMode) -> bool:
        """Return True if a step is one of those that this was made for."""
        is_like = decoder is self.decoder and mode is self._mode and step.end <= self._end
        is_like = is_like and hidden.shape == self._shape and hidden.dtype is self._dtype
        is_like = is_like and all(takes or not tokens for takes, tokens in zip(self._takes, step.lengths, strict=True))
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
        """Plan a step and run it. Returns the output of the decoder's last layer."""
        self._plan = self.plan(step, hidden)
        return self.run(self._plan)

    def plan(self, step: Step, hidden: Hidden) -> DecodePlan:
        """Plan the next step. This changes nothing yet."""
        before = self._state
        kept, dropped = list(before.logs), list[StepLog]()
        size = before.taken - before.logs[0].taken if before.logs else 0
        older = [history.split(self._limit - size) for history in before.starting] if before.has_older else []
        while kept and (size > self._limit or self._limit == 0):
            dropped.append(kept.pop(0))
            size -= dropped[-1].token.longest
        longest, lengths = max(step.lengths), before.lengths
        token = TokenInput(
            hidden=hidden,
            positions=step.positions.to(torch.int64).contiguous(),
            next_positions=step.next_positions,
            starts=torch.tensor(lengths) if lengths else None,
            row_sinks=None if step.sinks is None or not self._has_sinks else step.sinks.tensor,
            pins=None if step.sinks is None or not self._has_sinks else step.sinks.pins,
            longest=longest,
        )
        log = StepLog(
            step=step,
            token=token,
            memory=self._steps.memory(),
            taken=before.taken,
            lengths=lengths,
            tokens=before.tokens,
            initial=[],
            before=[],
        )
        after = StepLogs(
            logs=(*kept, log),
            starting=tuple(history for history, _ in older) or before.starting,
            taken=before.taken + longest,
            lengths=tuple([length + n for length, n in zip(lengths, step.lengths, strict=False)]),
            tokens=tuple([count + n for count, n in zip(before.tokens, step.lengths, strict=True)]),
            has_older=any(history.records for history, _ in older),
        )
        released = tuple(slots for _, slots in older)
        return DecodePlan(before, after, tuple(dropped), released, self._steps.count)

    def run(self, plan: DecodePlan) -> Hidden:
        """Run the step that was planned last. Returns the output of the decoder's last layer."""
        log = plan.log
        result = self._steps.step(log.token, log.memory, [each.memory for each in plan.dropped])
        for layer, slots in zip(self._layers, plan.released, strict=False):
            for index, positions in slots:
                free_reserved(layer.table.positions, index, positions)
        if self._initializes:
            self._put_initial_state(log)
        for group in self._policy_layers:
            group.observe_and_evict(log, self._steps, self._held_after(group.numbers[0], log.taken) + log.token.longest)
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
        # An interrupt may have come before.
        for group, before in zip(self._policy_layers, plan.log.before, strict=False):
            group.restore(before)

    def forget(self) -> None:
        """Make all steps so far permanent, and free the slots that they reserve."""
        state = self._state
        self._steps.free([log.memory for log in state.logs])
        if state.has_older:
            pairs = zip(state.starting, self._layers, strict=True)
            self._go_on([history.forgotten(0, 0, layer.table.positions) for history, layer in pairs])
        else:
            self._first, self._plan = replace(state, logs=()), None

    def settle(self) -> None:
        """Bring the layers up to date, with a record for each step that can be undone."""
        state = self._state
        for group in self._policy_layers:
            group.settle()
        for number, layer in enumerate(self._layers):
            table, history = layer.table, state.starting[number]
            states = table.copied_state() if state.logs else {}
            for log in state.logs:
                history = history.with_record(self._record(layer, number, log, states))
            evicts = layer.budget is not None and self._held[number] + state.taken > layer.budget
            # No record may mention evicted tokens any more.
            layer.history = history._replace(has_evicted=history.has_evicted or evicts)
            table.occupancy_bound = self._held_after(number, state.taken)
            if table.recall is not None:
                table.recall.lengths = state.lengths
            if (ring := self._rings[number]) is not None:
                ring.settle(layer, state.tokens)

    def resume(self) -> None:
        """Go on from the histories of the layers, which know of all steps."""
        self._go_on([layer.history for layer in self._layers])

    def _go_on(self, histories: Sequence[History]) -> None:
        state, has_older = self._state, any(history.records for history in histories)
        self._first = StepLogs((), tuple(histories), state.taken, state.lengths, state.tokens, has_older)
        self._plan = None

    def _is_over(self, number: int, log: StepLog) -> bool:
        """Return True if a step took a layer over its budget."""
        budget = self._layers[number].budget
        return budget is not None and self._held_after(number, log.taken) + log.token.longest > budget

    def _held_after(self, number: int, tokens: int) -> int:
        budget, held = self._layers[number].budget, self._held[number] + tokens
        return held if budget is None else min(held, budget)

    def _record(self, layer: SlotLayer, number: int, log: StepLog, states: dict[str, Tensor]) -> StepRecord:
        """The record of a step in a layer. `states` are the current ones, which differ in slots that were free."""
        memory, steps, is_over = log.memory, self._steps, self._is_over(number, log)
        evicted, positions = steps.evicted(memory, number) if is_over else (None, None)
        asked, statistics, ring = self._asked_as.get(number), layer.table.statistics, self._rings[number]
        if asked is not None:
            group, place = asked
            states, statistics = log.before[group].part(place, len(self._policy_layers[group].numbers))
        elif (observed := steps.state(memory, number)) is not None:
            states = states | {next(iter(states)): observed}
        # One token of one row is rolled back without its observation.
        is_shown = len(log.step.lengths) > 1 and layer.policy.observed_queries != 0
        mass = steps.mass(memory, number) if is_shown else None
        initial = dict(log.initial[number]) if log.initial else {}
        if log.token.starts is not None:
            initial[TOKEN_INDEX] = log.token.starts[:, None, None].float()
        return StepRecord(
            step=log.step,
            rolled_back=(0,) * len(log.step.lengths),
            occupancy_bound=self._held_after(number, log.taken),
            statistics=statistics,
            written=steps.written(memory, number),
            state=states,
            ring={} if ring is None else ring.after(log.tokens),
            initial_state=initial,
            observed=log.step.first_columns if is_shown else None,
            mass=mass,
            queries=steps.queries(memory, number) if is_shown else None,
            evicted=evicted,
            evicted_positions=positions,
            evicted_count=int(is_over),
        )

    def _put_initial_state(self, log: StepLog) -> None:
        """Give the new tokens the state that the policy gives them. No kernel has ranked them yet."""
        for number, layer in enumerate(self._layers):
            queries, keys = self._steps.queries(log.memory, number), self._steps.keys(log.memory, number)
            initial = initial_state(layer.policy, layer.index, layer.heads, queries, keys)
            written = self._steps.written(log.memory, number)
            for name, state in layer.table.state.items():
                if name in initial:
                    state.scatter_(-1, written, initial[name])
            log.initial.append(initial)


@dataclass(frozen=True, eq=False)
class _Ring:
    """A layer's tokens in full precision as steps found them. `index` is the one that the kernel reads."""

    tensors: dict[str, Tensor]
    index: Tensor

    @classmethod
    def of(cls, layer: SlotLayer) -> _Ring:
        ring = layer.store.full_precision
        index = ring.ring_index(layer.table.slots)
        assert index is not None, "a store that holds nothing in full precision"
        return cls(ring.tensors, index)

    def after(self, tokens: Sequence[int]) -> dict[str, Tensor]:
        """The tensors once each row has so many tokens more."""
        return with_tokens(self.tensors, tokens)

    def settle(self, layer: SlotLayer, tokens: Sequence[int]) -> None:
        """Let the layer's store know of the tokens."""
        ring = layer.store.full_precision
        ring.tensors = self.after(tokens)
        ring.keep(self.index)


def _are_alike(layers: Sequence[SlotLayer], step: Step) -> bool:
    """Return True if all recall stores have the same lengths, and all or no layers have recall and sinks per row."""
    recalls = {layer.table.recall.lengths for layer in layers if layer.table.recall is not None}
    have_recall = {layer.table.recall is not None for layer in layers}
    sinks = {layer.rules.row_sinks(step) is not None for layer in layers}
    return len(recalls) <= 1 and len(have_recall) == 1 and len(sinks) == 1


def _steps_left(layer: SlotLayer) -> int:
    """The number of tokens that a layer takes before it has to grow."""
    table, rules, limit = layer.table, layer.rules, layer.rules.limits.rollback
    own, held = table.slots - rules.recall_room, table.occupancy_bound
    left = own - held - layer.history.reserved
    if rules.budget is not None:
        steady = own - rules.budget - limit - 1 > 0  # the budget, and the tokens that a rollback may remove
        left = MAX_NUMBER if steady else left
    if table.recall is not None:
        left = min(left, table.recall.room)
    return left
