"""Unsupported operations on a text with pictures of several axes, and their errors. The cache is unchanged."""

from typing import Any

import pytest
import torch

from tests.helpers.axes import GRID, attached_reader, embedded, first, one_layer_read, plain_reader, shown
from tests.helpers.models import Text
from windlass import KVCache, UsageError
from windlass.policies import Recent

TOKENS, STARTS = 71, (8, 31)  # a picture takes 15 tokens

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"positions": "self_extend(4, 16)"}, r'positions="self_extend\(4, 16\)" can\'t read a text with pictures'),
    ({"positions": "clamp(30)"}, 'Set cache.positions to "original" or "compact"'),
    ({"budget": 40, "merge": "mean_count"}, "merge=mean_count averages keys"),
]


@pytest.mark.parametrize(("options", "message"), REFUSED)
@torch.no_grad()
def test_what_can_not_read_pictures_says_so(options: dict[str, Any], message: str, text: Text) -> None:
    model, given = attached_reader("qwen3_vl", 1), shown(text, TOKENS, STARTS)
    cache = KVCache(model, policy=Recent(), **options)
    model(given["input_ids"][:, :4], past_key_values=cache)
    with pytest.raises(UsageError, match=message):
        model(**given, past_key_values=cache)
    assert cache.next_positions == [4]
    assert not cache.layers[0].rules.has_places


@torch.no_grad()
def test_edits_that_can_not_keep_a_picture_say_so(text: Text) -> None:
    model, given = attached_reader("qwen3_vl", 1), shown(text, TOKENS, STARTS)
    cache, _ = one_layer_read("qwen3_vl", given, 60)
    plain = KVCache(model)
    model(given["input_ids"][:, :9] % 80, past_key_values=plain)
    with pytest.raises(UsageError, match="divide: this text has pictures"):
        cache.divide(0, 20, 2)
    for mine, theirs in ((cache, plain), (plain, cache)):
        with pytest.raises(UsageError, match="splice: this text has pictures"):
            mine.splice(theirs)
    with pytest.raises(UsageError, match="to_rotated: this text has pictures"):
        cache.to_rotated()
    with pytest.raises(UsageError, match="end at 40, inside of the picture from 31 up to 46"):
        cache.drop(40, 60)
    assert cache.next_positions == [60]
    cache.positions = "auto"
    assert cache.trained_length is not None


@torch.no_grad()
def test_auto_beyond_the_trained_length_says_so(text: Text) -> None:
    model, given = attached_reader("qwen3_vl", 1), shown(text, TOKENS, STARTS)
    cache = KVCache(model)
    lengths = [rotary.trained_length for rotary in cache.rotaries if rotary is not None]
    try:
        for rotary in cache.rotaries:
            assert rotary is not None
            rotary.trained_length = 45
        model(**first(given, 60), past_key_values=cache)  # 60 tokens in 40 places
        with pytest.raises(UsageError, match="beyond the trained length of 45, and it reaches 51"):
            model(given["input_ids"][:, 60:], past_key_values=cache)
        assert cache.next_positions == [60]
    finally:
        for rotary, length in zip(cache.rotaries, lengths, strict=True):
            assert rotary is not None
            rotary.trained_length = length


@torch.no_grad()
def test_positions_that_do_not_follow_say_so(text: Text) -> None:
    model, given = attached_reader("qwen3_vl", 1), shown(text, TOKENS, STARTS)
    _, axes = embedded(plain_reader("qwen3_vl", 1), given)
    cache, _ = one_layer_read("qwen3_vl", given, 60)
    ids = given["input_ids"][:, 60:]
    skipping = axes[:, :, 60:] + 3 * (torch.arange(11) >= 4)
    with pytest.raises(
        UsageError, match=r"position_ids\[:, 0, 0\] are \[41, 41, 41\], but the text of row 0 continues at 40"
    ):
        model(ids, position_ids=axes[:, :, 60:] + 1, past_key_values=cache)
    with pytest.raises(UsageError, match=r"position_ids\[:, 0, 4\] are \[47, 47, 47\].* continues at 44"):
        model(ids, position_ids=skipping, past_key_values=cache)
    with pytest.raises(UsageError, match=r"position_ids are \(2, 1, 11\), and this model has 3 axes"):
        model(ids, position_ids=axes[:2, :, 60:], past_key_values=cache)
    late = axes[:, :, 60:].clone()
    late[0, 0, 2:5] += torch.tensor([0, 9, 18])  # a video whose last frame lies far ahead
    late[1:, 0, 2:5] = 42
    late[:, 0, 5:] = torch.arange(45, 51)
    with pytest.raises(UsageError, match=r"end at 50, inside of a video that reaches 62.*more text after the video"):
        model(ids, position_ids=late, past_key_values=cache)
    assert cache.next_positions == [60]
    assert GRID == (6, 10)
