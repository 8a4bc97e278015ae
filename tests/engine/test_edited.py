"""A history that was edited takes its tokens from the row of the text before the edit, at their new positions."""

import copy
import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import windlass
from tests.helpers.models import Models, Text
from tests.helpers.models import tokenizer as tokenizer  # a fixture
from tests.helpers.schedulers import events_of, options_of, request_of, rows_of, running
from windlass import KVCache
from windlass.cache.edits import holds_all
from windlass.cache.recall import TOKEN_INDEX
from windlass.core.errors import UsageError
from windlass.core.step import PROMPT
from windlass.engine.prefill import Reader, feed
from windlass.engine.prefix_cache import PrefixCache, Snapshots
from windlass.engine.recompute import GRAM, LEAST, Alignment, EditPlan, Match
from windlass.engine.request import EXACT, PREFIX, Finish, Piece, Reuse, ReuseMode
from windlass.testing import tiny_model

WIDE, PLENTY = 400, 1 << 28
EDITED = Reuse(mode=ReuseMode("edited"))
Ids = list[int]


def reader_of(model: PreTrainedModel, ids: Ids, snapshots: Snapshots, **given: Any) -> Reader:
    """A reader of a prompt, which it has read."""
    reader = Reader(model, request_of(ids, **{"reuse": EDITED} | given), snapshots)
    while not reader.is_done:
        reader.read()
    return reader


def kept(model: PreTrainedModel, ids: Ids, **given: Any) -> Snapshots:
    """Snapshots with the row of a text."""
    snapshots = Snapshots(PrefixCache(PLENTY))
    snapshots.keep(reader_of(model, ids, snapshots, **given).entry)
    return snapshots


def edits_of(text: Text) -> tuple[Ids, dict[str, Ids]]:
    """A text, and what became of it."""
    a, b, c, d, e, f = rows_of(text, 23, 19, 31, 37, 27, 11)
    made = {
        "a turn is dropped": a + c + d + e,
        "an early word is changed": a[:5] + [(a[5] + 1) % 90] + a[6:] + b + c + d + f,
        "a turn is put in": a + b + e + c + d + f,
        "a turn goes to the end": a + c + d + b + f,
        "words differ in number": a[:7] + f + a[9:] + b + c[:20] + d + e,
        "the head is another": e + b + c + d + f,
    }
    return a + b + c + d, made


EDITS = [
    "a turn is dropped",
    "an early word is changed",
    "a turn is put in",
    "a turn goes to the end",
    "words differ in number",
    "the head is another",
]


def twin(model: PreTrainedModel, old: Ids, new: Ids, runs: list[Match], options: Any) -> tuple[KVCache, Tensor]:
    """The edited text by splices of what was read before, and prompts read behind them, one after the other."""
    source, cache = (KVCache.from_options(model, options) for _ in range(2))
    feed(model, source, [old], [], PROMPT)
    at = 0
    for run in [*runs, Match(0, len(new), 0)]:
        if at < run.new:
            logits = feed(model, cache, [new[at : run.new]], [run.new - at - 1], PROMPT)
        if run.size:
            piece = copy.deepcopy(source)
            piece.keep(run.old, run.old + run.size)
            piece.shift(run.old, run.old + run.size, -run.old)
            cache.splice(piece)
        at = run.new + run.size
    return cache, logits[0, -1]


def in_order(cache: KVCache, layer: int) -> tuple[Tensor, Tensor]:
    """Keys and values of a layer that holds all, in the order of the text."""
    table = cache.layers[layer].table
    order = table.positions[0, 0].argsort()[(table.positions[0, 0] < 0).sum() :]
    assert table.positions[0, 0][order].tolist() == list(range(cache.next_positions[0]))
    return table.store.keys()[0][:, order], table.store.values()[0][:, order]


@pytest.mark.parametrize("name", EDITS)
def test_an_edited_row_is_that_of_splices(attached_model: Models, text: Text, name: str) -> None:
    """Moved keys are those of the old row, bit by bit. Others have seen the tokens before them, and no others."""
    model, options, (old, edits) = attached_model("llama"), options_of(budget=WIDE), edits_of(text)
    new = edits[name]
    runs = Alignment(tuple(new)).to(tuple(old))
    reader = reader_of(model, new, snapshots := kept(model, old, options=options), options=options)
    (before,) = snapshots.kept.of(snapshots_key(new, options))
    assert reader.cache.tokens == [new]
    assert reader.cache.next_positions == [len(new)]
    assert reader.cached == sum(run.size for run in runs) > len(old) - 50
    head = runs[0].size if runs[0].old == runs[0].new == 0 else 0
    assert (reader.moved, reader.recomputed, reader.sound) == (reader.cached - head, 0, head)
    assert holds_all(reader.cache) == WIDE
    expected, logits = twin(model, old, new, runs, options)
    for layer in range(len(reader.cache.layers)):
        pairs = zip(in_order(reader.cache, layer), in_order(expected, layer), strict=True)
        assert all(torch.allclose(own, its, atol=2e-5) for own, its in pairs)
        keys, held = in_order(reader.cache, layer)[0], in_order(before.cache, layer)[0]
        for run in runs:
            assert keys[:, run.new : run.new + run.size].equal(held[:, run.old : run.old + run.size])
    fresh = KVCache.from_options(model, options)
    feed(model, fresh, [new], [], PROMPT)
    assert torch.allclose(in_order(reader.cache, 0)[0], in_order(fresh, 0)[0], atol=2e-5)
    assert reader.logits is not None
    assert torch.allclose(reader.logits, logits, atol=2e-5)


def snapshots_key(ids: Ids, options: Any) -> Any:
    from windlass.engine.prefix_cache import key_of

    return key_of(request_of(ids, options=options))
