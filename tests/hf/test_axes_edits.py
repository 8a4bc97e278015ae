"""Texts with pictures of several axes that are edited, read at other places, taken back, and kept in files.

The models have one layer, whose keys depend on the tokens alone: then any edit is exact, and transformers reads the
tokens that are left at positions of which all axes moved alike.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.axes import (
    PICTURE,
    at_axes,
    attached_reader,
    embedded,
    error,
    first,
    one_layer_read,
    plain_reader,
    shown,
)
from tests.helpers.models import Text
from windlass import KVCache, PromptCacheError, UsageError
from windlass.core.positions import BLOCK_END, BLOCK_START, PLACE
from windlass.policies import H2O, Recent

TOLERANCE = 1e-4  # of a standard deviation
TOKENS, STARTS, SIDE = 71, (8, 31), 5  # a picture takes 15 tokens, and as many places as its longer side
OFFSET = SIDE - PICTURE
BUDGET, SINKS = 40, 3
FAMILIES = ("qwen3_vl", "qwen2_vl", "ernie4_5_vl_moe")
each_family = pytest.mark.parametrize("family", FAMILIES)


@torch.no_grad()
def last_logits(family: str, given: dict[str, Any], kept: Sequence[int], axes: Tensor) -> Tensor:
    """Logits of transformers after the tokens at `kept`, read at these positions (3, 1, kept)."""
    embeds, _ = embedded(plain_reader(family, 1), given)
    return at_axes(plain_reader(family, 1), embeds[:, list(kept)], axes)[:, -1]


def compacted(axes: Tensor, kept: Sequence[int]) -> Tensor:
    """Each picture of which a token is kept in its full extent, each token of text in one place."""
    blocks = [range(start, start + PICTURE) for start in STARTS]
    end, done, columns = 0, {}, []
    for column in kept:
        block = next((each for each in blocks if column in each), range(column, column + 1))
        low = axes[:, 0, block.start].min()
        if block.start not in done:
            done[block.start] = end
            end += int(axes[:, 0, block.start : block.stop].max() - low) + 1
        columns.append(axes[:, 0, column] - low + done[block.start])
    return torch.stack(columns, 1)[:, None]


@each_family
def test_compact_keeps_what_a_picture_is_inside(family: str, text: Text) -> None:
    given = shown(text, TOKENS, STARTS, family)
    _, axes = embedded(plain_reader(family, 1), given)
    _, feed = one_layer_read(family, given, 52, budget=BUDGET, sinks=SINKS, positions="compact")
    parts = set()
    for column in range(52, TOKENS):
        logits = feed(column)
        # The query reads before its token pushes another one out.
        kept = [at for at in range(column + 1) if at < SINKS or column - at <= BUDGET - SINKS]
        theirs = last_logits(family, given, kept, compacted(axes, kept))
        assert error(logits, theirs) <= TOLERANCE
        assert error(last_logits(family, given, kept, axes[:, :, kept]), theirs) > 0.001
        parts.add(sum(STARTS[0] <= at < STARTS[0] + PICTURE for at in kept))
    assert set(range(8)) <= parts, "the first picture is evicted part by part"


@pytest.mark.parametrize("policy", [Recent(), H2O()], ids=["recent", "h2o"])
@torch.no_grad()
def test_compact_in_chunks_and_one_by_one(policy: Any, text: Text) -> None:
    """Nothing is evicted: then pictures and text stand where they stood, however they came."""
    given, plain, model = shown(text, TOKENS, STARTS), plain_reader("qwen3_vl"), attached_reader("qwen3_vl")
    theirs = plain(**given, use_cache=False).logits
    for chunk in (1, 9):
        cache = KVCache(model, 80, policy, positions="compact")
        pieces = [model(**first(given, 52), past_key_values=cache).logits]
        for ids in given["input_ids"][:, 52:].split(chunk, 1):
            pieces.append(model(ids, past_key_values=cache).logits)
        assert error(torch.cat(pieces, 1), theirs) <= TOLERANCE


@each_family
@pytest.mark.parametrize(
    ("start", "stop"), [(3, 6), (2, STARTS[0] + PICTURE + 1)], ids=["before", "with the first picture"]
)
def test_shift_after_drop(family: str, start: int, stop: int, text: Text) -> None:
    given, cut = shown(text, TOKENS, STARTS, family), 60
    _, axes = embedded(plain_reader(family, 1), given)
    cache, feed = one_layer_read(family, given, cut)
    cache.drop(start, stop)
    by = int(axes[0, 0, start] - axes[0, 0, stop])  # as many places as the dropped tokens took
    assert by == start - stop - OFFSET * (stop > STARTS[0])
    cache.shift(stop, cut, by)
    kept = [at for at in range(cut + 1) if not start <= at < stop]
    moved = axes[:, :, kept] + by * (torch.tensor(kept) >= stop)
    assert error(feed(cut), last_logits(family, given, kept, moved)) <= TOLERANCE
    second = last_logits(family, given, [*kept, cut + 1], torch.cat((moved, moved[:, :, -1:] + 1), 2))
    assert error(feed(cut + 1), second) <= TOLERANCE
    cache.rollback(2)
    assert error(feed(cut), last_logits(family, given, kept, moved)) <= TOLERANCE


def test_shift_that_no_text_survives(text: Text) -> None:
    given, cut = shown(text, TOKENS, STARTS), 60
    cache, _ = one_layer_read("qwen3_vl", given, cut)
    rows, before = cache.rows, [layer.table.places for layer in cache.layers]
    with pytest.raises(UsageError, match=r"tear the picture from 31 up to 46\. Shift from 31 or 46 on"):
        cache.shift(40, cut, 3)
    with pytest.raises(UsageError, match=r"all of the text from 46 on moves, or nothing\. Let the range end at 60"):
        cache.shift(46, 50, 0)
    cache.drop(4, 25)
    with pytest.raises(UsageError, match=r"read at 15 to -6, and the text before it reaches 4.*Shift by -11 at most"):
        cache.shift(25, cut, -21)
    assert cache.rows.rows[0].pictures == rows.rows[0].pictures
    assert before[0] is not None
    after = cache.layers[0].table.places
    assert after is not None
    held = after.at >= 0
    assert torch.equal(after.at[held], before[0].at[held])


@each_family
def test_rollback(family: str, text: Text) -> None:
    """Roll back text after pictures, and a whole pass with one, but not to the middle of a picture."""
    given, model = shown(text, TOKENS, STARTS, family), attached_reader(family, 1)
    _, axes = embedded(plain_reader(family, 1), given)
    cache, feed = one_layer_read(family, given, 60, budget=70, rollback=40)
    logits = [feed(column) for column in range(60, 66)]
    cache.rollback(4)
    assert error(feed(62), logits[2]) <= 1e-5
    assert error(feed(63), last_logits(family, given, range(64), axes[:, :, :64])) <= TOLERANCE
    whole = KVCache(model, policy=Recent())
    with torch.no_grad():
        model(given["input_ids"][:, :5], past_key_values=whole)
        part = shown(text, 40, (7,), family)
        model(**part, past_key_values=whole)
    with pytest.raises(UsageError, match="the text would end at 17, inside of the picture from 12 up to 27"):
        whole.rollback(28)
    whole.rollback(40)
    assert whole.rows.rows[0].pictures == ()
    with torch.no_grad():
        ours = model(given["input_ids"][:, 40:47], past_key_values=whole).logits
        ids = torch.cat((given["input_ids"][:, :5], given["input_ids"][:, 40:47]), 1)
        assert error(ours, plain_reader(family, 1)(ids, use_cache=False).logits[:, 5:]) <= TOLERANCE


@each_family
@pytest.mark.parametrize("mode", ["original", "compact"])
def test_a_file(family: str, mode: str, text: Text, tmp_path: Path) -> None:
    given, model = shown(text, TOKENS, STARTS, family), attached_reader(family, 1)
    cache, feed = one_layer_read(family, given, 60, budget=BUDGET, sinks=SINKS, positions=mode, policy=H2O())
    feed(60)
    cache.save(tmp_path / "pictures")
    again = KVCache.load(tmp_path / "pictures", model)
    assert again.rows.rows[0].pictures == cache.rows.rows[0].pictures
    with torch.no_grad():
        for column in range(61, 66):
            ids = given["input_ids"][:, column : column + 1]
            assert error(model(ids, past_key_values=again).logits[:, -1], feed(column)) <= 1e-5


def test_a_file_whose_places_lie(text: Text, tmp_path: Path) -> None:
    model = attached_reader("qwen3_vl", 1)
    cache, _ = one_layer_read("qwen3_vl", shown(text, TOKENS, STARTS), 60)
    for name, value in ((PLACE, 41.0), (PLACE, 7.5), (BLOCK_END, 1e6), (BLOCK_START, 39.0)):
        state = cache.layers[0].table.state
        before = state[name].clone()
        state[name][..., 12] = value
        cache.save(tmp_path / "lies")
        with pytest.raises(PromptCacheError, match="layer 0, row 0 reads tokens outside of its text, up to 40"):
            KVCache.load(tmp_path / "lies", model)
        state[name].copy_(before)
    cache.save(tmp_path / "true")
    KVCache.load(tmp_path / "true", model)


def test_rows_are_copied_and_chosen_with_their_places(text: Text) -> None:
    model, given = attached_reader("qwen3_vl", 1), shown(text, TOKENS, STARTS)
    other = shown(text, TOKENS, (20, 40), seed=4)
    cut, cache = 60, KVCache(model, batch=2, policy=Recent())
    both = {name: torch.cat((given[name], other[name])) for name in given}
    alone, feed = one_layer_read("qwen3_vl", other, cut)
    assert alone.rows.rows[0].offset == 2 * OFFSET
    with torch.no_grad():
        model(**first(both, cut), past_key_values=cache)
        cache.copy(1, 0)
        ids = other["input_ids"][:, cut : cut + 1]
        logits = model(ids.expand(2, 1), past_key_values=cache).logits[:, -1]
        expected = feed(cut)
        assert error(logits, expected.expand(2, -1)) <= TOLERANCE
        cache.select_rows(torch.tensor([1]))
        ids = other["input_ids"][:, cut + 1 : cut + 2]
        assert error(model(ids, past_key_values=cache).logits[:, -1], feed(cut + 1)) <= TOLERANCE


@torch.no_grad()
def test_a_sliding_window_that_is_cut_keeps_places(text: Text) -> None:
    family = "qwen2_vl_windows"
    given, model = shown(text, TOKENS, STARTS, family), attached_reader(family)
    _, axes = embedded(plain_reader(family), given)
    cache = KVCache(model, policy=H2O())
    model(**first(given, 50), past_key_values=cache)
    cache.compress(14)
    model(given["input_ids"][:, 50:51], past_key_values=cache)
    for layer in cache.layers:
        held = layer.positions >= 0
        places = layer.table.places
        assert places is not None
        assert int(held.sum(-1).max()) <= 14
        assert torch.equal(places.at[held].long(), axes[0, 0, layer.positions[held].long()])
