"""The memory of one layer: keys, values, positions and a policy's numbers, all addressed by slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from windlass import kernels
from windlass.cache.layer_config import LayerConfig
from windlass.cache.merging import log_counts
from windlass.cache.recall import TOKEN_INDEX, RecallSnapshot, RecallStore
from windlass.core.inputs import PackedStates
from windlass.core.parse import MAX_NUMBER
from windlass.core.positions import EMPTY, PLACES, RESERVED, SlotPlaces
from windlass.core.step import Step
from windlass.core.types import IndexKeys, NewKeys, NewValues, QueryPositions, Scores, SlotIndex, SlotPositions
from windlass.policies.calls import initial_writes
from windlass.stores.base import Parts, Store, StoreSnapshot

STATE: Final = "state."  # prefix of the names of state tensors
STATISTICS: Final = "statistics."


class TableSnapshot(NamedTuple):
    """A table at one moment: its tensors, and copies of those that will be written into."""

    store: StoreSnapshot
    positions: Tensor
    state: dict[str, Tensor]
    statistics: dict[str, Tensor]
    occupancy_bound: int
    recall: RecallSnapshot | None
    copies: list[tuple[Tensor, Tensor]]  # a tensor and a copy of its contents, appended before each write


class SlotTable:
    """Slots of one layer: each is free, holds a token, or is reserved for an evicted one that may come back.

    Of tokens that share a position, after an edit, the one in the lower slot is the earlier in the text.

    `positions` (batch, score_heads, slots) int32 has the token's index in its text, EMPTY or RESERVED. `state` has
    float32 tensors of the same shape, and `statistics` a policy's tensors of the whole layer. `occupancy_bound` is an
    upper bound on the number of tokens in any row, known without a device sync. `recall` has all tokens, where evicted
    ones can be recalled.
    """

    def __init__(self, store: Store, recall: RecallStore | None = None) -> None:
        self.store, self.recall = store, recall
        self.positions: Tensor = torch.empty(0, dtype=torch.int32)
        self.state: dict[str, Tensor] = {}
        self.statistics: dict[str, Tensor] = {}
        self.occupancy_bound = 0

    @property
    def is_empty(self) -> bool:
        """Return True if nothing was ever written."""
        return self.store.slots == 0

    @property
    def slots(self) -> int:
        """Slots per row and head, 0 before the first write."""
        return self.store.slots

    @property
    def score_heads(self) -> int:
        """1 where all heads of a row hold the same tokens, else kv_heads."""
        return self.positions.shape[1]

    def allocate(self, keys: NewKeys, values: NewValues, slots: int, per_head: bool, headroom: int) -> None:
        """Make room for `slots` tokens like these, of which the store can roll `headroom` back."""
        self.store.allocate(keys, values, slots, headroom)
        shape = keys.shape[0], keys.shape[1] if per_head else 1, slots
        self.positions = torch.full(shape, EMPTY, dtype=torch.int32, device=keys.device)

    def keep_state(self, names: tuple[str, ...], initial: Mapping[str, float]) -> None:
        """Set the names of the state per slot. Each tensor begins with its number of `initial`, or 0.

        The places at which tokens are read are kept.
        """
        places = {name: self.state[name].expand_as(self.positions).clone() for name in PLACES if name in self.state}
        self.state = {
            name: torch.full_like(self.positions, initial.get(name, 0.0), dtype=torch.float32) for name in names
        } | places

    def forget_state(self) -> None:
        """Drop the policy's state and statistics."""
        self.keep_state((), {})
        self.statistics = {}

    def keep_places(self) -> None:
        """Add places to the state: each token so far is read at its own position."""
        at = self.positions.clamp(min=0).float()
        self.state = self.state | dict(zip(PLACES, (at, at.clone(), at + 1), strict=True))

    @property
    def places(self) -> SlotPlaces | None:
        """The places at which tokens are read. None: at their positions."""
        if PLACES[0] not in self.state:
            return None
        return SlotPlaces(*(self.state[name].int().where(self.positions >= 0, EMPTY) for name in PLACES))

    def split_heads(self) -> None:
        """Let each kv head hold different tokens from now on."""
        self.positions = self.positions.expand(-1, self.store.layout[0], -1).clone()

    def remember(self, keys: NewKeys, values: NewValues, positions: QueryPositions, counts: Sequence[int]) -> Parts:
        """Store tokens for recall, if the layer recalls. Returns their initial state.

        Each row has `counts` tokens. The others are padding, whose `positions` are EMPTY.
        """
        if self.recall is None:
            return {}
        return {TOKEN_INDEX: self.recall.append(keys, values, positions, counts).to(keys.device)}

    def write(
        self,
        index: SlotIndex,
        keys: NewKeys,
        values: NewValues,
        positions: SlotIndex,
        state: Parts,
        index_keys: Tensor | None = None,
    ) -> None:
        """Put tokens with their `state` into the slots at `index`. The slot of a padding token stays free.

        `index_keys` (batch, tokens, channels) are those of an indexer, where the layer holds such.
        """
        beside = [(self.positions, positions), *initial_writes(self.state, state), *self.store.index_writes(index_keys)]
        self.store.write(index, keys, values, positions, beside)

    def rewrite(self, index: SlotIndex, positions: QueryPositions, state: Parts) -> None:
        """Mark the slots at `index`, whose keys and values are still there, as held again."""
        at = positions[:, None].expand_as(index)
        kernels.write_all(index, [(self.positions, at), *initial_writes(self.state, state)])

    def free(self, index: SlotIndex) -> None:
        """Free the slots at `index`."""
        self.positions.scatter_(-1, index, EMPTY)

    def put_back(self, index: SlotIndex, evicted_positions: SlotIndex) -> None:
        """Put evicted tokens back into their slots. Other slots do not change, as they may have been freed since."""
        now = self.positions.gather(-1, index)
        self.positions.scatter_(-1, index, evicted_positions.where(evicted_positions >= 0, now))

    def put_parts_back(self, index: SlotIndex, parts: Parts, evicted_positions: SlotIndex) -> None:
        """Write `parts` back to the slots at `index`, where a token was evicted and merged into them.

        Elsewhere the slot was free, and its present contents stay.
        """
        was_evicted = (evicted_positions >= 0)[..., None]
        now = self.store.take_all(index)
        self.store.put(index, {name: part.where(was_evicted, now[name]) for name, part in parts.items()})

    def put_state_back(self, state: Parts, statistics: dict[str, Tensor], occupancy_bound: int) -> None:
        """Copy state, statistics and count of an earlier moment into the current tensors."""
        for name, tensor in state.items():
            self.state[name].copy_(tensor)
        self.statistics = dict(statistics)
        self.occupancy_bound = occupancy_bound

    def resize(self, slots: int) -> None:
        """Pack the held tokens into the first of `slots` slots. Afterwards no slot is reserved."""
        order = (self.positions == EMPTY).to(torch.uint8).argsort(dim=-1, stable=True)
        self._rearrange(order[..., : min(slots, self.occupancy_bound)], slots)

    def sort(self) -> None:
        """Sort the held tokens into the first slots, in the order of their text. No slot may be reserved."""
        self._rearrange(kernels.argsort_positions(self.positions), self.slots)

    def _rearrange(self, order: SlotIndex, slots: int) -> None:
        """Keep the slots at `order`, in that order, and add free slots up to `slots`."""
        free = slots - order.shape[-1]
        self.store.rearrange(order, slots)
        self.positions = pad(self.positions.gather(-1, order), (0, free), value=EMPTY)
        self.state = {name: pad(tensor.gather(-1, order), (0, free)) for name, tensor in self.state.items()}

    def count(self) -> None:
        """Count the tokens on the device, so that the bound is exact."""
        self.occupancy_bound = 0 if self.is_empty else int((self.positions >= 0).sum(-1).max())

    def snapshot(self) -> TableSnapshot:
        """A snapshot for `restore`. Code that writes into the state adds it to `copies` first."""
        now = self.unwritten()
        now.copies.append((self.positions, self.positions.clone()))
        return now

    def unwritten(self) -> TableSnapshot:
        """A snapshot for a step that writes into none of the table's tensors, but replaces them."""
        return TableSnapshot(
            store=self.store.snapshot(),
            positions=self.positions,
            state=self.state,
            statistics=dict(self.statistics),
            occupancy_bound=self.occupancy_bound,
            recall=None if self.recall is None else RecallSnapshot.of(self.recall),
            copies=[],
        )

    def replace(self, positions: Tensor, state: Sequence[Tensor], occupancy_bound: int, step: Step) -> None:
        """Replace the tensors by these, which are copies with the changes of a `step` of one token per row."""
        if self.recall is not None:
            self.recall.count_written(step.positions, step.lengths)
        self.positions, self.occupancy_bound = positions, occupancy_bound
        self.state = dict(zip(self.state, state, strict=True))

    def copied_state(self) -> dict[str, Tensor]:
        """A copy of the state."""
        return {name: tensor.clone() for name, tensor in self.state.items()}

    def restore(self, snapshot: TableSnapshot) -> None:
        """Restore the table, and its tensors, to `snapshot`. The contents of free slots may differ."""
        self.store.restore_snapshot(snapshot.store)
        self.positions, self.state = snapshot.positions, snapshot.state
        for tensor, content in snapshot.copies:
            tensor.copy_(content)
        self.statistics, self.occupancy_bound = dict(snapshot.statistics), snapshot.occupancy_bound
        if self.recall is not None and snapshot.recall is not None:
            snapshot.recall.restore(self.recall)

    def roll_back_recall(self, counts: Sequence[int]) -> None:
        """Remove the newest `counts` tokens of each row from the recall store, if there is one."""
        if self.recall is not None:
            self.recall.roll_back(counts)

    def positions_of(self, row: int) -> Tensor:
        """The positions of all tokens of a row that can be read, in any order, with EMPTY among them."""
        return self.positions[row].flatten() if self.recall is None else self.recall.positions[row]

    def edit(self, change: Callable[[Tensor], Tensor], rows: slice) -> None:
        """Replace the positions of some rows."""
        self.positions[rows] = change(self.positions[rows]).to(torch.int32)
        if self.recall is not None:
            self.recall.edit(change, rows)
        self.count()

    def cut(self, ends: Tensor, counts: Sequence[int]) -> None:
        """Free the slots of the newest `counts` tokens of rows that held all of them: those at `ends` and beyond."""
        if self.recall is not None:
            self.edit(lambda positions: torch.where(positions >= ends[:, None, None], EMPTY, positions), slice(None))
            return
        self.positions.masked_fill_(self.positions >= ends[:, None, None], EMPTY)
        if len(counts) == 1:
            self.occupancy_bound -= counts[0]
        else:
            self.count()

    def keep_recalled(self) -> None:
        """Remove tokens without a position from the recall store of the only row."""
        assert self.recall is not None, "a table without recall"
        if (moved := self.recall.pack()) is not None:
            index = self.state[TOKEN_INDEX]
            found = moved.to(index.device, index.dtype)[index.long().clamp(max=len(moved) - 1)]
            self.state[TOKEN_INDEX] = found.where(self.positions >= 0, 0.0)

    def select_rows(self, rows: Tensor) -> None:
        """Keep the batch rows at `rows`, which may repeat."""
        self.store.select_rows(rows)
        self._select_metadata(rows)
        self.count()  # the longest row may be gone

    def _select_metadata(self, rows: Tensor) -> None:
        """Keep the rows' positions, state, statistics and recalled tokens."""
        if self.recall is not None:
            self.recall.select_rows(rows)
        self.positions = self.positions.index_select(0, rows)
        self.state = {name: tensor.index_select(0, rows) for name, tensor in self.state.items()}
        self.statistics = {name: tensor.index_select(0, rows) for name, tensor in self.statistics.items()}

    def arrange_rows(self, rows: Sequence[int | None]) -> None:
        """Keep these batch rows, each named once, in that order. None stands for a row without tokens."""
        slots = self.slots  # where tokens are recalled, free slots may have some
        if self.recall is None:
            used = (self.positions != EMPTY).flatten(0, 1).any(0).nonzero()
            slots = int(used[-1]) + 1 if len(used) else 0
        self.store.arrange_rows(rows, slots)
        self._select_metadata(torch.tensor([row or 0 for row in rows], device=self.positions.device))
        for target, source in enumerate(rows):
            if source is None:
                self._clear_metadata(target)
        self.count()

    def clear_row(self, row: int) -> None:
        """Let row `row` hold nothing, and its memory zeros."""
        self.store.clear_row(row)
        self._clear_metadata(row)
        self.count()

    def _clear_metadata(self, row: int) -> None:
        self.positions[row] = EMPTY
        for tensor in self.state.values():
            tensor[row] = 0
        self.statistics = {
            name: with_row(tensor, row, torch.zeros_like(tensor[:1]), len(tensor))
            for name, tensor in self.statistics.items()
        }
        if self.recall is not None:
            self.recall.clear_row(row)

    def copy_row(self, source: int, target: int) -> None:
        """Overwrite row `target` with row `source`."""
        self.store.copy_row(source, target)
        if self.recall is not None:
            self.recall.copy_row(source, target)
        for tensor in (self.positions, *self.state.values(), *self.statistics.values()):
            tensor[target] = tensor[source]
        self.count()  # as above

    def tensors(self) -> dict[str, Tensor]:
        """All allocated tensors, by name."""
        if self.is_empty:
            return {}
        state = {STATE + name: tensor for name, tensor in self.state.items()}
        statistics = {STATISTICS + name: tensor for name, tensor in self.statistics.items()}
        return {**self.store.tensors(), "positions": self.positions, **state, **statistics}

    def recalled_tensors(self, start: int = 0) -> dict[str, Tensor]:
        """Tensors of the tokens that can be recalled, from number `start` on, for a file, by name."""
        return {} if self.recall is None else self.recall.tensors(start)

    def load(self, tensors: dict[str, Tensor], state: tuple[str, ...], tokens_seen: Sequence[int]) -> None:
        """Load the results of `tensors` and `recalled_tensors`, with state of these names, into this empty table."""
        self.store.restore(tensors)
        if self.recall is not None:
            self.recall.load(tensors, tokens_seen)
        self.positions = tensors["positions"]
        self.state = {name: tensors[STATE + name] for name in state}
        self.statistics = {
            name.removeprefix(STATISTICS): tensor for name, tensor in tensors.items() if name.startswith(STATISTICS)
        }
        self.count()

    def packed(self, row: int | None = None, end: int = MAX_NUMBER) -> SlotTable:
        """A copy with its tokens in the first slots, and no more slots than tokens.

        `row`: only this row. `end`: only tokens at positions before it.
        """
        if self.is_empty:
            return self
        rows = slice(None) if row is None else slice(row, row + 1)
        positions = self.positions[rows]
        is_held = (positions >= 0) & (positions < end)
        slots = max(1, int(is_held.sum(-1).max()))
        if bool(is_held[..., :slots].all()):
            table = SlotTable(self.store.first(rows, slots))
            table.positions = positions[..., :slots].clone()
            table.state = {name: each[rows, :, :slots].clone() for name, each in self.state.items()}
        else:
            # The order in which `resize` packs, so that later ties between scores fall the same way.
            order = is_held.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :slots]
            is_packed = is_held.gather(-1, order)  # a free slot's state is that of padding, or of a token that is gone
            table = SlotTable(self.store.rearranged(rows, order, slots))
            table.positions = positions.gather(-1, order).where(is_packed, EMPTY)
            table.state = {
                name: each[rows].gather(-1, order).where(is_packed, 0.0) for name, each in self.state.items()
            }
        table.statistics = {name: each[rows].clone() for name, each in self.statistics.items()}
        return table


def free_reserved(positions: Tensor, index: SlotIndex, evicted_positions: SlotIndex) -> None:
    """Free the slots at `index` of `positions` that are reserved for tokens from `evicted_positions`."""
    now = positions.gather(-1, index)
    positions.scatter_(-1, index, now.masked_fill(evicted_positions >= 0, EMPTY))


def reserve_again(positions: Tensor, index: SlotIndex, evicted_positions: SlotIndex) -> None:
    """Undo `free_reserved`."""
    now = positions.gather(-1, index)
    positions.scatter_(-1, index, now.masked_fill(evicted_positions >= 0, RESERVED))


@dataclass(frozen=True)
class TableView:
    """A layer's slots once the tokens of `step` are written, and before any token is evicted.

    It reads the memory of the layer, so it is valid until that is written into. `kept` is valid for the whole pass.
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
    def of(cls, table: SlotTable, rules: LayerConfig, step: Step) -> TableView:
        """The view of a table that already holds the tokens of `step`."""
        store, occupancy = table.store, min(table.occupancy_bound + step.graph_headroom, table.slots)
        counts = log_counts(rules.merge, table.state)
        return cls(step, *store.packed(), table.positions, counts, table.places, occupancy, store.index_keys)

    @property
    def counted(self) -> int:
        """Tokens of the fullest row and head, counted on the device."""
        return int((self.positions >= 0).sum(-1).max())

    def within_reach(self, rules: LayerConfig) -> TableView:
        """The view with the last query that sees each slot, for rows with gaps or pins, or with different sinks.

        The policy keeps sinks, pins and the newest tokens. A slot is seen until so many newer ones as fill the budget.
        """
        assert rules.budget is not None, "a reach without a budget"
        sinks, positions, slots = self.step.sinks, self.positions, self.positions.shape[-1]
        if sinks is None:
            kept = torch.full_like(positions, rules.limits.sinks)
            is_behind = is_evictable = positions >= kept
        else:
            kept, is_behind = sinks.kept_before(positions), positions >= sinks.per_slot
            is_evictable = is_behind & ~sinks.pinned(positions)
        ordered = positions.where(is_behind, MAX_NUMBER).sort(-1).values  # pins fill the budget, too
        first_unseen = torch.searchsorted(ordered, positions.contiguous(), right=True) + rules.budget - kept
        unseen = ordered.gather(-1, first_unseen.clamp(0, slots - 1)).where(first_unseen < slots, MAX_NUMBER)
        return replace(self, seen_until=(unseen - 1).where(is_evictable, MAX_NUMBER).to(positions.dtype))

    def kept(self) -> TableView:
        """A view for the rest of the pass, through later writes and evictions. Merges have to be undone first.

        An evicted token's slot is reserved until the pass ends, so keys and values are still there. Full-precision
        tokens are copied, as the store may overwrite them.
        """
        keys, values = (_apart(states, self.has_recalled) for states in (self.keys, self.values))
        return replace(self, keys=keys, values=values, positions=self.positions.clone())

    def tail(self, columns: int) -> TableView:
        """The view of the last `columns` queries of the step, whose `lengths` stay those of the whole."""
        if columns == self.step.positions.shape[1]:
            return self
        assert self.places is None, "a part of a pass with pictures"
        if columns not in self._tails:  # made once, as it needs a device sync
            self._tails[columns] = replace(self.step, positions=self.step.positions[:, -columns:].contiguous())
        return replace(self, step=self._tails[columns])


def _apart(states: PackedStates, has_recalled: bool) -> PackedStates:
    """A copy of the full-precision tokens, and of all states where some are recalled."""
    ring = states.full_precision
    if has_recalled:
        scales = None if states.scales is None else states.scales.clone()
        states = replace(states, data=states.data.clone(), scales=scales)
    return states if ring is None else replace(states, full_precision=ring.clone())


def with_row(tensor: Tensor | None, row: int, own: Tensor, batch: int) -> Tensor:
    """A copy of `tensor`, or of zeros, in which `row` is the only one of `own`."""
    copied = own.new_zeros(batch, *own.shape[1:]) if tensor is None else tensor.clone()
    copied[row] = own[0]
    return copied
