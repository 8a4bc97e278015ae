"""The first and the newest tokens of each row in full precision, beside the codes of a low-bit store."""

from collections.abc import Sequence
from typing import Final
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from windlass import kernels
from windlass.core.errors import whole_number
from windlass.core.parse import LEAST, MAX_NUMBER
from windlass.core.types import NewKeys, NewValues, RowCounts, SlotIndex

# Names of the tensors. Prompt-cache files use them, too, so they must not change.
KEYS: Final = "exact_keys"  # (batch, kv_heads, entries, head_dim)
VALUES: Final = "exact_values"  # (batch, kv_heads, entries, value_dim)
SLOTS: Final = "exact_slots"  # (batch, kv_heads, entries) int32: the slot of an entry's token, -1 for none
TOKEN_INDEX: Final = "exact_serials"  # (batch, entries): which token of the row an entry holds, -1 for none
WRITTEN: Final = "exact_written"  # (batch): tokens written to the row
NAMES: Final = (KEYS, VALUES, SLOTS, TOKEN_INDEX, WRITTEN)


class FullPrecisionRing:
    """Each row's first `sinks` tokens and its `newest` ones, as the model made them.

    Layout: `sinks` fixed entries, a ring of `newest` entries and as many more as tokens can be rolled back, one scratch
    entry that absorbs discarded writes. Each entry stores the token's index in the row and the slot that holds its
    quantised copy. A token's index is the number of tokens written to the row before it, evicted ones included. Every
    token has a quantised copy, so a token leaves the ring by being overwritten.

    Raises: UsageError unless both are whole numbers from 0 to 2^30.
    """

    def __init__(self, sinks: int = 0, newest: int = 0) -> None:
        self.sinks = whole_number("sinks of a store", sinks, LEAST["sinks"], MAX_NUMBER)
        self.newest = whole_number("newest of a store", newest, LEAST["newest"], MAX_NUMBER)
        self.tensors: dict[str, Tensor] = {}
        """Allocated tensors by name. A write makes a new dictionary, so restoring the old dictionary undoes it."""
        self._latest_index: tuple[ReferenceType[Tensor], ...] | None = None  # its source tensors, and the index

    def allocate(self, keys: NewKeys, values: NewValues, rollback: int) -> None:
        """Make room for copies of such keys and values, so that `rollback` tokens can be rolled back."""
        if self.sinks + self.newest == 0:
            return
        batch, kv_heads = keys.shape[:2]
        entries = self.sinks + (self.newest + rollback if self.newest else 0) + 1
        self.tensors = {
            KEYS: keys.new_zeros(batch, kv_heads, entries, keys.shape[3]),
            VALUES: values.new_zeros(batch, kv_heads, entries, values.shape[3]),
            SLOTS: torch.full((batch, kv_heads, entries), -1, dtype=torch.int32, device=keys.device),
            TOKEN_INDEX: torch.full((batch, entries), -1, device=keys.device),
            WRITTEN: torch.zeros(batch, dtype=torch.int64, device=keys.device),
        }

    @property
    def keys(self) -> Tensor | None:
        """(batch, kv_heads, entries, head_dim), or None if nothing is kept in full precision."""
        return self.tensors.get(KEYS)

    @property
    def values(self) -> Tensor | None:
        """(batch, kv_heads, entries, value_dim), or None if nothing is kept in full precision."""
        return self.tensors.get(VALUES)

    def write(self, index: SlotIndex, keys: NewKeys, values: NewValues, positions: Tensor) -> None:
        """Count the tokens that go to the slots at `index`, and copy those that are first or newest.

        `positions` (batch, score_heads, tokens) are negative for padding. A token that only some heads get
        counts for the whole row.
        """
        if not self.tensors:
            return
        # A short write overwrites only entries that are not needed after it is undone, so it works in place.
        # A longer one would overwrite some that are needed then, so it works on copies.
        if keys.shape[2] > self._ring_size - self.newest > 0:
            self.tensors = {name: tensor.clone() for name, tensor in self.tensors.items()}
        slots, token_index, written = self.tensors[SLOTS], self.tensors[TOKEN_INDEX], self.tensors[WRITTEN]
        scratch = slots.shape[2] - 1
        is_token = (positions >= 0).any(1)
        new_index = written[:, None] + is_token.cumsum(1) - 1
        end = written + is_token.sum(1)
        is_kept = is_token & ((new_index < self.sinks) | (new_index >= end[:, None] - self._ring_size))
        # Shapes must not depend on data (no host sync, CUDA graphs), so tokens outside the ring are written to scratch.
        entries = self._entry_of(new_index).where(is_kept, scratch)
        index = index.expand(-1, slots.shape[1], -1)
        # The token of an entry was evicted if its slot is written again.
        slots.masked_fill_((slots[..., None] == index[:, :, None]).any(-1), -1)
        copies = (self.tensors[KEYS], keys), (self.tensors[VALUES], values)
        kernels.write_all(entries[:, None], [(slots, index), *copies])
        token_index.scatter_(1, entries, new_index)
        token_index[:, scratch] = -1
        self.tensors = {**self.tensors, WRITTEN: end}

    @property
    def filled_rows(self) -> tuple[bool, ...]:
        """Per row, whether its next token changes no entry: only first tokens are kept, and it has had all of them.

        Waits for the device.
        """
        written: list[int] = self.tensors[WRITTEN].tolist()
        return tuple(self.newest == 0 and count >= self.sinks for count in written)

    def keep(self, ring_index: Tensor) -> None:
        """Take `ring_index`, a result of ours that has lost the slots that were written since, as the present one."""
        slots = self.tensors[SLOTS]
        entries = torch.arange(slots.shape[2], dtype=torch.int32, device=slots.device)
        is_lost = ring_index.gather(2, slots.clamp(min=0).long()) != entries
        slots.masked_fill_(is_lost, -1)
        self._latest_index = (*map(ref, self.tensors.values()), ref(ring_index))

    def can_roll_back(self, counts: Sequence[int]) -> bool:
        """Return True if the newest tokens before the last `counts` tokens of each row are all still here.

        Waits for the device.
        """
        if not self._ring_size:
            return True
        end = self._written_without(counts)
        oldest = (end - self.newest).clamp(min=self.sinks)
        found = self.tensors[TOKEN_INDEX].gather(1, self._entry_of(oldest)[:, None])[:, 0]
        return bool(((found == oldest) | (oldest >= end)).all())

    def roll_back(self, counts: Sequence[int]) -> None:
        """Remove the newest `counts` tokens of each row from the count. Entries stay until they are overwritten."""
        if self.tensors:
            self.tensors = {**self.tensors, WRITTEN: self._written_without(counts)}

    def is_replaced(self, tensors: dict[str, Tensor]) -> bool:
        """Return True if writes since these `tensors` were ours went into separate memory."""
        return bool(tensors) and tensors[KEYS] is not self.tensors[KEYS]

    def copied_token_index(self) -> Tensor | None:
        """Index in the row of the token that each entry holds, copied, or None without full-precision entries."""
        return self.tensors[TOKEN_INDEX].clone() if self.tensors else None

    def put_back(self, tensors: dict[str, Tensor], token_index: Tensor | None) -> None:
        """Hold `tensors` again, from when `copied_token_index` gave `token_index`.

        Tokens written since may lie in the same memory. Their entries belong to no slot then.
        """
        if token_index is not None:
            is_lost = (tensors[TOKEN_INDEX] != token_index)[:, None]
            tensors = {**tensors, SLOTS: tensors[SLOTS].masked_fill(is_lost, -1)}
        self.tensors = tensors

    def ring_index(self, slots: int) -> Tensor | None:
        """Per slot, (batch, kv_heads, slots) int32: the entry that it is read from, -1 for its codes.

        None if nothing is kept in full precision.
        """
        if not self.tensors:
            return None
        # Keys and values of a step ask for the same index. A weak reference, so that it takes memory only in use.
        latest = None
        if self._latest_index is not None:
            *source, index = (reference() for reference in self._latest_index)
            if all(was is now for was, now in zip(source, self.tensors.values(), strict=True)):
                latest = index
        if latest is None or latest.shape[2] != slots:
            latest = self._build_ring_index(slots)
            self._latest_index = (*map(ref, self.tensors.values()), ref(latest))
        return latest

    def _build_ring_index(self, slots: int) -> Tensor:
        owners, token_index, written = self.tensors[SLOTS], self.tensors[TOKEN_INDEX], self.tensors[WRITTEN]
        # A token that was rolled back passes this test, but its slot is free: nobody reads the slot's entry.
        is_read = (token_index >= 0) & ((token_index < self.sinks) | (token_index >= written[:, None] - self.newest))
        batch, kv_heads, entries = owners.shape
        heads = torch.arange(batch * kv_heads, device=owners.device).view(batch, kv_heads, 1)
        beyond = batch * kv_heads * slots  # one more, for entries that are not read
        at = (heads * slots + owners).where(is_read[:, None] & (owners >= 0), beyond)
        index = torch.full((beyond + 1,), -1, dtype=torch.int32, device=owners.device)
        index[at] = torch.arange(entries, dtype=torch.int32, device=owners.device).expand_as(at)
        return index[:beyond].view(batch, kv_heads, slots)

    def overlay(self, states: Tensor, copies: Tensor | None) -> Tensor:
        """`states` (batch, kv_heads, slots, channels) with the entries of `copies`, our keys or values, in their slots.

        Returns `states` itself if nothing is kept in full precision.
        """
        ring_index = self.ring_index(states.shape[2])
        if ring_index is None or copies is None:
            return states
        index = ring_index.long().clamp(min=0)[..., None].expand_as(states)
        return torch.where(ring_index[..., None] >= 0, copies.gather(2, index), states)

    def rearrange(self, order: SlotIndex, slots: int) -> None:
        """Follow the tokens whose slots, `order` out of `slots`, became the first slots, in that order."""
        if not self.tensors:
            return
        owners = self.tensors[SLOTS]
        order = order.expand(-1, owners.shape[1], -1)
        new_slots = owners.new_full((*order.shape[:2], slots), -1)  # by old slot
        firsts = torch.arange(order.shape[2], dtype=owners.dtype, device=owners.device)
        new_slots.scatter_(2, order, firsts.expand_as(order))
        now = new_slots.gather(2, owners.clamp(min=0).long())
        self.tensors = {**self.tensors, SLOTS: now.where(owners >= 0, -1)}

    def copied(self, rows: slice, slots: int) -> "FullPrecisionRing":
        """A copy of some rows, in which entries of slots from `slots` on belong to no slot."""
        twin = FullPrecisionRing(self.sinks, self.newest)
        twin.tensors = {name: tensor[rows].clone() for name, tensor in self.tensors.items()}
        if twin.tensors:
            owners = twin.tensors[SLOTS]
            owners.masked_fill_(owners >= slots, -1)
        return twin

    def select_rows(self, rows: Tensor) -> None:
        """Keep the batch rows at `rows`, which may repeat."""
        self.tensors = {name: tensor.index_select(0, rows) for name, tensor in self.tensors.items()}

    def arrange_rows(self, rows: Sequence[int | None]) -> None:
        """Keep these batch rows in that order. None stands for a row that holds nothing."""
        if self.tensors:
            self.select_rows(torch.tensor([row or 0 for row in rows], device=self.tensors[WRITTEN].device))
        for target, source in enumerate(rows):
            if source is None:
                self.clear_row(target)

    def copy_row(self, source: int, target: int) -> None:
        """Overwrite row `target` with row `source`."""
        for tensor in self.tensors.values():
            tensor[target] = tensor[source]
        self._latest_index = None

    def put_row(self, other: "FullPrecisionRing", target: int) -> None:
        """Overwrite row `target` with the first row of another ring of the same size."""
        for name, tensor in self.tensors.items():
            tensor[target] = other.tensors[name][0]
        self._latest_index = None

    def clear_row(self, row: int) -> None:
        """Let row `row` hold nothing, as one to which nothing was written."""
        for name, tensor in self.tensors.items():
            tensor[row] = -1 if name in (SLOTS, TOKEN_INDEX) else 0
        self._latest_index = None

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Restore the state that `self.tensors` gave, from `tensors`. Other names are ignored."""
        self.tensors = {name: tensors[name] for name in NAMES if name in tensors}

    @property
    def _ring_size(self) -> int:
        return self.tensors[TOKEN_INDEX].shape[1] - self.sinks - 1 if self.tensors else 0

    def _entry_of(self, token_index: Tensor) -> Tensor:
        return token_index.where(token_index < self.sinks, self.sinks + token_index % max(self._ring_size, 1))

    def _written_without(self, counts: Sequence[int]) -> RowCounts:
        written = self.tensors[WRITTEN]
        return (written - torch.tensor(counts, device=written.device)).clamp(min=0)


def with_tokens(tensors: dict[str, Tensor], counts: Sequence[int]) -> dict[str, Tensor]:
    """The tensors of a ring once each row has `counts` tokens more, none of which changes an entry."""
    written = tensors[WRITTEN]
    return {**tensors, WRITTEN: written + torch.tensor(counts, device=written.device)}
