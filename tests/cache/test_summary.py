"""`repr` of a cache and its table in a notebook: two lines on its contents."""

from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import windlass
from tests.helpers.models import MODEL, Models, Text, read
from windlass import KVCache
from windlass.core.parse import in_units
from windlass.policies import H2O, KeyDiff, Pyramid


class Cells(HTMLParser):
    """The cells of a table, two to a line."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: object) -> None:  # of the base class
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.found.append(data)


def kept(cache: KVCache) -> list[list[set[int]]]:
    """Per layer and row how many tokens the heads hold."""
    return [
        [{sum(at >= 0 for at in head) for head in row} for row in layer.positions.tolist()] for layer in cache.layers
    ]


def test_an_empty_cache_and_one_in_use(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    cache = KVCache(model, 1200, "key_diff", positions="compact")
    asked = "KVCache of LlamaForCausalLM, budget 1,200, policy KeyDiff(), positions compact, store plain"
    assert repr(cache) == f"{asked}\n  0 tokens seen, 0 kept, 0 B held"
    read(model, cache, text(1500), 500)
    assert kept(cache) == [[{1200}]] * 2
    assert repr(cache) == f"{asked}\n  1,500 tokens seen, 1,200 kept, {in_units(cache.bytes_held)} held"
    cache.drop(1100, 1500)
    left = set.union(*kept(cache)[0], *kept(cache)[1])
    assert len(left) > 1, "heads hold different tokens, so an edit leaves different numbers"
    assert f"1,500 tokens seen, {min(left)} to {max(left)} a layer kept" in repr(cache)
    cache.reset()
    assert repr(cache) == f"{asked}\n  0 tokens seen, 0 kept, 0 B held"


def test_rows_are_told_one_by_one_while_they_are_few(attached_model: Models) -> None:
    model = attached_model("llama")
    cache = KVCache(model, 9, H2O(), window=3, batch=3, store="int8", merge="mean_count")
    windlass.prefill(model, cache, [[5] * 12, [7] * 4, [3] * 9])
    assert kept(cache) == [[{9}, {4}, {9}]] * 2
    first, second = repr(cache).split("\n")
    assert first.endswith("budget 9, policy H2O(), positions auto, store int8, merge mean_count, rows 3")
    assert second.startswith("  12, 4, 9 tokens seen, 9, 4, 9 kept, ")
    many = KVCache(model, batch=8)
    windlass.prefill(model, many, [[5] * (3 + row) for row in range(8)])
    assert "budget none" in repr(many)
    assert "  3 to 10 tokens seen, 3 to 10 kept, " in repr(many)


def test_layers_that_differ_are_told_by_the_least_and_the_most(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    cache = KVCache(model, 30, Pyramid(KeyDiff(), 4.0), window=4)
    read(model, cache, text(60), 20)
    first, last = (max(layer[0]) for layer in kept(cache))
    assert first > last
    assert f"60 tokens seen, {last} to {first} a layer kept" in repr(cache)


def test_the_table_of_a_notebook_says_the_same_and_is_escaped(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    cache = KVCache(model, 20, "SnapKV(pool=7)")
    read(model, cache, text(33), 11)
    cache.model_name = "<b>&'x"
    cells = Cells(cache._repr_html_())
    assert set(cells.tags) == {"table", "caption", "tr", "th", "td"}
    names, values = cells.found[1::2], cells.found[2::2]
    told = dict(zip(names, values, strict=True))
    assert told == {
        "model": "<b>&'x",
        "budget": "20",
        "policy": "SnapKV(observed_queries=32, pool=7, is_mean=False)",
        "positions": "auto",
        "store": "plain",
        "tokens seen": "33",
        "tokens kept": "20",
        "bytes held": in_units(cache.bytes_held),
    }


def test_a_model_is_called_by_the_name_of_its_folder() -> None:
    model, _ = windlass.load(Path(MODEL), "float32")
    told = repr(KVCache(model))
    assert told.startswith("KVCache of finder-3m (LlamaForCausalLM), budget none, ")
    assert "/" not in told


class Largest(TorchDispatchMode):
    """The bytes of the largest tensor that is made, in memory that no tensor of `known` has."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self.known, self.most = {each.untyped_storage().data_ptr() for each in known}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in self.known:
            self.most = max(self.most, out.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("store", ["plain", "int8"])
def test_showing_a_cache_copies_no_tensor(store: str, attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    cache = KVCache(model, 40, H2O(), store=store)
    read(model, cache, text(90), 30)
    held = [tensor for layer in cache.layers for tensor in layer.tensors().values()]
    with Largest(held) as largest, torch.no_grad():
        assert repr(cache) != cache._repr_html_()
    positions = cache.layers[0].positions
    assert 0 < largest.most <= positions.numel(), "one byte per slot, to count by"
    assert all(
        now is before
        for now, before in zip((t for layer in cache.layers for t in layer.tensors().values()), held, strict=True)
    )
