"""An attached model takes its cache as `cache` and as `past_key_values`, whatever this release of transformers says."""

import warnings

import pytest
import torch

import windlass
from tests.helpers.models import Models, Text, greedy
from windlass import KVCache, UsageError
from windlass.hf.attach import attached
from windlass.hf.passes import CACHE_NAMES, cache_name, our_cache, with_cache_as
from windlass.testing import tiny_model

GREEDY = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 6}
FAMILIES = ("llama", "gemma3", "mistral")


@pytest.mark.parametrize("name", CACHE_NAMES)
@pytest.mark.parametrize("family", FAMILIES)
def test_either_name_reads_a_text(family: str, name: str, attached_model: Models, text: Text) -> None:
    """In a pass of the model, of its decoder alone, and in `generate`. Nobody is warned."""
    model, ids = attached_model(family), text(9)
    decoder, head = attached(model).decoder.outer, model.get_output_embeddings()
    wanted = greedy(model, KVCache(model), ids, 6)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        whole, part = KVCache(model), KVCache(model)
        logits = model(ids, **{name: whole}).logits
        hidden = decoder(ids, **{name: part}).last_hidden_state
        written = model.generate(ids, **{name: KVCache(model)}, **GREEDY)
    assert whole.columns_seen == part.columns_seen == 9
    torch.testing.assert_close(head(hidden), logits, atol=1e-5, rtol=0)
    assert int(logits[0, -1].argmax()) == wanted[0]
    assert written[0, 9:].tolist() == wanted


@pytest.mark.parametrize("name", CACHE_NAMES)
def test_another_cache_goes_on_to_the_model(name: str, text: Text) -> None:
    """One of transformers' own, and none."""
    model, ids = windlass.attach(tiny_model("llama")), text(7)
    held = model(ids, use_cache=True).past_key_values
    with torch.no_grad():
        expected, after = model(ids).logits, model(ids[:, :3], **{name: held}).logits
        assert torch.equal(model(ids, **{name: None}).logits, expected)
    whole = model(torch.cat((ids, ids[:, :3]), 1)).logits
    torch.testing.assert_close(after, whole[:, 7:], atol=1e-5, rtol=0)


def test_both_names_at_once_are_refused(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    given = {name: KVCache(model) for name in CACHE_NAMES}
    for called in (model, model.model, model.generate):
        with pytest.raises(UsageError, match=r"two names of one argument, and both were given. Leave .* out"):
            called(text(4), **given)
    assert [cache.columns_seen for cache in given.values()] == [0, 0]
    only, nothing = CACHE_NAMES
    assert model(text(4), **{only: given[only], nothing: None}).logits.shape[1] == given[only].columns_seen == 4


def test_what_a_pass_names_its_cache(attached_model: Models) -> None:
    old, new = (lambda past_key_values, **more: (past_key_values, more)), (lambda cache, **more: (cache, more))
    assert [cache_name(each) for each in (old, new)] == ["past_key_values", "cache"]
    assert cache_name(lambda **more: more) == cache_name(attached_model("llama").forward)
    cache = KVCache(attached_model("llama"))
    for called in (old, new):
        for name in CACHE_NAMES:
            assert called(**with_cache_as(cache_name(called), {name: cache, "a": 1})) == (cache, {"a": 1})
    assert our_cache({"past_key_values": None, "cache": cache}) is our_cache({"past_key_values": cache}) is cache
    assert our_cache({"cache": object(), "other": cache}) is None
