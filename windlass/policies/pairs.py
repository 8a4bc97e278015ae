"""Neighbours that a table says can be merged."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedModel

from windlass import kernels
from windlass.core.errors import PolicyError, UsageError
from windlass.core.shapes import Scores
from windlass.hf.fingerprint import fingerprint
from windlass.policies import pair_table
from windlass.policies.along_text import ranks, to_slots
from windlass.policies.base import TOKEN, Policy, Slots
from windlass.policies.pair_table import PairTable

ROUNDS: Final = 4  # of choosing pairs that do not touch; what is left after them is chosen as it stands
NEVER: Final = 2**62  # the turn of what must not join
PLACE: Final = "place"  # state: 1 + the place of a token and the next in the table; 0: not known, inf: not there


@dataclass(frozen=True)
class _Lookup:
    """A table to search: pairs in the order of their ids, with the place of each when sorted by cost.

    `at` holds, for each device where it was asked for, ids (first << 32 | second) and places: copying them at
    every step would hold up the device.
    """

    model: str
    fingerprint: str
    at: dict[torch.device, tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, table: PairTable) -> "_Lookup":
        """The table, to search."""
        pairs = sorted(table.pairs, key=lambda pair: pair[3])
        ids, order = torch.tensor([(first << 32) + second for first, second, *_ in pairs]).sort()
        return cls(table.model, table.fingerprint, {ids.device: (ids, (order + 1).float())})

    def places_of(self, first: Tensor, second: Tensor) -> Tensor:
        """For each pair of ids 1 + its place; infinite where it is not in the table."""
        wanted = (first << 32) + second
        if wanted.device not in self.at:
            ids, places = next(iter(self.at.values()))
            self.at[wanted.device] = ids.to(wanted.device), places.to(wanted.device)
        ids, places = self.at[wanted.device]
        found = torch.searchsorted(ids, wanted).clamp(max=len(ids) - 1)
        known: Tensor = places[found]
        return known.where(ids[found] == wanted, torch.inf)


@dataclass(frozen=True)
class Pairs(Policy):
    """Gives up the first of two neighbours that `table`, a file of `windlass calibrate`, names: the cheapest first.

    With `merge="mean_count(next)"` the two become one cell. No token goes into a cell with two others while
    there are pairs to join; then pairs become fours, where the tokens that meet are a pair of the table, and
    so on. What is in no such pair is evicted only when nothing else is left, the oldest first. So a
    table made from novels, which have no digits in them, keeps the digits of a pass key.

    Source: after an idea in the thread of llama.cpp PR 5719: merge only pairs of tokens from a table.
    Differs: the table is measured, not written by hand. Where costs rise along the text, a few cells may
    grow before their turn when many tokens are evicted at once.
    """

    table: str

    state: ClassVar[tuple[str, ...]] = (TOKEN, PLACE)
    per_head: ClassVar[bool] = False

    def __post_init__(self) -> None:
        try:
            table = pair_table.read(Path(self.table))
        except UsageError as error:
            raise PolicyError(str(error)) from None
        vars(self)["lookup"] = _Lookup.of(table)

    @property
    def _lookup(self) -> "_Lookup":
        lookup: _Lookup = vars(self)["lookup"]
        return lookup

    def check(self, model: PreTrainedModel) -> None:
        name, measured = self._lookup.model, self._lookup.fingerprint
        way_out = f"make one for this model with `windlass calibrate`, in the same dtype ({model.dtype})"
        if name != type(model).__name__:
            raise PolicyError(
                f"pair table {self.table} was measured on a {name}, this is a {type(model).__name__}; {way_out}"
            )
        if measured != fingerprint(model):
            raise PolicyError(f"pair table {self.table} was measured on another {name}; {way_out}")

    def score(self, slots: Slots) -> Scores:
        order = kernels.text_order(slots.positions)
        positions = slots.positions.gather(-1, order).long()
        tokens, place = (slots.state[name].gather(-1, order) for name in (TOKEN, PLACE))
        following = positions.roll(-1, -1)
        following[..., -1] = -1
        found = self._lookup.places_of(tokens.long(), tokens.long().roll(-1, -1))
        place = found.where(following == positions + 1, place)
        slots.state[PLACE].scatter_(-1, order, place)
        can_join = (positions >= slots.sinks) & (following < slots.next_positions[:, None, None] - slots.window)
        can_join &= (following > positions) & (place > 0) & place.isfinite()
        return to_slots(ranks(turns(positions, place.where(can_join, 0).long())), order)


def turns(positions: Tensor, place: Tensor) -> Tensor:
    """When each token joins the next one, as a number to sort by; `NEVER` where `place` is 0. In the order of the text.

    Earlier the fewer tokens the new cell has, in powers of two; of those, the lower its place.
    """
    turn = torch.full_like(place, NEVER)
    for _ in range(ROUNDS):
        key, before, after = _keys(positions, place, turn)
        turn = turn.where((key >= before) | (key > after), key)
    return turn.where(turn < NEVER, _keys(positions, place, turn)[0])


def _keys(positions: Tensor, place: Tensor, turn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each token that has no turn yet: its key, if it were next to join, and the keys of the cells beside it."""
    slots = positions.shape[-1]
    index = torch.arange(slots, device=positions.device).expand_as(positions)
    is_left = turn == NEVER
    last = index.where(is_left, -1).cummax(-1).values
    first = index.where(is_left, slots).flip(-1).cummin(-1).values.flip(-1)
    before, after = pad(last[..., :-1], (1, 0), value=-1), pad(first[..., 1:], (0, 1), value=slots)
    # Padded by one place on each side, so that each token has neighbours.
    before, after = before + 1, after + 1
    around = pad(positions, (1, 1), value=-1)
    size = around.gather(-1, after) - around.gather(-1, before)
    key = ((size - 1).float().frexp().exponent.long() << 32) + place
    key = key.where(is_left & (place > 0), NEVER)
    keys = pad(key, (1, 1), value=NEVER)
    return key, keys.gather(-1, before), keys.gather(-1, after)
