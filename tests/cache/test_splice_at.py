"""A splice into the middle of a text: later tokens move, and nothing else changes."""

import copy

import pytest
import torch
from transformers import PreTrainedModel

import windlass
from tests.helpers import models
from tests.helpers.contents import content, is_same
from tests.helpers.models import Models, Text
from windlass import CacheOptions, KVCache, UsageError
from windlass.policies import KeyDiff

one_layer = models.one_layer  # fixture


def test_an_insertion_reads_as_one_text(one_layer: tuple[PreTrainedModel, PreTrainedModel], text: Text) -> None:
    """In a model of one layer keys depend on tokens alone: three texts in any places are one text, in every row."""
    plain, model = one_layer
    own, other, last = text(17, rows=2), text(6, seed=1), text(1, rows=2, seed=2)
    cache, added = KVCache(model, batch=2), KVCache(model)
    windlass.prefill(model, cache, own.tolist())
    windlass.prefill(model, added, other.tolist())
    cache.splice(added, row=1, at=5)
    whole = [own[0].tolist(), [*own[1, :5].tolist(), *other[0].tolist(), *own[1, 5:].tolist()]]
    assert (cache.tokens, cache.next_positions) == (whole, [17, 23])
    with torch.no_grad():
        ours = model(last, past_key_values=cache).logits[:, 0]
        truth = [
            plain(torch.tensor([[*ids, *end]])).logits[0, -1] for ids, end in zip(whole, last.tolist(), strict=True)
        ]
    torch.testing.assert_close(ours, torch.stack(truth), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "options", [{}, {"budget": 20, "policy": KeyDiff()}, {"budget": 20, "policy": KeyDiff(), "recall": 8}]
)
def test_at_the_start_is_the_other_way_round(attached_model: Models, text: Text, options: dict[str, object]) -> None:
    model = attached_model("llama")
    caches = [KVCache.from_options(model, CacheOptions(**options)) for _ in range(2)]  # type: ignore[arg-type]
    for cache, seed in zip(caches, (0, 1), strict=True):
        windlass.prefill(model, cache, text(31 + seed, seed=seed).tolist())
    first, second = (copy.deepcopy(each) for each in caches)
    first.splice(caches[1])
    second.splice(caches[0], at=0)
    assert first.tokens == second.tokens
    one, two = content(first), content(second)
    for name in one:
        if name.startswith(("positions", "keys", "values")) and " to recall " not in name:  # in order of writing
            assert one[name].equal(two[name]), name


def test_what_is_refused(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    cache, other = KVCache(model), KVCache(model)
    windlass.prefill(model, cache, text(12).tolist())
    windlass.prefill(model, other, text(7, seed=1).tolist())
    before = content(cache)
    for at, said in ((13, "at must be from 0 to 12"), (-1, "at must be from 0 to 12")):
        with pytest.raises(UsageError, match=said):
            cache.splice(other, at=at)
    with pytest.raises(UsageError, match="middle of itself"):
        cache.splice(cache, at=3)
    assert is_same(content(cache), before)


def test_ids_after_an_edit_stand_behind(attached_model: Models, text: Text) -> None:
    """Ids are told as they were fed where edits have moved the text."""
    model = attached_model("llama")
    cache, other = KVCache(model), KVCache(model)
    windlass.prefill(model, cache, text(12).tolist())
    windlass.prefill(model, other, text(7, seed=1).tolist())
    cache.drop(8, 12)
    cache.splice(other, at=2)
    assert cache.next_positions == [15]
    assert cache.tokens == [text(12)[0].tolist() + text(7, seed=1)[0].tolist()]
