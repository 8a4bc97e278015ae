"""Sequence edits: what happens to a text after it was read.

All of them change integers. `drop`, `keep` and `shift` touch positions only. `divide` sorts the slots as well, so
that tokens which then share a position lie in the order of the text. `copy` moves keys and values to another row, byte
for byte. Ranges are half-open.
After an edit other than `rollback`, the steps before it can no longer be rolled back.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from windlass.cache.picture_edits import check_places, refuse_pictures, shift_places, shifted
from windlass.cache.recurrent_layer import refuse_edit
from windlass.cache.state import CacheState
from windlass.core.check import check_kind, whole_number
from windlass.core.errors import UsageError
from windlass.core.limits import MAX_NUMBER
from windlass.core.rotary_index import EMPTY
from windlass.core.step import no_inference_mode


@no_inference_mode
def rollback(cache: CacheState, tokens: int | Sequence[int]) -> None:
    """Forget the newest `tokens` of every row (or one number per row), their evictions and policy state included.

    Taking back all tokens of a pass leaves the cache as if they had never been written. Of a pass that is taken back in
    part, the tokens that stay were computed beside the others: where these decide how a token is read, the result
    differs from one that never had them. So it is with a store that holds the newest tokens in full precision
    (`int4(newest=3)`), with dynamic NTK past the trained length, whose rotation depends on the length of the text, and
    with a row that idled over budget, after a splice: it stays cut.

    Raises: UsageError when they reach further back than can be rolled back; nothing is changed.
    """
    each = tokens if isinstance(tokens, (list, tuple)) else [tokens] * cache.batch_size
    counts = [whole_number("rollback's tokens", one, 0, MAX_NUMBER) for one in each]
    if len(counts) != cache.batch_size:
        raise UsageError(f"rollback takes one number, or one for each of {cache.batch_size} rows, got {len(counts)}")
    # A row that fed fewer tokens (it had finished) can't give more than it has.
    for row, (count, end) in enumerate(zip(counts, cache.next_positions, strict=True)):
        if count > end:
            raise UsageError(f"rollback of {count} tokens, but row {row} stands at position {end}")
        since = cache.rows.rows[row].since_edit
        if count > since:
            raise UsageError(f"rollback of {count} tokens, but row {row} was edited {since} tokens ago; use drop")
    if not any(counts):
        return
    for state in cache.recurrent:
        if not state.can_roll_back(counts):
            raise UsageError(
                f"rollback of {max(counts)} tokens is not the last step, whole, which is all that {state.label} can "
                "take back: it keeps one copy of its state; read the text again"
            )
    for layer in cache.layers:
        if not layer.can_roll_back(counts):
            raise UsageError(
                f"rollback of {max(counts)} tokens reaches past what layer {layer.index} ({layer.policy!r}) can take "
                "back: the last step, and before it whole steps of up to `rollback` tokens; use drop, or a KVCache "
                "with a larger rollback"
            )
        if not layer.holds_full_precision(counts):
            raise UsageError(
                f"rollback of {max(counts)} tokens reaches past what store {cache.store.name} still holds exactly in "
                f"layer {layer.index}: the last step, or `rollback` + 16 tokens; use drop, after which the tokens that "
                "are left are read as codes, or a KVCache with a larger rollback"
            )
    rows = cache.rows.rolled_back(counts)
    here = rows.standstill(cache.device)
    for memory in (*cache.layers, *cache.recurrent):
        memory.roll_back(counts, here)
    cache.rows = rows


@no_inference_mode
def drop(cache: CacheState, start: int, end: int, row: int | None = None) -> None:
    """Free the tokens at positions `start` up to `end`; the others keep their places.

    Dropping the newest tokens moves the end of the text back to `start`.
    """
    refuse_edit(cache.recurrent, "drop")
    _check_range(start, end)
    ends = [start if start < at <= end else at for at in cache.next_positions]
    _apply(cache, row, ends, lambda p: torch.where((p >= start) & (p < end), EMPTY, p))


@no_inference_mode
def keep(cache: CacheState, start: int, end: int, row: int | None = None) -> None:
    """Free every token but those at positions `start` up to `end`."""
    refuse_edit(cache.recurrent, "keep")
    _check_range(start, end)
    ends = [min(at, end) for at in cache.next_positions]
    _apply(cache, row, ends, lambda p: torch.where((p >= start) & (p < end), p, EMPTY))


@no_inference_mode
def shift(cache: CacheState, start: int, end: int, by: int, row: int | None = None) -> None:
    """Add `by` to the positions from `start` up to `end`.

    The tokens of a text with pictures are read `by` further on, too, on all axes.

    Raises: UsageError when a token would stand before 0, where another one stands, or past the end of its text; in a
    text with pictures, when the range ends before the text, tears a picture, or tokens would be read before 0 or
    before such as were before them.
    """
    refuse_edit(cache.recurrent, "shift")
    _check_range(start, end)
    rows, by = _rows_of(cache, row), whole_number("by", by, -MAX_NUMBER, MAX_NUMBER)
    ends = [at + by if start < at <= end else at for at in cache.next_positions]
    first = min(ends[index] for index in rows)
    if first < 0:
        raise UsageError(f"shift by {by} would move the end of the text to {first}, before 0")
    for layer in cache.layers:
        for index in rows:
            if not layer.is_empty:
                _check_shift(layer.table.positions_of(index), start, end, by, ends[index])
    pictures = {index: shifted(cache.rows.rows[index], start, end, by) for index in rows}
    check_places(cache, rows, start, end, by)
    moved = cache.rows.changed(lambda index, one: replace(one, pictures=pictures.get(index, one.pictures)), row)
    shift_places(cache, rows, start, end, by)
    cache.rows = moved
    _apply(cache, row, ends, lambda p: torch.where((p >= start) & (p < end), p + by, p))


@no_inference_mode
def divide(cache: CacheState, start: int, end: int, by: int, row: int | None = None) -> None:
    """Divide the positions from `start` up to `end`, rounding down: several tokens may share one.

    These keep the order in which they stood.

    Raises: UsageError when the end of a text would move before a token that stays.
    """
    refuse_edit(cache.recurrent, "divide")
    refuse_pictures(cache, "divide")
    _check_range(start, end)
    rows, by = _rows_of(cache, row), whole_number("by", by, 1, MAX_NUMBER)
    ends = [(at - 1) // by + 1 if start < at <= end else at for at in cache.next_positions]
    held = [layer for layer in cache.layers if not layer.is_empty]
    for layer in held:
        for index in rows:
            positions = layer.table.positions_of(index)
            _check_end(positions[(positions < start) | (positions >= end)], ends[index], f"divide by {by}")
    for layer in held:
        layer.forget_steps(0)
        layer.table.sort()
    _apply(cache, row, ends, lambda p: torch.where((p >= start) & (p < end), p // by, p))


@no_inference_mode
def copy(cache: CacheState, source: int, target: int) -> None:
    """Overwrite row `target` with row `source`: its tokens, positions and policy state."""
    for name, row in (("source", source), ("target", target)):
        check_row(cache, row, name)
    for layer in (*cache.layers, *cache.recurrent):
        layer.copy_row(source, target)
    copied = cache.rows.rows[source].copied()
    cache.rows = cache.rows.changed(lambda *_: copied, target)


def _check_shift(positions: Tensor, start: int, end: int, by: int, text_end: int) -> None:
    moves = (positions >= start) & (positions < end)
    moved, stays = positions[moves] + by, positions[(positions >= 0) & ~moves]
    _check_end(stays, text_end, f"shift by {by}")
    if not moved.numel():
        return
    low, high = int(moved.min()), int(moved.max())
    if low < 0:
        raise UsageError(f"shift by {by} would move position {low - by} before 0; drop it first")
    if high >= text_end:
        raise UsageError(f"shift by {by} would move position {high - by} to {high}, past the text's end at {text_end}")
    if bool(((stays >= low) & (stays <= high)).any()):
        raise UsageError(
            f"shift by {by} would move tokens onto positions {low} to {high}, where others stand; drop them"
        )


def _check_end(stays: Tensor, text_end: int, edit: str) -> None:
    """Refuse an `edit` after which the next token would be written before one that `stays`, or onto it."""
    last = int(stays.max()) if stays.numel() else -1
    if last >= text_end:
        raise UsageError(
            f"{edit} would move the end of the text to {text_end}, but a token stays at {last}; drop it first"
        )


@no_inference_mode
def select_rows(cache: CacheState, rows: Tensor) -> None:
    """Keep the batch rows at `rows`, in that order; a row may be named more than once."""
    check_kind("rows", rows, Tensor, "a tensor of row numbers", "write torch.tensor([1, 0])")
    for row in rows.tolist():
        check_row(cache, row, "row")
    for layer in (*cache.layers, *cache.recurrent):
        layer.select_rows(rows.to(cache.device))
    cache.rows = cache.rows.selected(rows.tolist())
    cache.options = replace(cache.options, batch=len(rows))


def _apply(cache: CacheState, row: int | None, ends: Sequence[int], change: Callable[[Tensor], Tensor]) -> None:
    """Change the positions of one row, or of all, whose texts then go on at `ends`."""
    _rows_of(cache, row)
    rows = cache.rows.moved_to(ends, row).edited(row)
    for layer in cache.layers:
        layer.edit(change, row)
    cache.rows = rows


def _rows_of(cache: CacheState, row: int | None) -> Sequence[int]:
    """The rows that an edit is for: the one given, or all."""
    if row is None:
        return range(cache.batch_size)
    check_row(cache, row, "row")
    return [row]


def check_row(cache: CacheState, row: int, name: str) -> None:
    """Raises: UsageError where `row`, which errors call `name`, is not one of the cache's."""
    if not 0 <= whole_number(name, row, -MAX_NUMBER, MAX_NUMBER) < cache.batch_size:
        raise UsageError(f"{name} {row} is not one of the cache's {cache.batch_size} rows")


def _check_range(start: int, end: int) -> None:
    for name, place in (("start", start), ("end", end)):
        whole_number(name, place, 0, MAX_NUMBER)
    if start > end:
        raise UsageError(f"range [{start}, {end}) ends before it starts")
