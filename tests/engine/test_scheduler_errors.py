"""Errors of the engine: who is told, who goes on, and when it gives up."""

from collections.abc import Mapping, Sequence

import pytest
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tests.helpers.models import MODEL, Models, Text
from tests.helpers.schedulers import alone, events_of, options_of, request_of, rows_of, running, tokens_of, wait_for
from windlass import UsageError
from windlass.cache.state import CacheState
from windlass.engine import scheduler, sequence
from windlass.engine import scheduler as turns
from windlass.engine.request import EngineDeadError, EngineLimits, Failure, Piece
from windlass.engine.scheduler import Scheduler, Watcher
from windlass.engine.sequence import Lane


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.mark.parametrize("where", ["chunk", "step"])
def test_an_error_fails_its_own_requests_and_the_engine_goes_on(
    monkeypatch: pytest.MonkeyPatch, attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text, where: str
) -> None:
    model = attached_model("llama")
    one, other, third = rows_of(text, 20, 31, 25)
    with running(model, tokenizer) as engine:
        ticket = engine.submit(request_of(one, 300))
        wait_for(lambda: [row.phase for row in engine.status().rows] == ["writing"])
        if where == "step":
            fails = iter([True])
            real = sequence.ActiveRequest.take

            def take(self: sequence.ActiveRequest, logits: Tensor) -> None:
                if self.writer.written > 3 and next(fails, False):
                    raise RuntimeError("out of luck")
                real(self, logits)

            monkeypatch.setattr(sequence.ActiveRequest, "take", take)
            events = events_of(ticket)
        else:
            monkeypatch.setattr(sequence.ActiveRequest, "read", lambda _: 1 / 0)
            bad = engine.submit(request_of(other))
            events = events_of(bad)
            monkeypatch.undo()
            engine.cancel(ticket)
        assert isinstance(events[-1], Failure)
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
        monkeypatch.setattr(sequence.ActiveRequest, "read", lambda _: 1 / 0)
        tickets = [engine.submit(request_of(ids)) for ids in prompts]
        last = [events_of(ticket)[-1] for ticket in tickets]
        assert all(isinstance(event, Failure) and event.is_ours for event in last)
        wait_for(lambda: not engine.status().is_alive)
        with pytest.raises(EngineDeadError):
            engine.submit(request_of(prompts[0]))


@pytest.mark.parametrize("is_alone", [False, True])
def test_three_failed_steps_are_the_end_though_all_else_is_well(
    monkeypatch: pytest.MonkeyPatch,
    attached_model: Models,
    tokenizer: PreTrainedTokenizerBase,
    text: Text,
    is_alone: bool,
) -> None:
    """Prompts are read, and a text of another lane is written, between them."""
    model, fine = attached_model("llama"), options_of(policy="h2o")
    other, ids = rows_of(text, 20, 31)
    options = options_of(budget=18) if is_alone else options_of()
    real = Lane.step

    def step(lane: Lane, tokens: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        if lane.serves(options):
            raise RuntimeError("out of luck")
        return real(lane, tokens)

    limits = EngineLimits(max_tokens=10**6)
    with running(model, tokenizer, kinds=[(2, options_of()), (1, fine)], limits=limits) as engine:
        beside = engine.submit(request_of(other, 10**6, options=fine))
        wait_for(lambda: [row.phase for row in engine.status().rows] == ["writing"])
        monkeypatch.setattr(Lane, "step", step)
        for _ in range(3):
            events = events_of(engine.submit(request_of(ids, 4, options=options)))
            assert any(isinstance(event, Piece) for event in events)
            assert isinstance(events[-1], Failure)
        wait_for(lambda: not engine.status().is_alive)
        assert isinstance(events_of(beside)[-1], Failure)


def test_a_request_that_cannot_begin_is_told_and_no_other(
    monkeypatch: pytest.MonkeyPatch, attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    model, (ids, other) = attached_model("llama"), rows_of(text, 19, 30)
    with running(model, tokenizer, rows=2) as engine:
        monkeypatch.setattr(sequence, "Writer", lambda *_: 1 / 0)
        last = events_of(engine.submit(request_of(ids)))[-1]
        monkeypatch.undo()
        assert isinstance(last, Failure)
        assert last.is_ours
        assert tokens_of(engine.submit(request_of(other, 7))) == alone(model, other, options_of(), 7)
        wait_for(lambda: engine.status().free_rows == 2)


@pytest.mark.parametrize("error", [UsageError("never"), RuntimeError("never")])
def test_a_request_for_which_no_row_can_be_made_is_told_and_no_other(
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    attached_model: Models,
    tokenizer: PreTrainedTokenizerBase,
    text: Text,
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise error

    model, (ids, other) = attached_model("llama"), rows_of(text, 19, 30)
    with running(model, tokenizer, rows=2) as engine:
        monkeypatch.setattr(scheduler, "Lane", broken)
        last = events_of(engine.submit(request_of(ids, options=options_of(budget=23))))[-1]
        assert isinstance(last, Failure)
        assert last.is_ours == isinstance(error, RuntimeError)
        assert tokens_of(engine.submit(request_of(other, 7))) == alone(model, other, options_of(), 7)
        wait_for(lambda: engine.status().free_rows == 2)
        assert engine.status().queued == 0


def test_an_engine_that_ends_by_an_error_of_its_own_tells_all(
    monkeypatch: pytest.MonkeyPatch, attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    model, prompts = attached_model("llama"), rows_of(text, 19, 30)
    with running(model, tokenizer, rows=1) as engine:
        monkeypatch.setattr(turns, "_late", lambda *_: 1 / 0)
        for ticket in [engine.submit(request_of(ids, 50)) for ids in prompts]:
            assert isinstance(events_of(ticket)[-1], Failure)
        wait_for(lambda: not engine.status().is_alive)


def test_errors_of_single_requests_count_as_well(
    monkeypatch: pytest.MonkeyPatch, attached_model: Models, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    model, prompts = attached_model("llama"), rows_of(text, 19, 30, 8)
    with running(model, tokenizer, rows=3) as engine:
        tickets = [engine.submit(request_of(ids, 10**3)) for ids in prompts]
        wait_for(lambda: [row.phase for row in engine.status().rows] == ["writing"] * 3)
        monkeypatch.setattr(sequence.ActiveRequest, "take", lambda *_: 1 / 0)
        assert all(isinstance(events_of(ticket)[-1], Failure) for ticket in tickets)
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
