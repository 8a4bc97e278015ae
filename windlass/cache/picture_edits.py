"""What pictures ask of a cache, and what edits do to the places of a text that has them."""

from collections.abc import Sequence

from torch import Tensor

from windlass.cache.row import Row
from windlass.cache.state import CacheState
from windlass.core.errors import UsageError
from windlass.core.places import MAX_PLACE, PLACE, PLACES, Picture
from windlass.core.step import Step


def check_pictures(cache: CacheState, step: Step) -> None:
    """Raises: UsageError where a cache can't take the pictures of `step`, or not this step after those it has read."""
    if step.places is None:
        return
    if step.places.end > MAX_PLACE:
        raise UsageError(
            f"a text with pictures may reach place {MAX_PLACE:,}, and this one goes on to {step.places.end:,}; shift "
            "it back, or start anew"
        )
    if cache.merge is not None:
        raise UsageError(
            f"merge={cache.merge} averages keys, and those of a picture stand on several axes; to read pictures, make "
            "the KVCache without merge"
        )
    if cache.is_rotated:
        raise UsageError("rotated storage can't read pictures; it is there to be compared with, use KVCache")
    if any(rotary is not None and rotary.is_length_dependent for rotary in cache.rotaries):
        raise UsageError(
            "this model's RoPE changes with the length of the text, and the keys of a picture are turned in part when "
            "they are written; leave past_key_values out to read pictures"
        )


def refuse_pictures(cache: CacheState, what: str) -> None:
    """Raises: UsageError for an edit, `what`, of a text with pictures."""
    if has_places(cache):
        raise UsageError(
            f"{what}: this text has pictures, whose tokens stand on several axes; reset, and read it again"
        )


def has_places(cache: CacheState) -> bool:
    """Whether it is kept where tokens are read."""
    return any(layer.rules.has_places for layer in cache.layers)


def shifted(row: Row, start: int, end: int, by: int) -> tuple[Picture, ...]:
    """The pictures of a row whose positions from `start` up to `end` move by `by`.

    Raises: UsageError where a picture would be torn, or the text after the range stays.
    """
    if not row.pictures:
        return ()
    if end < row.next_position:
        raise UsageError(
            f"shift of [{start}, {end}) in a text with pictures: all of the text from {start} on moves, or nothing; "
            f"let the range end at {row.next_position}"
        )
    moved = []
    for picture in row.pictures:
        if picture.start < start < picture.stop:
            raise UsageError(
                f"shift from {start} on would tear the picture from {picture.start} up to {picture.stop}; shift from "
                f"{picture.start} or {picture.stop} on"
            )
        if picture.start >= start:
            first, stop = picture.start + by, picture.stop + by
        else:  # of one that was dropped, the tokens behind it may take the positions
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
                    f"reaches {least}: a picture takes fewer places than tokens; shift by {least - first} at most"
                )


def shift_places(cache: CacheState, rows: Sequence[int], start: int, end: int, by: int) -> None:
    """Move the places of tokens whose positions are from `start` up to `end`; to be called before these move."""
    for layer in cache.layers:
        if not layer.is_empty and layer.rules.has_places:
            for row in rows:
                moves = _is_in(layer.positions[row], start, end)
                for name in PLACES:
                    layer.table.state[name][row] += by * moves


def _is_in(positions: Tensor, start: int, end: int) -> Tensor:
    return (positions >= start) & (positions < end)
