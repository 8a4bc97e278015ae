"""A prompt that begins as another one did is read from there, and nothing else changes."""

from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import windlass
from tests.helpers.hybrids import bound as bound_hybrid
from tests.helpers.models import MODEL, Models, Text
from tests.helpers.schedulers import events_of, options_of, request_of, rows_of, running, wait_for
from windlass.cache.slot_table import SlotTable
from windlass.core.step import PROMPT
from windlass.core.types import Tokens
from windlass.engine import prefill
from windlass.engine.prefill import Reader, feed
from windlass.engine.prefix_cache import PrefixCache, Snapshots
from windlass.engine.prefix_entry import PrefixText, superfluous
from windlass.engine.request import EXACT, PREFIX, Finish, Piece, Reuse, ReuseMode, Ticket
from windlass.engine.scheduler import Scheduler
from windlass.engine.sequence import Lane
from windlass.hf.kv_cache import KVCache
from windlass.policies import NAMES, Policy
from windlass.policies.base import ModelSpecific, OneShot
from windlass.testing import tiny_model

STREAMING = [policy() for policy in NAMES.values() if not issubclass(policy, ModelSpecific | OneShot)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


@cache
def bound() -> PreTrainedModel:
    """An attached model, for a test that takes no fixtures."""
    return windlass.attach(tiny_model("llama"))


def read(model: PreTrainedModel, prompt: list[int], snapshots: Snapshots, **given: Any) -> Reader:
    reader = Reader(model, request_of(prompt, **given), snapshots)
    while not reader.is_done:
        reader.read()
    return reader


def test_a_short_last_chunk_and_a_retry_move_no_slots(
    attached_model: Models, text: Text, tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The room for a chunk stays from one turn to the next. Chunks have 23 tokens, and the last one has 6."""
    moved, resize = list[tuple[int, int]](), SlotTable.resize

    def noted(table: SlotTable, slots: int) -> None:
        moved.append((table.slots, slots))
        resize(table, slots)

    monkeypatch.setattr(SlotTable, "resize", noted)
    (ids,) = rows_of(text, 75)
    options = options_of(policy="key_diff", budget=90, chunk=23)
    with running(attached_model("llama"), tokenizer, kinds=[(1, options)], reuse_bytes=1 << 30) as engine:
        for _ in range(3):
            events_of(engine.submit(request_of(ids, options=options, max_tokens=2)))
    assert moved == []


@pytest.mark.parametrize("policy", STREAMING, ids=repr)
def test_a_hit_equals_a_miss_bit_by_bit(attached_model: Models, text: Text, policy: Policy) -> None:
    model, options = attached_model("llama"), options_of(policy=policy)
    ids, ends = rows_of(text, 70, 29)
    snapshots = Snapshots(PrefixCache(1 << 30))
    read(model, ids[:60], snapshots, options=options)
    for prompt, cached in ((ids, 52), (ids[:53] + ends, 52), (ids[:52], 0)):
        hit = read(model, prompt, snapshots, options=options)
        miss = read(model, prompt, Snapshots(PrefixCache(0)), options=options)
        assert hit.cached == cached
        assert hit.logits is not None
        assert miss.logits is not None
        assert hit.logits.equal(miss.logits)
        for own, other in zip(hit.cache.layers, miss.cache.layers, strict=True):
            is_held = own.positions >= 0
            assert own.positions.clamp(min=-1).equal(other.positions.clamp(min=-1))
            assert all(
                own.table.state[name][is_held].equal(other.table.state[name][is_held]) for name in own.table.state
            )


@pytest.mark.parametrize("policy", STREAMING, ids=repr)
@pytest.mark.parametrize("lengths", [(9, 5, 3), (4, 30, 1), (21, 2, 17)])
def test_the_end_of_each_message_is_kept(
    attached_model: Models, text: Text, policy: Policy, lengths: tuple[int, int, int]
) -> None:
    """A prompt that begins with so many messages of an earlier one is read from the end of the last of them on."""
    model, options = attached_model("llama"), options_of(policy=policy)
    ids, other = rows_of(text, 80, 40)
    ends = tuple(accumulate(lengths))
    snapshots = Snapshots(PrefixCache(1 << 30))
    read(model, ids[: ends[-1] + 2], snapshots, options=options, ends=ends)
    for end in ends:
        prompt, own = ids[:end] + other, (*(each for each in ends if each <= end), end + 7)
        hit = read(model, prompt, snapshots, options=options, ends=own)
        miss = read(model, prompt, Snapshots(PrefixCache(0)), options=options, ends=own)
        assert hit.cached == end
        assert hit.logits is not None
        assert miss.logits is not None
        assert hit.logits.equal(miss.logits)
    again = read(model, ids[: ends[-1] + 2], snapshots, options=options, ends=ends)
    assert again.cached == ends[-1]


def test_a_prompt_that_was_read_in_other_passes_is_read_again(attached_model: Models, text: Text) -> None:
    """After an eviction its state is another."""
    model, (ids,) = attached_model("llama"), rows_of(text, 60)
    snapshots = Snapshots(PrefixCache(1 << 30))
    read(model, ids, snapshots, ends=(20, 45))
    assert read(model, ids[:45] + ids, snapshots).cached == 0
    assert read(model, ids[:45] + ids, snapshots, ends=(20,)).cached == 20


@pytest.mark.parametrize(
    ("mode", "kind", "budget", "stops"),
    [
        (PREFIX, "llama", 70, (13, 26, 39, 52, 60)),
        (ReuseMode("edited", 3), "llama", 70, (13, 26, 39, 52, 60)),
        (PREFIX, "llama", None, (13, 26, 39, 52, 60)),
        (EXACT, "llama", 70, (5, 18, 29, 42, 55, 60)),
        (PREFIX, "llama", 59, (5, 18, 29, 42, 55, 60)),
        (PREFIX, "qwen3_next", 70, (5, 18, 29, 42, 55, 60)),
    ],
    ids=str,
)
def test_a_pass_ends_with_a_message_only_where_others_need_it(
    attached_model: Models,
    text: Text,
    monkeypatch: pytest.MonkeyPatch,
    mode: ReuseMode,
    kind: str,
    budget: int | None,
    stops: tuple[int, ...],
) -> None:
    """Messages end at 5 and 29, chunks have 13 tokens: exact reuse, copies of a text that loses tokens, and states."""
    model = attached_model(kind) if kind == "llama" else bound_hybrid(kind)
    options, (ids,) = options_of(policy="key_diff", budget=budget), rows_of(text, 60)
    fed, real = list[int](), feed

    def noted(model: PreTrainedModel, cache: KVCache, pieces: list[list[int]], *rest: Any) -> torch.Tensor:
        fed.append(len(pieces[0]))
        return real(model, cache, pieces, *rest)

    monkeypatch.setattr(prefill, "feed", noted)
    snapshots = Snapshots(PrefixCache(1 << 30))
    reader = read(model, ids, snapshots, options=options, ends=(5, 29), reuse=Reuse(mode=mode))
    assert tuple(accumulate(fed)) == reader.passes == stops
    twin = KVCache.from_options(model, options)
    for start, stop in pairwise((0, *stops)):
        logits = real(model, twin, [ids[start:stop]], [stop - start - 1], PROMPT)
    assert reader.logits is not None
    assert reader.logits.equal(logits[0, -1])


def test_the_first_token_comes_before_its_prompt_is_kept_and_moved(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A copy of the prompt and the move of its row cost the client no time."""
    (ids,) = rows_of(text, 20)
    with running(attached_model("llama"), tokenizer, reuse_bytes=1 << 30) as engine:
        seen, put, move, give = list[str](), Snapshots.put, Lane.put, Ticket.put

        def kept(self: Snapshots, *given: Any) -> None:
            seen.append("keep")
            put(self, *given)

        def moved(self: Lane, *given: Any) -> None:
            seen.append("move")
            move(self, *given)

        def told(self: Ticket, event: Any) -> None:
            seen.append(type(event).__name__)
            give(self, event)

        monkeypatch.setattr(Snapshots, "put", kept)
        monkeypatch.setattr(Lane, "put", moved)
        monkeypatch.setattr(Ticket, "put", told)
        for _ in range(2):
            events_of(engine.submit(request_of(ids, 2, options=options_of(chunk=20))))
        events_of(engine.submit(request_of(ids[:9], 1, options=options_of(chunk=20))))
    ended = ["Piece", "Finish"]
    first = ["Progress", "Piece", "keep", "move", *ended]
    assert seen == [*first, "Progress", "Piece", "move", *ended, "Progress", "Piece", "Finish"]


@pytest.mark.parametrize("length", [1, 5, 12])
def test_a_whole_prompt_within_a_chunk_is_read_once(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text, length: int
) -> None:
    model, (ids,) = attached_model("llama"), rows_of(text, length)
    with running(model, tokenizer, reuse_bytes=1 << 20) as engine:
        first, again = (_taken(engine, ids) for _ in range(2))
        assert first[0] == again[0]
        assert (first[1].usage.cached, again[1].usage.cached) == (0, length)
        assert engine.status().bytes_held <= engine.status().bytes_limit


def test_where_prompts_part_is_kept_when_it_is_seen_again(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    shared, *ends = rows_of(text, 30, 31, 32, 33)
    snapshots = Snapshots(PrefixCache(1 << 30))
    cached = [read(model, shared + end, snapshots).cached for end in ends]
    assert cached == [0, 0, 26]  # two chunks of 13


@pytest.mark.parametrize(
    "other", [{"tenant": "another"}, {"options": options_of(budget=18)}], ids=["tenant", "options"]
)
def test_who_may_not_share_does_not(attached_model: Models, text: Text, other: dict[str, object]) -> None:
    model, (ids,) = attached_model("llama"), rows_of(text, 60)
    snapshots = Snapshots(PrefixCache(1 << 30))
    read(model, ids, snapshots)
    assert read(model, ids, snapshots, **other).cached == 0
    assert read(model, ids, snapshots).cached == 52


def test_a_copy_is_given_out(attached_model: Models, text: Text) -> None:
    """No other request sees the changes that one makes to a snapshot."""
    model, (ids,) = attached_model("llama"), rows_of(text, 60)
    snapshots = Snapshots(PrefixCache(1 << 30))
    read(model, ids, snapshots)
    one = read(model, ids, snapshots)
    for layer in one.cache.layers:
        layer.store.packed_keys().data.fill_(torch.nan)
    again = read(model, ids, snapshots)
    assert again.logits is not None
    assert not bool(again.logits.isnan().any())


def test_logits_go_with_the_end_of_their_prompt(attached_model: Models, text: Text) -> None:
    """A copy that is cut before it has none."""
    model, (ids,) = attached_model("llama"), rows_of(text, 17)
    reader = read(model, ids, Snapshots(PrefixCache(0)))
    row = replace(reader.entry, logits=reader.logits, logits_end=14)
    found = [row.first(tokens) for tokens in (17, 14, 13)]
    assert [each.logits_end for each in found] == [14, 14, None]
    assert [each.logits is None for each in found] == [False, False, True]


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(14, 60), min_size=1, max_size=6), limit=st.integers(0, 40_000), seed=st.integers(0, 3)
)
def test_the_limit_holds_after_every_call(lengths: list[int], limit: int, seed: int) -> None:
    model, draw = bound(), torch.Generator().manual_seed(seed)
    snapshots = Snapshots(PrefixCache(limit))
    for length in lengths:
        reader = Reader(model, request_of(torch.randint(0, 3, (length,), generator=draw).tolist()), snapshots)
        while not reader.is_done:
            reader.read()
            assert snapshots.kept.bytes <= limit


def test_the_engine_tells_what_it_did_not_read_again(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    model, (ids,) = attached_model("llama"), rows_of(text, 60)
    with running(model, tokenizer, reuse_bytes=1 << 20) as engine:
        first, again = (_taken(engine, ids) for _ in range(2))
        assert first[0] == again[0]
        assert (first[1].usage.cached, again[1].usage.cached) == (0, 52)
        assert again[1].usage.seen == first[1].usage.seen
        wait_for(lambda: engine.status().cached_tokens_total == 52)


def _taken(engine: Scheduler, ids: list[int]) -> tuple[list[int], Finish]:
    ticket: Ticket = engine.submit(request_of(ids, 9))
    events = events_of(ticket)
    assert isinstance(events[-1], Finish)
    return [event.token for event in events if isinstance(event, Piece)], events[-1]


@pytest.mark.parametrize("is_prompt", [False, True])
@pytest.mark.parametrize(
    ("sizes", "gone"),
    [
        ((10, 20, 30, 40, 50, 60, 70, 80), []),
        ((10, 20, 30, 40, 50, 52, 60, 70, 80), [50]),
        ((5, 20, 30, 40, 49, 60, 70, 88, 97), [40]),
        ((2, 22, 30, 40, 52, 96, 97, 98, 99), [30]),
        ((5, 9, 30, 40, 50, 60, 61, 62, 70, 88, 90), [61, 5, 60]),
    ],
)
def test_of_many_beginnings_of_a_text_those_far_apart_stay(
    sizes: tuple[int, ...], gone: list[int], is_prompt: bool
) -> None:
    tokens = tuple(range(100))
    rows = [PrefixText(tokens=Tokens.of(tokens[:size]), logits_end=size if is_prompt else None) for size in sizes]
    others = [PrefixText(tokens=Tokens.of((7, *tokens[:9]))), PrefixText(tokens=Tokens.of(tokens[:11]), holds_all=True)]
    assert [len(each.tokens) for each in superfluous(PrefixText(tokens=Tokens.of(tokens)), [*others, *rows])] == gone
    assert superfluous(PrefixText(tokens=Tokens.of(tokens), holds_all=True), rows) == []
