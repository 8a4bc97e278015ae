"""One layer's slots and the four steps: write, attend, observe, evict."""

from collections import deque
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from windlass import kernels
from windlass.cache.observation import observation, observed_columns
from windlass.core.rotary_index import EMPTY
from windlass.core.shapes import Attended, NewKeys, NewValues, ObservedColumns, Queries, SlotIndex
from windlass.core.step import SPARE, AttentionCall, Limits, Record, Step
from windlass.kernels.reference import Mass, Visibility, Writes
from windlass.merge import Merge, Room, absorb, as_read
from windlass.policies.base import Policy, Slots, arrived, at_start, policy_errors, scores_of, unknown_state
from windlass.policies.recent import Recent
from windlass.positions.modes import PositionMode
from windlass.positions.rotary import Rotary, Turns
from windlass.stores.base import Parts, Store

GROWTH = 64  # slots of an unbounded layer grow by half, and to a multiple of this


class LayerCache:
    """Slots of one attention layer; sized from the first keys it sees.

    A layer whose sliding window fits in the budget holds just that window, whatever the policy: all
    of it is visible to the next token and nothing else is.
    """

    def __init__(
        self,
        index: int,
        limits: Limits,
        policy: Policy,
        rotary: Rotary | None,
        store: Store,
        merge: Merge | None = None,
    ) -> None:
        self.index, self.rotary, self.store, self.limits = index, rotary, store, limits
        self.own = policy, merge  # what it goes by, unless it holds just its sliding window
        self.policy, self.merge, self.budget = policy, merge, limits.budget
        self.positions: Tensor = torch.empty(0, dtype=torch.int32)
        self.state: dict[str, Tensor] = {}
        self.statistics: dict[str, Tensor] = {}  # what the policy keeps beside the slots
        self.most_held = 0  # an upper bound over rows, known without asking the device
        self.reserved = 0  # slots that are known to be needed soon, so that a layer without budget grows once
        self.has_evicted = self.is_whole = False  # whole: a first text is held, whatever the budget
        self.sliding_window: int | None = None
        self.records: deque[Record] = deque()

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever written."""
        return self.store.slots == 0

    def step(
        self,
        queries: Queries,
        keys: NewKeys,
        values: NewValues,
        step: Step,
        mode: PositionMode,
        call: AttentionCall,
    ) -> Attended:
        """Write, attend, observe, evict; returns what the queries read."""
        if self.is_empty or call.sliding_window != self.sliding_window:  # an import may not have known it
            self.fit_to(call.sliding_window)
        self.make_room(keys, values)
        queries, keys, born = arrived(self.own[0], self.index, queries, keys, step.ids)
        positions = step.positions[:, None].expand(-1, self.positions.shape[1], -1)
        most_held, written = self.most_held, kernels.first_free(self.positions, keys.shape[2])
        state = {name: tensor.clone() for name, tensor in self.state.items()}
        statistics, copies = dict(self.statistics), self.store.exact.copies
        try:
            self.write(written, keys, values, positions, born)
            self.most_held += max(step.lengths)
            observed = observed_columns(step, self.policy.observed_queries)
            out, mass = self.attend(queries, step, mode, call, observed)
            is_shown = mass is not None or (self.merge is not None and self.merge.asks_query)
            seen = (0,) * len(step.lengths), most_held, written, state, statistics, copies, observed, mass
            self.settle(Record(step, *seen, queries if is_shown else None, call.scale, born))
        except BaseException:  # an interrupt, too, must leave the cache as it was
            self.unwrite(written, state, statistics, most_held)
            self.store.exact.copies = copies
            raise
        return out

    def settle(self, record: Record) -> None:
        """Observe and evict; the record is kept so that the step can be taken back."""
        if record.mass is not None:
            seen = observation(record, self.policy.observed_queries)
            with policy_errors(self.policy, self.index):
                self.policy.observe(self.slots_at(record.step), seen)
        self.records.append(self._evict(record))

    def unwrite(self, written: SlotIndex, state: Parts, statistics: Parts, most_held: int) -> None:
        """Free the slots of a step again, with state, statistics and counts from before it."""
        self.positions.scatter_(-1, written, EMPTY)
        for name, tensor in state.items():
            self.state[name].copy_(tensor)
        self.statistics = dict(statistics)
        self.most_held = most_held

    def fit_to(self, sliding_window: int | None) -> None:
        """Hold just the sliding window, where that fits in the budget."""
        self.sliding_window = sliding_window
        if sliding_window is not None and (self.budget is None or sliding_window <= self.budget):
            self.policy, self.merge, self.budget, self.state, self.statistics = Recent(), None, sliding_window, {}, {}

    @property
    def is_whole_window(self) -> bool:
        """Whether the layer's budget is its sliding window."""
        return self.sliding_window is not None and self.budget == self.sliding_window

    def limit_to(self, budget: int | None) -> None:
        """Let another budget hold; what is over it goes at the next step."""
        self.limits = replace(self.limits, budget=budget)
        self.budget = budget

    def leave_window(self) -> None:
        """Go by the cache's own policy, which has observed nothing yet, where just the sliding window was held."""
        self.policy, self.merge = self.own
        if self.policy.per_head:
            self.positions = self.positions.expand(-1, self.store.layout[0], -1).clone()
        self.state = unknown_state(self.state_names, self.positions)

    @property
    def spare(self) -> int:
        """Slots beyond the budget at rest: for the next tokens, and for those that may be taken back."""
        return SPARE + self._rollback

    @property
    def _rollback(self) -> int:
        return 0 if self.state_names or self.policy.statistics else self.limits.rollback

    @property
    def state_names(self) -> tuple[str, ...]:
        """What is kept per slot: the policy's state, and what merging needs."""
        return self.policy.state if self.merge is None else (*self.policy.state, *self.merge.state)

    def append(self, keys: NewKeys, values: NewValues, positions: Tensor, sliding_window: int | None) -> SlotIndex:
        """Write tokens that attend to nothing: (batch, ranked, tokens) `positions`, EMPTY for none.

        Returns the slots they got. What exceeds the budget is evicted at the next step.
        """
        if self.is_empty:
            self.fit_to(sliding_window)
        self.make_room(keys, values)
        positions = positions.expand(-1, self.positions.shape[1], -1)
        written = kernels.first_free(self.positions, keys.shape[2])
        self.write(written, keys, values, positions, {})
        self.most_held += int((positions >= 0).sum(-1).max())
        self.forget_records(0)
        return written

    def make_room(self, keys: NewKeys, values: NewValues) -> None:
        """Slots for the new tokens: allocate, grow, or pack once decode begins."""
        tokens = keys.shape[2]
        is_decode = tokens <= SPARE
        self.forget_records(self._rollback if is_decode else 0)
        wanted, needed = self.store.slots, self.most_held + tokens
        if self.budget is not None and not self.is_whole:
            room = self.spare if is_decode else max(tokens, self.limits.chunk, wanted - self.budget)
            wanted = max(self.budget + room, needed)
        elif needed > wanted:
            grown = self.reserved if self.reserved >= needed else max(needed, wanted * 3 // 2)
            wanted = -(-grown // GROWTH) * GROWTH
        if self.is_empty:
            self.store.allocate(keys, values, wanted, SPARE + self.limits.rollback)
            ranked = keys.shape[1] if self.policy.per_head else 1
            self.positions = torch.full((keys.shape[0], ranked, wanted), EMPTY, dtype=torch.int32, device=keys.device)
            self.state = {name: torch.zeros_like(self.positions, dtype=torch.float32) for name in self.state_names}
        elif wanted != self.store.slots:
            self.resize(wanted)

    def resize(self, slots: int) -> None:
        """Pack the held tokens into the first of `slots` slots; earlier steps can't be taken back."""
        self.forget_records(0)
        kept = min(slots, self.store.slots)
        order = (self.positions == EMPTY).to(torch.uint8).argsort(dim=-1, stable=True)[..., :kept]
        self.store.rearrange(order, slots)
        self.positions = pad(self.positions.gather(-1, order), (0, slots - kept), value=EMPTY)
        self.state = {name: pad(tensor.gather(-1, order), (0, slots - kept)) for name, tensor in self.state.items()}

    def write(self, slots: SlotIndex, keys: NewKeys, values: NewValues, positions: Tensor, born: Parts) -> None:
        """Put the tokens into these slots; a padding token's slot stays free."""
        self.store.write(slots, keys, values, positions, self.beside(positions, born))

    def beside(self, positions: Tensor, born: Parts) -> Writes:
        """What is written beside keys and values for tokens at `positions`."""
        return [(self.positions, positions), *at_start(self.state, born)]

    def attend(
        self, queries: Queries, step: Step, mode: PositionMode, call: AttentionCall, observed: ObservedColumns | None
    ) -> tuple[Attended, Mass | None]:
        tables, reading, tokens = None, None, queries.shape[2]
        read = as_read(self.merge, self.store, self.positions, self.state)
        if self.rotary is not None:
            reading = mode.read(read.positions, step.positions)
            bound = mode.bound(step.end, min(self.most_held + step.ahead, self.store.slots), tokens)
            tables = self.rotary.tables(bound, queries.device, kernels.table_dtype(queries))
        out, mass = kernels.attend(
            queries,
            read.keys,
            read.values,
            read.positions,
            step.positions,
            reading=reading,
            tables=tables,
            scale=call.scale,
            visibility=self._visibility(),
            softcap=call.softcap,
            sink_logits=call.sink_logits,
            log_counts=read.log_counts,
            observed=observed,
            is_rest_wanted=self.policy.observed_queries is None and observed is not None and observed.shape[1] < tokens,
        )
        return out, read.folded(mass)

    def _visibility(self) -> Visibility:
        if self.policy.is_recency and self.budget is not None and self.merge is None and not self.is_whole_window:
            return Visibility(self.sliding_window, self.budget - self.limits.sinks + 1, self.limits.sinks)
        return Visibility(self.sliding_window)

    def _evict(self, record: Record) -> Record:
        """Free the lowest-ranked tokens over budget; returns the record with what was freed."""
        if self.budget is None or self.is_whole or self.most_held <= self.budget:
            return record
        evicted, before = self._give_up(record.step, self.store.slots - self.budget)
        freed, self.most_held = self.most_held - self.budget, self.budget
        self.has_evicted = True
        record = replace(record, evicted=evicted, evicted_positions=before, freed=freed)
        if self.merge is None:
            return record
        turns = Turns(self.rotary, record.step.end, evicted.device)
        room = Room(self.store, self.positions, self.state, self.statistics, self.limits, self.sliding_window, turns)
        return absorb(self.merge, room, record)

    def _give_up(self, step: Step, count: int) -> tuple[SlotIndex, SlotIndex]:
        """Reserve the slots that the policy ranks lowest; a whole window, what the next token sees, protects none."""
        score = scores_of(self.policy, self.index, self.slots_at(step))
        sinks, window = (0, 0) if self.is_whole_window else (self.limits.sinks, self.limits.window)
        return kernels.evict(score, self.positions, step.next_positions, sinks, window, self.sliding_window, count)

    def slots_at(self, step: Step) -> Slots:
        """The layer as a policy sees it after `step`."""
        held, ends = (self.store, self.positions.clamp(min=EMPTY)), (step.next_positions, step.prompt_ends)
        turns, limits = Turns(self.rotary, step.end, self.positions.device), (self.limits.sinks, self.limits.window)
        return Slots(*held, self.state, *ends, turns.turned, turns.one, self.statistics, *limits)

    @property
    def is_lossless(self) -> bool:
        """Whether nothing but the tokens' own slots remembers that they were written."""
        return not self.has_evicted and not (self.policy.state or self.policy.statistics)

    def forget_records(self, tokens: int) -> None:
        """Keep only the newest records that hold `tokens` or fewer; free what the others reserved."""
        held = sum(record.size for record in self.records)
        while self.records and held > tokens:
            record = self.records.popleft()
            held -= record.size
            if record.evicted is not None and record.evicted_positions is not None:
                now = self.positions.gather(-1, record.evicted)
                self.positions.scatter_(-1, record.evicted, now.masked_fill(record.evicted_positions >= 0, EMPTY))

    def edit(self, change: Callable[[Tensor], Tensor], row: int | None = None) -> None:
        """Replace the positions of one row, or of all; earlier steps can't be taken back after it."""
        if self.is_empty:
            return
        self.forget_records(0)
        rows = slice(None) if row is None else slice(row, row + 1)
        self.positions[rows] = change(self.positions[rows]).to(torch.int32)
        self.most_held = int((self.positions >= 0).sum(-1).max())

    def tensors(self) -> dict[str, Tensor]:
        """Everything allocated, by name."""
        if self.is_empty:
            return {}
        state = {f"state.{name}": tensor for name, tensor in self.state.items()}
        statistics = {f"statistics.{name}": tensor for name, tensor in self.statistics.items()}
        return {**self.store.tensors(), "positions": self.positions, **state, **statistics}

    def restore(self, tensors: dict[str, Tensor], sliding_window: int | None, has_evicted: bool) -> None:
        """Take back what `tensors` gave, in a layer that is empty."""
        self.fit_to(sliding_window)
        self.store.restore(tensors)
        self.positions = tensors["positions"]
        self.state = {name: tensors[f"state.{name}"] for name in self.state_names}
        own = "statistics."
        self.statistics = {name[len(own) :]: tensor for name, tensor in tensors.items() if name.startswith(own)}
        self.most_held = int((self.positions >= 0).sum(-1).max())
        self.has_evicted = has_evicted
