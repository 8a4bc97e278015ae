"""Which caches can have tokens written over, that are read a second time where they stand."""

from typing import Final

from windlass.cache.picture_edits import refuse_pictures
from windlass.cache.recurrent_layer import refuse_edit
from windlass.cache.state import CacheState
from windlass.core.errors import UsageError

EDIT: Final = "recompute"  # what errors call it


def check_rewrite(cache: CacheState, end: int, added: CacheState | None = None) -> None:
    """Raises: UsageError for a cache whose texts, up to `end`, can't have tokens written over.

    `added` is a cache whose tokens are to come into it, and tells which layers have a sliding window where this one is
    empty.
    """
    refuse_edit(cache.recurrent, EDIT)
    refuse_pictures(cache, EDIT)
    if cache.is_rotated:
        raise UsageError(f"{EDIT}: rotated storage is there to be compared with; use KVCache")
    if cache.merge is not None:
        raise UsageError(
            f"{EDIT}: merge={cache.merge} lets a slot stand for several tokens, and one of them can't be written over; "
            "make the KVCache without merge"
        )
    if cache.options.recall:
        raise UsageError(
            f"{EDIT}: recall={cache.options.recall} keeps a second copy of each token, which would stay as it was; "
            "make the KVCache without recall"
        )
    ring = cache.store.full_precision
    if ring.sinks or ring.newest:
        raise UsageError(
            f"{EDIT}: store {cache.store.name} counts the tokens that it holds exactly as they are written, and tokens "
            f"written over would push out the newest; use {cache.store.name.partition('(')[0]}"
        )
    known = cache.layers if added is None else added.layers
    for mine, its in zip(cache.layers, known, strict=True):
        window = its.sliding_window if mine.is_empty else mine.sliding_window
        if mine.rotary is None:
            continue
        trained = mine.rotary.trained_length if window is None else None
        most = cache.positions.within(trained, mine.rules.budget is not None).stands_until()
        if end > most:
            beyond = f"beyond position {most} " if most else ""
            raise UsageError(
                f'{EDIT}: positions="{cache.positions}" {beyond}reads tokens at other places than their own, which is '
                f"known for the newest tokens only, and this text goes on to {end}; set cache.positions to "
                '"original" before it, and back after it'
            )
