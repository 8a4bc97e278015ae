"""Sequence edits: changes to a text after it was read.

They change integers. `drop`, `keep` and `shift` touch positions only. `divide` also sorts the slots, as tokens may then
share a position. `copy` copies keys and values byte for byte. `splice` copies those of another text, or converts them
once into another kind of store. Ranges are half-open. Only `rollback` leaves earlier steps that can be rolled back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from windlass import kernels
from windlass.cache.compress import cut_to_budget
from windlass.cache.layer import SlotLayer, append, check_windows
from windlass.cache.recall import TOKEN_INDEX
from windlass.cache.recurrent import RecurrentLayer, prior_states, refuse_edit
from windlass.cache.rows import RowState, RowTable
from windlass.cache.shares import Heads
from windlass.cache.slot_table import SlotTable, with_row
from windlass.cache.state import CacheState
from windlass.core.errors import UsageError, check_kind, whole_number
from windlass.core.parse import MAX_NUMBER
from windlass.core.positions import EMPTY, MAX_PLACE, PLACE, PLACES, Picture
from windlass.core.step import Step, no_inference_mode
from windlass.core.types import Tokens
from windlass.policies.base import INITIAL_STATE
from windlass.stores.base import INDEX_KEYS, Parts


def check_pictures(cache: CacheState, step: Step) -> None:
    """Raises: UsageError where a cache can't take the pictures of `step`, or not this step after those it has read."""
    if step.places is None:
        return
    if step.places.end > MAX_PLACE:
        raise UsageError(
            f"a text with pictures may reach place {MAX_PLACE:,}, and this one continues to {step.places.end:,}. Shift "
            "it back, or start anew"
        )
    if cache.merge is not None:
        raise UsageError(
            f"merge={cache.merge} averages keys, and keys of a picture have positions on several axes. For pictures, "
            "make the KVCache without merge"
        )
    if cache.is_rotated:
        raise UsageError("rotated storage is for comparisons and cannot read pictures. Use KVCache")
    if any(rotary is not None and rotary.is_length_dependent for rotary in cache.rotaries):
        raise UsageError(
            "this model's RoPE changes with the length of the text, and the keys of a picture are turned in part when "
            "they are written. Leave past_key_values out to read pictures"
        )


def refuse_pictures(cache: CacheState, what: str) -> None:
    """Raises: UsageError for an edit, with the given name, of a text with pictures."""
    if has_places(cache):
        raise UsageError(
            f"{what}: this text has pictures, whose tokens have positions on several axes. Reset, and read it again"
        )


def has_places(cache: CacheState) -> bool:
    """Return True if slots have the places at which their tokens are read."""
    return any(layer.rules.has_places for layer in cache.layers)


def shifted(row: RowState, start: int, end: int, by: int) -> tuple[Picture, ...]:
    """The pictures of a row whose positions from `start` up to `end` move by `by`.

    Raises: UsageError where a picture would be torn, or the text after the range stays.
    """
    if not row.pictures:
        return ()
    if end < row.next_position:
        raise UsageError(
            f"shift of [{start}, {end}) in a text with pictures: all of the text from {start} on moves, or nothing. "
            f"Let the range end at {row.next_position}"
        )
    moved = []
    for picture in row.pictures:
        if picture.start < start < picture.stop:
            raise UsageError(
                f"shift from {start} on would tear the picture from {picture.start} up to {picture.stop}. Shift from "
                f"{picture.start} or {picture.stop} on"
            )
        if picture.start >= start:
            first, stop = picture.start + by, picture.stop + by
        else:  # tokens behind a dropped picture may take its positions
            first, stop = min(picture.start, start + by), min(picture.stop, start + by)
        moved.append(Picture(max(first, 0), max(stop, 0), picture.offset))
    return tuple(moved)


def check_places(cache: CacheState, rows: Sequence[int], start: int, end: int, by: int) -> None:
    """Raises: UsageError where tokens would be read before 0, or at or before one that stays and was before them."""
    for layer in cache.layers:
        if layer.is_empty or not layer.rules.has_places:
            continue
        for row in rows:
            positions, ends = layer.positions[row], layer.table.state[PLACES[2]][row]
            moves, stays = _is_in(positions, start, end), (positions >= 0) & (positions < start)
            places = layer.table.state[PLACE][row][moves]
            least = int(ends[stays].max()) if bool(stays.any()) else 0
            if places.numel() and int(places.min()) + by < least:
                first = int(places.min())
                raise UsageError(
                    f"shift by {by} would move a token that is read at {first} to {first + by}, and the text before it "
                    f"reaches {least}: a picture takes fewer places than tokens. Shift by {least - first} at most"
                )


def shift_places(cache: CacheState, rows: Sequence[int], start: int, end: int, by: int) -> None:
    """Move the places of tokens whose positions are from `start` up to `end`. Call it before the positions move."""
    for layer in cache.layers:
        if not layer.is_empty and layer.rules.has_places:
            for row in rows:
                moves = _is_in(layer.positions[row], start, end)
                for name in PLACES:
                    layer.table.state[name][row] += by * moves


def _is_in(positions: Tensor, start: int, end: int) -> Tensor:
    return (positions >= start) & (positions < end)


@no_inference_mode
def rollback(cache: CacheState, tokens: int | Sequence[int]) -> None:
    """Roll back the newest `tokens` of every row (or one number per row), with their evictions and policy state.

    After a rollback of a whole pass, the cache is as if its tokens had never been written. A pass can be rolled back in
    part, but its remaining tokens were computed together with the others. Where those decide how a token is read, the
    result differs from a text that never had them. This is so with a store that holds the newest tokens in full
    precision (`int4(newest=3)`), and with dynamic NTK past the trained length, where the rotation depends on the length
    of the text. A row that idled over budget, after a splice, stays cut. Recurrent layers go back to a checkpoint, to
    before the last pass, or to a draft in it.

    Raises: UsageError when they reach further back than can be rolled back. Then nothing is changed.
    """
    each = tokens if isinstance(tokens, (list, tuple)) else [tokens] * cache.batch_size
    counts = [whole_number("rollback's tokens", one, 0, MAX_NUMBER) for one in each]
    if len(counts) != cache.batch_size:
        raise UsageError(f"rollback takes one number, or one for each of {cache.batch_size} rows, got {len(counts)}")
    # A finished row fed fewer tokens, and cannot give back more.
    for row, (count, end) in enumerate(zip(counts, cache.next_positions, strict=True)):
        if count > end:
            raise UsageError(f"rollback of {count} tokens, but row {row} is at position {end}")
        since = cache.rows.rows[row].since_edit
        if count > since:
            raise UsageError(f"rollback of {count} tokens, but row {row} was edited {since} tokens ago. Use drop")
    if not any(counts):
        return
    prior = prior_states(cache.recurrent, cache.rows.rows, counts)
    for layer in cache.layers:
        if not layer.can_roll_back(counts):
            raise UsageError(
                f"rollback of {max(counts)} tokens is more than layer {layer.index} ({layer.policy!r}) can take "
                "back: the last step, and before it whole steps of up to `rollback` tokens. Use drop, or a KVCache "
                "with a larger rollback"
            )
        if not layer.holds_full_precision(counts):
            raise UsageError(
                f"rollback of {max(counts)} tokens is more than store {cache.store.name} still holds exactly in "
                f"layer {layer.index}: the last step, or `rollback` + 16 tokens. Use drop, after which the tokens that "
                "are left are read as codes, or a KVCache with a larger rollback"
            )
    rows = cache.rows.rolled_back(counts)
    here = rows.standstill(cache.device)
    for layer in cache.layers:
        layer.roll_back(counts, here)
    for recurrent, states in zip(cache.recurrent, prior, strict=True):
        recurrent.restore(states)
        recurrent.forget_steps()
    cache.rows = rows


@no_inference_mode
def drop(cache: CacheState, start: int, end: int, row: int | None = None) -> None:
    """Free the tokens at positions `start` up to `end`. The others keep their positions.

    Dropping the newest tokens moves the end of the text back to `start`.

    Raises: UsageError where a layer has evicted tokens that its sliding window would see from there.
    """
    refuse_edit(cache.recurrent, "drop")
    _check_range(start, end)
    ends = [start if start < at <= end else at for at in cache.next_positions]
    check_windows(cache.layers, _rows_of(cache, row), cache.next_positions, ends, "drop")
    _apply(cache, row, ends, lambda p: torch.where(_is_in(p, start, end), EMPTY, p))


@no_inference_mode
def keep(cache: CacheState, start: int, end: int, row: int | None = None) -> None:
    """Free every token but those at positions `start` up to `end`. Raises: UsageError, as `drop` does."""
    refuse_edit(cache.recurrent, "keep")
    _check_range(start, end)
    ends = [min(at, end) for at in cache.next_positions]
    check_windows(cache.layers, _rows_of(cache, row), cache.next_positions, ends, "keep")
    _apply(cache, row, ends, lambda p: torch.where(_is_in(p, start, end), p, EMPTY))


@no_inference_mode
def shift(cache: CacheState, start: int, end: int, by: int, row: int | None = None) -> None:
    """Add `by` to the positions from `start` up to `end`.

    In a text with pictures, the tokens' places move by as much on all axes.

    Raises: UsageError when a token would stand before 0, on another token, or past the end of its text. In a text with
    pictures also when the range ends before the text, tears a picture, or a token would be read before 0 or before the
    text in front of it.
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
    _apply(cache, row, ends, lambda p: torch.where(_is_in(p, start, end), p + by, p))


@no_inference_mode
def divide(cache: CacheState, start: int, end: int, by: int, row: int | None = None) -> None:
    """Divide the positions from `start` up to `end`, rounding down. Tokens that then share one keep their order.

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
            _check_end(positions[~_is_in(positions, start, end)], ends[index], f"divide by {by}")
    for layer in held:
        layer.forget_steps(0)
        layer.table.sort()
    _apply(cache, row, ends, lambda p: torch.where(_is_in(p, start, end), p // by, p))


@no_inference_mode
def copy(cache: CacheState, source: int, target: int) -> None:
    """Overwrite row `target` with row `source`: its tokens, positions and policy state."""
    for name, row in (("source", source), ("target", target)):
        check_row(cache, row, name)
    for layer in (*cache.layers, *cache.recurrent):
        layer.copy_row(source, target)
    cache.rows = cache.rows.changed(lambda *_: cache.rows.rows[source], target)


def _check_shift(positions: Tensor, start: int, end: int, by: int, text_end: int) -> None:
    moves = _is_in(positions, start, end)
    moved, stays = positions[moves] + by, positions[(positions >= 0) & ~moves]
    _check_end(stays, text_end, f"shift by {by}")
    if not moved.numel():
        return
    low, high = int(moved.min()), int(moved.max())
    if low < 0:
        raise UsageError(f"shift by {by} would move position {low - by} before 0. Drop it first")
    if high >= text_end:
        raise UsageError(f"shift by {by} would move position {high - by} to {high}, past the text's end at {text_end}")
    if bool(((stays >= low) & (stays <= high)).any()):
        raise UsageError(
            f"shift by {by} would move tokens onto positions {low} to {high}, which other tokens hold. Drop those first"
        )


def _check_end(stays: Tensor, text_end: int, edit: str) -> None:
    """Refuse an `edit` after which the next token would be written before one that `stays`, or onto it."""
    last = int(stays.max()) if stays.numel() else -1
    if last >= text_end:
        raise UsageError(
            f"{edit} would move the end of the text to {text_end}, but a token stays at {last}. Drop it first"
        )


@no_inference_mode
def select_rows(cache: CacheState, rows: Tensor) -> None:
    """Keep the batch rows at `rows`, in that order. A row may be named more than once."""
    check_kind("rows", rows, Tensor, "a tensor of row numbers", "Write torch.tensor([1, 0])")
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


@no_inference_mode
def put_row(
    cache: CacheState,
    row: int,
    other: CacheState,
    source: int = 0,
    tokens: int | None = None,
    is_clear: bool = False,
) -> None:
    """Overwrite row `row` with row `source` of a cache with the same options: its tokens, positions and policy state.

    The caches may differ in their numbers of rows and their free slots. `other` does not change. Nothing of the old row
    remains, and no earlier step can be rolled back.
    `tokens`: only its first so many, of a row that `holds_all`. `is_clear`: the row's memory holds zeros already.

    Raises: UsageError for a cache of another model, or with other options, naming the first that differs, and for
    `tokens` at which a recurrent layer has no checkpoint.
    """
    check_row(cache, row, "row")
    check_row(other, source, "source")
    _check_alike(cache, other)
    copied = other.rows.rows[source]
    beyond = 0 if tokens is None else copied.tokens_seen - tokens
    prior = prior_states(other.recurrent, other.rows.rows, [beyond * (at == source) for at in range(other.batch_size)])
    copied = copied.rolled_back(beyond) if beyond else copied
    for mine, theirs in zip(cache.layers, other.layers_to_read, strict=True):
        _put_slots(mine, row, theirs, source, cache.batch_size, copied, is_clear)
    for own, its, states in zip(cache.recurrent, other.recurrent, prior, strict=True):
        given = states.get(source, {name: state[source] for name, state in its.tensors().items()})
        _put_states(own, row, given, cache.batch_size)
    cache.rows = cache.rows.changed(lambda *_: copied, row)


@no_inference_mode
def clear_row(cache: CacheState, row: int) -> None:
    """Begin a new text in row `row`. Nothing of the old one remains, not even in free slots.

    Afterwards no earlier step can be rolled back.
    """
    check_row(cache, row, "row")
    for layer in cache.layers:
        if not layer.is_empty:
            layer.forget_steps(0)
            layer.table.clear_row(row)
    _clear_text(cache, row)


def _clear_text(cache: CacheState, row: int) -> None:
    for recurrent in cache.recurrent:
        recurrent.forget_steps()
        for tensor in recurrent.tensors().values():
            tensor[row] = 0
    cache.rows = cache.rows.changed(lambda *_: RowState(ids=Tokens()), row)


@no_inference_mode
def arrange_rows(cache: CacheState, rows: Sequence[int | None]) -> None:
    """Keep the rows at `rows`, each named once, in that order. None stands for a row that begins a new text.

    Memory is taken, and given back, one layer after the other. Afterwards no earlier step can be rolled back. After an
    error only `reset` makes the cache usable again.
    """
    index = torch.tensor([row or 0 for row in rows])
    for layer in cache.layers:
        layer.arrange_rows(rows)
    for recurrent in cache.recurrent:
        recurrent.select_rows(index)
    cache.rows, cache.options = cache.rows.selected(index.tolist()), replace(cache.options, batch=len(rows))
    for new in [at for at, row in enumerate(rows) if row is None]:
        _clear_text(cache, new)


def _check_alike(cache: CacheState, other: CacheState) -> None:
    if other.model_id is not cache.model_id:
        raise UsageError("put_row: the other cache belongs to another model. Make both with the same one")
    mine, theirs = cache.options.labels(), other.options.labels()
    for name, value in mine.items():
        if theirs[name] != value:
            raise UsageError(
                f"put_row: this cache has {name}={value!r}, the other one {theirs[name]!r}. Make both alike"
            )


def _put_slots(
    mine: SlotLayer, row: int, theirs: SlotLayer, source: int, batch: int, text: RowState, is_clear: bool
) -> None:
    mine.forget_steps(0)
    if theirs.is_empty:
        if not mine.is_empty:
            mine.table.clear_row(row)
        return
    table = theirs.table.packed(source, text.next_position)
    is_whole = not theirs.history.has_evicted or int((table.positions >= 0).sum(-1).min()) == text.tokens_seen
    if mine.is_empty:
        mine.rules, recall = theirs.rules, mine.table.recall if theirs.rules.recalls else None
        if batch > 1:
            table.select_rows(torch.zeros(batch, dtype=torch.long, device=table.positions.device))
        table.recall, mine.table = recall, table
        for index in range(batch):
            if index != row:
                table.clear_row(index)
    else:
        _put_table(mine, row, table, is_clear)
    mine.history = mine.history._replace(has_evicted=mine.history.has_evicted or not is_whole)
    if mine.table.recall is not None and theirs.table.recall is not None:
        mine.table.recall.clear_row(row)
        mine.table.recall.join(theirs.table.recall, source, row, 0, batch, theirs.table.positions.device)
        beyond = theirs.table.recall.lengths[source] - text.tokens_seen
        mine.table.recall.roll_back([beyond * (index == row) for index in range(batch)])
    mine.table.count()


def _put_table(mine: SlotLayer, row: int, packed: SlotTable, is_clear: bool) -> None:
    """Overwrite a row with the only one of a table, whose tokens lie in its first slots."""
    table = mine.table
    if packed.slots > table.slots:
        mine.resize(packed.slots)
    if table.score_heads < packed.score_heads:
        table.split_heads()
    table.store.put_row(packed.store, row, is_clear)
    table.positions[row], slots = EMPTY, packed.slots
    table.positions[row, :, :slots] = packed.positions[0]
    for name, tensor in table.state.items():
        tensor[row] = 0
        tensor[row, :, :slots] = packed.state[name][0]
    table.statistics = {
        name: with_row(table.statistics.get(name), row, tensor, len(table.positions))
        for name, tensor in packed.statistics.items()
    }


def _put_states(mine: RecurrentLayer, row: int, given: dict[str, Tensor], batch: int) -> None:
    mine.forget_steps()
    if mine.is_empty:
        mine.load({name: state.new_zeros(batch, *state.shape) for name, state in given.items()})
    for name, state in mine.tensors().items():
        state[row] = given.get(name, 0)


@no_inference_mode
def begin_after(cache: CacheState, prefix: int, ids: Sequence[int]) -> None:
    """Drop the first `prefix` tokens of a cache of one row, so that its text is the tokens `ids` behind them.

    The cache is then cut to its budget, if it has one. Earlier steps can't be rolled back.
    """
    end = cache.next_positions[0]
    if prefix:
        drop(cache, 0, prefix)
        shift(cache, prefix, end, -prefix)
    tokens = len(ids)
    cache.rows = RowTable((RowState(tokens, tokens, tokens, 0, ((0, tokens),), Tokens.of(ids)),))
    if cache.options.budget is not None:
        cut_to_budget(cache)
    for layer in cache.layers:
        layer.table.count()
        if not layer.is_empty:
            layer.resize(max(layer.table.occupancy_bound, 1))


def holds_all(cache: CacheState, row: int = 0) -> int:
    """The most tokens up to which a row holds its whole text, of which any number of the newest can be rolled back.

    0: it holds less, or a token has changed more than its own slot. Recurrent layers go back to checkpoints alone.
    """
    text, ring = cache.rows.rows[row], cache.store.full_precision
    layers = cache.layers_to_read
    is_whole = all(layer.is_lossless for layer in layers) and text.since_edit == text.tokens_seen
    if ring.sinks or ring.newest or not is_whole:
        return 0
    return min((layer.budget for layer in layers if layer.budget is not None), default=MAX_NUMBER)


def held_positions(cache: CacheState, row: int) -> set[int]:
    """The positions of a row's tokens that any head of any layer holds, on any rank."""
    held = [layer.positions[row].flatten() for layer in cache.layers if not layer.is_empty]
    own = {position for each in held for position in each.unique().tolist() if position >= 0}
    return own if cache.heads is None else own.union(*cache.heads.ranks.all_gather(own))


def takes_edits(cache: CacheState, end: int, has_gaps: bool) -> bool:
    """Return True if tokens of a text up to `end` can be dropped and moved, and others be read in gaps between them."""
    ring = cache.store.full_precision
    grows = any(rotary is not None and rotary.is_length_dependent for rotary in cache.rotaries)
    if cache.recurrent or has_places(cache) or cache.is_rotated or cache.merge is not None or ring.sinks or ring.newest:
        return False
    for layer in cache.layers_to_read:  # a window that was evicted is not there for tokens before its end
        is_cut = layer.rules.is_whole_window and layer.history.has_evicted
        if is_cut or layer.policy.needs.statistics or (has_gaps and end > _stands_until(cache, layer)):
            return False
    return not (has_gaps and grows)


@no_inference_mode
def remap(cache: CacheState, moves: Sequence[int], end: int) -> None:
    """Move the token at each position of a cache of one row to the one in `moves`, or drop it where that is EMPTY.

    The text then ends at `end`, and its ids are unknown. Tokens of its gaps are still to be read, see `Step.is_insert`.
    """
    table = torch.tensor(moves, dtype=torch.int32)

    def moved(positions: Tensor) -> Tensor:  # of slots, and of a recall store on another device
        return table.to(positions.device)[positions.clamp(min=0).long()].where(positions >= 0, positions)

    for layer in cache.layers:
        layer.edit(moved)
        if layer.table.recall is not None:
            layer.table.keep_recalled()
    sinks = cache.rows.rows[0].sinks
    cache.rows = RowTable((RowState(end, end, end, prompts=((0, end),), sinks=sinks),))


EDIT: Final = "recompute"  # the name in errors


def _stands_until(cache: CacheState, layer: SlotLayer, sliding_window: int | None = None) -> int:
    """The length of the longest text whose tokens a layer reads at their own positions."""
    if layer.rotary is None:
        return MAX_NUMBER
    window = layer.sliding_window if sliding_window is None else sliding_window
    trained = layer.rotary.trained_length if window is None else None
    return cache.positions.within(trained, layer.rules.budget is not None).stands_until()


def check_rewrite(cache: CacheState, end: int, added: CacheState | None = None) -> None:
    """Raises: UsageError for a cache whose texts, up to `end`, can't be recomputed in place.

    `added` is a cache whose tokens are to come into it, and tells which layers have a sliding window where this one is
    empty.
    """
    refuse_edit(cache.recurrent, EDIT)
    refuse_pictures(cache, EDIT)
    if cache.is_rotated:
        raise UsageError(f"{EDIT}: rotated storage is for comparisons. Use KVCache")
    if cache.merge is not None:
        raise UsageError(
            f"{EDIT}: merge={cache.merge} lets a slot stand for several tokens, and one of them can't be written over. "
            "Make the KVCache without merge"
        )
    if cache.options.recall:
        raise UsageError(
            f"{EDIT}: recall={cache.options.recall} keeps a second copy of each token, which would stay as it was. "
            "Make the KVCache without recall"
        )
    ring = cache.store.full_precision
    if ring.sinks or ring.newest:
        raise UsageError(
            f"{EDIT}: store {cache.store.name} counts the tokens that it holds exactly as they are written, and tokens "
            f"written over would push out the newest. Use {cache.store.name.partition('(')[0]}"
        )
    known = cache.layers if added is None else added.layers
    for mine, its in zip(cache.layers, known, strict=True):
        most = _stands_until(cache, mine, its.sliding_window if mine.is_empty else None)
        if end > most:
            beyond = f"beyond position {most} " if most else ""
            raise UsageError(
                f'{EDIT}: positions="{cache.positions}" {beyond}reads tokens at other places than their own, which is '
                f"known for the newest tokens only, and this text continues to {end}. Set cache.positions to "
                '"original" before it, and back after it'
            )


@no_inference_mode
def splice(cache: CacheState, other: CacheState, source: int = 0, row: int = 0, at: int | None = None) -> None:
    """Put the kept tokens of row `source` of another cache into row `row`, after its text or at position `at`.

    Tokens at and behind `at` move behind the other text. Keys are copied, or converted once into another kind of store,
    and distances among them stay. The spliced tokens have not seen the text before them, as after any join. Tokens over
    the budget are evicted at the next step.

    Raises: UsageError when the caches differ in model or layout, or `at` lies behind the text. Then nothing is changed.
    """
    check_kind("other", other, CacheState, "a KVCache")
    refuse_edit(cache.recurrent, "splice")
    for each in (cache, other):
        refuse_pictures(each, "splice")
    check_row(cache, row, "row")
    check_row(other, source, "source")
    if other.model_id is not cache.model_id:
        raise UsageError("splice: the other cache was made for another model")
    if other.is_rotated != cache.is_rotated:
        raise UsageError("splice: one of the caches holds rotated keys, the other does not")
    if len(other.by_layer) != len(cache.by_layer):
        raise UsageError(f"splice: the other cache has {len(other.by_layer)} layers, this one {len(cache.by_layer)}")
    if _heads(other) != _heads(cache):
        raise UsageError("splice: the shares of the caches put other heads together. Give both the same shares")
    if other.merge is not None and cache.merge != other.merge:
        raise UsageError(
            f"splice: the other cache merges tokens by {other.merge}, this one {cache.merge or 'does not'}"
        )
    if bool(cache.options.recall) != bool(other.options.recall):
        raise UsageError(
            f"splice: this cache has recall={cache.options.recall}, the other one recall={other.options.recall}: "
            "evicted tokens of one of them could not be recalled here. Make both with recall, or both without"
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
    rows, end = cache.rows, cache.next_positions[row]
    at = end if at is None else whole_number("at", at, 0, end)
    if at < end and other is cache and source == row:
        raise UsageError("splice: a row can't be put into the middle of itself. Give copy.deepcopy(cache)")
    if at < end:
        shift(cache, at, end, other.next_positions[source], row)
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        if not theirs.is_empty:
            _splice_layer(mine, theirs, source, row, at, cache.batch_size)
    cache.rows = rows.spliced(other.rows.rows[source], row, at)


def _heads(cache: CacheState) -> list[tuple[Heads, ...]]:
    """The kv heads of each layer that lie together, in layers whose heads are in groups."""
    return [its.heads for its in cache.by_layer]


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
    begins: Parts = {}
    if mine.table.recall is not None and theirs.table.recall is not None:
        index = state[TOKEN_INDEX] + mine.table.recall.join(
            theirs.table.recall, source, row, at, batch, theirs.table.positions.device
        )
        begins[TOKEN_INDEX] = index.expand(batch, -1, -1)
        mine.history = mine.history._replace(has_evicted=mine.history.has_evicted or theirs.history.has_evicted)
    slots = append(mine, keys, values, positions.where(is_row, EMPTY), begins)
    is_alike = mine.store.is_compatible(theirs.store)  # else keys and values were converted, once
    mine.store.put(slots, {name: part for name, part in parts.items() if is_alike or name == INDEX_KEYS})
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
            "holds the same in all. Make this cache with a policy that ranks per head"
        )
