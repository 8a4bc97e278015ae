"""Joining two texts: the kept tokens of a row of one cache, after those of a row of another, or among them.

Keys and values are copied byte for byte, but into another kind of store, where they are converted once. What is spliced
counts as newly written: a store with exact tokens copies these as the other cache reads them.
"""

import torch

from windlass import kernels
from windlass.cache.edits import check_row, refuse_pictures, shift
from windlass.cache.layer import SlotLayer, append
from windlass.cache.recall import TOKEN_INDEX
from windlass.cache.recurrent import refuse_edit
from windlass.cache.shares import Heads
from windlass.cache.state import CacheState
from windlass.core.errors import UsageError, check_kind, whole_number
from windlass.core.positions import EMPTY
from windlass.core.step import no_inference_mode
from windlass.policies.base import INITIAL_STATE
from windlass.stores.base import INDEX_KEYS, Parts


@no_inference_mode
def splice(cache: CacheState, other: CacheState, source: int = 0, row: int = 0, at: int | None = None) -> None:
    """Put the kept tokens of row `source` of another cache into row `row`: after its text, or at position `at`.

    What stands at `at` and behind it is moved to behind the other text. Keys are copied (converted once, into another
    kind of store); distances among them stay. They have not seen the text before them, as after any join. What exceeds
    the budget goes at the next step.

    Raises: UsageError when the caches differ in model or layout, or `at` lies behind the text; nothing is changed.
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
        raise UsageError("splice: the shares of the caches put other heads together; give both the same shares")
    if other.merge is not None and cache.merge != other.merge:
        raise UsageError(
            f"splice: the other cache merges tokens by {other.merge}, this one {cache.merge or 'does not'}"
        )
    if bool(cache.options.recall) != bool(other.options.recall):
        raise UsageError(
            f"splice: this cache has recall={cache.options.recall}, the other one recall={other.options.recall}: what "
            "one of them has evicted could not be recalled here; make both with recall, or both without"
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
        raise UsageError("splice: a row can't be put into the middle of itself; give copy.deepcopy(cache)")
    if at < end:
        shift(cache, at, end, other.next_positions[source], row)
    for mine, theirs in zip(cache.layers, other.layers, strict=True):
        if not theirs.is_empty:
            _splice_layer(mine, theirs, source, row, at, cache.batch_size)
    cache.rows = rows.spliced(other.rows.rows[source], row, at)


def _heads(cache: CacheState) -> list[tuple[Heads, ...]]:
    """Which kv heads of each layer lie together, where not all do."""
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
            "holds the same in all; make this cache with a policy that ranks per head"
        )
