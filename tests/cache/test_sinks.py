"""A row keeps as many first tokens as it is told, whatever the other rows keep."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import windlass
from tests.helpers.chats import TEMPLATE, with_template
from tests.helpers.models import Models, Text
from windlass import KVCache
from windlass.core.errors import UsageError

SINKS = (13, 0, 9)  # of each row, where less than 4 counts as 4
LIMITS: dict[str, Any] = {"budget": 24, "window": 5, "chunk": 11}
CASES: list[dict[str, Any]] = [
    *({"policy": policy} for policy in ("recent", "key_diff", "h2o", "snapkv", "tova", "lag_kv", "key_norm")),
    {"policy": "recent", "store": "int8"},
    {"policy": "recent", "merge": "mean_count"},
    {"policy": "dmc", "merge": "mean_count"},
    {"policy": "recent", "positions": "compact"},
]


def told(cache: KVCache) -> KVCache:
    for row, count in enumerate(SINKS):
        cache.set_sinks(count, row)
    return cache


def logits_of(model: PreTrainedModel, cache: KVCache, ids: Tensor, prompt: int) -> list[Tensor]:
    """A prompt in chunks, and then token by token."""
    found = [windlass.prefill(model, cache, [row[:prompt].tolist() for row in ids])]
    with torch.no_grad():
        for at in range(prompt, ids.shape[1]):
            found.append(model(ids[:, at : at + 1], past_key_values=cache).logits[:, -1])
    return found


@pytest.mark.parametrize("options", CASES, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_row_is_what_it_is_alone(attached_model: Models, text: Text, family: str, options: dict[str, Any]) -> None:
    model, ids = attached_model(family), text(75, len(SINKS))
    cache = told(KVCache(model, sinks="system", batch=len(SINKS), **LIMITS | options))
    together = logits_of(model, cache, ids, 50)
    for row, count in enumerate(SINKS):
        own = KVCache(model, sinks=max(count, 4), **LIMITS | options)
        alone = logits_of(model, own, ids[row : row + 1], 50)
        for ours, theirs in zip(together, alone, strict=True):
            atol = 5e-3 if "store" in options else 1e-4  # a code of int8 may round to either side
            torch.testing.assert_close(ours[row : row + 1], theirs, rtol=1e-4, atol=atol)
        for layer in cache.layers:
            if not layer.rules.is_whole_window:
                held = {*layer.positions[row].flatten().tolist()}
                assert held >= {*range(max(count, 4))} or options.get("merge")


def test_a_cut_keeps_the_sinks_of_each_row(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(60, len(SINKS))
    cache = told(KVCache(model, sinks="system", batch=len(SINKS), window=3))
    windlass.prefill(model, cache, ids.tolist())
    cache.compress(20)
    for row, count in enumerate(SINKS):
        for layer in cache.layers:
            held = sorted(each for each in layer.positions[row, 0].tolist() if each >= 0)
            assert len(held) == 20
            assert {*held} >= {*range(max(count, 4)), 57, 58, 59}


def test_a_row_keeps_its_sinks_where_it_goes(attached_model: Models, text: Text, tmp_path: Path) -> None:
    model, ids = attached_model("llama"), text(60, len(SINKS))
    options = LIMITS | {"sinks": "system", "policy": "key_diff"}
    cache = told(KVCache(model, batch=len(SINKS), **options))
    windlass.prefill(model, cache, ids[:, :40].tolist())
    path = tmp_path / "rows.safetensors"
    cache.save(path)
    loaded = windlass.KVCache.load(path, model)
    assert loaded.options.sinks == "system"
    single = KVCache(model, **options)
    single.put_row(0, cache, 2)
    with torch.no_grad():
        for at in range(40, 60):
            column = ids[:, at : at + 1]
            ours = model(column, past_key_values=cache).logits
            torch.testing.assert_close(model(column, past_key_values=loaded).logits, ours, rtol=1e-4, atol=1e-4)
            alone = model(column[2:], past_key_values=single).logits
            torch.testing.assert_close(alone, ours[2:], rtol=1e-4, atol=1e-4)


def test_what_is_not_known_or_does_not_fit_is_refused(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(9, 1)
    cache = KVCache(model, sinks="system", **LIMITS)
    with pytest.raises(UsageError, match=r"Call cache\.set_sinks"):
        windlass.prefill(model, cache, ids.tolist())
    with pytest.raises(UsageError, match="have 19 tokens, and the budget of 24 tokens has room for 18 beside"):
        cache.set_sinks(19)
    cache.set_sinks(18)
    windlass.prefill(model, cache, ids.tolist())
    with pytest.raises(UsageError, match=r"this cache has sinks=4"):
        KVCache(model, **LIMITS).set_sinks(3)
    with pytest.raises(UsageError, match="sinks must be a whole number from 0, or 'system', got 'all'"):
        KVCache(model, sinks="all")
    with pytest.raises(UsageError, match="of which a layer keeps"):
        KVCache(model, sinks="system", policy="pyramid(key_diff)", **LIMITS).set_sinks(18)


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "look", "parameters": {}}}]])
def test_the_head_is_what_stands_before_the_first_message_of_a_user(tools: Any) -> None:
    tokenizer = with_template("{% if tools %}{{ tools | tojson }}{% endif %}Be good.\n" + TEMPLATE)
    system = {"role": "system", "content": "Answer in one word."}
    text = tokenizer.apply_chat_template(
        [system, {"role": "user", "content": "Hello"}], tools=tools, tokenize=False
    ).removeprefix(str(tokenizer.bos_token))
    ids = tokenizer(text)["input_ids"]
    count = windlass.system_tokens(tokenizer, [system], tools)
    assert "Hello" not in tokenizer.decode(ids[:count])
    assert tokenizer.decode(ids[count:]).lstrip().startswith("Hello")
    assert "one word" in tokenizer.decode(ids[:count])
    assert windlass.system_tokens(tokenizer, []) > 3  # the template's own text
    with pytest.raises(UsageError, match="no chat template"):
        windlass.system_tokens(with_template(None), [])
