"""Sequence edits: what happens to a text after it was read.

All of them change integers. `drop`, `keep` and `shift` touch positions only. `divide` sorts the slots as well, so
that tokens which then share a position lie in the order of the text. `copy` and `splice` move keys and values to
other rows or caches, byte for byte (but into another kind of store, where they are converted once). What is spliced
counts as newly written: a store with exact tokens copies these as the other cache reads them. Ranges are half-open.
After an edit other than `rollback`, the steps before it can no longer be rolled back.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from windlass import kernels
from windlass.cache.recurrent_layer import refuse_edit
from windlass.cache.slot_layer import SlotLayer
from windlass.cache.state import CacheState
from windlass.core.check import check_kind, whole_number
from windlass.core.errors import UsageError
from windlass.core.limits import MAX_NUMBER
from windlass.core.rotary_index import EMPTY
from windlass.core.step import no_inference_mode
from windlass.policies.base import INITIAL_STATE


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
    _apply(cache, row, lambda p: torch.where((p >= start) & (p < end), EMPTY, p))
    cache.rows = cache.rows.moved_to([start if start < at <= end else at for at in cache.next_positions], row)


@no_inference_mode
def keep(cache: CacheState, start: int, end: int, row: int | None = None) -> None:
    """Free every token but those at positions `start` up to `end`."""
    refuse_edit(cache.recurrent, "keep")
    _check_range(start, end)
    _apply(cache, row, lambda p: torch.where((p >= start) & (p < end), p, EMPTY))
    cache.rows = cache.rows.moved_to([min(at, end) for at in cache.next_positions], row)


@no_inference_mode
def shift(cache: CacheState, start: int, end: int, by: int, row: int | None = None) -> None:
    """Add `by` to the positions from `start` up to `end`.

    Raises: UsageError when a token would stand before 0, where another one stands, or past the end of its text.
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
                _check_shift(layer.positions[index], start, end, by, ends[index])
    _apply(cache, row, lambda p: torch.where((p >= start) & (p < end), p + by, p))
    cache.rows = cache.rows.moved_to(ends, row)


@no_inference_mode
def divide(cache: CacheState, start: int, end: int, by: int, row: int | None = None) -> None:
    """Divide the positions from `start` up to `end`, rounding down: several tokens may share one.

    These keep the order in which they stood.

    Raises: UsageError when the end of a text would move before a token that stays.
    """
    refuse_edit(cache.recurrent, "divide")
    _check_range(start, end)
    rows, by = _rows_of(cache, row), whole_number("by", by, 1, MAX_NUMBER)
    ends = [(at - 1) // by + 1 if start < at <= end else at for at in cache.next_positions]
    held = [layer for layer in cache.layers if not layer.is_empty]
    for layer in held:
        for index in rows:
            positions = layer.positions[index]
            _check_end(positions[(positions < start) | (positions >= end)], ends[index], f"divide by {by}")
    for layer in held:
        layer.forget_steps(0)
        layer.table.sort()
    _apply(cache, row, lambda p: torch.where((p >= start) & (p < end), p // by, p))
    cache.rows = cache.rows.moved_to(ends, row)


@no_inference_mode
def copy(cache: CacheState, source: int, target: int) -> None:
    """Overwrite row `target` with row `source`: its tokens, positions and policy state."""
    for name, row in (("source", source), ("target", target)):
        _check_row(cache, row, name)
    for layer in (*cache.layers, *cache.recurrent):
        layer.copy_row(source, target)
    copied = cache.rows.rows[source].copied()
    cache.rows = cache.rows.changed(lambda *_: copied, target)


@no_inference_mode
def splice(cache: CacheState, other: CacheState, source: int = 0, row: int = 0) -> None:
    """Append the kept tokens of row `source` of another cache to row `row`, as text that goes on here.

    Keys are copied (converted once, into another kind of store); distances among them stay. They have
    not seen the text before them, as after any join. What exceeds the budget goes at the next step.

    Raises: UsageError when the caches differ in model or layout.
    """
    check_kind("other", other, CacheState, "a KVCache")
    refuse_edit(cache.recurrent, "splice")
    _check_row(cache, row, "row")
    _check_row(other, source, "source")
    if other.model_id is not cache.model_id:
        raise UsageError("splice: the other cache was made for another model")
    if other.is_rotated != cache.is_rotated:
        raise UsageError("splice: one of the caches holds rotated keys, the other does not")
    if len(other.layers) != len(cache.layers):
        raise UsageError(f"splice: the other cache has {len(other.layers)} layers, this one {len(cache.layers)}")
    if other.merge is not None and cache.merge != other.merge:
        raise UsageError(
            f"splice: the other cache merges tokens by {other.merge}, this one {cache.merge or 'does not'}"
        )
    missing = [
        said
        for name, said in INITIAL_STATE.items()
        if name in {*cache.policy.needs.state} - {*other.policy.needs.state}
    ]
    if missing:
        raise UsageError(
            f"splice: {cache.policy!r} ranks by {missing[0]}, which the other cache's policy does not keep"
        )
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        _check_same_layout(mine, theirs)
    at = cache.next_positions[row]
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        if not theirs.is_empty:
            _splice_layer(mine, theirs, source, row, at, cache.batch_size)
    cache.rows = cache.rows.spliced(other.rows.rows[source], row)


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


def _splice_layer(mine: SlotLayer, theirs: SlotLayer, source: int, row: int, at: int, batch: int) -> None:
    held = theirs.positions[source : source + 1]
    # In the order of the text: the store counts them as they come.
    order = kernels.argsort_positions(held)[..., : int((held >= 0).sum(-1).max())]
    parts = {name: part.expand(batch, -1, -1, -1) for name, part in theirs.store.take(source, order).items()}
    state = {name: tensor[source : source + 1].gather(-1, order) for name, tensor in theirs.table.state.items()}
    positions = held.gather(-1, order)
    positions = (positions + at).where(positions >= 0, EMPTY)  # a head may hold fewer than another
    is_row = (torch.arange(batch, device=positions.device) == row)[:, None, None]
    keys, values = (states.expand(batch, -1, -1, -1) for states in theirs.store.read(source, order))
    slots = mine.append(keys, values, positions.where(is_row, EMPTY))
    if mine.store.is_compatible(theirs.store):  # else they were converted, once
        mine.store.put(slots, parts)
    kept = {*INITIAL_STATE, *(() if mine.rules.merge is None else mine.rules.merge.state)}
    for name in kept & set(mine.table.state) & set(state):
        here = mine.table.state[name]
        here.scatter_(-1, slots, state[name].expand_as(slots).where(is_row, here.gather(-1, slots)))


def _check_same_layout(mine: SlotLayer, theirs: SlotLayer) -> None:
    if theirs.is_empty:
        return
    if mine.is_empty:
        mine.use_sliding_window(theirs.sliding_window, theirs.rules.attention_chunk)
        _check_ranks(mine, theirs, theirs.store.layout[0] if mine.policy.needs.per_head else 1)
        return
    ours, other = mine.store.layout, theirs.store.layout
    if ours != other:
        raise UsageError(f"splice: layer {mine.index} holds (kv_heads, head_dim, dtype) {ours}, not {other}")
    _check_ranks(mine, theirs, mine.positions.shape[1])


def _check_ranks(mine: SlotLayer, theirs: SlotLayer, score_heads: int) -> None:
    if score_heads < theirs.positions.shape[1]:
        raise UsageError(
            f"splice: the other cache's policy {theirs.policy!r} kept other tokens in each head, {mine.policy!r} "
            "holds the same in all; make this cache with a policy that ranks per head"
        )


@no_inference_mode
def select_rows(cache: CacheState, rows: Tensor) -> None:
    """Keep the batch rows at `rows`, in that order; a row may be named more than once."""
    check_kind("rows", rows, Tensor, "a tensor of row numbers", "write torch.tensor([1, 0])")
    for row in rows.tolist():
        _check_row(cache, row, "row")
    for layer in (*cache.layers, *cache.recurrent):
        layer.select_rows(rows.to(cache.device))
    cache.rows = cache.rows.selected(rows.tolist())
    cache.options = replace(cache.options, batch=len(rows))


def _apply(cache: CacheState, row: int | None, change: Callable[[Tensor], Tensor]) -> None:
    _rows_of(cache, row)
    for layer in cache.layers:
        layer.edit(change, row)
    cache.rows = cache.rows.edited(row)


def _rows_of(cache: CacheState, row: int | None) -> Sequence[int]:
    """The rows that an edit is for: the one given, or all."""
    if row is None:
        return range(cache.batch_size)
    _check_row(cache, row, "row")
    return [row]


def _check_row(cache: CacheState, row: int, name: str) -> None:
    if not 0 <= whole_number(name, row, -MAX_NUMBER, MAX_NUMBER) < cache.batch_size:
        raise UsageError(f"{name} {row} is not one of the cache's {cache.batch_size} rows")


def _check_range(start: int, end: int) -> None:
    for name, place in (("start", start), ("end", end)):
        whole_number(name, place, 0, MAX_NUMBER)
    if start > end:
        raise UsageError(f"range [{start}, {end}) ends before it starts")
