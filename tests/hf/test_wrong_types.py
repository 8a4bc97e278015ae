"""Arguments of the wrong type: one line with the argument, its value and the right type, and nothing has changed."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import windlass as typed
from tests.helpers.models import MODEL, Models, Text, read
from windlass import UsageError

windlass: Any = typed  # so that no type checker refuses these tests
KVCache, CacheOptions, Sampling = windlass.KVCache, windlass.CacheOptions, windlass.Sampling
SelfExtend, Int8 = windlass.positions.SelfExtend, windlass.stores.Int8
MOST = 2**30
NO_MODEL = "Load a model and its tokenizer with windlass.load(folder)"


@dataclass
class Setup:
    """Correct arguments, of types that a checker does not see."""

    model: Any
    tokenizer: Any
    cache: Any
    file: Any


@pytest.fixture
def setup(attached_model: Models, text: Text, tmp_path: Path) -> Setup:
    model = attached_model("llama")
    cache = KVCache(model, batch=2)
    read(model, cache, text(7, rows=2), 5)
    return Setup(model, AutoTokenizer.from_pretrained(MODEL), cache, tmp_path / "file")


def whole(name: str, got: str, least: int = 1, otherwise: str = "") -> str:
    return f"{name} must be a whole number from {least} to {MOST}{otherwise}, got {got}"


OPTIONS: list[tuple[dict[str, Any], str]] = [
    ({"budget": "a"}, whole("budget", "'a'", otherwise=", or None")),
    ({"budget": 64.0}, whole("budget", "64.0. Write 64", otherwise=", or None")),
    ({"budget": True}, whole("budget", "True", otherwise=", or None")),
    ({"window": "a"}, whole("window", "'a'", otherwise=", or None")),
    ({"sinks": None}, whole("sinks", "None", 0)),
    ({"chunk": 2.5}, whole("chunk", "2.5")),
    ({"batch": [1]}, whole("batch", "[1]")),
    ({"rollback": "x"}, whole("rollback", "'x'", 0)),
    ({"positions": 3}, 'positions must be a position mode or its name, got 3. Write positions="compact" or '),
    ({"positions": SelfExtend}, "positions must be a position mode or its name, got the class SelfExtend. Write"),
    ({"store": 8}, 'store must be a store or its name, got 8. Write store="int8" or windlass.stores.Int8()'),
    ({"store": Int8}, "store must be a store or its name, got the class Int8. Write"),
    ({"merge": 1}, 'merge must be a rule, its name or None, got 1. Write merge="mean_count"'),
]


@pytest.mark.usefixtures("any_type")
@pytest.mark.parametrize(("options", "says"), OPTIONS, ids=str)
def test_options_of_a_cache(options: dict[str, Any], says: str, attached_model: Models) -> None:
    for make in (lambda: CacheOptions(**options), lambda: KVCache(attached_model("llama"), **options)):
        with pytest.raises(UsageError, match=f"^{re.escape(says)}"):
            make()


@pytest.mark.usefixtures("any_type")
def test_numbers_of_numpy_are_numbers(attached_model: Models, tmp_path: Path) -> None:
    """They are held as those of Python, which a file can take."""
    cache = KVCache(attached_model("llama"), np.int64(30), sinks=np.int32(2), window=np.int16(3), rollback=np.uint8(5))
    assert cache.limits == KVCache(attached_model("llama"), 30, sinks=2, window=3, rollback=5).limits
    cache.save(tmp_path / "file")
    assert KVCache.load(tmp_path / "file", attached_model("llama")).options.document() == cache.options.document()
    assert Sampling(np.float32(0.5), np.int64(5), seed=np.int64(3)) == Sampling(0.5, 5, seed=3)
    assert type(Sampling(0.5, np.int64(5)).top_k) is int


CALLS: dict[str, tuple[Callable[[Setup], object], str]] = {
    "KVCache(folder)": (
        lambda _: KVCache("folder"),
        f"model must be a model of transformers, got 'folder'. {NO_MODEL}",
    ),
    "KVCache(tokenizer)": (lambda s: KVCache(s.tokenizer), "model must be a model of transformers, got a Tokenizers"),
    "from_options": (lambda s: KVCache.from_options(s.model, {"budget": 9}), "options must be CacheOptions, got {'bud"),
    "attach(name)": (
        lambda _: windlass.attach("name"),
        f"model must be a model of transformers, got 'name'. {NO_MODEL}",
    ),
    "attach(module)": (
        lambda _: windlass.attach(torch.nn.Linear(2, 3)),
        "model must be a model of transformers, got a Linear",
    ),
    "detach(None)": (lambda _: windlass.detach(None), "model must be a model of transformers, got None"),
    "load(name)": (lambda _: windlass.load(5), "name must be a folder or a name on the hub, got 5"),
    "load(dtype)": (
        lambda _: windlass.load("x", torch.float32),
        "dtype must be one of: auto, float32, bfloat16, float16, got a dtype",
    ),
    "load(device)": (lambda _: windlass.load("x", device=0), "device must be auto, cpu, mps, cuda or cuda:1, got 0"),
    "save(path)": (lambda s: s.cache.save(None), "path must be the name of a file, got None"),
    "load(path)": (lambda s: KVCache.load(7, s.model), "path must be the name of a file, got 7"),
    "load(model)": (lambda s: KVCache.load(s.file, "m"), "model must be a model of transformers, got 'm'"),
    "Sampling(a)": (lambda _: Sampling("a"), "temperature must be a number, got 'a'"),
    "Sampling(top_k)": (
        lambda _: Sampling(top_k=2.0),
        f"top_k must be a whole number from 0 to {2**62}, got 2.0. Write 2",
    ),
    "Sampling(seed)": (lambda _: Sampling(seed=None), f"seed must be a whole number from 0 to {2**62 - 1}, got None"),
    "prefill(swapped)": (
        lambda s: windlass.prefill(s.cache, s.model, [[1]]),
        "model must be a model of transformers, got a KVCache",
    ),
    "prefill(text)": (
        lambda s: windlass.prefill(s.model, s.cache, ["ab", [1]]),
        "the prompt of row 0 must be a list of token ids, got 'ab'. Use tokenizer(text)",
    ),
    "prefill(str)": (
        lambda s: windlass.prefill(s.model, s.cache, "ab"),
        "prompts must be a list of token ids for each row, got 'ab'",
    ),
    "prefill(float)": (
        lambda s: windlass.prefill(s.model, s.cache, [[1], [2, 3.0]]),
        "the prompt of row 1 must be a list of token ids, and has 3.0. Use tok",
    ),
    "prefill(flat)": (
        lambda s: windlass.prefill(s.model, s.cache, [1, 2]),
        "the prompt of row 0 must be a list of token ids, got 1. Use tok",
    ),
    "progress": (
        lambda s: windlass.prefill(s.model, s.cache, [[1], [2]], True),
        "progress must be a function of (tokens done, tokens in all), or None, got True",
    ),
    "stream(swapped)": (
        lambda s: windlass.stream(s.tokenizer, s.model, "a", s.cache),
        "model must be a model of transformers, got a Tok",
    ),
    "stream(cache)": (
        lambda s: windlass.stream(s.model, s.tokenizer, "a", None),
        "cache must be a KVCache, got None. Make one with windlass.KVCache(model)",
    ),
    "generate(tokenizer)": (
        lambda s: windlass.generate(s.model, "t", ["a", "b"], s.cache),
        "tokenizer must be the model's tokenizer, got 't'. Pass it after the model",
    ),
    "generate(swapped)": (
        lambda s: windlass.generate(s.tokenizer, s.model, ["a"]),
        "model must be a model of transformers, got a Tok",
    ),
    "generate(prompts)": (
        lambda s: windlass.generate(s.model, s.tokenizer, 5),
        "prompts must be a list of texts, one per row, got 5",
    ),
    "generate(ids)": (
        lambda s: windlass.generate(s.model, s.tokenizer, ["a", [1]], s.cache),
        "the prompt of row 1 must be a text, got [1]. For token ids use windlass.prefill",
    ),
    "generate(sampling)": (
        lambda s: windlass.generate(s.model, s.tokenizer, ["a", "b"], s.cache, sampling={"top_k": 3}),
        "sampling must be a windlass.Sampling, got {'top_k': 3}. Write Sampling(temperature=0.7)",
    ),
    "generate(max_tokens)": (
        lambda s: windlass.generate(s.model, s.tokenizer, ["a", "b"], s.cache, "x"),
        whole("max_tokens", "'x'"),
    ),
    "generate(cache)": (
        lambda s: windlass.generate(s.model, s.tokenizer, ["a"], cache=64),
        "cache must be a KVCache, got 64. Make one with",
    ),
    "rollback(str)": (lambda s: s.cache.rollback("2"), whole("rollback's tokens", "'2'", 0)),
    "rollback(float)": (lambda s: s.cache.rollback([1, 2.0]), whole("rollback's tokens", "2.0. Write 2", 0)),
    "rollback(rows)": (lambda s: s.cache.rollback([1]), "rollback takes one number, or one for each of 2 rows, got 1"),
    "rollback(bool)": (lambda s: s.cache.rollback(True), whole("rollback's tokens", "True", 0)),
    "drop": (lambda s: s.cache.drop("1", 3), whole("start", "'1'", 0)),
    "keep": (lambda s: s.cache.keep(1, None), whole("end", "None", 0)),
    "drop(row)": (lambda s: s.cache.drop(1, 3, row="0"), whole("row", "'0'", -MOST)),
    "shift": (lambda s: s.cache.shift(1, 3, 1.0), whole("by", "1.0. Write 1", -MOST)),
    "divide": (lambda s: s.cache.divide(1, 3, "2"), whole("by", "'2'")),
    "copy": (lambda s: s.cache.copy(0, "1"), whole("target", "'1'", -MOST)),
    "splice": (lambda s: s.cache.splice("other"), "other must be a KVCache, got 'other'"),
    "select_rows": (
        lambda s: s.cache.select_rows([1, 0]),
        "rows must be a tensor of row numbers, got [1, 0]. Write torch.tensor([1, 0])",
    ),
    "select_rows(row)": (lambda s: s.cache.select_rows(torch.tensor([0, 2])), "row 2 is not one of the cache's 2 rows"),
    "compress": (lambda s: s.cache.compress(None), whole("budget", "None")),
    "compress(window)": (lambda s: s.cache.compress(20, "3"), whole("window", "'3'", otherwise=", or None")),
    "compress(fit)": (lambda s: s.cache.compress(20, fit="yes"), "fit must be True or False, got 'yes'"),
    "reserve": (lambda s: s.cache.reserve("many"), whole("tokens", "'many'", 0)),
    "SelfExtend": (lambda _: SelfExtend("a", 3), whole("group", "'a'")),
    "Int8": (lambda _: Int8(sinks="a"), whole("sinks of a store", "'a'", 0)),
}


@pytest.mark.usefixtures("any_type")
@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_calls(name: str, setup: Setup) -> None:
    call, says = CALLS[name]
    with pytest.raises(UsageError, match=f"^{re.escape(says)}") as caught:
        call(setup)
    assert "\n" not in str(caught.value)
    assert setup.cache.tokens_seen == [7, 7]
    assert not setup.file.exists()
