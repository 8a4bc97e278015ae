"""A second `generate` of transformers on one cache: a text that does not go on is refused before anything changes."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig

import windlass
from tests.helpers.models import Models, Text, read
from windlass import KVCache, UsageError
from windlass.hf.attach import WAY_OUT
from windlass.policies import KeyDiff
from windlass.testing import tiny_model

RUN = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 6}


def padded(ids: Tensor, gaps: list[int]) -> tuple[Tensor, Tensor]:
    """The rows of `ids` with padding, of an id that some token has, too, in their first columns, and the mask."""
    mask = torch.tensor([[0] * gap + [1] * (ids.shape[1] - gap) for gap in gaps])
    return ids.where(mask.bool(), 7), mask


def refused(model: object, cache: KVCache, says: str, *args: object, **options: object) -> None:
    """`generate` raises one line with the way out, and the cache is unchanged."""
    twin = copy.deepcopy(cache)
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        model.generate(*args, past_key_values=cache, **RUN, **options)  # type: ignore[attr-defined]
    assert "\n" not in str(caught.value)
    assert (cache.tokens, cache.next_positions, cache.rows) == (twin.tokens, twin.next_positions, twin.rows)


@pytest.mark.parametrize("options", [{}, {"budget": 9, "window": 3, "policy": KeyDiff()}], ids=str)
def test_a_text_that_does_not_go_on_is_refused(options: dict[str, Any], attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(12)
    cache = KVCache(model, **options)
    first = model.generate(ids, past_key_values=cache, **RUN)
    seen = cache.columns_seen
    assert seen == 17, "all but the last token, which is chosen and not fed"
    short = "generate was given a text of {} tokens, and this cache has read 17 before. " + WAY_OUT
    refused(model, cache, short.format(5), text(5, seed=1))
    refused(model, cache, short.format(5), input_ids=text(5, seed=1), attention_mask=torch.ones(1, 5, dtype=torch.long))
    refused(model, cache, short.format(17), first[:, :17])
    refused(model, cache, short.format(5), inputs_embeds=model.get_input_embeddings()(text(5, seed=1)))
    other = torch.cat((first, text(4, seed=3)), 1)
    other[0, 13] = (other[0, 13] + 1) % 97
    says = f"token 13 of row 0 is {int(other[0, 13])}, and was {int(first[0, 13])}. {WAY_OUT}"
    refused(model, cache, says, other)
    refused(model, cache, says, inputs=other)
    # A text that continues the old one is read.
    longer = torch.cat((first, text(4, seed=3)), 1)
    again = model.generate(longer, past_key_values=cache, **RUN)
    assert again[:, :22].tolist() == longer.tolist()
    cache.reset()
    short_one = model.generate(text(5, seed=1), past_key_values=cache, **RUN)
    assert short_one.tolist() == model.generate(text(5, seed=1), **RUN).tolist()


def test_padding_is_not_compared_and_tokens_of_its_id_are(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    ids, mask = padded(text(9, rows=2), [0, 4])
    ids[0, 2] = 7
    cache = KVCache(model, batch=2)
    first = model.generate(ids, attention_mask=mask, past_key_values=cache, **RUN)
    ones = torch.ones(2, 6 + 3, dtype=torch.long)
    more, mask = torch.cat((first, text(3, rows=2, seed=5)), 1), torch.cat((mask, ones), 1)
    elsewhere = more.clone()
    elsewhere[1, :4] = 50  # padding has no id
    expected = model.generate(more, attention_mask=mask, past_key_values=copy.deepcopy(cache), **RUN)
    given = model.generate(elsewhere, attention_mask=mask, past_key_values=copy.deepcopy(cache), **RUN)
    assert given[:, 18:].tolist() == expected[:, 18:].tolist()
    for row, column in ((0, 2), (1, 4), (1, 13)):
        other = more.clone()
        other[row, column] = 60 if more[row, column] != 60 else 61
        refused(model, cache, f"token {column} of row {row} is {int(other[row, column])}", other, attention_mask=mask)


def test_what_is_not_known_is_not_compared(attached_model: Models, text: Text, tmp_path: Path) -> None:
    """Embeddings have no ids. A file does not name its padding columns. An edit leaves the ids unchanged."""
    model, ids = attached_model("llama"), text(20)
    cache = KVCache(model)
    with torch.no_grad():
        model(inputs_embeds=model.get_input_embeddings()(ids[:, :9]), past_key_values=cache)
    other = ids.clone()
    other[0, 3] = (other[0, 3] + 1) % 97
    assert model.generate(other, past_key_values=cache, **RUN).shape == (1, 26)

    rows = KVCache(model, batch=2)
    batch, mask = padded(text(9, rows=2), [0, 4])
    model.generate(batch, attention_mask=mask, past_key_values=rows, **RUN)
    rows.save(tmp_path / "rows.safetensors")
    loaded = KVCache.load(tmp_path / "rows.safetensors", model)
    assert loaded.tokens is not None
    refused(model, loaded, "has read 14 before", batch, attention_mask=mask)

    cache = KVCache(model)
    read(model, cache, ids[:, :9], 4)
    cache.drop(2, 5)
    refused(model, cache, f"token 3 of row 0 is {int(other[0, 3])}", other)
    assert model.generate(ids, past_key_values=cache, **RUN).shape == (1, 26)


def test_only_what_is_new_may_be_fed(attached_model: Models, text: Text) -> None:
    """To the model, and to `generate` under a mask of the whole text."""
    model, ids = attached_model("llama"), text(20)
    cache = KVCache(model)
    read(model, cache, ids[:, :13], 5)
    mask = torch.ones(1, 20, dtype=torch.long)
    written = model.generate(ids[:, 13:], attention_mask=mask, past_key_values=cache, **RUN)
    assert written[0, 7:].tolist() == model.generate(ids, **RUN)[0, 20:].tolist()
    with pytest.raises(UsageError, match=r"the model was called with no tokens\. Pass the new tokens"):
        model(ids[:, :0], past_key_values=cache)


def test_beams_of_another_text_are_refused(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(13, rows=2)
    cache = KVCache(model, batch=6)
    with torch.no_grad():
        model(ids.repeat_interleave(3, 0), past_key_values=cache)
    longer = torch.cat((ids, text(4, rows=2, seed=2)), 1)
    other = longer.clone()
    other[1, 5] = (other[1, 5] + 1) % 97
    refused(model, cache, f"token 5 of row 3 is {int(other[1, 5])}", other, num_beams=3)
    ours = model.generate(longer, past_key_values=cache, num_beams=3, **RUN)
    assert ours.tolist() == model.generate(longer, num_beams=3, **RUN).tolist()


@pytest.mark.parametrize("copied", [lambda model: model, copy.deepcopy], ids=["itself", "a copy"])
def test_detach_gives_generate_back(copied: Callable[[object], object], text: Text) -> None:
    model = windlass.attach(tiny_model("llama"))
    twin = copied(model)
    cache = KVCache(twin)  # type: ignore[arg-type]
    twin.generate(text(9), past_key_values=cache, **RUN)  # type: ignore[attr-defined]
    refused(twin, cache, "has read 14 before", text(5))
    windlass.detach(twin)  # type: ignore[arg-type]
    assert "generate" not in vars(twin)
    assert ("generate" in vars(model)) == (twin is not model)


@pytest.mark.parametrize("drafts", ["prompt_lookup_num_tokens", "assistant_model", "generation_config"])
def test_assisted_decoding_begins_with_an_empty_cache(drafts: str, attached_model: Models, text: Text) -> None:
    """transformers' loop reads the whole text in its first pass, whatever the cache has read."""
    model, ids = attached_model("llama"), text(12)
    cache = KVCache(model)
    first = model.generate(ids, past_key_values=cache, prompt_lookup_num_tokens=3, **RUN)
    given = {
        "prompt_lookup_num_tokens": 3,
        "assistant_model": tiny_model("llama"),
        "generation_config": GenerationConfig(prompt_lookup_num_tokens=3),
    }
    longer, name = (
        torch.cat((first, text(4, seed=3)), 1),
        drafts.replace("generation_config", "prompt_lookup_num_tokens"),
    )
    says = f"{name}: transformers' assisted decoding begins with an empty cache, and this one has read "
    refused(model, cache, says, longer, **{drafts: given[drafts]})
    assert model.generate(longer, past_key_values=cache, **RUN).tolist() == model.generate(longer, **RUN).tolist()
