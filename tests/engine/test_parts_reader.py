"""Prompts with parts: joins equal the library's, and the prefix cache stays within its bytes."""

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import windlass
from tests.helpers import models
from tests.helpers.joined import joined_by_hand, texts
from tests.helpers.models import Models
from tests.helpers.schedulers import events_of, options_of, request_of, running, tokens_of, wait_for
from windlass import KVCache, UsageError, chunks
from windlass.core.types import Tokens
from windlass.engine.chunks import PartsReader, part_options
from windlass.engine.prefill import PromptReader
from windlass.engine.prefix_cache import PrefixCache
from windlass.engine.prefix_entry import CacheEntry, CacheKey, EntrySelector
from windlass.engine.recompute import recompute_of
from windlass.engine.request import Failure, Finish, Piece, PromptParts, Request, Reuse
from windlass.engine.row_bytes import RowBytes
from windlass.engine.scheduler import Scheduler
from windlass.testing import tiny_model

tokenizer = models.tokenizer  # fixture
SIZES = (7, 23, 31, 9, 5)  # a lead, three parts, a question
PLENTY = 1 << 30
BUDGET = 90


def prompt_of(pieces: list[list[int]], are_parts: list[bool], recompute: str = "first(4)", **given: Any) -> Request:
    """A request for these pieces of text, behind each other."""
    ids, spans = list[int](), list[tuple[int, int]]()
    for piece, is_part in zip(pieces, are_parts, strict=True):
        spans += [(len(ids), len(ids) + len(piece))] * is_part
        ids += piece
    given.setdefault("options", options_of(budget=BUDGET))
    return request_of(ids, parts=PromptParts(tuple(spans), recompute_of(recompute)), **given)


def usual(recompute: str = "first(4)", order: tuple[int, ...] = (1, 2, 3), **given: Any) -> Request:
    """A lead, parts in some order, a question."""
    own = texts(3, SIZES)
    return prompt_of(
        [own[0], *(own[at] for at in order), own[4]], [False, *(True for _ in order), False], recompute, **given
    )


def all_read(reader: PromptReader) -> PromptReader:
    while not reader.is_done:
        reader.read()
    return reader


def read(model: PreTrainedModel, request: Request, kept: PrefixCache) -> PromptReader:
    assert request.parts is not None
    return all_read(PartsReader(model, request, request.parts, kept))


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("recompute", ["none", "first(4)", "first(40)"])
def test_parts_are_joined_as_transformers_itself_would(
    plain_model: Models, attached_model: Models, family: str, recompute: str
) -> None:
    """Each was read alone, and tokens that are read again overwrite their old places."""
    own = texts(3, SIZES)[1:]
    kept = PrefixCache(PLENTY)
    reader = read(attached_model(family), prompt_of(own, [True, True, True, False], recompute), kept)
    count = {"none": 0, "first(4)": 4, "first(40)": 40}[recompute]
    starts = ((23, 31), (54, 9))  # the first part is exact
    again = [start + at for start, size in starts for at in range(min(count, size))]
    truth = joined_by_hand(plain_model(family), own[:3], again, own[3])[-1]
    assert reader.logits is not None
    torch.testing.assert_close(reader.logits, truth, atol=5e-5, rtol=0)
    assert (reader.done, reader.cached, reader.recomputed) == (68, 0, len(again))


@pytest.mark.parametrize("recompute", ["first(4)", "divergent(0.3)"])
def test_text_before_between_and_behind(attached_model: Models, recompute: str) -> None:
    """As `windlass.chunks` joins them, group by group. A part is read behind the first token of the prompt."""
    model, own = attached_model("qwen3"), texts(5, (4, 17, 8, 11, 6, 3))
    request = prompt_of(own, [False, True, True, False, True, False], recompute)
    reader = read(model, request, PrefixCache(PLENTY))
    options = request.options
    parts = {at: chunks.encode(model, own[at], part_options(options), prefix=own[0][:1]) for at in (1, 2, 4)}
    whole = KVCache.from_options(model, options)
    windlass.prefill(model, whole, [own[0]])
    first = chunks.join(model, whole, [parts[1], parts[2]], recompute)
    windlass.prefill(model, whole, [own[3]])
    second = chunks.join(model, whole, [parts[4]], recompute)
    truth = windlass.prefill(model, whole, [own[5]])[0]
    assert reader.logits is not None
    torch.testing.assert_close(reader.logits, truth, atol=1e-5, rtol=0)
    assert reader.recomputed == len(first.recomputed) + len(second.recomputed)
    assert whole.tokens == reader.cache.tokens == [list(request.prompt)]


def test_what_was_read_once_is_not_read_again(attached_model: Models) -> None:
    """In any order, and to the bit as if it had been read."""
    model, kept = attached_model("llama"), PrefixCache(PLENTY)
    first = read(model, usual(), kept)
    assert (first.cached, first.recomputed) == (0, 12)
    for order in ((1, 2, 3), (3, 1, 2), (2, 3), (2, 2)):
        request = usual(order=order)
        again, fresh = read(model, request, kept), read(model, request, PrefixCache(PLENTY))
        size = sum(SIZES[at] for at in order)
        assert (again.cached, again.recomputed) == (size - 4 * len(order), 4 * len(order))
        assert again.logits is not None
        assert fresh.logits is not None
        assert again.logits.equal(fresh.logits)
    assert len(list(kept.stored(EntrySelector("")))) == 3


@pytest.mark.parametrize(
    ("other", "cached"),
    [
        ({"tenant": "another"}, 0),
        ({"reuse": Reuse(name="another")}, 0),
        ({"reuse": Reuse(lookup=False)}, 0),
        ({"reuse": Reuse(store=False)}, 51),
        ({"options": options_of(budget=70, window=9)}, 51),
        ({"options": options_of(budget=BUDGET, store="int8")}, 0),
        ({"options": options_of(budget=BUDGET, policy="h2o")}, 0),
    ],
)
def test_who_shares_parts(attached_model: Models, other: dict[str, Any], cached: int) -> None:
    """A part evicts nothing, so that it fits rows of any budget. All other options must be alike."""
    model, kept = attached_model("llama"), PrefixCache(PLENTY)
    read(model, usual(), kept)
    assert read(model, usual(**other), kept).cached == cached


def test_what_is_not_to_be_stored_is_not(attached_model: Models) -> None:
    kept = PrefixCache(PLENTY)
    read(attached_model("llama"), usual(reuse=Reuse(store=False)), kept)
    assert (kept.bytes, list(kept.stored(EntrySelector("")))) == (0, [])


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("store", ["plain", "int4"])
def test_bytes_stay_within_what_was_said(attached_model: Models, family: str, store: str) -> None:
    """Bytes of the row after each turn, of kept entries, and of the part in the making."""
    model, request = attached_model(family), usual("all", (2, 1, 3), options=options_of(budget=72, store=store))
    assert request.parts is not None
    limit = RowBytes.of(model, part_options(request.options)).reading(32) + 500
    kept, most = PrefixCache(limit), RowBytes.of(model, request.options).joining(0)
    reader = PartsReader(model, request, request.parts, kept)
    made = list[int]()
    real = kept.reserve

    def noted(size: int) -> int | None:
        made.append(size)
        return real(size)

    kept.reserve = noted  # type: ignore[method-assign]
    while not reader.is_done:
        reader.read()
        assert reader.cache.bytes_held <= most
        assert kept.bytes <= limit
    assert len(made) == 3
    for each in kept.of(next(iter(kept._held)).key):
        assert each.bytes == each.cache.bytes_held <= max(made)


@settings(max_examples=40, deadline=None)
@given(limit=st.integers(0, 90), sizes=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 2)), max_size=25))
def test_the_limit_holds_after_every_call(limit: int, sizes: list[tuple[int, int]]) -> None:
    """After every reservation, addition and release, the memory in use leaves room enough for each fitting request."""
    kept, places = PrefixCache(limit), list[tuple[int, int]]()
    for size, what in sizes:
        if what == 0 and places:
            place, reserved = places.pop()
            assert kept.add(_of_bytes(reserved), place)
        elif what == 1 and places:
            kept.release(places.pop()[0])
        elif (found := kept.reserve(size)) is not None:
            places.append((found, size))
        else:
            assert size > limit - sum(each for _, each in places)
        assert sum(each for _, each in places) <= kept.bytes <= limit


@cache
def empty() -> KVCache:
    return KVCache(windlass.attach(tiny_model("llama")))


def _of_bytes(size: int) -> CacheEntry:
    return CacheEntry(tokens=Tokens(), key=CacheKey("part", "", "", ()), cache=empty(), bytes=size)


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_part_as_large_as_the_budget(attached_model: Models, family: str) -> None:
    model = attached_model(family)
    own, options = texts(9, (3, 190, 4)), options_of(budget=200)
    request = prompt_of(own, [False, True, False], "all", options=options)
    assert request.parts is not None
    reader = PartsReader(model, request, request.parts, PrefixCache(PLENTY))
    most = 0
    while not reader.is_done:
        reader.read()
        most = max(most, reader.cache.bytes_held)
    limit = RowBytes.of(model, options).joining(0)
    assert limit / 2 < most <= limit


def test_two_that_need_the_same_room_take_turns(attached_model: Models) -> None:
    model, request = attached_model("llama"), usual("none")
    assert request.parts is not None
    kept = PrefixCache(RowBytes.of(model, part_options(request.options)).reading(32) + 500)
    readers = [PartsReader(model, request, request.parts, kept) for _ in range(2)]
    for _ in range(50):
        for reader in readers:
            if not reader.is_done:
                reader.read()
    first, second = (reader.logits for reader in readers)
    assert first is not None
    assert second is not None
    assert first.equal(second)


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_a_reader_that_is_closed_gives_its_room_back(attached_model: Models, turns: int) -> None:
    request, kept = usual(), PrefixCache(PLENTY)
    assert request.parts is not None
    reader = PartsReader(attached_model("llama"), request, request.parts, kept)
    for _ in range(turns):
        reader.read()
    assert bool(kept._reserved) == (turns == 2)  # the first one reads the lead, the third one ends a part
    reader.close()
    reader.close()
    assert not kept._reserved
    assert kept.bytes == sum(each.bytes for each in kept._held)


def test_the_engine_tells_what_was_joined_and_all_is_a_plain_prompt(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase
) -> None:
    model, options = attached_model("llama"), options_of(budget=BUDGET)
    with running(model, tokenizer, reuse_bytes=1 << 20, kinds=[(2, options)]) as engine:
        plain = request_of(list(usual().prompt), 8, options=options, reuse=Reuse(lookup=False, store=False))
        text, usage = _taken(engine, plain)
        same, of_all = _taken(engine, usual("all", max_tokens=8, reuse=Reuse(lookup=False, store=False)))
        assert (same, of_all) == (text, usage)
        _, cold = _taken(engine, usual(max_tokens=8))
        _, warm = _taken(engine, usual(max_tokens=8, order=(3, 2, 1)))
        assert (cold.usage.cached, cold.usage.recomputed, cold.usage.prompt) == (0, 12, 75)
        assert (warm.usage.cached, warm.usage.recomputed, warm.usage.seen) == (51, 12, 75 + 7)
        wait_for(lambda: engine.status().cached_tokens_total == 51)
        assert engine.status().bytes_held <= engine.bytes_limit


def test_a_request_that_ends_early_gives_its_room_back(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Cancelled, or refused in the middle of its parts."""
    model = attached_model("llama")
    with running(model, tokenizer, reuse_bytes=1 << 17, kinds=[(2, options_of(budget=700))]) as engine:
        long = prompt_of(texts(7, (5, 300, 300, 5)), [False, True, True, False], options=engine.options)
        failed = events_of(engine.submit(long))[-1]
        assert isinstance(failed, Failure)
        assert failed.message.startswith("chunks: a part of 300 tokens takes")
        small = prompt_of(texts(8, (5, 60, 60, 5)), [False, True, True, False], options=engine.options)
        tokens_of(engine.submit(small))
        ticket = engine.submit(small)
        engine.cancel(ticket)
        wait_for(lambda: engine.status().cancelled_total == 1 and engine.status().free_rows == 2)
        assert not engine._snapshots.kept._reserved


def _taken(engine: Scheduler, request: Request) -> tuple[list[int], Finish]:
    events = events_of(engine.submit(request))
    assert isinstance(events[-1], Finish)
    return [event.token for event in events if isinstance(event, Piece)], events[-1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"positions": "compact"}, 'chunks: recompute: positions="compact"'),
        ({"store": "int4(sinks=2, newest=5)"}, "chunks: recompute: store"),
    ],
)
def test_rows_that_read_nothing_again(attached_model: Models, options: dict[str, Any], said: str) -> None:
    request = usual(options=options_of(budget=90, **options))
    with pytest.raises(UsageError, match=said.replace("(", r"\(")):
        read(attached_model("llama"), request, PrefixCache(PLENTY))
    assert read(attached_model("llama"), usual("none", options=request.options), PrefixCache(PLENTY)).recomputed == 0
