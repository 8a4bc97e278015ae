"""What a decode step of one layer in one call means, in plain PyTorch."""

import torch
from torch import Tensor
from torch.nn import functional

from windlass.core.attention import AttentionInput, EvictionInput, Mass, Writes
from windlass.core.decode import DecodeInput, DecodeOutput, DecodeSlots, Ranking, Retention
from windlass.core.packed import PackedStates
from windlass.core.rotary_index import EMPTY, RESERVED, RotaryBranch, RotaryIndex
from windlass.core.shapes import PerSlot, QueryPositions, Scores, SlotIndex, SlotPositions
from windlass.kernels import reference
from windlass.kernels.ranking import total_order
from windlass.kernels.reference_recall import recall, remember


def decode(slots: DecodeSlots, new: DecodeInput) -> DecodeOutput:
    """Write one token per row to a free slot, let its query read the slots, each at its own position, and evict.

    Changes nothing but the keys and values of free slots, and of a recall store behind its last token. The slot of a
    padding token stays free.
    """
    places, state = new.slot_positions.clone(), tuple(tensor.clone() for tensor in new.state)
    index, retention = reference.first_free(places, 1), slots.retention
    positions = new.positions[:, None].expand(-1, slots.score_heads, -1)
    beside: Writes = [(places, positions), *((tensor, 0.0) for tensor in state)]
    reference.write_all(index, [(slots.keys, new.keys), (slots.values, new.values), *beside])
    read, recalled = places, None
    if slots.recall is not None and new.remembered is not None:
        remember(slots.recall, new)
        numbers = state[slots.recall.state]
        numbers.scatter_(-1, index, new.remembered[:, None, None].float().expand_as(index))
        if new.is_recalling:
            read, recalled = recall(slots, new, places, numbers)
    at = RotaryBranch(new.positions[:, None].expand(-1, read.shape[1], -1).clamp(min=0), read.clamp(min=0))
    is_observing = retention is not None and retention.ranking.observe != "nothing"
    out, mass = reference.attend(
        AttentionInput(
            new.queries,
            PackedStates(slots.keys),
            PackedStates(slots.values),
            read,
            new.positions,
            None if slots.tables is None else RotaryIndex(at),
            slots.tables,
            slots.scale,
            slots.visibility,
            softcap=slots.softcap,
            observed=new.positions.clamp(max=0) if is_observing or new.is_observed else None,
        )
    )
    if mass is not None and recalled is not None:
        mass = Mass(mass.rows.scatter(-1, recalled[:, :, None], 0.0), None)
    evicted = before = None
    if retention is not None and mass is not None and is_observing:
        _observe(retention.ranking, state[0], mass.rows[:, :, 0], new.positions)
    if retention is not None and new.is_evicting:
        evicted, before = _evict_lowest(slots, retention, new, places, state)
    for released, stood in new.released:
        places.scatter_(-1, released, places.gather(-1, released).masked_fill(stood >= 0, EMPTY))
    return DecodeOutput(index, out, mass if new.is_observed else None, places, state, evicted, before)


def _observe(ranking: Ranking, state: Scores, mass: PerSlot, positions: QueryPositions) -> None:
    """What a policy's state becomes once a query of each row was observed."""
    is_token = (positions >= 0)[..., None]
    if ranking.observe == "last":
        state.copy_(mass.sum(1, keepdim=True).where(is_token, state))
    elif ranking.observe == "sum":
        state += mass
    else:
        state.mul_(1 - is_token * torch.tensor(ranking.share)).add_(mass, alpha=ranking.share)


def _score(
    slots: DecodeSlots, ranking: Ranking, places: SlotPositions, state: tuple[Scores, ...], starts: Tensor
) -> Scores:
    """What a policy ranks slots by. `starts`: where the rows' windows begin."""
    if ranking.score == "position":
        return places.float()
    if ranking.score == "novelty":
        return -(reference.mean_key_cosine(PackedStates(slots.keys), places) * 2**16).round()
    if ranking.score == "state":
        return state[0]
    is_pooled = (places >= 0) & (places < starts)
    order = reference.argsort_positions(places)
    votes = state[0].masked_fill(~is_pooled, 0.0).gather(-1, order)
    pool = functional.avg_pool1d if ranking.is_mean else functional.max_pool1d
    pooled = pool(votes, ranking.pool, stride=1, padding=ranking.pool // 2)
    return torch.empty_like(votes).scatter_(-1, order, pooled)


def _evict_lowest(
    slots: DecodeSlots, retention: Retention, new: DecodeInput, places: SlotPositions, state: tuple[Scores, ...]
) -> tuple[SlotIndex, SlotIndex]:
    """Reserve the lowest slot of each row that is over budget; returns the slots, and what stood there."""
    starts = (new.next_positions - retention.window)[:, None, None]
    score = _score(slots, retention.ranking, places, state, starts)
    limits = retention.sinks, retention.window, slots.visibility.sliding_window
    beside = slots.visibility.attention_chunk, new.row_sinks
    order = EvictionInput(score, places, new.next_positions, *limits, 1, *beside)
    ranks = total_order(order).masked_fill(places < 0, torch.iinfo(torch.int64).max)
    is_over = (places >= 0).sum(-1, keepdim=True) > retention.budget
    lowest_slot = ranks.argsort(dim=-1, stable=True)[..., :1]
    before = places.gather(-1, lowest_slot).where(is_over, EMPTY)
    places.scatter_(-1, lowest_slot, torch.where(is_over, RESERVED, places.gather(-1, lowest_slot)))
    return lowest_slot, before
