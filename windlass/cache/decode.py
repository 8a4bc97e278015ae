"""A step of a layer, the interface of its backends, and the kernel that takes a decode step in one call."""

import copy
import operator
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, final
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from windlass import kernels
from windlass.cache.layer_config import LayerConfig
from windlass.cache.recall import DISTANCE, TOKEN_INDEX
from windlass.cache.shares import Heads
from windlass.cache.slot_table import SlotTable
from windlass.core.inputs import DecodeInput, DecodeOutput, DecodeSlots, Format, PackedStates, RecallSlots, Retention
from windlass.core.parse import MAX_NUMBER
from windlass.core.positions import ReadRule
from windlass.core.step import AttentionCall, Step, StepRecord
from windlass.core.types import Attended, ListedSlots, NewKeys, NewValues, Queries
from windlass.policies.base import TOKEN, Policy
from windlass.policies.calls import initial_state
from windlass.policies.wrappers import changes_keys, ranking_of
from windlass.positions.modes import PositionMode
from windlass.positions.rotary import Rotary

if TYPE_CHECKING:
    from windlass.kernels.cpu.decode import Decode

Released = tuple[tuple[ListedSlots, ListedSlots], ...]  # slots to free, and their old positions


class LayerCall(NamedTuple):
    """A call of one layer's attention by the model: new tokens, the step that they come in, and how they are read."""

    queries: Queries
    keys: NewKeys
    values: NewValues
    step: Step
    mode: PositionMode
    attention: AttentionCall


class LayerStep(NamedTuple):
    """A step of a layer, or of some kv heads: slots and rules, new queries, keys and values, and how they are read.

    `has_evicted` tells whether any token of any row may have left its slot before the step.
    """

    table: SlotTable
    rules: LayerConfig
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
        """The most tokens of any row once the new ones are written."""
        return self.table.occupancy_bound + max(self.step.lengths)

    @property
    def is_recalling(self) -> bool:
        """Return True if the step searches for evicted tokens, in any row.

        The lengths of rows do not tell: the slots of one row may hide how many tokens another one has lost. A row
        without evicted tokens recalls none.
        """
        # A graph serves steps before and after the first eviction: until then all tokens are in slots. The step
        # that comes before a graph is recorded recalls as well, so that all kernels are there.
        is_recorded = self.step.is_captured or self.step.graph_headroom > 0
        recall = self.table.recall
        if recall is None or not (is_recorded or self.has_evicted):
            return False
        # Joined tokens have left their slots as well. Other slots hold them until the budget evicts.
        return not self.rules.joins or max(recall.lengths, default=0) > (self.rules.budget or MAX_NUMBER)

    @property
    def evicts_one(self) -> bool:
        """Return True if the step evicts one token of a row at most."""
        return self.rules.budget is None or self.bound <= self.rules.budget + 1

    def split(self, parts: Sequence[Step]) -> list["LayerStep"]:
        """Split the step into consecutive parts."""
        if len(parts) == 1:
            return [self._replace(step=parts[0])]
        columns = [part.positions.shape[1] for part in parts]
        pieces = zip(*(each.split(columns, 2) for each in self.states), strict=True)
        each = zip(pieces, parts, self.call.split(columns), strict=True)
        return [self._replace(states=states, step=step, call=call) for states, step, call in each]

    def fits(self, reserved: int, reserve_hint: int, longest_decode: int) -> bool:
        """Return True if the step has one token per row, and the table needs no other size for it.

        `reserved` counts the slots that are reserved for evicted tokens.
        """
        table, rules = self.table, self.rules
        slots, held = table.slots, table.occupancy_bound
        if not self.step.is_token or slots - held - reserved <= rules.recall_room or not rules.knows(self.call):
            return False
        return slots == rules.slots_for(1, slots, held, reserve_hint, longest_decode, False)

    def kernel_input(self, is_observed: bool, is_evicting: bool = False, released: Released = ()) -> DecodeInput:
        """The input of a kernel."""
        (queries, keys, values), table, step = self.states, self.table, self.step
        recall, sinks = table.recall, self.rules.row_sinks(step)
        return DecodeInput(
            queries=queries,
            keys=keys,
            values=values,
            positions=step.positions,
            slot_positions=table.positions,
            state=tuple(table.state.values()),
            next_positions=step.next_positions,
            is_observed=is_observed,
            is_evicting=is_evicting,
            released=released,
            remembered=None if recall is None else torch.tensor(recall.lengths),
            is_recalling=self.is_recalling,
            row_sinks=None if sinks is None else sinks.tensor,
            pins=None if sinks is None else sinks.pins,
        )

    def remembered(self) -> dict[str, Tensor]:
        """State of the new tokens: their numbers in the recall store."""
        recall = self.table.recall
        if recall is None:
            return {}
        return {TOKEN_INDEX: torch.tensor(recall.lengths)[:, None, None].float()}


class KernelHandle(NamedTuple):
    """A kernel, and all that it was prepared for: it serves steps for which all of that is the same."""

    kernel: "Decode"
    retention: Retention | None  # done by the kernel
    end: int  # of the longest text
    tensors: tuple[ReferenceType[Tensor], ...]  # weak: a tensor that its layer or rotary drops must be freed
    rules: LayerConfig
    rotary: Rotary | None
    mode: PositionMode
    numbers: tuple[object, ...]

    @property
    def observes(self) -> bool:
        """Return True if the kernel changes the state of all slots by the attention that they get."""
        return self.retention is not None and self.retention.ranking.observe != "nothing"

    def keeps_observed(self, rows: int) -> bool:
        """Return True if records keep the observation. One token of one row is rolled back without it."""
        return self.observes and rows > 1

    def is_all(self, layer_step: LayerStep) -> bool:
        """Return True if the kernel does the whole step and needs no policy."""
        budget, policy = layer_step.rules.budget, layer_step.rules.policy
        over = 0 if budget is None else layer_step.bound - budget
        return over <= 1 if self.retention is not None else over <= 0 and policy.observed_queries == 0

    def needs_policy(self, rules: LayerConfig) -> bool:
        """Return True if the policy itself has to observe or to evict."""
        return self.retention is None and (rules.budget is not None or rules.policy.observed_queries != 0)

    def serves(self, layer_step: LayerStep) -> bool:
        """Return True if the kernel was prepared for a step like this one."""
        tensors = _tensors(layer_step.table, layer_step.rotary)
        if (
            self.end < layer_step.step.end
            or self.rules is not layer_step.rules
            or self.rotary is not layer_step.rotary
            or self.mode is not layer_step.mode
            or self.numbers != _numbers(layer_step)
            or len(self.tensors) != len(tensors)
        ):
            return False
        return all(map(operator.is_, [weak() for weak in self.tensors], tensors))


@final
class DecodeKernel:
    """The kernel for steps of one token per row of one layer, prepared when the first such step comes.

    It serves keys and values that are stored as they are or in codes, and position modes with a rule. It does not
    serve merged tokens, pictures, an indexer, policies that change keys or ask for token ids, or norms after RoPE. It
    observes and evicts for policies whose ranking it knows. For others it writes and attends.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._prepared: KernelHandle | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> "DecodeKernel":
        """Copy for a layer whose slots are elsewhere: nothing is prepared."""
        return DecodeKernel(copy.deepcopy(self._policy, memo))

    def of(self, layer_step: LayerStep, *, beside_sinks: bool = False) -> KernelHandle | None:
        """The kernel for this step. None: the kernel does not serve such a step.

        `beside_sinks`: also where a store holds first tokens in full precision. The caller then keeps its ring.
        """
        if not beside_sinks and layer_step.table.store.full_precision.tensors:
            return None
        step, call, (queries, keys, values) = layer_step.step, layer_step.call, layer_step.states
        if not step.is_token or not kernels.has_decode(queries.device.type):
            return None
        if call.sees_to is not None or call.picker is not None or call.sink_logits is not None:
            return None
        rules = layer_step.rules
        if (
            rules.visibility.reach is not None
            and not rules.reads_all(step)
            and (step.sinks is not None or step.may_have_gaps)
        ):
            return None
        if queries.stride(-1) != 1 or keys.stride(-1) != 1 or values.stride(-1) != 1:
            return None
        if (recall := layer_step.table.recall) is not None:
            if recall.is_empty:
                return None
            recall.make_room()
        prepared = self._prepared
        # An edit of a row changes in place which slots are held in full precision.
        if prepared is None or layer_step.table.store.full_precision.tensors or not prepared.serves(layer_step):
            prepared = self._prepared = self._prepare(layer_step)
        return prepared

    def _prepare(self, layer_step: LayerStep) -> KernelHandle | None:
        """Prepare a kernel for steps like this one. None: it can't serve them."""
        table, rules, rotary, (queries, keys, values), step, mode, call, *_ = layer_step
        held, end, tables, bound, rule = _held(layer_step), MAX_NUMBER, None, step.end, ReadRule()
        if held is None or rules.merge is not None or TOKEN in table.state or changes_keys(self._policy):
            return None
        if not (_takes(held[0], keys, queries) and _takes(held[1], values, queries)):
            return None
        if rotary is not None:
            if rotary.norm_weights is not None:
                return None
            trained_length = rotary.trained_length if rules.sliding_window is None else None
            within = mode.within(trained_length, rules.budget is not None)
            bound, its_rule = within.bound(step.end, table.slots, 1), within.rule()
            if its_rule is None or rotary.table_changes_at(bound):
                return None
            rule, tables = its_rule, rotary.tables(bound, queries.device, kernels.table_dtype(queries))
            lengths = range(MAX_NUMBER + 1)
            end = bisect_right(lengths, tables[0].shape[0], key=lambda end: within.bound(end, table.slots, 1)) - 1
        recall = None
        if table.recall is not None and (recall := _recall(table, rotary, keys, bound)) is None:
            return None
        retention = _retention(rules)
        visible = rules.visible_in(step)
        stored_keys, stored_values = held
        slots = DecodeSlots(
            keys=stored_keys,
            values=stored_values,
            score_heads=table.score_heads,
            tables=tables,
            scale=call.scale,
            visibility=visible,
            softcap=call.softcap,
            retention=retention,
            recall=recall,
            rule=rule,
        )
        if (kernel := kernels.decode_of(slots, queries)) is None:
            return None
        tensors = tuple(map(ref, _tensors(table, rotary)))
        return KernelHandle(
            kernel=kernel,
            retention=retention,
            end=end,
            tensors=tensors,
            rules=rules,
            rotary=rotary,
            mode=mode,
            numbers=_numbers(layer_step),
        )


Backend = Literal["fused", "generic"]


class StepPart(NamedTuple):
    """A step of a layer, or a part of one, for a backend: the kernel that serves it, and slots of older steps to free.

    `is_continued`: whether another part of the same step was taken before.
    """

    layer_step: LayerStep
    handle: KernelHandle | None
    released: Released = ()
    is_continued: bool = False

    @property
    def backend(self) -> Backend:
        """Name of the backend that takes it: the fused one where a kernel does all of it."""
        return "fused" if self.handle is not None and self.handle.is_all(self.layer_step) else "generic"


class StepPlan(ABC):
    """A step of a layer as one backend takes it. Planning changes nothing. Run the plan, then record it.

    `FusedStep` takes a step in one call of a kernel. `GenericStep` takes its four verbs one by one.
    """

    @abstractmethod
    def run(self) -> Attended:
        """Write the new tokens and attend. Returns the attention output."""

    @abstractmethod
    def record(self) -> StepRecord:
        """Observe and evict, and update the table. Returns the record that undoes the step."""


@final
class FusedStep(StepPlan):
    """A step of one layer in a kernel, which writes the results to new memory. The table takes it when recorded.

    The slots that `released` steps reserved for evicted tokens are free afterwards.
    """

    def __init__(self, part: StepPart) -> None:
        layer_step, handle = part.layer_step, part.handle
        assert handle is not None, "a fused step without a kernel"
        budget = layer_step.rules.budget
        self._handle, self._layer_step, self._is_continued = handle, layer_step, part.is_continued
        self._is_over = budget is not None and layer_step.bound > budget
        given = layer_step.kernel_input(
            handle.keeps_observed(len(layer_step.step.lengths)), self._is_over, part.released
        )
        self._planned = handle.kernel.planned(given)

    def run(self) -> Attended:
        self._handle.kernel.take(self._planned)
        return self._planned.output.out

    def record(self) -> StepRecord:
        layer_step, done, table = self._layer_step, self._planned.output, self._layer_step.table
        record = StepRecord(
            step=layer_step.step,
            rolled_back=(0,) * len(layer_step.step.lengths),
            occupancy_bound=table.occupancy_bound,
            statistics=table.statistics,
            written=done.written,
            state=table.state,
            initial_state=put_initial_state(layer_step, done),
            observed=None if done.mass is None else layer_step.step.first_columns,
            mass=done.mass,
            queries=None if done.mass is None else layer_step.states[0].detach(),
            evicted=done.evicted,
            evicted_positions=done.evicted_positions,
            evicted_count=int(self._is_over),
            is_continued=self._is_continued,
        )
        table.replace(done.slot_positions, done.state, layer_step.bound - int(self._is_over), layer_step.step)
        return record


def put_initial_state(layer_step: LayerStep, done: DecodeOutput) -> dict[str, Tensor]:
    """Give the tokens of a step the state that the policy gives them, where a kernel wrote 0. Returns that state.

    The tokens stand in the window, so no kernel has ranked them yet.
    """
    queries, keys, _ = layer_step.states
    initial = initial_state(layer_step.rules.policy, layer_step.layer, layer_step.heads, queries, keys)
    for name, tensor in zip(layer_step.table.state, done.state, strict=True):
        if name in initial:
            tensor.scatter_(-1, done.written, initial[name])  # for padding, into a slot that stays free
    return initial | layer_step.remembered()


def _retention(rules: LayerConfig) -> Retention | None:
    """The rules by which the kernel observes and evicts in place of the policy. None: the policy has to be asked."""
    ranking = ranking_of(rules.policy)
    if ranking is None:
        return None
    sinks, window = rules.protected
    budget = MAX_NUMBER if rules.budget is None else rules.budget
    return Retention(ranking, budget=budget, sinks=sinks, window=window)


def _recall(table: SlotTable, rotary: Rotary | None, keys: NewKeys, end: int) -> RecallSlots | None:
    """The recall store as a kernel reads it, which takes such `keys`, in a text up to `end`. None: it can't."""
    recall, cos_sin = table.recall, None
    assert recall is not None, "a table that recalls nothing"
    pieces, names = recall.pieces(), tuple(table.state)
    states = [each for piece in pieces for each in (piece.keys.states, piece.values)]
    if any(each.format is Format.FLOAT and each.data.dtype != keys.dtype for each in states):
        return None
    if rotary is not None:
        cos, sin = rotary.cos_sin_at(DISTANCE, end, keys.device)
        cos_sin = cos.clone(), sin.clone()
    return RecallSlots(
        pieces=pieces,
        positions=recall.positions,
        last_recalled=recall.last_recalled,
        count=recall.page_count,
        cos_sin=cos_sin,
        state=names.index(TOKEN_INDEX),
        digests=recall.digests.tiled(),
        candidates=recall.candidates,
    )


def _held(layer_step: LayerStep) -> tuple[PackedStates, PackedStates] | None:
    """Keys and values as a kernel writes and reads them in such a step. None: it can't."""
    store = layer_step.table.store
    ring = store.full_precision
    if not ring.tensors:
        return store.in_place()
    pairs = zip(layer_step.step.lengths, ring.filled_rows, strict=True)
    is_filled = all(is_filled or not tokens for tokens, is_filled in pairs)
    return store.in_place_beside_sinks() if is_filled and layer_step.table.recall is None else None


def _takes(held: PackedStates, new: Tensor, queries: Queries) -> bool:
    """Return True if a kernel can write new states: as they are, or as codes of numbers like those of the queries."""
    return new.dtype == (held.data.dtype if held.format is Format.FLOAT else queries.dtype)


def _tensors(table: SlotTable, rotary: Rotary | None) -> tuple[Tensor, ...]:
    """The tensors whose memory a kernel knows: all of the store, and tables."""
    held: tuple[Tensor, ...] = tuple(table.store.tensors().values())
    # A recall store with new memory has a new tensor of positions.
    held = held if table.recall is None else (*held, table.recall.positions)
    return held if rotary is None else (*held, *rotary.built.get(torch.float32, ()))


def _numbers(layer_step: LayerStep) -> tuple[object, ...]:
    """Sizes and numbers that all steps of one kernel share."""
    (queries, keys, values), call = layer_step.states, layer_step.call
    sizes = queries.shape, keys.shape, values.shape, queries.dtype, keys.dtype, values.dtype
    return *sizes, tuple(layer_step.table.state), call.scale, call.softcap, layer_step.step.sinks is None
