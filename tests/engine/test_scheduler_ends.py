"""However a request ends, its row is free, the others go on, and all who wait are told."""

import time
from typing import Any

import pytest
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.helpers.models import MODEL, Models, Text
from tests.helpers.schedulers import alone, events_of, options_of, request_of, rows_of, running, tokens_of, wait_for
from windlass import UsageError
from windlass.cache.state import CacheState
from windlass.engine import task, turns
from windlass.engine.request import Failed, Piece, Progress
from windlass.engine.scheduler import Scheduler
from windlass.engine.service import Watcher
from windlass.engine.status import EngineDeadError, EngineLimits, QueueFullError


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
        tokens_of(engine.submit(request_of(again, 3)))  # what all rows have at rest
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
        wait_for(lambda: ticket.number not in [row.number for row in engine.status().rows])
        assert engine.status().queued == 0
        ticket.take()
        time.sleep(0.05)
        assert ticket.take() == []
        assert (came + tokens_of(beside)) == alone(model, other, options_of(), 80)
        wait_for(lambda: engine.status().free_rows == engine.status().total_rows)
        assert tokens_of(engine.submit(request_of(again, 7))) == alone(model, again, options_of(), 7)
        assert engine.status().cancelled_total == 1


@pytest.mark.parametrize("where", ["chunk", "step"])
def test_an_error_fails_its_own_requests_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch, attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text, where: str
) -> None:
    model = attached_model("llama")
    one, other, third = rows_of(text, 20, 31, 25)
    with running(model, tokenizer) as engine:
        ticket = engine.submit(request_of(one, 300))
        ticket.take(10.0)
        if where == "step":
            fails = iter([True])
            real = task.Task.take

            def take(self: task.Task, logits: Tensor) -> None:
                if self.writer.written > 3 and next(fails, False):
                    raise RuntimeError("out of luck")
                real(self, logits)

            monkeypatch.setattr(task.Task, "take", take)
            events = events_of(ticket)
        else:
            monkeypatch.setattr(task.Task, "read", lambda _: 1 / 0)
            bad = engine.submit(request_of(other))
            events = events_of(bad)
            monkeypatch.undo()
            engine.cancel(ticket)
        assert isinstance(events[-1], Failed)
        assert events[-1].is_ours
        assert tokens_of(engine.submit(request_of(third, 7))) == alone(model, third, options_of(), 7)
        wait_for(lambda: engine.status().free_rows == 3)
        assert engine.status().errors_total == 1
        assert engine.status().is_alive


def test_three_errors_in_a_row_are_the_end_and_all_are_told(
    monkeypatch: pytest.MonkeyPatch, attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    model = attached_model("llama")
    prompts = rows_of(text, *range(10, 16))
    with running(model, tokenizer, rows=1) as engine:
        monkeypatch.setattr(task.Task, "read", lambda _: 1 / 0)
        tickets = [engine.submit(request_of(ids)) for ids in prompts]
        last = [events_of(ticket)[-1] for ticket in tickets]
        assert all(isinstance(event, Failed) and event.is_ours for event in last)
        wait_for(lambda: not engine.status().is_alive)
        with pytest.raises(EngineDeadError):
            engine.submit(request_of(prompts[0]))


def test_limits(attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text) -> None:
    model, (ids,) = attached_model("llama"), rows_of(text, 30)
    limits = EngineLimits(queue=2, queued_tokens=70, prompt_tokens=41, max_tokens=9000, alone=0)
    with running(model, tokenizer, rows=1, limits=limits) as engine:
        with pytest.raises(UsageError, match="42 tokens, and this server reads at most 41"):
            engine.submit(request_of([3] * 42))
        with pytest.raises(UsageError, match="from 1 to 9000"):
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
        assert isinstance(failed, Failed)
        assert not failed.is_ours
        assert "20,000" in failed.message
        assert len(tokens_of(engine.submit(request_of(ids)))) == 6


def test_rows_without_a_budget_are_refused(attached_model: Models, tokenizer: PreTrainedTokenizerBase) -> None:
    for options, said in (({"budget": None}, "need a budget"), ({"recall": 8}, "recall=8")):
        with (
            pytest.raises(UsageError, match=said),
            running(attached_model("llama"), tokenizer, kinds=[(2, options_of(**options))]),
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
        assert isinstance(last, Failed)
        assert "not taken" in last.message


def test_a_request_that_takes_too_long_ends(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    model, (ids,) = attached_model("llama"), rows_of(text, 30)
    with running(model, tokenizer, limits=EngineLimits(max_tokens=10**6)) as engine:
        last = events_of(engine.submit(request_of(ids, 10**6, seconds=0.1)))[-1]
        assert isinstance(last, Failed)
        assert "longer than 0.1 seconds" in last.message


def test_stop_ends_all_and_takes_nothing_more(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    model, (ids, other) = attached_model("llama"), rows_of(text, 19, 30)
    with running(model, tokenizer, rows=1, limits=EngineLimits(max_tokens=10**6)) as engine:
        writing, waiting = engine.submit(request_of(ids, 10**6)), engine.submit(request_of(other))
        writing.take(10.0)
        engine.stop()
        for ticket in (writing, waiting):
            assert isinstance(events_of(ticket)[-1], Failed)
        with pytest.raises(EngineDeadError):
            engine.submit(request_of(ids))


def test_stop_lets_what_is_short_end(attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text) -> None:
    model, (ids,) = attached_model("llama"), rows_of(text, 19)
    with running(model, tokenizer) as engine:
        ticket = engine.submit(request_of(ids, 20))
        engine.stop(30.0)
        assert len(tokens_of(ticket)) == 20


def test_a_request_that_cannot_begin_is_told_and_no_other(
    monkeypatch: pytest.MonkeyPatch, attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    model, (ids, other) = attached_model("llama"), rows_of(text, 19, 30)
    with running(model, tokenizer, rows=2) as engine:
        monkeypatch.setattr(task, "Writer", lambda *_: 1 / 0)
        last = events_of(engine.submit(request_of(ids)))[-1]
        monkeypatch.undo()
        assert isinstance(last, Failed)
        assert last.is_ours
        assert tokens_of(engine.submit(request_of(other, 7))) == alone(model, other, options_of(), 7)
        wait_for(lambda: engine.status().free_rows == 2)


def test_an_engine_that_ends_by_an_error_of_its_own_tells_all(
    monkeypatch: pytest.MonkeyPatch, attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    model, prompts = attached_model("llama"), rows_of(text, 19, 30)
    with running(model, tokenizer, rows=1) as engine:
        monkeypatch.setattr(turns, "_late", lambda *_: 1 / 0)
        for ticket in [engine.submit(request_of(ids, 50)) for ids in prompts]:
            assert isinstance(events_of(ticket)[-1], Failed)
        wait_for(lambda: not engine.status().is_alive)


def test_errors_of_single_requests_count_as_well(
    monkeypatch: pytest.MonkeyPatch, attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    model, prompts = attached_model("llama"), rows_of(text, 19, 30, 8)
    with running(model, tokenizer, rows=3) as engine:
        tickets = [engine.submit(request_of(ids, 10**3)) for ids in prompts]
        wait_for(lambda: [row.phase for row in engine.status().rows] == ["writing"] * 3)
        monkeypatch.setattr(task.Task, "take", lambda *_: 1 / 0)
        assert all(isinstance(events_of(ticket)[-1], Failed) for ticket in tickets)
        wait_for(lambda: not engine.status().is_alive)


def test_who_looks_and_fails_harms_no_text(
    attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    class Broken(Watcher):
        is_watched = True

        def step(self, cache: CacheState, row: int = 0, number: int = 0, is_last: bool = False) -> None:
            raise RuntimeError("no picture")

    model, (ids,) = attached_model("llama"), rows_of(text, 19)
    engine = Scheduler(model, tokenizer, [(1, options_of())], watcher=Broken())
    engine.start()
    try:
        assert tokens_of(engine.submit(request_of(ids, 9))) == alone(model, ids, options_of(), 9)
    finally:
        engine.stop()
