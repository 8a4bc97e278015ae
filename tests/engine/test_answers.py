"""A conversation's next turn goes on from the row that has its prompt and its answer."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import windlass
from tests.helpers.conversations import LOOSE, PLENTY, WIDE, Conversation, chat
from tests.helpers.hybrids import bound
from tests.helpers.models import MODEL, Models, Text
from tests.helpers.schedulers import (
    bytes_told,
    events_of,
    options_of,
    request_of,
    rows_of,
    running,
    tokens_of,
    wait_for,
)
from windlass import KVCache
from windlass.cache.edits import holds_all
from windlass.core.errors import UsageError
from windlass.core.types import Tokens
from windlass.engine import prefill
from windlass.engine.prefix_cache import key_of
from windlass.engine.prefix_entry import EntrySelector, PrefixText
from windlass.engine.request import EXACT, PREFIX, EngineLimits, Failure, Finish, Piece, Reuse, ReuseMode
from windlass.engine.row_bytes import RowBytes


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of tokens of each pass over a prompt."""
    fed, real = list[int](), prefill.feed

    def feed(model: Any, cache: Any, pieces: Any, *rest: Any) -> Any:
        fed.append(sum(map(len, pieces)))
        return real(model, cache, pieces, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(prefill, "feed", feed)
        yield fed


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"budget": WIDE},
        {"budget": 40},
        {"budget": 40, "policy": "h2o", "store": "int8"},
        {"budget": 40, "policy": "snapkv", "store": "int4(sinks=2, newest=5)"},
        {"budget": WIDE, "sinks": "system"},
        {"budget": 40, "recall": 24},
        {"budget": WIDE, "recall": 24, "recall_store": "plain"},
    ],
    ids=str,
)
def test_ten_turns_read_each_token_once(
    monkeypatch: pytest.MonkeyPatch,
    attached_model: Models,
    tokenizer: PreTrainedTokenizerBase,
    text: Text,
    options: dict[str, Any],
    rows: int,
) -> None:
    """They are those of one cache that lives through all of them."""
    model, own = attached_model("llama"), options_of(**options)
    turns = rows_of(text, 21, 5, 17, 3, 9, 14, 1, 11, 6, 8)
    with running(model, tokenizer, kinds=[(rows, own)], reuse_bytes=PLENTY) as engine:
        talk = Conversation(engine, own)
        with counted(monkeypatch) as fed:
            answers = [talk.turn(new) for new in turns]
        assert sum(fed) == len(talk.ids) - 10 * 7 + 9  # and the last token of each answer but the last
        assert engine.status().bytes_held <= engine.status().bytes_limit
    read = [usage.prompt - usage.cached for usage in talk.usages]
    assert read == [len(turns[0]), *(len(new) + 1 for new in turns[1:])]
    assert [usage.seen for usage in talk.usages] == [usage.prompt + 6 for usage in talk.usages]
    assert answers == chat(model, own, turns)


@pytest.mark.parametrize("budget", [40, WIDE])
def test_recall_and_reuse_go_together(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text, budget: int
) -> None:
    """Tokens that a conversation can recall are kept with its row, and count in the limit."""
    model, own = attached_model("llama"), options_of(budget=budget, recall=16)
    turns = rows_of(text, 21, 5, 60, 3, 9)
    with running(model, tokenizer, kinds=[(1, options_of())], reuse_bytes=PLENTY) as engine:
        talk = Conversation(engine, own)
        assert [talk.turn(new) for new in turns] == chat(model, own, turns)
        read = [usage.prompt - usage.cached for usage in talk.usages]
        assert read == [len(turns[0]), *(len(new) + 1 for new in turns[1:])]
        entries = engine._snapshots.kept.of(key_of(request_of([1], options=own, reuse=LOOSE)))
        assert max(each.cache.recall_bytes for each in entries) > 0
        sizes = [each.cache.bytes_held + each.cache.recall_bytes + each.logits_bytes for each in entries]
        assert engine._snapshots.kept.bytes == sum(sizes)
        branch = talk.ids[: len(turns[0]) + 7] + turns[2]
        events = events_of(engine.submit(request_of(branch, 7, options=own, ends=(21, 28), reuse=LOOSE)))
        assert isinstance(events[-1], Finish)
        assert events[-1].usage.cached == 28


def test_a_turn_that_is_exact_reads_answers_again(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    """Its text is that of an engine without reuse, where a turn before was not exact."""
    model, own = attached_model("llama"), options_of(budget=WIDE)
    turns = rows_of(text, 21, 5, 17)

    def answers(reuse_bytes: int, *exact: bool) -> list[tuple[list[int], int]]:
        with running(model, tokenizer, kinds=[(2, own)], reuse_bytes=reuse_bytes) as engine:
            talk, found = Conversation(engine, own), []
            for new, is_exact in zip(turns, exact, strict=True):
                talk._given["reuse"] = Reuse(mode=EXACT if is_exact else PREFIX)
                found.append((talk.turn(new), talk.usages[-1].cached))
            return found

    again = answers(0, True, True, True)
    assert [text for text, _ in answers(PLENTY, True, True, True)] == [text for text, _ in again]
    mixed = answers(PLENTY, True, False, True)
    assert mixed[2][0] == again[2][0]
    assert [cached for _, cached in mixed] == [0, 21 + 6, 21]
    assert [cached for _, cached in answers(PLENTY, True, True, True)] == [0, 21, 21 + 7 + 5]


@pytest.mark.parametrize("mode", [EXACT, PREFIX, ReuseMode("edited", 4)], ids=str)
@pytest.mark.parametrize("count", [3, 19])
def test_the_same_prompt_again_takes_no_pass(
    monkeypatch: pytest.MonkeyPatch,
    attached_model: Models,
    tokenizer: PreTrainedTokenizerBase,
    text: Text,
    mode: ReuseMode,
    count: int,
) -> None:
    """Its row knows the logits behind it, while it is written and afterwards. The text is that of the first time."""
    model, own = attached_model("llama"), options_of(budget=4000)
    (ids,) = rows_of(text, 30)
    given: dict[str, Any] = {"options": own, "ends": (4, 21), "reuse": Reuse(mode=mode)}
    limits = EngineLimits(max_tokens=10**6)
    with running(model, tokenizer, kinds=[(2, own)], limits=limits, reuse_bytes=PLENTY) as engine:

        def asked(prompt: list[int], tokens: int) -> tuple[list[int], int]:
            events = events_of(engine.submit(request_of(prompt, tokens, **given)))
            assert isinstance(events[-1], Finish)
            return [each.token for each in events if isinstance(each, Piece)], events[-1].usage.cached

        first, cached = asked(ids, count)
        assert cached == 0
        with counted(monkeypatch) as fed:
            assert [asked(ids, count) for _ in range(3)] == [(first, 30)] * 3
            assert asked(ids, 1) == (first[:1], 30)
            assert fed == []
            longer = asked([*ids, 7], count)
            assert (sum(fed), longer[1]) == ((10, 21) if mode is EXACT else (1, 30))
            writing = engine.submit(request_of(longer[0] * 9, 3500, **given))
            wait_for(lambda: any(isinstance(each, Piece) for each in writing.take(1.0)))
            fed.clear()
            assert asked(longer[0] * 9, 2)[1] == 9 * count
            assert fed == []
            engine.cancel(writing)
        assert engine.status().bytes_held <= engine.status().bytes_limit


@pytest.mark.parametrize(
    ("row", "tokens"),
    [
        ({}, 6),
        ({"logits_end": 7}, 7),
        ({"logits_end": 6}, 6),
        ({"logits_end": 9}, 6),
        ({"logits_end": 7, "exact_tokens": 5}, 5),
        ({"logits_end": 7, "checkpoints": (3, 7)}, 7),
        ({"logits_end": 7, "checkpoints": (3, 6)}, 6),
        ({"logits_end": 7, "holds_all": False}, 0),
    ],
)
@pytest.mark.parametrize("mode", [PREFIX, EXACT], ids=str)
def test_a_prompt_is_used_to_its_end_where_its_logits_are_known(
    row: dict[str, Any], tokens: int, mode: ReuseMode
) -> None:
    """A row has 9 tokens, read one by one, and a prompt is its first 7."""
    ids = range(9)
    text = PrefixText(**{"tokens": Tokens.of(ids), "passes": tuple(range(1, 10)), "holds_all": True, **row})
    asked = request_of(list(ids[:7]), ends=tuple(range(1, 7)), reuse=Reuse(mode=mode))
    assert text.usable(asked) == tokens


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("budget", [WIDE, 40])
def test_two_branches_of_one_beginning(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text, budget: int, is_exact: bool
) -> None:
    """Neither costs the other what it has, whoever comes first, and both are what they are alone."""
    model, own = attached_model("llama"), options_of(budget=budget)
    first, one, other, last = rows_of(text, 30, 14, 15, 4)
    reuse = Reuse(mode=EXACT if is_exact else PREFIX)
    with running(model, tokenizer, kinds=[(3, own)], reuse_bytes=PLENTY) as engine:

        def asked(ids: list[int], *ends: int) -> tuple[list[int], int]:
            last = events_of(ticket := engine.submit(request_of(ids, 7, options=own, ends=ends, reuse=reuse)))
            assert isinstance(last[-1], Finish)
            assert ticket.is_over
            return [each.token for each in last if isinstance(each, Piece)], last[-1].usage.cached

        begun, _ = asked(first)
        base = first + begun
        found = [asked(base + end, 30, 37) for end in (one, other, one)]
        assert found[0][0] == found[2][0]
        assert found[0][1] == (30 if is_exact else 36)
        assert found[1][1] >= (37 if is_exact else 36)
        assert found[2][1] >= 37
        longer = asked(base + one + found[0][0] + last, 30, 37, 51, 58)
        assert longer[1] >= (50 if is_exact else 57)
        assert asked(base + other + found[1][0] + last, 30, 37, 52, 59)[1] >= (50 if is_exact else 58)
    with running(model, tokenizer, kinds=[(3, own)]) as engine:
        if is_exact:
            assert asked(base + one, 30, 37)[0] == found[0][0]
            assert asked(base + other, 30, 37)[0] == found[1][0]
            assert asked(base + one + found[0][0] + last, 30, 37, 51, 58)[0] == longer[0]


def test_a_row_that_is_written_is_copied_for_another(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    """While it goes on, another text begins from its beginning. Both are what they are alone."""
    model, own = attached_model("llama"), options_of(budget=WIDE)
    shared, one, other = rows_of(text, 39, 3, 9)
    limits = EngineLimits(max_tokens=300)
    with running(model, tokenizer, kinds=[(2, own)], limits=limits) as engine:
        alone = [tokens_of(engine.submit(request_of(shared + end, 200, options=own))) for end in (one, other)]
    with running(model, tokenizer, kinds=[(2, own)], limits=limits, reuse_bytes=PLENTY) as engine:
        first = engine.submit(request_of(shared + one, 200, options=own))
        wait_for(lambda: [row.phase for row in engine.status().rows] == ["writing"])
        second = events_of(engine.submit(request_of(shared + other, 20, options=own)))
        assert not first.is_over
        assert isinstance(second[-1], Finish)
        assert second[-1].usage.cached == 39
        assert [each.token for each in second if isinstance(each, Piece)] == alone[1][:20]
        assert tokens_of(first) == alone[0]


@pytest.mark.parametrize("budget", [WIDE, 60])
def test_a_text_that_was_cancelled_is_kept(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text, budget: int
) -> None:
    """In the middle of its answer, and of its prompt. The tokens that it had go on as they would have."""
    model, own = attached_model("llama"), options_of(budget=budget)
    (ids,) = rows_of(text, 30)
    limits = EngineLimits(max_tokens=10**6)
    with running(model, tokenizer, kinds=[(1, own)], limits=limits) as engine:
        truth = tokens_of(engine.submit(request_of(ids, 400, options=own)))
    with running(model, tokenizer, kinds=[(1, own)], limits=limits, reuse_bytes=PLENTY) as engine:
        ticket = engine.submit(request_of(ids, 10**6, options=own, reuse=LOOSE))
        had = [each.token for each in ticket.take(10.0) if isinstance(each, Piece)]
        while len(had) < 20:
            had += [each.token for each in ticket.take(10.0) if isinstance(each, Piece)]
        engine.cancel(ticket)
        wait_for(lambda: engine.status().free_rows == 1)
        had = truth[:20]
        events = events_of(engine.submit(request_of(ids + had, 30, options=own, reuse=LOOSE)))
        assert isinstance(events[-1], Finish)
        if budget == WIDE:
            assert events[-1].usage.cached == 49
            assert [each.token for each in events if isinstance(each, Piece)] == truth[20:50]
        long = ids * 300
        ticket = engine.submit(request_of(long, 5, options=own, reuse=LOOSE))
        wait_for(lambda: any(row.seen > 100 for row in engine.status().rows))
        engine.cancel(ticket)
        wait_for(lambda: engine.status().free_rows == 1)
        events = events_of(engine.submit(request_of(long[:5000], 5, options=own, reuse=LOOSE)))
        assert isinstance(events[-1], Finish)
        assert events[-1].usage.cached > 100


@pytest.mark.parametrize("other", [{"tenant": "b"}, {"reuse": Reuse(name="b", mode=PREFIX)}], ids=["tenant", "name"])
def test_who_may_not_share_does_not(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text, other: dict[str, Any]
) -> None:
    """Neither a row that is kept, nor one under way."""
    model, own = attached_model("llama"), options_of(budget=WIDE)
    (ids,) = rows_of(text, 30)
    ours: dict[str, Any] = {"options": own, "tenant": "a", "reuse": LOOSE}
    limits = EngineLimits(max_tokens=10**6)
    with running(model, tokenizer, kinds=[(2, own)], limits=limits, reuse_bytes=PLENTY) as engine:
        tokens_of(engine.submit(request_of(ids, 9, **ours)))
        ticket = engine.submit(request_of([*ids, 7], 10**6, **ours))
        ticket.take(10.0)
        for given, most in ((ours | other, 0), (ours, 30)):
            last = events_of(engine.submit(request_of([*ids, 8, 9], 1, **given)))[-1]
            assert isinstance(last, Finish)
            assert last.usage.cached == most
        engine.cancel(ticket)


@pytest.mark.parametrize("budget", [60, WIDE])
def test_the_limit_holds(attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text, budget: int) -> None:
    """Many conversations in turn, with room for two of them. What leaves is read again."""
    model, own, draw = attached_model("llama"), options_of(budget=budget), torch.Generator().manual_seed(1)
    with running(model, tokenizer, kinds=[(1, own)], reuse_bytes=PLENTY) as engine:
        Conversation(engine, own).turn(rows_of(text, 30)[0])
        size = engine._snapshots.kept.bytes
    limit = 2 * size + size // 2
    with running(model, tokenizer, kinds=[(2, own)], reuse_bytes=limit) as engine:
        held = bytes_told(engine)
        talks = [Conversation(engine, own) for _ in range(4)]
        for at in torch.randint(0, 4, (40,), generator=draw).tolist():
            talks[at].turn([at, *torch.randint(0, 90, (at + 1,), generator=draw).tolist()])
            assert engine._snapshots.kept.bytes <= limit
        assert 0 < max(held) <= engine.status().bytes_limit
        cached = [usage.cached for talk in talks for usage in talk.usages[1:]]
    assert 0 in cached
    assert max(cached) > 0


def test_deleted_rows_are_gone(attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text) -> None:
    model, own = attached_model("llama"), options_of(budget=WIDE)
    with running(model, tokenizer, kinds=[(1, own)], reuse_bytes=PLENTY) as engine:
        talk = Conversation(engine, own, tenant="a/x")
        for new in rows_of(text, 21, 4):
            talk.turn(new)
        (entry,) = engine.stored(EntrySelector("a"))
        assert entry.tokens == 21 + 7 + 4 + 6
        assert engine.stored(EntrySelector("b")) == []
        assert engine.forget(EntrySelector("a")) == [entry]
        talk.turn([3])
        assert talk.usages[-1].cached == 0


def test_a_hybrid_goes_on_from_its_answer(tokenizer: PreTrainedTokenizerBase, text: Text) -> None:
    """Its state can be cut back nowhere, so only the very end of a row serves."""
    model, own = bound("qwen3_next"), options_of(budget=WIDE)
    turns = rows_of(text, 21, 5, 17)
    with running(model, tokenizer, kinds=[(2, own)], reuse_bytes=PLENTY) as engine:
        talk = Conversation(engine, own)
        assert [talk.turn(new) for new in turns] == chat(model, own, turns)
        assert [usage.cached for usage in talk.usages] == [0, 27, 39]


def test_a_step_that_fails_keeps_nothing(
    monkeypatch: pytest.MonkeyPatch, attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    """After an error of the engine nobody knows what a row holds."""
    model, own = attached_model("llama"), options_of(budget=WIDE)
    with running(model, tokenizer, kinds=[(1, own)], reuse_bytes=PLENTY) as engine:
        talk, (ids,) = Conversation(engine, own), rows_of(text, 21)
        with monkeypatch.context() as patched:
            patched.setattr("windlass.engine.sequence.feed_tokens", lambda *_: 1 // 0)
            assert isinstance(events_of(engine.submit(request_of(ids, 7, options=own)))[-1], Failure)
        assert not engine._snapshots.kept.bytes
        assert talk.turn(ids) == chat(model, own, [ids])[0]


def test_a_copy_has_the_first_tokens_of_a_row(attached_model: Models, text: Text) -> None:
    """A cache that read no more goes on with the same numbers."""
    model, own = attached_model("llama"), options_of(budget=WIDE, batch=2)
    cache, ids = KVCache.from_options(model, own), rows_of(text, 60, 60)
    windlass.prefill(model, cache, ids)
    assert holds_all(cache, 1) == WIDE
    for row, tokens in ((1, 26), (0, 13), (1, 60)):
        ours, fresh = cache.copy_of_row(row, tokens), KVCache.from_options(model, options_of(budget=WIDE))
        truth = windlass.prefill(model, fresh, [ids[row]])
        assert ours.tokens == [ids[row][:tokens]]
        assert [layer.table.slots for layer in ours.layers] == [tokens] * len(ours.layers)
        if tokens < 60:
            torch.testing.assert_close(windlass.prefill(model, ours, [ids[row][tokens:]]), truth)
    assert cache.tokens == ids


@pytest.mark.parametrize("budget", [40, WIDE])
def test_rows_with_recall_stay_within_their_bytes(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text, budget: int
) -> None:
    """Texts of all lengths beside each other. One that needs more than a row may have is refused by name."""
    model, own = attached_model("llama"), options_of(budget=budget, recall=24)
    (size,) = (RowBytes.of(model, own).recalled(tokens) for tokens in (3000,))
    limits = EngineLimits(recall_bytes=5 * size)  # of three rows, and two prompts under way
    prompts = rows_of(text, 700, 31, 2990, 14, 160, 5)
    alone = [chat(model, own, [prompt], 9)[0] for prompt in prompts]
    with running(model, tokenizer, kinds=[(3, own)], limits=limits, reuse_bytes=PLENTY) as engine:
        held = bytes_told(engine)
        tickets = [engine.submit(request_of(prompt, 9, options=own)) for prompt in prompts]
        assert [tokens_of(ticket) for ticket in tickets] == alone
        wait_for(lambda: engine.status().free_rows == 3)
        assert 0 < max(held) <= engine.status().bytes_limit
        with pytest.raises(
            UsageError, match=r"recall=24 keeps all tokens of a text.* gives [\d,]+ to a row\. Lower max_t"
        ):
            engine.submit(request_of(prompts[2], 11, options=own))


def test_recalled_bytes_never_exceed_those_of_all_rows(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    model, own = attached_model("llama"), options_of(budget=40, recall=24)
    limits = EngineLimits(recall_bytes=5 * RowBytes.of(model, own).recalled(2000), alone=0)
    with running(model, tokenizer, kinds=[(3, own)], limits=limits) as engine:
        held = bytes_told(engine)
        found, told = [0], engine._told

        def noted() -> Any:
            caches = {id(cache): cache for cache in [engine._lanes[0].cache, *(task.cache for task in engine._tasks)]}
            found.append(sum(cache.recall_bytes for cache in caches.values()))
            return told()

        engine._told = noted  # type: ignore[method-assign]
        tickets = [
            engine.submit(request_of(prompt, 40, options=own)) for prompt in rows_of(text, 1960, 9, 1200, 1700, 3)
        ]
        for ticket in tickets:
            tokens_of(ticket)
        assert max(held) <= engine.status().bytes_limit
        wait_for(lambda: engine.status().free_rows == 3)
        assert engine._lanes[0].cache.recall_bytes == 0  # nobody writes in the lane
    assert limits.recall_bytes // 9 < max(found) <= limits.recall_bytes
