"""Drafts change no text: what a request writes with them is what it writes token by token."""

import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import windlass
from tests.helpers.models import MODEL, Models, Text
from tests.helpers.schedulers import events_of, options_of, request_of, running, tokens_of
from windlass import KVCache, Sampling, UsageError
from windlass.cache.options import CacheOptions
from windlass.engine import speculate
from windlass.engine.request import PREFIX, Event, Finish, Grammar, Piece, Request, Reuse
from windlass.engine.scheduler import Scheduler
from windlass.engine.speculate import (
    DRAFT_COST,
    FIRST_CREDIT,
    LONGEST,
    MATCHED,
    PASS_COST,
    SHARE,
    Drafter,
    LookupIndex,
    take_back,
)
from windlass.engine.text import Stops
from windlass.policies import H2O, NAMES, KeyDiff, Policy, Recent, SnapKV
from windlass.policies.base import ModelSpecific
from windlass.testing.models import tiny_hybrid

POLICIES = [policy() for policy in NAMES.values() if not issubclass(policy, ModelSpecific)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


def test_an_index_finds_the_longest_of_the_latest_places() -> None:
    index = LookupIndex()
    for token in [1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]:
        index.push(token)
    assert index.following(3, least_match=2) == [7, 9, 2]  # 1 2 3 7, though 2 3 8 is later
    assert index.following(3, least_match=4) == []
    for token in [8, 2, 3]:
        index.push(token)
    assert index.following(5, least_match=2) == [8, 2, 3, 8, 2]  # 1 2 3 8 2 3: the draft repeats itself
    assert [len(index.following(most, 2)) for most in (1, 4)] == [1, 4]


def test_an_index_finds_what_a_search_of_the_whole_text_finds() -> None:
    """The longest match within a few places, by plain search over lists."""
    draw, text, index, found = random.Random(3), list[int](), LookupIndex(), 0
    for _ in range(600):
        text.append(draw.choice([3, 5, 7, 90_000, 11]))
        index.push(text[-1])
        places = [at for at in range(len(text) - 2, 0, -1) if text[at - 1 : at + 1] == text[-2:]][
            : speculate.CANDIDATES
        ]

        def match(at: int) -> int:
            return next((n for n in range(MATCHED) if n > at or text[at - n] != text[len(text) - 1 - n]), MATCHED)

        best = max(places, key=match, default=None)  # the first of equals
        if best is None or match(best) < 3:
            assert index.following(4, 3) == []
            continue
        found += 1
        wanted = [*text]
        for ahead in range(4):
            wanted.append(wanted[best + 1 + ahead])
        assert index.following(4, 3) == wanted[len(text) :]
    assert found > 100


def test_drafts_that_fail_cost_a_bounded_share() -> None:
    """A text whose every draft is wrong pays the first credit and a share of each token, and no more."""
    draw, drafter, cost, passes = random.Random(5), Drafter(range(50)), 0.0, 0
    for tokens in range(1, 3000):
        drafter.push(draw.randrange(3))
        drafts = drafter.draft(LONGEST)
        drafter.note(len(drafts), 0)
        cost += (PASS_COST + DRAFT_COST * len(drafts)) * bool(drafts)
        passes += bool(drafts)
        assert cost <= FIRST_CREDIT + SHARE * tokens
    assert passes > 20


def test_drafts_grow_while_they_are_right_and_end_within_what_is_left() -> None:
    drafter, lengths = Drafter([*range(30)] * 2), list[int]()
    at = 0
    while at < 60:
        drafts = drafter.draft(17)
        lengths.append(len(drafts))
        drafter.note(len(drafts), len(drafts))
        for _ in range(len(drafts) + 1):
            drafter.push(at % 30)
            at += 1
    assert lengths[:4] == [4, 8, 15, 15]
    assert len(drafter.draft(2)) == 2
    assert drafter.draft(0) == []


class Prophet:
    """Drafts the text that will come, with a wrong token at a place that depends on the length of the text."""

    def __init__(self, truths: Sequence[Sequence[int]]) -> None:
        self.truths, self.outcomes = [list(each) for each in truths], list[tuple[int, int]]()

    def draft(self, drafter: Drafter, most: int) -> list[int]:
        assert isinstance(drafter._source, LookupIndex)
        text = list(drafter._source._text)
        truth = next((each for each in self.truths if each[: len(text)] == text), [])
        length = min(most, 1 + len(text) % 6)
        drafts = (truth[len(text) :] + [5] * 9)[: max(length, 0)]
        wrong = len(text) % 8
        return [token if at != wrong else (token + 1) % 90 for at, token in enumerate(drafts)]

    def install(self, patch: pytest.MonkeyPatch) -> "Prophet":
        patch.setattr(Drafter, "draft", lambda own, most: self.draft(own, most))
        patch.setattr(Drafter, "note", lambda _, drafted, accepted: self.outcomes.append((drafted, accepted)))
        return self

    def check(self) -> None:
        """Drafts of several lengths were accepted in part, and whole."""
        tried = [(drafted, accepted) for drafted, accepted in self.outcomes if drafted]
        assert any(0 < accepted < drafted for drafted, accepted in tried), self.outcomes
        assert any(accepted == drafted > 1 for drafted, accepted in tried), self.outcomes
        assert any(accepted <= 0 for _, accepted in tried), self.outcomes


def written(events: Sequence[Event]) -> tuple[list[Event], list[float]]:
    """The events of a text but for the progress of its prompt, without the bytes that it happens to hold.

    Log probabilities come apart from them: passes of several tokens round float32 otherwise.
    """
    found, values = list[Event](), list[float]()
    for event in events:
        if isinstance(event, Piece):
            values += [each.value for each in event.logprobs]
            found.append(replace(event, logprobs=tuple(replace(each, value=0.0) for each in event.logprobs)))
        elif isinstance(event, Finish):
            found.append(replace(event, usage=replace(event.usage, bytes=0)))
    return found, values


def assert_same(found: Sequence[Event], truth: Sequence[Event]) -> None:
    (events, values), (known, known_values) = written(found), written(truth)
    assert events == known
    assert values == pytest.approx(known_values, abs=1e-4)


def assert_drafts_change_nothing(
    patch: pytest.MonkeyPatch,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    request: Callable[[], Request],
    reuse_bytes: int = 0,
) -> None:
    """A request gives the same events with drafts, mostly right ones and mostly wrong, and those of the lookup."""
    kinds = [(1, request().options)]
    with running(model, tokenizer, kinds=kinds, reuse_bytes=reuse_bytes) as engine:
        truth = events_of(engine.submit(request()))
    tokens = [event.token for event in truth if isinstance(event, Piece)]
    drafted = lambda: replace(request(), speculate="lookup")  # noqa: E731
    with running(model, tokenizer, kinds=kinds, reuse_bytes=reuse_bytes) as engine:
        assert_same(events_of(engine.submit(drafted())), truth)
    with patch.context() as inner:
        prophet = Prophet([[*request().prompt, *tokens]]).install(inner)
        with running(model, tokenizer, kinds=kinds, reuse_bytes=reuse_bytes) as engine:
            assert_same(events_of(engine.submit(drafted())), truth)
    prophet.check()


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_every_policy(
    monkeypatch: pytest.MonkeyPatch,
    attached_model: Models,
    tokenizer: PreTrainedTokenizerBase,
    text: Text,
    policy: Policy,
) -> None:
    ids, options = text(30)[0].tolist(), options_of(policy=policy)
    assert_drafts_change_nothing(
        monkeypatch, attached_model("llama"), tokenizer, lambda: request_of(ids, 40, options=options)
    )


@pytest.mark.parametrize(
    "options",
    [
        {"budget": 200},
        {"budget": 39, "policy": H2O()},
        {"store": "int8"},
        {"store": "int4(sinks=3, newest=5)", "policy": KeyDiff()},
        {"store": "int4(sinks=3, newest=5)", "budget": 200},
        {"recall": 8, "policy": KeyDiff()},
        {"recall": 8, "policy": SnapKV(observed_queries=4), "recall_store": "plain"},
        {"merge": "mean_count", "policy": KeyDiff()},
        {"merge": "mean_count(next)", "policy": Recent(), "store": "int8"},
        {"positions": "compact", "policy": H2O()},
        {"positions": "self_extend(4, 8)"},
        {"positions": "clamp(20)"},
    ],
    ids=str,
)
def test_stores_recall_merges_and_modes(
    monkeypatch: pytest.MonkeyPatch,
    attached_model: Models,
    tokenizer: PreTrainedTokenizerBase,
    text: Text,
    options: dict[str, Any],
) -> None:
    ids = text(30)[0].tolist()
    assert_drafts_change_nothing(
        monkeypatch, attached_model("llama"), tokenizer, lambda: request_of(ids, 40, options=options_of(**options))
    )


@pytest.mark.parametrize("budget", [17, 200])
@pytest.mark.parametrize("family", ["mistral", "gemma3", "gemma3n", "deepseek_v3", "gpt_oss", "llama_dynamic", "phi3"])
def test_families(
    monkeypatch: pytest.MonkeyPatch,
    attached_model: Models,
    tokenizer: PreTrainedTokenizerBase,
    text: Text,
    family: str,
    budget: int,
) -> None:
    """The texts pass the length for which the two last ones were trained, where their rotation changes."""
    ids, options = text(30)[0].tolist(), options_of(budget=budget, positions="original")
    assert_drafts_change_nothing(
        monkeypatch, attached_model(family), tokenizer, lambda: request_of(ids, 40, options=options)
    )


class Steps(Grammar):
    """A token that is 1, 2 or 3 above the one before, within 90. It allows none after `most`."""

    def __init__(self, most: int = 1000) -> None:
        self.came, self._most = [0], most

    def allowed(self) -> Tensor:
        mask = torch.zeros(97, dtype=torch.bool)
        if len(self.came) <= self._most:
            mask[[(self.came[-1] + ahead) % 90 for ahead in (1, 2, 3)]] = True
        return mask

    def accept(self, token: int) -> None:
        self.came.append(token)


@pytest.mark.parametrize(
    "given",
    [
        {"sampling": Sampling(temperature=0.8, seed=4)},
        {"sampling": Sampling(temperature=1.3, top_k=7, top_p=0.9, min_p=0.02, repetition_penalty=1.4, seed=9)},
        {"presence_penalty": 0.7, "frequency_penalty": 0.9},
        {"logit_bias": {3: 9.0, 8: 8.5}, "sampling": Sampling(temperature=0.9, seed=2)},
        {"top_logprobs": 3, "frequency_penalty": 0.4, "sampling": Sampling(temperature=0.7, seed=3)},
        {"grammar": Steps, "sampling": Sampling(temperature=0.9, seed=2)},
    ],
    ids=lambda given: "-".join(given),
)
def test_the_processed_distribution_decides(
    monkeypatch: pytest.MonkeyPatch,
    attached_model: Models,
    tokenizer: PreTrainedTokenizerBase,
    text: Text,
    given: dict[str, Any],
) -> None:
    """Sampled with the same seed, the text is the same: a draft stands where its token is drawn, with its share."""
    ids = text(30)[0].tolist()

    def request() -> Request:
        made = {name: value() if name == "grammar" else value for name, value in given.items()}
        return request_of(ids, 60, **made)

    assert_drafts_change_nothing(monkeypatch, attached_model("llama"), tokenizer, request)


@pytest.mark.parametrize("max_tokens", [2, 3, 19])
def test_ends(
    monkeypatch: pytest.MonkeyPatch,
    attached_model: Models,
    tokenizer: PreTrainedTokenizerBase,
    text: Text,
    max_tokens: int,
) -> None:
    """A text ends at its limit and at its stops, also where drafts go on behind them."""
    model, ids = attached_model("llama"), text(30)[0].tolist()
    with running(model, tokenizer, rows=1) as engine:
        whole = tokens_of(engine.submit(request_of(ids, 40)))
    for stops in (
        Stops(frozenset()),
        Stops(frozenset(whole[11:12])),
        Stops(frozenset(), (str(tokenizer.decode(whole[9:11])),)),
    ):
        request = request_of(ids, max_tokens, stops=stops)
        with running(model, tokenizer, rows=1) as engine:
            truth = events_of(engine.submit(request))
        with monkeypatch.context() as inner:
            Prophet([[*ids, *whole]]).install(inner)
            inner.setattr(Drafter, "draft", lambda own, most: whole[own.tokens - len(ids) :][: max(most, 0)])
            with running(model, tokenizer, rows=1) as engine:
                assert_same(events_of(engine.submit(replace(request, speculate="lookup"))), truth)


def test_a_grammar_that_allows_no_more_fails_its_request_alone(
    monkeypatch: pytest.MonkeyPatch, attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    model, ids = attached_model("llama"), text(30)[0].tolist()
    with running(model, tokenizer, rows=1) as engine:
        truth = events_of(engine.submit(request_of(ids, 40, grammar=Steps(9))))
    tokens = [event.token for event in truth if isinstance(event, Piece)]
    Prophet([[*ids, *tokens, *tokens]]).install(monkeypatch)
    with running(model, tokenizer, rows=1) as engine:
        drafted = events_of(engine.submit(request_of(ids, 40, grammar=Steps(9), speculate="lookup")))
        assert [event for event in drafted if isinstance(event, Piece)] == [e for e in truth if isinstance(e, Piece)]
        assert drafted[-1] == truth[-1]
        assert engine.status().errors_total == 0


def test_turns_behind_an_answer_with_drafts(
    monkeypatch: pytest.MonkeyPatch, attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    """The second turn takes over the row, which has evicted or not, and finds the copy that was made before that."""
    model, found = attached_model("llama"), list[list[Event]]()
    ids, more = text(18)[0].tolist(), text(7, seed=3)[0].tolist()
    options, reuse = options_of(budget=31), Reuse(mode=PREFIX)
    for drafts in (None, "lookup"):
        with running(model, tokenizer, kinds=[(1, options)], reuse_bytes=1 << 22) as engine:
            first = events_of(engine.submit(request_of(ids, 24, options=options, speculate=drafts, reuse=reuse)))
            tokens = [event.token for event in first if isinstance(event, Piece)]
            asked = [*ids, *tokens, *more], [*ids, *tokens[:5], *more]
            turns = [
                events_of(engine.submit(request_of(each, 9, options=options, speculate=drafts, reuse=reuse)))
                for each in asked
            ]
            found.append([event for turn in (first, *turns) for event in written(turn)[0]])
        if drafts is None:
            Prophet([[*ids, *tokens]]).install(monkeypatch)
    assert found[0] == found[1]
    cached = [event.usage.cached for event in found[0] if isinstance(event, Finish)]
    assert cached[1] > 18, cached


def test_a_row_beside_others_drafts_nothing_and_goes_on_alone(
    monkeypatch: pytest.MonkeyPatch, attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    model = attached_model("llama")
    prompts = [text(length, seed=length)[0].tolist() for length in (41, 12, 30)]
    lengths = (90, 11, 23)
    truths = list[list[int]]()
    for ids, count in zip(prompts, lengths, strict=True):
        with running(model, tokenizer, rows=1) as engine:
            truths.append(tokens_of(engine.submit(request_of(ids, count))))
    prophet = Prophet([[*ids, *own] for ids, own in zip(prompts, truths, strict=True)]).install(monkeypatch)
    with running(model, tokenizer, rows=3) as engine:
        asked = [request_of(ids, n, speculate="lookup") for ids, n in zip(prompts, lengths, strict=True)]
        assert [tokens_of(each) for each in engine.submit_all(asked)] == truths
    prophet.check()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, top_p=0.9, repetition_penalty=1.2, seed=5)])
@pytest.mark.parametrize(
    "options", [{}, {"budget": 40, "policy": SnapKV()}, {"budget": 40, "policy": KeyDiff()}], ids=str
)
def test_the_library_writes_the_same_text(
    monkeypatch: pytest.MonkeyPatch,
    finder: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    sampling: Sampling,
    options: dict[str, Any],
) -> None:
    prompt, stop = "There were four of us--George, and William Samuel Harris, and", None
    for more in ({}, {"max_tokens": 3}):
        run: dict[str, Any] = {"max_tokens": 45, "sampling": sampling, "stop": stop} | more
        caches = [KVCache(finder, chunk=9, **options) for _ in range(3)]
        (truth,) = windlass.generate(finder, tokenizer, [prompt], caches[0], **run)
        (looked_up,) = windlass.generate(finder, tokenizer, [prompt], caches[1], speculate="lookup", **run)
        with monkeypatch.context() as inner:
            assert caches[0].tokens is not None
            prophet = Prophet(caches[0].tokens).install(inner)
            stream = windlass.stream(finder, tokenizer, prompt, caches[2], speculate="lookup", **run)
            assert "".join(stream) == truth.text
        if not more:
            prophet.check()
            stop = [tokenizer.decode(truth.tokens[20:22])]
        for result, cache in zip((looked_up, stream.result), caches[1:], strict=True):
            assert (result.tokens, result.text) == (truth.tokens, truth.text)
            assert result.finish_reason == truth.finish_reason
            assert cache.tokens == caches[0].tokens


def test_a_caller_that_stops_early_finds_the_tokens_that_came(
    monkeypatch: pytest.MonkeyPatch, finder: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> None:
    prompt, cache = "There were four of us--George, and", KVCache(finder)
    (truth,) = windlass.generate(finder, tokenizer, [prompt], KVCache(finder), 40)
    ids = tokenizer(prompt)["input_ids"]
    Prophet([[*ids, *truth.tokens]]).install(monkeypatch)
    stream = windlass.stream(finder, tokenizer, prompt, cache, 40, speculate="lookup")
    for _ in range(4):
        next(stream)
        assert cache.tokens == [ids + stream.result.tokens]
    assert 4 < len(stream.result.tokens) < 40


@pytest.fixture(scope="module")
def finder() -> PreTrainedModel:
    model, _ = windlass.load(MODEL, dtype="float32")
    return model


def test_ctrl_c_waits_for_a_rollback(monkeypatch: pytest.MonkeyPatch, attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(20)
    cache = KVCache(model, budget=12, sinks=2, window=3)
    windlass.prefill(model, cache, ids.tolist())
    own = KVCache.rollback

    def rollback(cache: KVCache, tokens: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        own(cache, tokens)

    with torch.no_grad():
        model(text(3, seed=4), past_key_values=cache)
    monkeypatch.setattr(KVCache, "rollback", rollback)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in the background
    try:
        with pytest.raises(KeyboardInterrupt):
            take_back(cache, 2)
        assert cache.tokens_seen == [21]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_refusals(tokenizer: PreTrainedTokenizerBase, finder: PreTrainedModel) -> None:
    with pytest.raises(UsageError, match="speculate='draft' is no kind of drafts"):
        windlass.stream(finder, tokenizer, "He", KVCache(finder), speculate="draft")
    with pytest.raises(UsageError, match="speculate drafts one text, but the cache has batch=2"):
        windlass.generate(finder, tokenizer, ["He", "She"], speculate="lookup")
    hybrid = windlass.attach(tiny_hybrid("qwen3_next"))
    with pytest.raises(UsageError, match=r"speculate='lookup' takes single drafts back, and layer 0 .* Leave"):
        windlass.generate(hybrid, tokenizer, ["He"], speculate="lookup")
    options = CacheOptions(budget=17, sinks=2, window=3)
    with pytest.raises(UsageError, match="speculate='lookup' takes single drafts back"):
        Scheduler(hybrid, tokenizer, [(1, options)], speculate="lookup")
    with running(hybrid, tokenizer, kinds=[(1, options_of())]) as engine:
        with pytest.raises(UsageError, match="takes single drafts back"):
            engine.submit(request_of([1, 2, 3], speculate="lookup"))
        assert tokens_of(engine.submit(request_of([1, 2, 3], speculate="off")))


def test_the_server_decides_for_requests_that_do_not_say(
    monkeypatch: pytest.MonkeyPatch, attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    model, ids, lengths = attached_model("llama"), text(30)[0].tolist(), list[int]()

    def draft(_: Drafter, most: int) -> list[int]:
        lengths.append(most)
        return []

    monkeypatch.setattr(Drafter, "draft", draft)
    for default, asked, drafts in (
        (None, None, False),
        ("lookup", None, True),
        ("lookup", "off", False),
        (None, "lookup", True),
    ):
        scheduler = Scheduler(model, tokenizer, [(1, options_of())], speculate=default)
        scheduler.start()
        lengths.clear()
        tokens_of(scheduler.submit(request_of(ids, 5, speculate=asked)))
        scheduler.stop()
        assert bool(lengths) == drafts, (default, asked)
    assert lengths == [3, 2, 1, 0]
