"""Exact copies of the first and the newest tokens, beside the codes of a low-bit store."""

from collections.abc import Sequence
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from windlass import kernels
from windlass.core.errors import UsageError
from windlass.core.shapes import NewKeys, NewValues, RowCounts, SlotIndex
from windlass.core.step import MOST

Copies = dict[str, Tensor]  # by name: keys, values, slots, serials and written, each preceded by "exact_"


class Exact:
    """Copies, as the model made them, of each row's first `sinks` tokens and of its `newest` ones.

    Tokens are counted as they are written, whether they are still held or not: a token's serial is
    how many came before it. The first `sinks` have a place each, the others share a ring of `newest`
    places and some spare ones, so that tokens can be taken back and those before them are still there.
    The last place takes whatever is not kept. A place knows its token's serial and slot; all tokens
    have codes as well, so leaving the ring costs nothing.
    """

    def __init__(self, sinks: int = 0, newest: int = 0) -> None:
        for name, number in (("sinks", sinks), ("newest", newest)):
            if not 0 <= number <= MOST:
                raise UsageError(f"{name} of a store must be from 0 to {MOST}, got {number}")
        self.sinks = sinks
        self.newest = newest
        self.copies: Copies = {}
        """What is allocated. Every change makes a new dictionary; that from before `write` is a way back."""
        self._latest: tuple[Copies, ReferenceType[Tensor]] | None = None

    def allocate(self, keys: NewKeys, values: NewValues, spare: int) -> None:
        """Make room for copies of such keys and values, of which `spare` tokens may be taken back."""
        if self.sinks + self.newest == 0:
            return
        batch, kv_heads = keys.shape[:2]
        places = self.sinks + (self.newest + spare if self.newest else 0) + 1
        self.copies = {
            "exact_keys": keys.new_zeros(batch, kv_heads, places, keys.shape[3]),
            "exact_values": values.new_zeros(batch, kv_heads, places, values.shape[3]),
            "exact_slots": torch.full((batch, kv_heads, places), -1, dtype=torch.int32, device=keys.device),
            "exact_serials": torch.full((batch, places), -1, device=keys.device),
            "exact_written": torch.zeros(batch, dtype=torch.int64, device=keys.device),
        }

    @property
    def keys(self) -> Tensor | None:
        """(batch, kv_heads, places, channels)"""
        return self.copies.get("exact_keys")

    @property
    def values(self) -> Tensor | None:
        """(batch, kv_heads, places, channels)"""
        return self.copies.get("exact_values")

    def write(self, index: SlotIndex, keys: NewKeys, values: NewValues, positions: Tensor) -> None:
        """Count the tokens that go to the slots at `index`, and keep what is to be kept.

        `positions` (batch, ranked, tokens) are negative for padding. A token that only some heads get
        counts for the whole row.
        """
        if not self.copies:
            return
        if keys.shape[2] > self._ring - self.newest > 0:  # else what may be needed again stays where it is
            self.copies = {name: tensor.clone() for name, tensor in self.copies.items()}
        slots, serials, written = (self.copies[f"exact_{name}"] for name in ("slots", "serials", "written"))
        last = slots.shape[2] - 1
        is_token = (positions >= 0).any(1)
        numbers = written[:, None] + is_token.cumsum(1) - 1
        end = written + is_token.sum(1)
        is_kept = is_token & ((numbers < self.sinks) | (numbers >= end[:, None] - self._ring))
        places = self._places_of(numbers).where(is_kept, last)
        index = index.expand(-1, slots.shape[1], -1)
        # A place whose slot now has another token is nobody's.
        slots.masked_fill_((slots[..., None] == index[:, :, None]).any(-1), -1)
        copies = (self.copies["exact_keys"], keys), (self.copies["exact_values"], values)
        kernels.write_all(places[:, None], [(slots, index), *copies])
        serials.scatter_(1, places, numbers)
        serials[:, last] = -1
        self.copies = {**self.copies, "exact_written": end}

    def can_unwrite(self, counts: Sequence[int]) -> bool:
        """Whether all that is to be exact without the newest `counts` tokens of each row still is."""
        if not self._ring:
            return True
        end = self._without(counts)
        oldest = (end - self.newest).clamp(min=self.sinks)
        held = self.copies["exact_serials"].gather(1, self._places_of(oldest)[:, None])[:, 0]
        return bool(((held == oldest) | (oldest >= end)).all())

    def unwrite(self, counts: Sequence[int]) -> None:
        """Take the newest `counts` tokens of each row out of the count."""
        if self.copies:
            self.copies = {**self.copies, "exact_written": self._without(counts)}

    def places(self, slots: int) -> Tensor | None:
        """Per slot, (batch, kv_heads, slots) int32: the place it is read from, -1 for its codes."""
        if not self.copies:
            return None
        # Keys and values of a step ask alike; what is not in use takes no memory.
        latest = self._latest[1]() if self._latest is not None and self._latest[0] is self.copies else None
        if latest is None or latest.shape[2] != slots:
            latest = self._found(slots)
            self._latest = self.copies, ref(latest)
        return latest

    def _found(self, slots: int) -> Tensor:
        owners, serials, written = (self.copies[f"exact_{name}"] for name in ("slots", "serials", "written"))
        # A token that was taken back has left its slot, so nobody reads its place.
        is_read = (serials >= 0) & ((serials < self.sinks) | (serials >= written[:, None] - self.newest))
        batch, kv_heads, count = owners.shape
        heads = torch.arange(batch * kv_heads, device=owners.device).view(batch, kv_heads, 1)
        beyond = batch * kv_heads * slots  # one more, for places that are not read
        at = (heads * slots + owners).where(is_read[:, None] & (owners >= 0), beyond)
        places = torch.full((beyond + 1,), -1, dtype=torch.int32, device=owners.device)
        places[at] = torch.arange(count, dtype=torch.int32, device=owners.device).expand_as(at)
        return places[:beyond].view(batch, kv_heads, slots)

    def over(self, states: Tensor, copies: Tensor | None) -> Tensor:
        """`states` (batch, kv_heads, slots, channels) with the copies in their slots."""
        places = self.places(states.shape[2])
        if places is None or copies is None:
            return states
        index = places.long().clamp(min=0)[..., None].expand_as(states)
        return torch.where(places[..., None] >= 0, copies.gather(2, index), states)

    def rearrange(self, order: SlotIndex, slots: int) -> None:
        """The slots at `order` were moved to the first places, in that order; there were `slots`."""
        if not self.copies:
            return
        owners = self.copies["exact_slots"]
        order = order.expand(-1, owners.shape[1], -1)
        moved = owners.new_full((*order.shape[:2], slots), -1)
        places = torch.arange(order.shape[2], dtype=owners.dtype, device=owners.device)
        moved.scatter_(2, order, places.expand_as(order))
        now = moved.gather(2, owners.clamp(min=0).long())
        self.copies = {**self.copies, "exact_slots": now.where(owners >= 0, -1)}

    def select_rows(self, rows: Tensor) -> None:
        """Keep the batch rows at `rows`, which may repeat."""
        self.copies = {name: tensor.index_select(0, rows) for name, tensor in self.copies.items()}

    def copy_row(self, source: int, target: int) -> None:
        """Overwrite row `target` with row `source`."""
        for tensor in self.copies.values():
            tensor[target] = tensor[source]
        self.copies = dict(self.copies)

    def restore(self, tensors: Copies) -> None:
        """Take `copies` back out of `tensors`; other names are passed over."""
        self.copies = {name: tensor for name, tensor in tensors.items() if name.startswith("exact_")}

    @property
    def _ring(self) -> int:
        return self.copies["exact_serials"].shape[1] - self.sinks - 1 if self.copies else 0

    def _places_of(self, serials: Tensor) -> Tensor:
        return serials.where(serials < self.sinks, self.sinks + serials % max(self._ring, 1))

    def _without(self, counts: Sequence[int]) -> RowCounts:
        written = self.copies["exact_written"]
        return (written - torch.tensor(counts, device=written.device)).clamp(min=0)
