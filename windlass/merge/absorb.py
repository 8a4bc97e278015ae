"""The step of a layer in which evicted tokens join cells."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from windlass import kernels
from windlass.core.shapes import SlotIndex, SlotPositions
from windlass.core.step import Limits, Record
from windlass.merge.base import FRAMES, LIKENESS, Groups, Joined, Members, Merge, groups_of
from windlass.merge.newest import newest
from windlass.merge.readout import MERGED, OFFSET, SPREAD, damped, take_places, undamped
from windlass.merge.targets import FINENESS, TARGETS, Seekers, likeness_of, without_rare
from windlass.positions.rotary import Turns
from windlass.stores.base import Store

MOVED = 0.5  # of the way from the running mean of cosines to that of a step
LEAST = 1e-30  # weight, of a slot that holds nothing, which is divided by
UNKNOWN = -2.0  # a running mean before the first token


@dataclass(frozen=True)
class Room:
    """The layer in which tokens join cells: `absorb` changes `store`, `state` and `statistics`."""

    store: Store
    positions: SlotPositions  # after the eviction
    state: dict[str, Tensor]
    statistics: dict[str, Tensor]
    limits: Limits
    sliding_window: int | None
    turns: Turns


def absorb(merge: Merge, room: Room, record: Record) -> Record:
    """Let the tokens that `record` evicted join cells; returns it with what the cells held before.

    A token that no later one could see, that is less like its cell than the rule wants, or for which a row
    has no cell, is let go.
    """
    evicted, before, ends = record.evicted, record.evicted_positions, record.step.next_positions[:, None, None]
    assert evicted is not None, "a step that evicted nothing"
    assert before is not None, "evicted tokens without positions"
    oldest = torch.zeros_like(ends) if room.sliding_window is None else ends - room.sliding_window + 1
    is_cell = (room.positions >= room.limits.sinks) & (room.positions >= oldest)
    is_cell &= room.positions < ends - room.limits.window
    is_joined = (before >= 0) & (before >= oldest) & is_cell.any(-1, keepdim=True)
    keys = _raw_keys(merge, room)
    seekers = Seekers(keys, room.positions.scatter(-1, evicted, before), is_cell, evicted)
    if merge.rare:
        seekers = replace(seekers, is_cell=without_rare(seekers, merge.rare))
    cells, likeness = TARGETS[merge.target](seekers), None
    if merge.is_relative or merge.threshold > -1:
        likeness = likeness_of(keys, evicted, cells)
        is_joined &= _is_alike(merge, room.statistics, likeness, is_joined)
    groups = groups_of(cells.where(is_joined, evicted), is_joined, is_cell.shape[-1])
    return _take_in(merge, room, record, seekers, groups, likeness)


def _raw_keys(merge: Merge, room: Room) -> Tensor:
    """Keys as they join: before rotation and damping."""
    keys = room.store.keys()
    if merge.read != "damped":
        return keys
    offsets, spreads = (room.state[name].expand(-1, keys.shape[1], -1) for name in (OFFSET, SPREAD))
    return undamped(keys.float(), offsets, spreads, room.turns)


def _is_alike(merge: Merge, statistics: dict[str, Tensor], likeness: Tensor, is_joined: Tensor) -> Tensor:
    """Whether each token is enough like its cell, up to rounding; may move the running mean in `statistics`."""
    least = likeness.new_full((*likeness.shape[:2], 1), merge.threshold)
    if merge.is_relative:
        number = is_joined.sum(-1)
        now = (likeness * is_joined).sum(-1) / number.clamp(min=1)
        was = statistics.get(LIKENESS, torch.full_like(now, UNKNOWN))
        moved = torch.where(was == UNKNOWN, now, was + MOVED * (now - was))
        statistics[LIKENESS] = moved.where(number > 0, was)
        least = torch.maximum(least, statistics[LIKENESS][..., None])
    return likeness >= least - 1 / FINENESS


def _take_in(
    merge: Merge, room: Room, record: Record, seekers: Seekers, groups: Groups, likeness: Tensor | None
) -> Record:
    """Write the cells of `groups` with their tokens taken in."""
    keys, values, state = seekers.keys, room.store.values(), room.state
    heads, head_dim = keys.shape[1:4:2]
    counts, joins = state[MERGED] + 1, groups.expand(heads)
    weights = counts if merge.weighs_by is None else state[merge.weighs_by].clamp(min=LEAST)

    def members(index: SlotIndex, is_token: bool) -> Members:
        index = index.expand(-1, heads, -1)
        places = seekers.positions.expand(-1, heads, -1).gather(-1, index)
        own: Tensor = kernels.read(keys, index)
        if is_token and merge.frame != FRAMES[0]:
            own = room.turns.moved(own, places.clamp(min=0), cells.positions.clamp(min=0))
        states = torch.cat((own, kernels.read(values, index)), -1).float()
        number = weights.expand(-1, heads, -1).gather(-1, index)
        return Members(states, (number * joins.is_joined if is_token else number)[..., None], places)

    cells = members(groups.cells, is_token=False)
    tokens = members(seekers.evicted, is_token=True)
    alike = None if likeness is None else likeness.expand(-1, heads, -1)
    asked = newest(record, heads, room.turns)
    written = merge.join(Joined(cells, tokens, joins, head_dim, alike, asked.logits))
    take_places(state, weights, seekers.positions, seekers.evicted, groups)
    state[MERGED].scatter_add_(-1, groups.cells, counts.gather(-1, seekers.evicted) * groups.is_joined)
    if merge.weighs_by is not None:
        state[merge.weighs_by].scatter_add_(-1, groups.cells, weights.gather(-1, seekers.evicted) * groups.is_joined)
    new_keys, new_values = written.split((head_dim, written.shape[-1] - head_dim), -1)
    if merge.read == "damped":
        offsets, spreads = (state[name].gather(-1, groups.cells).expand(-1, heads, -1) for name in (OFFSET, SPREAD))
        new_keys = damped(new_keys, offsets, spreads, room.turns)
    held = room.store.take_all(joins.cells)
    room.store.put(joins.cells, room.store.encode(new_keys.to(room.store.layout[2]), new_values.to(values.dtype)))
    return replace(record, cells=joins.cells, cells_before=held)
