"""Texts that are written side by side are the texts that each request gives alone."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import windlass
from tests.helpers.models import MODEL, Models, Text
from tests.helpers.schedulers import (
    alone,
    bytes_told,
    events_of,
    options_of,
    request_of,
    rows_of,
    running,
    tokens_of,
    wait_for,
)
from windlass import KVCache, Sampling
from windlass.engine import sequence
from windlass.engine.prefill import Reader
from windlass.engine.request import EngineLimits, Event, Finish, Grammar, Piece, Ticket
from windlass.engine.sequence import Lane
from windlass.engine.text import Stops
from windlass.policies import NAMES, Policy
from windlass.policies.base import ModelSpecific

POLICIES = [policy() for policy in NAMES.values() if not issubclass(policy, ModelSpecific)]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_row_beside_others_writes_what_it_writes_alone(
    monkeypatch: pytest.MonkeyPatch,
    attached_model: Models,
    tokenizer: PreTrainedTokenizerBase,
    text: Text,
    policy: Policy,
) -> None:
    monkeypatch.setattr(sequence, "PATIENCE", 1)  # so that rows are moved often
    model, options = attached_model("llama"), options_of(policy=policy)
    prompts = rows_of(text, 41, 7, 30, 52, 1)
    truth = [alone(model, ids, options, 9 + number) for number, ids in enumerate(prompts)]
    with running(model, tokenizer, kinds=[(3, options)]) as engine:
        tickets = [engine.submit(request_of(ids, 9 + n, options=options)) for n, ids in enumerate(prompts)]
        assert [tokens_of(ticket) for ticket in tickets] == truth
        wait_for(lambda: engine.status().free_rows == 3)


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "deepseek_v3"])
def test_families(attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text, family: str) -> None:
    model, options = attached_model(family), options_of(store="int8")
    prompts = rows_of(text, 41, 7, 30)
    with running(model, tokenizer, kinds=[(2, options)]) as engine:
        tickets = [engine.submit(request_of(ids, 12, options=options)) for ids in prompts]
        found = [tokens_of(ticket) for ticket in tickets]
    assert found == [alone(model, ids, options, 12) for ids in prompts]


def test_other_options_have_a_cache_of_their_own(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    model, prompts = attached_model("llama"), rows_of(text, 41, 35, 60, 44)
    kinds = [options_of(), options_of(budget=24, policy="h2o"), options_of(recall=16), options_of(budget=None)]
    with running(model, tokenizer, kinds=[(1, kinds[0]), (1, kinds[1])]) as engine:
        tickets = [engine.submit(request_of(ids, 8, options=kind)) for ids, kind in zip(prompts, kinds, strict=True)]
        events = [events_of(ticket) for ticket in tickets]
    for ids, kind, own in zip(prompts, kinds, events, strict=True):
        assert [event.token for event in own if isinstance(event, Piece)] == alone(model, ids, kind, 8)
        last = own[-1]
        assert isinstance(last, Finish)
        usage, seen = last.usage, len(ids) + 7
        assert (usage.prompt, usage.written, usage.seen) == (len(ids), 8, seen)
        assert usage.kept == (seen if kind.budget is None else kind.budget)
        assert usage.evicted == seen - usage.kept
        assert usage.recalled == kind.recall


def test_a_long_prompt_holds_no_other_back(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    """While it is read, others write a token for each of its chunks, and a short prompt is read between them."""
    model = attached_model("llama")
    long, writes, short = rows_of(text, 13 * 40, 5, 6)
    order: list[str] = []
    with running(model, tokenizer) as engine:
        first = engine.submit(request_of(writes, 60), lambda: order.append("writes"))
        first.take(10.0)
        ticket = engine.submit(request_of(long, 2), lambda: order.append("long"))
        wait_for(lambda: "long" in order)
        second = engine.submit(request_of(short, 1), lambda: order.append("short"))
        assert len(tokens_of(ticket)) == 2
        tokens_of(second)
        tokens_of(first)
    began = order.index("long")
    assert order.index("short") < len(order) - 1 - order[::-1].index("long")
    during = order[began : order.index("long", began + 1)]
    assert during.count("writes") <= 1
    gaps = [i for i, name in enumerate(order[began:]) if name == "writes"][:20]
    assert all(after - before <= 4 for before, after in pairwise(gaps))  # a chunk gives three events at most


def test_bytes_never_exceed_the_formula(attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text) -> None:
    model = attached_model("llama")
    kinds = [options_of(), options_of(policy="h2o", store="int8")]
    limits = EngineLimits(prompt_tokens=300, max_tokens=40, alone_bytes=1 << 18)
    prompts = rows_of(text, 300, 41, 7, 30, 52, 100, 200, 13, 14, 26)
    with running(model, tokenizer, kinds=[(2, each) for each in kinds], limits=limits, reuse_bytes=50_000) as engine:
        held = bytes_told(engine)
        tickets = [
            engine.submit(request_of(ids, 5 + n, options=[*kinds, options_of(budget=30)][n % 3]))
            for n, ids in enumerate(prompts)
        ]
        for ticket in tickets:
            tokens_of(ticket)
        assert max(held) <= engine.bytes_limit
        assert engine.bytes_limit < 3 * max(held) + limits.alone_bytes
        wait_for(lambda: engine.status().free_rows == 4)


def test_a_canary_of_the_last_text_is_never_read(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last text's keys and values become NaN when it ends: one that was read would make NaN of all."""
    model, release, poisoned = attached_model("llama"), Lane.release, list[int]()
    first, second = rows_of(text, 50, 22)

    def poison(lane: Lane, row: int) -> None:
        for layer in lane.cache.layers:
            for tensor in (layer.store.packed_keys().data, layer.store.packed_values().data):
                poisoned.append(tensor.fill_(torch.nan).shape[2])
        release(lane, row)

    monkeypatch.setattr(Lane, "release", poison)
    with running(model, tokenizer, rows=1) as engine:
        cache = engine._lanes[0].cache
        tokens_of(engine.submit(request_of(first, 5)))
        wait_for(lambda: engine.status().free_rows == 1)
        assert min(poisoned) > 17
        for layer in cache.layers:
            for name, tensor in layer.tensors().items():
                assert not bool(tensor.count_nonzero()) or name == "positions"
        assert tokens_of(engine.submit(request_of(second, 9))) == alone(model, second, options_of(), 9)


def test_samples_are_the_same_in_any_company(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    model, prompts = attached_model("llama"), rows_of(text, 30, 12, 44)
    drawn = {"sampling": Sampling(temperature=0.8, top_p=0.9, seed=11), "presence_penalty": 0.5, "top_logprobs": 2}
    with running(model, tokenizer) as engine:
        first = events_of(engine.submit(request_of(prompts[0], 20, **drawn)))
        tickets = [engine.submit(request_of(ids, 20, **drawn)) for ids in prompts]
        assert [event for event in events_of(tickets[0]) if isinstance(event, Piece)] == [
            event for event in first if isinstance(event, Piece)
        ]


def test_penalties_biases_and_log_probabilities(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    model, (ids,) = attached_model("llama"), rows_of(text, 19)
    cache = KVCache(model, **{**vars(options_of()), "budget": None, "policy": None, "shares": None})
    scores = windlass.prefill(model, cache, [ids])[0]
    best = int(scores.argmax())
    with running(model, tokenizer) as engine:
        (piece, *_), last = _pieces(engine.submit(request_of(ids, 1, logit_bias={best: -50.0}, top_logprobs=3)))
        assert last.reason == "length"
        biased = scores.clone()
        biased[best] -= 50
        values = biased.log_softmax(-1)
        assert piece.token == int(biased.argmax())
        assert [each.token for each in piece.logprobs[1:]] == values.topk(3).indices.tolist()
        assert piece.logprobs[0].value == pytest.approx(float(values.max()), abs=1e-4)
        pieces, _ = _pieces(engine.submit(request_of(ids, 30, presence_penalty=40.0)))
        assert len({piece.token for piece in pieces}) == 30  # none comes twice


def test_stops_and_grammars(attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text) -> None:
    model, (ids,) = attached_model("llama"), rows_of(text, 19)

    class Only(Grammar):
        """One of three tokens, never the one before."""

        def __init__(self) -> None:
            self.came: list[int] = []

        def allowed(self) -> Tensor:
            mask = torch.zeros(model.config.vocab_size, dtype=torch.bool)
            mask[[token for token in (5, 8, 13) if token not in self.came[-1:]]] = True
            return mask

        def accept(self, token: int) -> None:
            self.came.append(token)

    with running(model, tokenizer) as engine:
        grammar = Only()
        found = tokens_of(engine.submit(request_of(ids, 12, grammar=grammar)))
        assert found == grammar.came
        assert set(found) <= {5, 8, 13}
        assert all(a != b for a, b in pairwise(found))
        free = tokens_of(engine.submit(request_of(ids, 12)))
        stopped, last = _pieces(engine.submit(request_of(ids, 12, stops=Stops(frozenset({free[4]})))))
        assert last.reason == "stop"
        assert [piece.token for piece in stopped] == free[: free.index(free[4]) + 1]


def _pieces(ticket: Ticket) -> tuple[list[Piece], Finish]:
    events = events_of(ticket)
    last = events[-1]
    assert isinstance(last, Finish)
    return [event for event in events if isinstance(event, Piece)], last


def test_a_short_prompt_waits_for_no_step_of_others(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is read as soon as it has a row, and only then do all rows write, its own among them."""
    seen, step, begin, give = list[str](), Lane.step, Reader.__init__, Ticket.put
    (ids,) = rows_of(text, 9)
    with running(attached_model("llama"), tokenizer, limits=EngineLimits(max_tokens=10**6)) as engine:
        long = engine.submit(request_of(ids, 10**6))
        wait_for(lambda: bool(long.take(1.0)))
        for _ in range(3):  # its first token comes with its prompt, and behind that a step has its turn
            wait_for(lambda: any(isinstance(each, Piece) for each in long.take(1.0)))

        def stepped(self: Lane, tokens: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
            seen.append(f"step of {len(tokens)}")
            return step(self, tokens)

        def begun(self: Reader, *given: Any) -> None:
            seen.append("row")
            begin(self, *given)

        def told(self: Ticket, event: Event) -> None:
            if self is not long:
                seen.append(type(event).__name__)
            give(self, event)

        monkeypatch.setattr(Lane, "step", stepped)
        monkeypatch.setattr(Reader, "__init__", begun)
        monkeypatch.setattr(Ticket, "put", told)
        assert len(tokens_of(engine.submit(request_of(ids[:4], 2)))) == 2
        engine.cancel(long)
    start = seen.index("row")
    assert seen[start : start + 6] == ["row", "Progress", "Piece", "step of 2", "Piece", "Finish"]
