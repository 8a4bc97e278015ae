"""However a request ends, its row is free, the others go on, and all who wait are told."""

import time
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.helpers.models import MODEL, Models, Text
from tests.helpers.schedulers import alone, events_of, options_of, request_of, rows_of, running, tokens_of, wait_for
from windlass import UsageError
from windlass.engine.request import EngineDeadError, EngineLimits, Failure, Finish, Piece, Progress, QueueFullError
from windlass.engine.text import Stops


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


PHASES = ("waiting", "first chunk", "reading", "first token", "writing")


@pytest.mark.parametrize("phase", PHASES)
def test_cancel_frees_the_row_and_leaves_nothing(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text, phase: str
) -> None:
    model = attached_model("llama")
    other, ids, again = rows_of(text, 20, 13 * 30, 23)
    with running(model, tokenizer, rows=1 if phase == "waiting" else 2) as engine:
        tokens_of(engine.submit(request_of(again, 3)))  # the bytes of all rows between requests
        wait_for(lambda: engine.status().free_rows == engine.status().total_rows)
        beside = engine.submit(request_of(other, 80))
        came = [event.token for event in beside.take(10.0) if isinstance(event, Piece)]
        ticket = engine.submit(request_of(ids, 400))
        seen: list[Any] = []
        wanted = {"first chunk": Progress, "reading": Progress, "first token": Piece, "writing": Piece}
        enough = {"waiting": 0, "first chunk": 1, "reading": 3, "first token": 1, "writing": 9}[phase]
        while phase != "waiting" and sum(isinstance(event, wanted[phase]) for event in seen) < enough:
            seen += ticket.take(10.0)
        engine.cancel(ticket)
        engine.cancel(ticket)
        wait_for(lambda: engine.status().cancelled_total == 1)  # told at the end of the turn that dropped it
        told = engine.status()
        assert ticket.number not in [row.number for row in told.rows]
        assert told.queued == 0
        ticket.take()
        time.sleep(0.05)
        assert ticket.take() == []
        assert (came + tokens_of(beside)) == alone(model, other, options_of(), 80)
        wait_for(lambda: engine.status().free_rows == engine.status().total_rows)
        assert tokens_of(engine.submit(request_of(again, 7))) == alone(model, again, options_of(), 7)
        assert engine.status().cancelled_total == 1


def test_limits(attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text) -> None:
    model, (ids,) = attached_model("llama"), rows_of(text, 30)
    limits = EngineLimits(queue=2, queued_tokens=70, prompt_tokens=41, max_tokens=9000, alone=0)
    with running(model, tokenizer, rows=1, limits=limits) as engine:
        with pytest.raises(UsageError, match="42 tokens, and this server reads at most 41"):
            engine.submit(request_of([3] * 42))
        with pytest.raises(UsageError, match="from 0 to 9000"):
            engine.submit(request_of(ids, 9001))
        with pytest.raises(UsageError, match="outside of the vocabulary"):
            engine.submit(request_of([10**6]))
        with pytest.raises(UsageError, match="empty"):
            engine.submit(request_of([]))
        with pytest.raises(UsageError, match="no row has these options"):
            engine.submit(request_of(ids, options=options_of(budget=18)))
        first = engine.submit(request_of(ids, 9000))
        wait_for(lambda: engine.status().free_rows == 0)
        waiting = [engine.submit(request_of(ids)) for _ in range(2)]
        with pytest.raises(QueueFullError, match="2 requests wait"):
            engine.submit(request_of(ids))
        engine.cancel(waiting[1])
        wait_for(lambda: engine.status().queued == 1)
        with pytest.raises(QueueFullError, match="30 tokens of prompts wait, and at most 70"):
            engine.submit(request_of([3] * 41))
        engine.cancel(first)


def test_what_is_too_large_alone_is_refused(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    model, (ids,) = attached_model("llama"), rows_of(text, 30)
    with running(model, tokenizer, limits=EngineLimits(alone_bytes=20_000)) as engine:
        failed = events_of(engine.submit(request_of(ids, options=options_of(budget=400))))[-1]
        assert isinstance(failed, Failure)
        assert not failed.is_ours
        assert "20,000" in failed.message
        assert len(tokens_of(engine.submit(request_of(ids)))) == 6


def test_rows_without_a_budget_are_refused(attached_model: Models, tokenizer: PreTrainedTokenizerBase) -> None:
    with (
        pytest.raises(UsageError, match="need a budget"),
        running(attached_model("llama"), tokenizer, kinds=[(2, options_of(budget=None))]),
    ):
        pass


def test_a_slow_reader_is_dropped_and_holds_nobody_back(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    model, (ids, other) = attached_model("llama"), rows_of(text, 30, 12)
    limits = EngineLimits(unread_events=20, unread_seconds=0.2, max_tokens=10**6)
    with running(model, tokenizer, limits=limits) as engine:
        slow = engine.submit(request_of(ids, 10**6))
        assert len(tokens_of(engine.submit(request_of(other, 50)))) == 50
        wait_for(lambda: not engine.status().rows)
        last = slow.take(0.0)[-1]
        assert isinstance(last, Failure)
        assert "not taken" in last.message


def test_a_request_that_takes_too_long_ends(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    model, (ids,) = attached_model("llama"), rows_of(text, 30)
    with running(model, tokenizer, limits=EngineLimits(max_tokens=10**6)) as engine:
        last = events_of(engine.submit(request_of(ids, 10**6, seconds=0.1)))[-1]
        assert isinstance(last, Failure)
        assert "longer than 0.1 seconds" in last.message


def test_time_counts_from_the_arrival(
    monkeypatch: pytest.MonkeyPatch, attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    """Timeouts of a writing request and of one that waits behind it. Without one, the engine's holds."""
    model, (ids, other) = attached_model("llama"), rows_of(text, 30, 19)
    now = [0.0]
    monkeypatch.setattr("windlass.engine.request.monotonic", lambda: now[0])
    with running(model, tokenizer, rows=1, limits=EngineLimits(max_tokens=10**6, seconds=40.0)) as engine:
        with pytest.raises(UsageError, match="at most 40 seconds here, got 41"):
            engine.submit(request_of(ids, seconds=41.0))
        writes, waits = engine.submit(request_of(ids, 10**6)), engine.submit(request_of(other, seconds=20.0))
        wait_for(lambda: engine.status().queued == 1)
        now[0] = 15.0
        stays = engine.submit(request_of(other, 7, seconds=30.0))
        now[0] = 21.0
        assert events_of(waits) == [Failure("the request took longer than 20 seconds", is_ours=False)]
        assert engine.status().free_rows == 0
        now[0] = 41.0
        assert events_of(writes)[-1] == Failure("the request took longer than 40 seconds", is_ours=False)
        assert tokens_of(stays) == alone(model, other, options_of(), 7)


def test_stop_ends_all_and_takes_nothing_more(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    model, (ids, other) = attached_model("llama"), rows_of(text, 19, 30)
    with running(model, tokenizer, rows=1, limits=EngineLimits(max_tokens=10**6)) as engine:
        writing, waiting = engine.submit(request_of(ids, 10**6)), engine.submit(request_of(other))
        writing.take(10.0)
        engine.stop()
        for ticket in (writing, waiting):
            assert isinstance(events_of(ticket)[-1], Failure)
        with pytest.raises(EngineDeadError):
            engine.submit(request_of(ids))


def test_stop_lets_what_is_short_end(attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text) -> None:
    model, (ids,) = attached_model("llama"), rows_of(text, 19)
    with running(model, tokenizer) as engine:
        ticket = engine.submit(request_of(ids, 20))
        engine.stop(30.0)
        assert len(tokens_of(ticket)) == 20


def test_a_text_shows_special_tokens_and_tells_its_stop(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    model, (ids,) = attached_model("llama"), rows_of(text, 19)
    pad, stop = "<|pad|>", "pad|><|"
    with running(model, tokenizer) as engine:
        for hidden, strings, shown, by in (
            (None, (), "", None),
            (frozenset({0, 1}), (), pad * 5, None),
            (frozenset({0, 1}), ("x", stop), "<|", stop),
        ):
            stops = Stops(frozenset(), strings)
            asked = request_of(ids, 5, logit_bias={2: 1e4}, hidden=hidden, stops=stops)
            *found, last = events_of(engine.submit(asked))
            assert "".join(event.text for event in found if isinstance(event, Piece)) == shown
            assert isinstance(last, Finish)
            assert (last.reason, last.stopped_by) == ("stop" if by else "length", by)
