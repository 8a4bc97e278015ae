"""Taking steps back, so that a layer is as if their tokens had never been written."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from windlass import kernels
from windlass.cache.layer import LayerCache
from windlass.core.rotary_index import EMPTY
from windlass.core.step import SPARE, Record, Step


def can_roll_back(layer: LayerCache, counts: Sequence[int]) -> bool:
    """Whether the newest `counts` tokens of each row can be taken back exactly."""
    if layer.is_lossless:
        return True
    for record in reversed(layer.records):
        kept, left = _split(record, counts)
        if any(kept):
            undone = max(done + n for done, n in zip(record.undone, counts, strict=True))
            return not any(left) and (record.mass is None or undone <= SPARE)
        counts = left
    return not any(counts)


def holds_copies(layer: LayerCache, counts: Sequence[int]) -> bool:
    """Whether all that the store is to hold exactly without the newest `counts` tokens it still does."""
    return _is_last_step(layer, counts) or layer.store.exact.can_unwrite(counts)


def roll_back(layer: LayerCache, counts: Sequence[int], step: Step) -> None:
    """Take the newest `counts` tokens of each row back; `step` tells where the rows then stand.

    Evictions that these tokens caused are undone, those of the tokens before them are not.
    """
    if _is_last_step(layer, counts):
        layer.store.exact.copies = layer.records[-1].copies
    else:
        layer.store.exact.unwrite(counts)
    if layer.is_lossless:
        layer.edit(lambda positions: torch.where(positions >= step.next_positions[:, None, None], EMPTY, positions))
        return
    while any(counts):
        record = layer.records.pop()
        kept, counts = _split(record, counts)
        undo(layer, record)
        if any(kept):
            _redo(layer, record, kept, step)


def undo(layer: LayerCache, record: Record) -> None:
    """Take a whole step back, the layer's last, but for what the store holds exactly."""
    if record.evicted is not None and record.evicted_positions is not None:
        # Only tokens come back: a slot that was reserved for an older step may be free by now.
        now, before = layer.positions.gather(-1, record.evicted), record.evicted_positions
        layer.positions.scatter_(-1, record.evicted, before.where(before >= 0, now))
    if record.cells is not None and record.cells_before is not None:
        layer.store.put(record.cells, record.cells_before)
    layer.unwrite(record.written, record.state, record.statistics, record.most_held)


def undo_if_last(layer: LayerCache, step: Step) -> None:
    """Take `step` back where the layer has done it: for a forward pass that failed halfway."""
    if layer.records and layer.records[-1].step is step:
        layer.store.exact.copies = layer.records[-1].copies
        undo(layer, layer.records.pop())


def _redo(layer: LayerCache, record: Record, kept: Sequence[int], step: Step) -> None:
    """Observe and evict again, as if only the first `kept` tokens of each row had come."""
    positions = record.step.positions
    positions = positions.where(positions < step.next_positions[:, None], EMPTY)
    undone = tuple(done + was - n for done, was, n in zip(record.undone, record.step.lengths, kept, strict=True))
    beside = layer.beside(positions[:, None].expand_as(record.written), record.born)
    kernels.write_all(record.written, beside)
    layer.most_held += max(kept)
    step = replace(step, positions=positions, lengths=tuple(kept))
    record = replace(record, step=step, undone=undone, evicted=None, evicted_positions=None, cells=None, freed=0)
    layer.settle(record)


def _is_last_step(layer: LayerCache, counts: Sequence[int]) -> bool:
    return bool(layer.records) and layer.records[-1].step.lengths == tuple(counts)


def _split(record: Record, counts: Sequence[int]) -> tuple[list[int], list[int]]:
    """Of a step: how many tokens of each row stay, and how many are left to take from earlier steps."""
    pairs = list(zip(record.step.lengths, counts, strict=True))
    return [max(was - n, 0) for was, n in pairs], [max(n - was, 0) for was, n in pairs]
