"""Rows that come from another cache, or begin anew, while the other rows of a batch go on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from windlass.cache.edits import check_row, select_rows
from windlass.cache.recurrent_layer import RecurrentLayer
from windlass.cache.row import Row
from windlass.cache.slot_layer import SlotLayer
from windlass.cache.slot_table import SlotTable
from windlass.cache.state import CacheState
from windlass.core.errors import UsageError
from windlass.core.rotary_index import EMPTY
from windlass.core.step import no_inference_mode


@no_inference_mode
def put_row(cache: CacheState, row: int, other: CacheState, source: int = 0) -> None:
    """Overwrite row `row` with row `source` of a cache with the same options: its tokens, positions and policy state.

    The numbers of rows may differ, and which slots are free; `other` stays as it is. Nothing is left of the old row.
    Afterwards no earlier step can be rolled back.

    Raises: UsageError for a cache of another model, or with other options, naming the first that differs.
    """
    check_row(cache, row, "row")
    check_row(other, source, "source")
    _check_alike(cache, other)
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        _put_slots(mine, row, theirs, source, cache.batch_size)
    for own, its in zip(cache.recurrent, other.recurrent, strict=True):
        _put_states(own, row, its, source, cache.batch_size)
    copied = other.rows.rows[source].copied()
    cache.rows = cache.rows.changed(lambda *_: copied, row)


@no_inference_mode
def clear_row(cache: CacheState, row: int) -> None:
    """Let row `row` begin a new text. Nothing of its old one is left, not even where no slot is in use.

    Afterwards no earlier step can be rolled back.
    """
    check_row(cache, row, "row")
    for layer in cache.layers:
        if not layer.is_empty:
            layer.forget_steps(0)
            _clear(layer.table, row)
    for recurrent in cache.recurrent:
        recurrent.forget_steps()
        for tensor in recurrent.tensors().values():
            tensor[row] = 0
    cache.rows = cache.rows.changed(lambda *_: Row(ids=[]), row)


@no_inference_mode
def arrange_rows(cache: CacheState, rows: Sequence[int | None]) -> None:
    """Keep the rows at `rows`, each named once, in that order; None stands for one that begins a new text.

    Memory is taken, and given back, one layer after the other. Afterwards no earlier step can be rolled back. After an
    error the cache is good for nothing but `reset`.
    """
    select_rows(cache, torch.tensor([0 if row is None else row for row in rows]))
    for index, row in enumerate(rows):
        if row is None:
            clear_row(cache, index)


def _check_alike(cache: CacheState, other: CacheState) -> None:
    if other.model_id is not cache.model_id:
        raise UsageError("put_row: the other cache belongs to another model; make both with the same one")
    mine, theirs = cache.options.labels(), other.options.labels()
    for name, value in mine.items():
        if theirs[name] != value:
            raise UsageError(
                f"put_row: this cache has {name}={value!r}, the other one {theirs[name]!r}; make both alike"
            )


def _put_slots(mine: SlotLayer, row: int, theirs: SlotLayer, source: int, batch: int) -> None:
    mine.forget_steps(0)
    if theirs.is_empty:
        if not mine.is_empty:
            _clear(mine.table, row)
        return
    table = theirs.table.packed()
    table.select_rows(torch.tensor([source], device=table.positions.device))
    if mine.is_empty:
        mine.rules, recall = theirs.rules, mine.table.recall if theirs.rules.recalls else None
        table.select_rows(torch.zeros(batch, dtype=torch.long, device=table.positions.device))
        table.recall, mine.table = recall, table
        for index in range(batch):
            if index != row:
                _clear(table, index)
    else:
        _put_table(mine, row, table)
    mine.history = mine.history._replace(has_evicted=mine.history.has_evicted or theirs.history.has_evicted)
    if mine.table.recall is not None and theirs.table.recall is not None:
        mine.table.recall.clear_row(row)
        mine.table.recall.join(theirs.table.recall, source, row, 0, batch, theirs.table.positions.device)
    mine.table.count()


def _put_table(mine: SlotLayer, row: int, packed: SlotTable) -> None:
    """Overwrite a row with the only one of a table, whose tokens lie in its first slots."""
    table = mine.table
    if packed.slots > table.slots:
        mine.resize(packed.slots)
    packed.resize(table.slots)
    if table.score_heads < packed.score_heads:
        table.split_heads()
    table.store.put_row(packed.store, row)
    table.positions[row] = packed.positions[0]
    for name, tensor in table.state.items():
        tensor[row] = packed.state[name][0]
    table.statistics = {
        name: _with_row(table.statistics.get(name), row, tensor, len(table.positions))
        for name, tensor in packed.statistics.items()
    }


def _with_row(tensor: Tensor | None, row: int, own: Tensor, batch: int) -> Tensor:
    """A copy of `tensor`, or of zeros, in which `row` is the only one of `own`."""
    copied = own.new_zeros(batch, *own.shape[1:]) if tensor is None else tensor.clone()
    copied[row] = own[0]
    return copied


def _clear(table: SlotTable, row: int) -> None:
    table.store.clear_row(row)
    table.positions[row] = EMPTY
    for tensor in table.state.values():
        tensor[row] = 0
    table.statistics = {
        name: _with_row(tensor, row, torch.zeros_like(tensor[:1]), len(tensor))
        for name, tensor in table.statistics.items()
    }
    if table.recall is not None:
        table.recall.clear_row(row)
    table.count()


def _put_states(mine: RecurrentLayer, row: int, theirs: RecurrentLayer, source: int, batch: int) -> None:
    mine.forget_steps()
    held, given = mine.tensors(), theirs.tensors()
    if not held:
        mine.load({name: state.new_zeros(batch, *state.shape[1:]) for name, state in given.items()})
        held = mine.tensors()
    for name, state in held.items():
        state[row] = given[name][source] if name in given else 0
