"""Prefixes of hybrids: a prompt goes on from the longest one at which there is a checkpoint of recurrent states."""

from collections.abc import Sequence
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tests.helpers.hybrid_caches import each_kind
from tests.helpers.hybrids import bound
from tests.helpers.models import MODEL, Text
from tests.helpers.schedulers import bytes_told, events_of, options_of, request_of, rows_of, running
from windlass import KVCache
from windlass.cache.options import CacheOptions
from windlass.core.step import PROMPT
from windlass.engine.prefill import feed, feed_tokens
from windlass.engine.prefix_cache import key_of
from windlass.engine.request import EXACT, PREFIX, Finish, Piece, Reuse, ReuseMode
from windlass.engine.row_bytes import RowBytes

WIDE, PLENTY, ANSWER = 400, 1 << 28, 7  # a budget above all tokens of a conversation, memory for any, tokens
Ids = list[int]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


class Asked:
    """Requests to an engine, one after the other."""

    def __init__(self, engine: Any, options: CacheOptions, mode: ReuseMode = PREFIX, **given: Any) -> None:
        self._engine, self._given = engine, {"options": options, "reuse": Reuse(mode=mode), **given}

    def __call__(self, ids: Ids, *ends: int) -> tuple[Ids, int]:
        """The answer, and the tokens of the prompt that were cached."""
        events = events_of(self._engine.submit(request_of(ids, ANSWER, ends=ends, **self._given)))
        assert isinstance(events[-1], Finish), events[-1]
        assert events[-1].usage.seen == len(ids) + ANSWER - 1
        return [each.token for each in events if isinstance(each, Piece)], events[-1].usage.cached


def written(model: PreTrainedModel, options: CacheOptions, pieces: list[Ids | int]) -> Ids:
    """The greedy answer of one cache behind these passes. A number is a token that was written."""
    cache = KVCache.from_options(model, options)
    for piece in pieces:
        if isinstance(piece, int):
            logits = feed_tokens(model, cache, {0: piece})[0]
        else:
            logits = feed(model, cache, [piece], [len(piece) - 1], PROMPT)[0, -1]
    found = [int(logits.argmax())]
    while len(found) < ANSWER:
        found.append(int(feed_tokens(model, cache, {0: found[-1]})[0].argmax()))
    return found


@each_kind
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("mode", [PREFIX, ReuseMode("edited")], ids=str)
def test_a_message_that_is_edited_is_read_again_from_its_beginning(
    tokenizer: PreTrainedTokenizerBase, text: Text, family: str, rows: int, mode: ReuseMode
) -> None:
    """The answers are those of one cache that was fed in the same passes, and never had the other text."""
    model, own = bound(family), options_of(budget=WIDE, chunk=40)
    first, second, edited, third = rows_of(text, 21, 5, 9, 4)
    with running(model, tokenizer, kinds=[(rows, own)], reuse_bytes=PLENTY) as engine:
        ask, held = Asked(engine, own, mode), bytes_told(engine)
        one, cached = ask(first)
        assert (one, cached) == (written(model, own, [first]), 0)
        base, fed = first + one, list[Ids | int]([first, *one[:-1], one[-1:]])
        two, cached = ask(base + second, 21, 28)
        assert (two, cached) == (written(model, own, [*fed, second]), 27)  # of the row that has the answer
        for last in (edited, second):  # the message is edited, and edited back
            assert ask(base + last, 21, 28) == (written(model, own, [*fed, last]), 28)
        three, cached = ask(base + second + two + third, 21, 28, 33, 40)
        assert (three, cached) == (written(model, own, [*fed, second, *two[:-1], two[-1:], third]), 39)
        assert ask(first + third, 21) == (written(model, own, [first, third]), 21)  # the answer is stripped
        assert ask(first[:20] + third, 20)[1] == 0
        assert engine.status().bytes_held <= engine.status().bytes_limit
        assert max(held) <= engine.status().bytes_limit


@each_kind
def test_an_exact_turn_is_that_of_an_engine_without_reuse(
    tokenizer: PreTrainedTokenizerBase, text: Text, family: str
) -> None:
    """To the bit: it goes on from ends of the passes in which it would read its prompt itself."""
    model, own = bound(family), options_of(budget=WIDE)
    first, second, edited = rows_of(text, 30, 15, 18)
    found = []
    for reuse_bytes in (0, PLENTY):
        with running(model, tokenizer, kinds=[(2, own)], reuse_bytes=reuse_bytes) as engine:
            ask = Asked(engine, own, EXACT)
            one, _ = ask(first, 19)
            turns = [ask(first + one + last, 19, 30, 37) for last in (second, edited, second)]
            turns += [ask(first[:19] + last, 19) for last in (edited, second)]
            found.append([one, *(answer for answer, _ in turns)])
            cached = [each for _, each in turns]
    assert found[0] == found[1]
    assert cached == [30, 37, 37 + 15, 19, 19]  # the third turn is the first once more


def test_two_conversations_are_ragged_rows_of_one_lane(tokenizer: PreTrainedTokenizerBase, text: Text) -> None:
    """Rows keep checkpoints of their own while others write beside them."""
    model, own = bound("falcon_h1"), options_of(budget=WIDE, chunk=40)
    texts = rows_of(text, 25, 11, 7, 16)
    with running(model, tokenizer, kinds=[(3, own)], reuse_bytes=PLENTY) as engine:

        def both(prompts: list[Ids], ends: Sequence[tuple[int, ...]]) -> list[tuple[Ids, int]]:
            given = {"options": own, "reuse": Reuse(mode=PREFIX)}
            pairs = zip(prompts, ends, strict=True)
            tickets = [engine.submit(request_of(ids, ANSWER, ends=own, **given)) for ids, own in pairs]
            events = [events_of(each) for each in tickets]
            usages = [each[-1].usage for each in events if isinstance(each[-1], Finish)]
            tokens = [[one.token for one in each if isinstance(one, Piece)] for each in events]
            return [(own, usage.cached) for own, usage in zip(tokens, usages, strict=True)]

        answers = [one for one, _ in both(texts[:2], [(), ()])]
        bases = [own + one for own, one in zip(texts[:2], answers, strict=True)]
        ends = [(25, 32), (11, 18)]
        for news, cached in ((texts[2:], [31, 17]), (texts[:1:-1], [32, 18])):
            pairs = [*zip(bases, news, strict=True)]
            found = both([base + new for base, new in pairs], ends)
            truth = [written(model, own, [base[:-ANSWER], *base[-ANSWER:-1], base[-1:], new]) for base, new in pairs]
            assert found == [*zip(truth, cached, strict=True)]


def test_a_row_beyond_its_budget_serves_as_a_whole(tokenizer: PreTrainedTokenizerBase, text: Text) -> None:
    """Its attention layers have evicted, so no checkpoint helps, and none is made."""
    model, own = bound("lfm2"), options_of(budget=24)
    first, second, edited = rows_of(text, 40, 5, 9)
    with running(model, tokenizer, kinds=[(1, own)], reuse_bytes=PLENTY) as engine:
        ask = Asked(engine, own)
        one, _ = ask(first, 31)
        assert ask(first + one + second, 31, 40, 47)[1] == 46
        assert ask(first + one + edited, 31, 40, 47)[1] == 40 + ANSWER
        held = engine._snapshots.kept.of(key_of(request_of([1], options=own, reuse=Reuse(mode=PREFIX))))
        assert not any(own for each in held for own in each.cache.checkpoints)


def test_rows_are_counted_with_all_their_checkpoints(text: Text) -> None:
    """No row takes more bytes than is told beforehand."""
    model, own = bound("qwen3_next"), options_of(budget=WIDE)
    cache, most = KVCache.from_options(model, own), RowBytes.of(model, own)
    for seed in range(12):
        feed(model, cache, [text(9, seed=seed).tolist()[0]], [], PROMPT)
        cache.forget_steps()
        cache.checkpoint()
        assert cache.bytes_held <= most.reading(9 * (seed + 1))
    states = sum(each.nbytes for layer in cache.recurrent for each in layer.tensors().values())
    assert most.fixed >= 8 * states
