"""Sequence edits: what happens to a text after it was read.

All of them change integers. `drop`, `keep`, `shift` and `divide` touch positions only; `copy` and
`splice` move keys and values to other rows or caches, byte for byte (but into another kind of
store, where they are converted once). What is spliced counts as newly written: a store with exact
tokens copies these as the other cache reads them. Ranges are half-open. After an edit other than
`rollback`, the steps before it can no longer be rolled back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from windlass import kernels
from windlass.cache import layer_rows as rows
from windlass.cache.undo import can_roll_back, holds_copies, roll_back
from windlass.core.errors import UsageError
from windlass.core.rotary_index import EMPTY
from windlass.core.step import outlasting
from windlass.merge import holds_cells
from windlass.policies.base import BORN

if TYPE_CHECKING:
    from windlass.cache.layer import LayerCache
    from windlass.hf.kv_cache import KVCache


@outlasting
def rollback(cache: KVCache, tokens: int | Sequence[int]) -> None:
    """See `KVCache.rollback`."""
    counts = [tokens] * cache.batch_size if isinstance(tokens, int) else list(tokens)
    if len(counts) != cache.batch_size or min(counts) < 0:
        raise UsageError(
            f"rollback takes one number of at least 0, or one for each of {cache.batch_size} rows: {tokens}"
        )
    # A row that fed fewer tokens (it had finished) can't give more than it has.
    for row, (count, end) in enumerate(zip(counts, cache.next_positions, strict=True)):
        if count > end:
            raise UsageError(f"rollback of {count} tokens, but row {row} stands at position {end}")
        since = cache.standing.since_edit[row]
        if count > since:
            raise UsageError(f"rollback of {count} tokens, but row {row} was edited {since} tokens ago; use drop")
    if not any(counts):
        return
    for layer in cache.layers:
        if not can_roll_back(layer, counts):
            raise UsageError(
                f"rollback of {max(counts)} tokens reaches past what layer {layer.index} ({layer.policy!r}) can take "
                "back: the last step, and before it whole steps of up to `rollback` tokens for a policy without "
                "state; use drop, or a KVCache with a larger rollback"
            )
        if not holds_copies(layer, counts):
            raise UsageError(
                f"rollback of {max(counts)} tokens reaches past what store {cache.store.name} still holds exactly in "
                f"layer {layer.index}: the last step, or `rollback` + 16 tokens; use drop, after which the tokens that "
                "are left are read as codes, or a KVCache with a larger rollback"
            )
    standing = cache.standing
    standing.move_to([end - n for end, n in zip(standing.next_positions, counts, strict=True)])
    standing.forget(counts)
    here = standing.step(
        torch.empty(cache.batch_size, 0, dtype=torch.long, device=cache.device), [0] * cache.batch_size
    )
    for layer in cache.layers:
        roll_back(layer, counts, here)


@outlasting
def drop(cache: KVCache, start: int, end: int, row: int | None) -> None:
    """See `KVCache.drop`."""
    _check_range(start, end)
    _apply(cache, row, lambda p: torch.where((p >= start) & (p < end), EMPTY, p))
    cache.standing.move_to([start if start < at <= end else at for at in cache.next_positions], row)


@outlasting
def keep(cache: KVCache, start: int, end: int, row: int | None) -> None:
    """See `KVCache.keep`."""
    _check_range(start, end)
    _apply(cache, row, lambda p: torch.where((p >= start) & (p < end), p, EMPTY))
    cache.standing.move_to([min(at, end) for at in cache.next_positions], row)


@outlasting
def shift(cache: KVCache, start: int, end: int, by: int, row: int | None) -> None:
    """See `KVCache.shift`."""
    _check_range(start, end)
    if row is not None:
        _check_row(cache, row, "row")
    ends = [at + by if start < at <= end else at for at in cache.next_positions]
    if min(ends) < 0:
        raise UsageError(f"shift by {by} would move the end of the text to {min(ends)}, before 0")
    for layer in cache.layers:
        for index in range(cache.batch_size) if row is None else [row]:
            if not layer.is_empty:
                _check_shift(layer.positions[index], start, end, by, ends[index])
    _apply(cache, row, lambda p: torch.where((p >= start) & (p < end), p + by, p))
    cache.standing.move_to(ends, row)


@outlasting
def divide(cache: KVCache, start: int, end: int, by: int, row: int | None) -> None:
    """See `KVCache.divide`."""
    _check_range(start, end)
    if by < 1:
        raise UsageError(f"divide by {by}: must be at least 1")
    is_placed = cache.merge is not None and cache.merge.read != "plain"
    if is_placed and any(holds_cells(layer.positions, layer.state) for layer in cache.layers):
        raise UsageError(
            f"divide: the distances inside this cache's cells, merge={cache.merge}, would stay as they are"
        )
    _apply(cache, row, lambda p: torch.where((p >= start) & (p < end), p // by, p))
    cache.standing.move_to([(at - 1) // by + 1 if start < at <= end else at for at in cache.next_positions], row)


@outlasting
def copy(cache: KVCache, source: int, target: int) -> None:
    """See `KVCache.copy`."""
    for name, row in (("source", source), ("target", target)):
        _check_row(cache, row, name)
    for layer in cache.layers:
        rows.copy_row(layer, source, target)
    cache.standing.copy_row(source, target)


@outlasting
def splice(cache: KVCache, other: KVCache, source: int, row: int) -> None:
    """See `KVCache.splice`."""
    _check_row(cache, row, "row")
    _check_row(other, source, "source")
    if other.seam is not cache.seam:
        raise UsageError("splice: the other cache was made for another model")
    if other.is_rotated != cache.is_rotated:
        raise UsageError("splice: one of the caches holds rotated keys, the other does not")
    if len(other.layers) != len(cache.layers):
        raise UsageError(f"splice: the other cache has {len(other.layers)} layers, this one {len(cache.layers)}")
    if other.merge is not None and cache.merge != other.merge:
        raise UsageError(
            f"splice: the other cache merges tokens by {other.merge}, this one {cache.merge or 'does not'}"
        )
    missing = [said for name, said in BORN.items() if name in {*cache.policy.state} - {*other.policy.state}]
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
    cache.standing.splice(other.standing, source, row)


def _check_shift(positions: Tensor, start: int, end: int, by: int, text_end: int) -> None:
    moves = (positions >= start) & (positions < end)
    moved, stays = positions[moves] + by, positions[(positions >= 0) & ~moves]
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


def _splice_layer(mine: LayerCache, theirs: LayerCache, source: int, row: int, at: int, batch: int) -> None:
    held = theirs.positions[source : source + 1]
    # In the order of the text: the store counts them as they come.
    order = kernels.text_order(held)[..., : int((held >= 0).sum(-1).max())]
    parts = {name: part.expand(batch, -1, -1, -1) for name, part in theirs.store.take(source, order).items()}
    positions = held.gather(-1, order)
    positions = (positions + at).where(positions >= 0, EMPTY)  # a head may hold fewer than another
    is_row = (torch.arange(batch, device=positions.device) == row)[:, None, None]
    keys, values = (states.expand(batch, -1, -1, -1) for states in theirs.store.read(source, order))
    slots = mine.append(keys, values, positions.where(is_row, EMPTY), theirs.sliding_window)
    if mine.store.reads_like(theirs.store):  # else they were converted, once
        mine.store.put(slots, parts)
    kept = {*BORN, *(() if mine.merge is None else mine.merge.state)}
    for name in kept & set(mine.state) & set(theirs.state):
        there = theirs.state[name][source : source + 1].gather(-1, order).expand_as(slots)
        here = mine.state[name]
        here.scatter_(-1, slots, there.where(is_row, here.gather(-1, slots)))


def _check_same_layout(mine: LayerCache, theirs: LayerCache) -> None:
    if theirs.is_empty:
        return
    if mine.is_empty:
        mine.fit_to(theirs.sliding_window)
        _check_ranks(mine, theirs, theirs.store.layout[0] if mine.policy.per_head else 1)
        return
    ours, other = mine.store.layout, theirs.store.layout
    if ours != other:
        raise UsageError(f"splice: layer {mine.index} holds (kv_heads, head_dim, dtype) {ours}, not {other}")
    _check_ranks(mine, theirs, mine.positions.shape[1])


def _check_ranks(mine: LayerCache, theirs: LayerCache, ranked: int) -> None:
    if ranked < theirs.positions.shape[1]:
        raise UsageError(
            f"splice: the other cache's policy {theirs.policy!r} kept other tokens in each head, {mine.policy!r} "
            "holds the same in all; make this cache with a policy that ranks per head"
        )


@outlasting
def select_rows(cache: KVCache, indices: Tensor) -> int:
    """See `KVCache.select_rows`; returns how many rows there are then."""
    for layer in cache.layers:
        rows.select_rows(layer, indices.to(cache.device))
    cache.standing.select_rows(indices.tolist())
    return len(indices)


def _apply(cache: KVCache, row: int | None, change: Callable[[Tensor], Tensor]) -> None:
    if row is not None:
        _check_row(cache, row, "row")
    for layer in cache.layers:
        layer.edit(change, row)
    cache.standing.edited(row)


def _check_row(cache: KVCache, row: int, name: str) -> None:
    if not 0 <= row < cache.batch_size:
        raise UsageError(f"{name} {row} is not one of the cache's {cache.batch_size} rows")


def _check_range(start: int, end: int) -> None:
    if not 0 <= start <= end:
        raise UsageError(f"range [{start}, {end}) must satisfy 0 <= start <= end")
