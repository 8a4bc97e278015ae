"""A history that was edited takes its tokens from the row of the text before the edit, at their new positions."""

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tests.helpers.hybrids import bound
from tests.helpers.models import Models, Text
from tests.helpers.models import one_layer as one_layer
from tests.helpers.models import tokenizer as tokenizer
from tests.helpers.schedulers import events_of, options_of, request_of, rows_of, running
from windlass import KVCache
from windlass.cache.edits import holds_all
from windlass.cache.options import CacheOptions
from windlass.cache.recall import TOKEN_INDEX
from windlass.core.errors import UsageError
from windlass.core.step import PROMPT
from windlass.engine.prefill import Reader, feed, feed_tokens
from windlass.engine.prefix_cache import PrefixCache, Snapshots, key_of
from windlass.engine.prefix_entry import CacheEntry
from windlass.engine.recompute import LEAST, Alignment, EditPlan, Match, Sinks
from windlass.engine.request import EXACT, PREFIX, Finish, Piece, Reuse, ReuseMode

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


def row_of(snapshots: Snapshots, options: CacheOptions) -> KVCache:
    """A copy of the longest row that is kept of requests with these options."""
    entries: list[CacheEntry] = snapshots.kept.of(key_of(request_of([1], options=options)))
    return copy.deepcopy(max(entries, key=lambda each: len(each.tokens)).cache)


def edits_of(text: Text) -> tuple[Ids, dict[str, Ids]]:
    """A text, and what became of it."""
    a, b, c, d, e, f = rows_of(text, 23, 19, 31, 37, 27, 11)
    made = {
        "a turn is dropped": a + c + d + e,
        "an early word is changed": [*a[:5], (a[5] + 1) % 90, *a[6:], *b, *c, *d, *f],
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


def twin(
    model: PreTrainedModel, old: Ids, new: Ids, runs: list[Match], options: CacheOptions
) -> tuple[KVCache, Tensor]:
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
    snapshots = kept(model, old, options=options)
    before = row_of(snapshots, options)
    reader = reader_of(model, new, snapshots, options=options)
    assert reader.cache.tokens == [new]
    assert reader.cache.next_positions == [len(new)]
    assert reader.cached == sum(run.size for run in runs) > len(old) - 50
    head = runs[0].size if runs[0].old == runs[0].new == 0 else 0
    assert (reader.moved, reader.recomputed, reader.exact_tokens) == (reader.cached - head, 0, head)
    assert max(reader.passes, default=0) <= head
    assert holds_all(reader.cache) == WIDE
    expected, logits = twin(model, old, new, runs, options)
    for layer in range(len(reader.cache.layers)):
        pairs = zip(in_order(reader.cache, layer), in_order(expected, layer), strict=True)
        assert all(torch.allclose(own, its, atol=2e-5) for own, its in pairs)
        keys, held = in_order(reader.cache, layer)[0], in_order(before, layer)[0]
        for run in runs:
            assert keys[:, run.new : run.new + run.size].equal(held[:, run.old : run.old + run.size])
    fresh = KVCache.from_options(model, options)
    feed(model, fresh, [new], [], PROMPT)
    assert torch.allclose(in_order(reader.cache, 0)[0], in_order(fresh, 0)[0], atol=2e-5)
    assert reader.logits is not None
    assert torch.allclose(reader.logits, logits, atol=2e-5)
    for token in (3, 14, 15):
        own, its = (feed_tokens(model, each, {0: token}) for each in (reader.cache, expected))
        assert torch.allclose(own, its, atol=2e-5)


@pytest.mark.parametrize("family", ["qwen3", "deepseek_v3", "smollm3", "gemma2", "gpt_oss"])
def test_families_are_edited_or_read_anew(attached_model: Models, text: Text, family: str) -> None:
    """Latents and layers without RoPE are moved. A sliding window that has evicted is not there for new text."""
    model, options, (old, edits) = attached_model(family), options_of(budget=WIDE), edits_of(text)
    new = edits["a turn is put in"]
    has_window = family in ("gemma2", "gpt_oss")
    runs = [] if has_window else Alignment(tuple(new)).to(tuple(old))
    reader = reader_of(model, new, kept(model, old, options=options), options=options)
    expected, logits = twin(model, old, new, runs, options)
    assert (reader.moved > 0) != has_window
    assert reader.logits is not None
    assert torch.allclose(reader.logits, logits, atol=2e-5)
    own, its = (feed_tokens(model, each, {0: 3}) for each in (reader.cache, expected))
    assert torch.allclose(own, its, atol=2e-5)


def test_an_edit_at_the_very_end_is_a_prefix(attached_model: Models, text: Text) -> None:
    """Bit by bit, with nothing moved."""
    model, options, (old, _) = attached_model("llama"), options_of(budget=WIDE), edits_of(text)
    new = old[:97] + rows_of(text, 9, 12, 14)[2]
    one, other = (
        reader_of(model, new, kept(model, old, options=options), options=options, reuse=Reuse(mode=mode))
        for mode in (ReuseMode("edited"), PREFIX)
    )
    assert (one.cached, one.moved, one.exact_tokens) == (97, 0, None)
    assert one.logits is not None
    assert other.logits is not None
    assert one.logits.equal(other.logits)
    for layer in range(len(one.cache.layers)):
        for own, its in zip(in_order(one.cache, layer), in_order(other.cache, layer), strict=True):
            assert own.equal(its)


@pytest.mark.parametrize("window", [3, 29, 4000])
def test_tokens_behind_an_edit_are_read_again(attached_model: Models, text: Text, window: int) -> None:
    """Where all behind it are, the text is that of a prompt read anew."""
    model, options, (old, edits) = attached_model("llama"), options_of(budget=WIDE), edits_of(text)
    new = edits["a turn is dropped"]  # 23 tokens, then 19 less, then 31 + 37, then 27 new ones
    reuse = Reuse(mode=ReuseMode("edited", window))
    reader = reader_of(model, new, kept(model, old, options=options), options=options, reuse=reuse)
    again = min(window, 31 + 37)
    fresh = KVCache.from_options(model, options)
    logits = feed(model, fresh, [new], [len(new) - 1], PROMPT)[0, -1]
    assert reader.logits is not None
    assert reader.cache.tokens == [new]
    if window == 4000:
        assert (reader.cached, reader.moved) == (23, 0)
        assert torch.allclose(reader.logits, logits, atol=2e-5)
    else:
        assert (reader.cached, reader.moved, reader.recomputed) == (23 + 68 - again, 68 - again, again)
        assert not torch.allclose(reader.logits, logits, atol=2e-5)
    for layer in range(len(fresh.layers)):
        (own, _), (its, _) = in_order(reader.cache, layer), in_order(fresh, layer)
        assert torch.allclose(own[:, : 23 + again], its[:, : 23 + again], atol=2e-5)


def held(cache: KVCache) -> list[list[set[int]]]:
    """The positions that each head of each layer holds."""
    return [[{at for at in head if at >= 0} for head in layer.positions[0].tolist()] for layer in cache.layers]


@pytest.mark.parametrize("recall", [0, 16])
@pytest.mark.parametrize("policy", ["key_diff", "recent", "snapkv", "h2o"])
def test_what_was_evicted_stays_evicted(attached_model: Models, text: Text, policy: str, recall: int) -> None:
    """And may be recalled at its new position. What the edit dropped may not."""
    model, (old, edits) = attached_model("llama"), edits_of(text)
    options = options_of(budget=40, policy=policy, recall=recall)
    for name in ("a turn is dropped", "an early word is changed", "words differ in number"):
        new, snapshots = edits[name], kept(model, old, options=options)
        runs = Alignment(tuple(new)).to(tuple(old))
        moves = {run.old + at: run.new + at for run in runs for at in range(run.size)}
        was = held(row_of(snapshots, options))
        reader = Reader(model, request_of(new, options=options, reuse=EDITED), snapshots)
        assert held(reader.cache) == [[{moves[at] for at in head if at in moves} for head in layer] for layer in was]
        while not reader.is_done:
            reader.read()
            assert max(len(head) for layer in held(reader.cache) for head in layer) <= 40
        assert reader.cache.tokens == [new]
        assert reader.cached == len(moves)
        for layer in reader.cache.layers:
            if (store := layer.table.recall) is not None:
                known = store.positions[0, : store.lengths[0]]
                assert known.sort().values.tolist() == list(range(len(new)))
                slots = layer.positions >= 0
                index = layer.table.state[TOKEN_INDEX][slots].long()
                assert known[index].equal(layer.positions[slots])


def test_recall_finds_moved_tokens(one_layer: tuple[PreTrainedModel, PreTrainedModel], text: Text) -> None:
    """With room for all of them, the edited text is that of a prompt read anew: in one layer no key has seen others."""
    model, (old, edits) = one_layer[1], edits_of(text)
    options = options_of(budget=40, recall=160, recall_store="plain")
    for name, new in edits.items():
        reader = reader_of(model, new, kept(model, old, options=options), options=options)
        fresh = KVCache.from_options(model, options_of(budget=WIDE))
        logits = feed(model, fresh, [new], [len(new) - 1], PROMPT)[0, -1]
        assert reader.logits is not None
        assert reader.moved, name
        assert torch.allclose(reader.logits, logits, atol=2e-5), name


@pytest.mark.parametrize("policy", ["key_diff", "recent"])
@pytest.mark.parametrize(("head", "new_tokens"), [(19, 1), (22, 4), (23, 5), (31, 13), (45, 27), (45, 5), (51, 2)])
def test_a_system_text_of_another_length(
    attached_model: Models, text: Text, policy: str, head: int, new_tokens: int
) -> None:
    """All of its tokens are held, the rest comes from the row, and the next request finds the row by its new text."""
    model, (a, b, c, d, e) = attached_model("llama"), rows_of(text, 23, 61, 37, 29, 45)
    options, new = options_of(budget=60, sinks="system", policy=policy), [*e[:new_tokens], *a[5:], *b, *c, *d]
    snapshots = kept(model, a + b + c, options=options, head=23)
    reader = reader_of(model, new, snapshots, options=options, head=head)
    assert reader.moved + reader.cached > len(b)
    assert all({*range(head)} <= own for layer in held(reader.cache) for own in layer)
    assert reader.cache.rows.rows[0].sinks == head
    snapshots.keep(reader.entry)
    again = reader_of(model, [*new, *a], snapshots, options=options, head=head)
    # The next turn has the row as it is, and tells that it stands behind another text.
    assert reader.exact_tokens is not None
    assert (again.moved, again.cached) == (len(new) - reader.exact_tokens, len(new))


@pytest.mark.parametrize("policy", ["key_diff", "recent", "h2o"])
def test_sinks_are_held(attached_model: Models, text: Text, policy: str) -> None:
    """Also where their text has changed, or stood behind the old ones and was evicted."""
    model, (a, b, c, d, e, f) = attached_model("llama"), rows_of(text, 23, 41, 31, 37, 27, 33)
    options = options_of(budget=48, sinks="system", policy=policy)
    for new in ([*a[:5], (a[5] + 1) % 90, *a[6:], *b, *c, *d, *e], b + c + f + d + e):
        snapshots = kept(model, a + b + c + d, options=options, head=23)
        reader = reader_of(model, new, snapshots, options=options, head=23)
        assert reader.moved > 31
        assert all({*range(23)} <= head for layer in held(reader.cache) for head in layer)


def test_pins_beyond_the_budget_are_no_request(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    model, options, (ids,) = attached_model("llama"), options_of(budget=64, sinks="system"), rows_of(text, 90)
    with running(model, tokenizer, kinds=[(1, options)]) as engine:
        with pytest.raises(UsageError, match="system text and pins have 65 tokens, and the budget of 64"):
            engine.submit(request_of(ids, options=options, head=5, pins=((10, 70),)))
        events_of(engine.submit(request_of(ids, 2, options=options, head=5, pins=((10, 40),))))


def test_pinned_tokens_are_read_anew(attached_model: Models, text: Text) -> None:
    """Where an edit moves evicted tokens to pinned positions."""
    model, (a, b, c, d) = attached_model("llama"), rows_of(text, 23, 31, 31, 97)
    options, pins = options_of(budget=64, sinks="system", policy="recent"), ((23, 54),)
    snapshots = kept(model, a + b + c + d, options=options, head=5, pins=pins)
    reader = reader_of(model, a + c + b + d, snapshots, options=options, head=5, pins=pins)
    assert all({*range(23, 54)} <= head for layer in held(reader.cache) for head in layer)
    again = reader_of(model, [*a, *b, *c, *d, 1], snapshots, options=options, head=5, pins=pins)
    assert again.cached == len(a + b + c + d)


@pytest.mark.parametrize("recall", [0, 400])
@pytest.mark.parametrize("window", [0, 5])
def test_random_sessions(one_layer: tuple[PreTrainedModel, PreTrainedModel], window: int, recall: int) -> None:
    """Turns, edits, branches and retries, of two users. In one layer each edited text is that of a prompt read anew."""
    draw, model = random.Random(2 * recall + window), one_layer[1]
    given = {"budget": 48, "recall": recall, "recall_store": "plain"} if recall else {"budget": WIDE}
    options = options_of(**given)
    snapshots, texts, moved = Snapshots(PrefixCache(24 << 20)), dict[str, list[Ids]](a=[], b=[]), 0
    mode = ReuseMode("edited", window)
    for _ in range(40):
        user = draw.choice("ab")
        ids = list(draw.choice(texts[user])) if texts[user] and draw.random() < 0.9 else []
        ids = ids or [draw.randrange(90) for _ in range(200)]
        for _ in range(draw.randrange(4)):
            start = draw.randrange(len(ids) + 1)
            cut, put = draw.choice((0, 1, 30)), draw.choice((0, 1, 9, 40))
            ids[start : start + cut] = [draw.randrange(90) for _ in range(put)]
        ids = (ids + [draw.randrange(90) for _ in range(draw.randrange(1, 20))])[:350]
        reader = reader_of(model, ids, snapshots, options=options, tenant=user, reuse=Reuse(mode=mode))
        fresh = KVCache.from_options(model, options_of(budget=WIDE))
        logits = feed(model, fresh, [ids], [len(ids) - 1], PROMPT)[0, -1]
        assert reader.logits is not None
        assert torch.allclose(reader.logits, logits, atol=5e-5)
        assert reader.cache.tokens == [ids]
        snapshots.keep(reader.entry)
        assert snapshots.kept.bytes <= snapshots.kept.limit
        texts[user].append(ids)
        moved += reader.moved
    assert moved > 1000


REFUSED: list[dict[str, Any]] = [
    {"store": "int4(sinks=2, newest=5)"},
    {"policy": "expected_attention"},
    {"budget": 60, "merge": "mean_count"},
    {"positions": "compact"},
]


@pytest.mark.parametrize("given", REFUSED, ids=str)
def test_options_that_take_no_edit_get_a_prefix(attached_model: Models, text: Text, given: dict[str, Any]) -> None:
    model, (old, edits) = attached_model("llama"), edits_of(text)
    options = options_of(**{"budget": WIDE} | given)
    new = edits["an early word is changed"]
    reader = reader_of(model, new, kept(model, old, options=options), options=options)
    again = reader_of(model, new, Snapshots(PrefixCache(0)), options=options)
    assert reader.moved == 0
    assert reader.cached <= 5
    assert reader.logits is not None
    assert again.logits is not None
    assert torch.allclose(reader.logits, again.logits, atol=1e-3)


def test_a_hybrid_gets_a_prefix(text: Text) -> None:
    model, (old, edits) = bound("qwen3_next"), edits_of(text)
    options = options_of(budget=WIDE)
    reader = reader_of(model, edits["an early word is changed"], kept(model, old, options=options), options=options)
    assert (reader.cached, reader.moved) == (0, 0)


def test_a_rotation_that_grows_with_the_text_takes_no_gaps(attached_model: Models, text: Text) -> None:
    model, (old, edits) = attached_model("llama_dynamic"), edits_of(text)
    options = options_of(budget=WIDE)
    for name, cached in (("an early word is changed", 5), ("a turn is put in", 42)):
        reader = reader_of(model, edits[name], kept(model, old, options=options), options=options)
        assert (reader.cached, reader.moved) == (cached, 0)
    reader = reader_of(model, edits["a turn is dropped"], kept(model, old, options=options), options=options)
    assert (reader.cached, reader.moved) == (23 + 68, 68)


def test_positions_that_are_ranks_take_no_gaps(attached_model: Models, text: Text) -> None:
    """But tokens may be dropped, and new ones read behind the others."""
    model, (old, edits) = attached_model("llama"), edits_of(text)
    options = options_of(budget=WIDE, positions="compact")
    reader = reader_of(model, edits["a turn is dropped"], kept(model, old, options=options), options=options)
    assert (reader.cached, reader.moved) == (23 + 68, 68)


def test_others_get_what_was_read_in_order_alone(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    """Not what an edit has moved, nor the rows of another user. What they write is what they write alone."""
    model, options, (old, edits) = attached_model("llama"), options_of(budget=WIDE), edits_of(text)
    new = edits["an early word is changed"]

    def asked(engine: Any, ids: Ids, mode: ReuseMode, **given: Any) -> tuple[Ids, Any]:
        events = events_of(engine.submit(request_of(ids, 7, options=options, reuse=Reuse(mode=mode), **given)))
        assert isinstance(events[-1], Finish), events[-1]
        return [each.token for each in events if isinstance(each, Piece)], events[-1].usage

    with running(model, tokenizer, kinds=[(2, options)]) as engine:
        alone = asked(engine, [*new, 4], EXACT)[0]
    with running(model, tokenizer, kinds=[(2, options)], reuse_bytes=PLENTY) as engine:
        asked(engine, old, EDITED.mode, tenant="a")
        assert asked(engine, new, EDITED.mode, tenant="b")[1].cached == 0
        first = asked(engine, new, EDITED.mode, tenant="a")[1]
        assert (first.cached, first.moved, first.seen) == (len(old) - 1, len(old) - 6, len(new) + 6)
        usage = asked(engine, [*new, 4], EDITED.mode, tenant="a")[1]
        assert (usage.cached, usage.moved) == (len(new), len(new) - 5)
        usage = asked(engine, [*new, 4], PREFIX, tenant="a")[1]
        assert (usage.cached, usage.moved) == (5, 0)
        found, usage = asked(engine, [*new, 4], EXACT, tenant="a")
        assert found == alone
        assert usage.cached == 0
        usage = asked(engine, [*new, 5], PREFIX, tenant="a")[1]
        assert usage.cached == len(new)  # of the row that was read in order


STRIPPED, ANSWER = 9, 30


def stripped_chat(model: PreTrainedModel, options: CacheOptions, turns: list[Ids]) -> list[Ids]:
    """The answers of one cache, from which the first tokens of each answer are dropped before the next turn."""
    cache, ids, ends, found = KVCache.from_options(model, options), Ids(), Ids(), list[Ids]()
    for new in turns:
        ids, answer = ids + new, Ids()
        for stop in request_of(ids, options=options, ends=tuple(ends)).pass_ends:
            if (done := cache.next_positions[0]) < stop:
                logits = feed(model, cache, [ids[done:stop]], [stop - done - 1], PROMPT)[0, -1]
        ends, end = [*ends, len(ids)], len(ids)
        while len(answer) < ANSWER - 1:
            answer.append(int(logits.argmax()))
            logits = feed_tokens(model, cache, {0: answer[-1]})[0]
        found.append([*answer, int(logits.argmax())])
        cache.drop(end, end + STRIPPED)
        cache.shift(end + STRIPPED, end + ANSWER - 1, -STRIPPED)
        ids += found[-1][STRIPPED:]
    return found


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "given",
    [
        {"budget": WIDE},
        {"budget": 40},
        {"budget": 40, "policy": "h2o", "store": "int8"},
        {"budget": 40, "recall": 400, "recall_store": "plain"},
    ],
    ids=str,
)
def test_thoughts_are_stripped_from_a_row(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text, given: dict[str, Any], rows: int
) -> None:
    """The answers of an engine are those of one cache. Only what is new is read."""
    model, options, turns = attached_model("llama"), options_of(**given), rows_of(text, 21, 5, 17, 13)
    ids, ends, answers = Ids(), Ids(), list[Ids]()
    with running(model, tokenizer, kinds=[(rows, options)], reuse_bytes=PLENTY) as engine:
        for number, new in enumerate(turns):
            ids = ids + new
            request = request_of(ids, ANSWER, options=options, ends=tuple(ends), reuse=EDITED)
            events = events_of(engine.submit(request))
            assert isinstance(events[-1], Finish), events[-1]
            usage, ends = events[-1].usage, [*ends, len(ids)]
            assert usage.prompt - usage.cached == len(new) + (number > 0)
            assert usage.moved == (usage.cached - len(turns[0])) * (number > 0)
            answers.append([each.token for each in events if isinstance(each, Piece)])
            ids = ids + answers[-1][STRIPPED:]
    assert answers == stripped_chat(model, options, turns)


def test_a_row_read_in_order_stays_beside_an_edited_one(attached_model: Models, text: Text) -> None:
    options = options_of(budget=WIDE)
    entry = reader_of(attached_model("llama"), rows_of(text, 50)[0], Snapshots(PrefixCache(0)), options=options).entry
    assert entry.covers(entry)
    assert entry.covers(replace(entry, exact_tokens=9))
    assert not replace(entry, exact_tokens=9).covers(entry)


def test_a_request_that_ends_in_a_gap_leaves_no_row(attached_model: Models, text: Text) -> None:
    """Its row has tokens of the prompt that it has not read."""
    model, options, (old, edits) = attached_model("llama"), options_of(budget=WIDE), edits_of(text)
    reader = Reader(
        model, request_of(edits["a turn is put in"], options=options, reuse=EDITED), kept(model, old, options=options)
    )
    reader.read()
    assert reader.cache.tokens is None
    while reader.done < 23 + 19 + 27 + 31 + 37:
        assert not reader.is_done
        reader.read()
    assert reader.cache.tokens == [edits["a turn is put in"][: reader.done]]


def test_an_alignment_by_hand() -> None:
    """Runs of less than 16 tokens are not worth it, crossing ones give way to longer ones."""
    a, b, c, d = range(100, 120), range(200, 215), range(300, 340), range(400, 418)
    old = (*a, 1, *b, 2, *c, 3, 4, *d)
    new = (*a[:7], 9, *a[7:], *d, 5, *b, 6, 7, *c, 8)
    assert Alignment(new).to(old) == [Match(0, 0, 7), Match(37, 57, 40)]
    assert LEAST == 16
    runs = [Match(0, 0, 9), Match(12, 20, 30)]
    plan = EditPlan.of(runs, 50, Sinks(4, 4), 0)
    assert (plan.cached, plan.end, plan.head, plan.gaps, plan.again) == (9 + 29, 49, 9, [*range(9, 20)], 0)
    moves = plan.moves(45)
    assert [moves[at] for at in (0, 8, 9, 11, 12, 40, 41, 44)] == [0, 8, -1, -1, 20, 48, -1, -1]
    plan = EditPlan.of(runs, 60, Sinks(4, 4), 5)
    assert (plan.cached, plan.gaps, plan.again) == (9 + 25, [*range(9, 25)], 5)
    plan = EditPlan.of([Match(30, 2, 25)], 60, Sinks(6, 6), 0)  # the first six come from tokens that were never evicted
    assert (plan.runs, plan.head) == ((Match(34, 6, 21),), 0)
    # Of a row with 25 such tokens, 16 stay so, two are read, and the others follow.
    plan = EditPlan.of([Match(9, 7, 50)], 90, Sinks(25, 25), 0)
    assert (plan.runs, plan.gaps) == ((Match(9, 7, 16), Match(27, 25, 32)), [*range(7), 23, 24])
    plan = EditPlan.of([Match(0, 0, 50)], 90, Sinks(10, 20), 0)
    assert (plan.cached, plan.gaps, plan.again) == (40, [*range(10, 20)], 10)
    # A run that its window leaves too short is read again as a whole.
    plan = EditPlan.of([Match(0, 0, 9), Match(12, 20, 19)], 60, Sinks(4, 4), 5)
    assert (plan.cached, plan.gaps, plan.again) == (9, [], 19)
    plan = EditPlan.of([Match(9, 12, 50)], 90, Sinks(25, 28), 0)
    assert (plan.runs, plan.gaps) == ((Match(9, 12, 50),), [*range(12)])


def test_alignments_of_random_edits() -> None:
    """They are equal runs, in order, and leave little that both have."""
    draw = random.Random(3)
    for _ in range(200):
        old = [draw.randrange(draw.choice((3, 50, 5000))) for _ in range(draw.randrange(400))]
        new = list(old)
        for _ in range(draw.randrange(6)):
            start = draw.randrange(len(new) + 1)
            new[start : start + draw.randrange(60)] = [draw.randrange(5000) for _ in range(draw.randrange(60))]
        found = Alignment(tuple(new)).to(tuple(old))
        end = (0, 0)
        for run in found:
            assert run.old >= end[0]
            assert run.new >= end[1]
            assert run.size >= LEAST or run.old == run.new == 0
            assert old[run.old : run.old + run.size] == new[run.new : run.new + run.size]
            end = run.old + run.size, run.new + run.size


@pytest.mark.parametrize("spec", ["exact(3)", "edited(x)", "edited(-1)", "prefixed", "edited(1, 2)", ""])
def test_other_modes_are_refused(spec: str) -> None:
    with pytest.raises(UsageError, match="reuse"):
        ReuseMode.of(spec)


def test_modes_are_read_and_written() -> None:
    for spec, mode in (
        ("exact", EXACT),
        ("prefix", PREFIX),
        ("edited(0)", EDITED.mode),
        ("edited(16)", ReuseMode("edited", 16)),
    ):
        assert ReuseMode.of(spec) == mode
        assert str(mode) == spec
    assert str(ReuseMode.of("edited")) == "edited(64)"
