"""One row as a part of other texts: it begins at 0, and takes no more memory than its tokens."""

from collections.abc import Sequence

from windlass.cache.compress import cut_to_budget
from windlass.cache.edits import drop, shift
from windlass.cache.row import Row
from windlass.cache.rows import RowTable
from windlass.cache.state import CacheState
from windlass.core.step import no_inference_mode


@no_inference_mode
def begin_after(cache: CacheState, prefix: int, ids: Sequence[int]) -> None:
    """Let the text of a cache of one row be the tokens `ids`, which stand behind `prefix` others; these are dropped.

    It is then cut to the budget, if there is one. Earlier steps can't be rolled back.
    """
    end = cache.next_positions[0]
    if prefix:
        drop(cache, 0, prefix)
        shift(cache, prefix, end, -prefix)
    tokens = len(ids)
    cache.rows = RowTable((Row(tokens, tokens, tokens, 0, ((0, tokens),), list(ids), tokens),))
    if cache.options.budget is not None:
        cut_to_budget(cache)
    for layer in cache.layers:
        layer.table.count()
        if not layer.is_empty:
            layer.resize(max(layer.table.occupancy_bound, 1))


def held_positions(cache: CacheState, row: int) -> set[int]:
    """The positions of a row's tokens that any head of any layer holds, of whatever rank."""
    held = [layer.positions[row].flatten() for layer in cache.layers if not layer.is_empty]
    own = {position for each in held for position in each.unique().tolist() if position >= 0}
    return own if cache.heads is None else own.union(*cache.heads.ranks.gathered(own))
