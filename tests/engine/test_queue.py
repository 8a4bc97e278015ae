"""The queue holds requests that no free row can take, and no others."""

from collections.abc import Callable, Sequence
from threading import Barrier, Lock, Thread

import pytest
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tests.helpers.models import MODEL, Models, Text
from tests.helpers.schedulers import alone, events_of, options_of, request_of, rows_of, running, tokens_of, wait_for
from windlass.core.errors import UsageError
from windlass.engine.request import EngineLimits, Finish, QueueFullError, Request, Ticket
from windlass.engine.scheduler import Scheduler

ROWS = 4


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture
def model(attached_model: Models) -> PreTrainedModel:
    return attached_model("llama")


def taken_at_once(engine: Scheduler, requests: Sequence[Request]) -> list[Ticket]:
    """The tickets of those requests that are not refused, of as many threads as there are requests."""
    together, lock, tickets = Barrier(len(requests)), Lock(), list[Ticket]()

    def submit(request: Request) -> None:
        together.wait()
        try:
            ticket = engine.submit(request)
        except QueueFullError:
            return
        with lock:
            tickets.append(ticket)

    threads = [Thread(target=submit, args=(request,)) for request in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tickets


@pytest.mark.parametrize("queue", [0, 1, 3])
def test_a_burst_fills_all_rows_and_the_queue(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: Text, queue: int
) -> None:
    prompts = rows_of(text, *range(7, 19))  # of up to 18 tokens, for a memory of 17
    truth = {len(ids): alone(model, ids, options_of(), 60) for ids in prompts}
    with running(model, tokenizer, rows=ROWS, limits=EngineLimits(queue=queue)) as engine:
        for _ in range(3):
            tickets = taken_at_once(engine, [request_of(ids, 60) for ids in prompts])
            assert len(tickets) == ROWS + queue
            for ticket in tickets:
                assert tokens_of(ticket) == truth[len(ticket.request.prompt)]


def test_requests_one_after_the_other_need_no_queue(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    """A row is free for the next request once the client was told that the last one has ended."""
    (ids,) = rows_of(text, 45)  # longer than its memory
    with running(model, tokenizer, rows=1, limits=EngineLimits(queue=0)) as engine:
        for _ in range(20):
            assert isinstance(events_of(engine.submit(request_of(ids, 2)))[-1], Finish)


@pytest.mark.parametrize("is_reading", [True, False])
def test_a_cancelled_request_leaves_its_row_to_the_next(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: Text, is_reading: bool
) -> None:
    (ids,) = rows_of(text, 45)
    with running(model, tokenizer, rows=2, limits=EngineLimits(queue=1, max_tokens=10**6)) as engine:
        tickets = [engine.submit(request_of(ids, 10**6)) for _ in range(3)]
        if not is_reading:
            wait_for(lambda: engine.status().free_rows == 0)
        with pytest.raises(QueueFullError, match="no row is free, and 1 requests wait"):
            engine.submit(request_of(ids))
        engine.cancel(tickets[0])
        tickets.append(engine.submit(request_of(ids, 10**6)))
        engine.cancel(tickets[-1])  # while it waits
        tickets.append(engine.submit(request_of(ids, 10**6)))
        with pytest.raises(QueueFullError):
            engine.submit(request_of(ids))
        for ticket in tickets:
            engine.cancel(ticket)
        assert len(tokens_of(engine.submit(request_of(ids)))) == 6


def test_each_kind_of_rows_takes_its_own(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    (ids,), kinds = rows_of(text, 30), [options_of(), options_of(budget=24), options_of(budget=30)]
    rows = [(2, kinds[0]), (1, kinds[1])]
    with running(model, tokenizer, kinds=rows, limits=EngineLimits(queue=0, max_tokens=10**6)) as engine:
        tickets = taken_at_once(engine, [request_of(ids, 10**6, options=kind) for kind in kinds * 4])
        taken = [kinds.index(ticket.request.options) for ticket in tickets]
        assert sorted(taken) == [0, 0, 1, 2]
        for ticket in tickets:
            engine.cancel(ticket)


def test_texts_of_one_request_are_taken_together(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    (ids,) = rows_of(text, 30)
    with running(model, tokenizer, rows=ROWS, limits=EngineLimits(queue=1, max_tokens=10**6)) as engine:
        with pytest.raises(UsageError, match="6 texts at once, and 4 rows and a queue of 1"):
            engine.submit_all([request_of(ids)] * 6)
        tickets = engine.submit_all([request_of(ids, 10**6)] * 3)
        with pytest.raises(QueueFullError):
            engine.submit_all([request_of(ids, 10**6)] * 3)
        tickets += engine.submit_all([request_of(ids, 10**6)] * 2)  # of those refused, none has a row
        with pytest.raises(QueueFullError):
            engine.submit(request_of(ids))
        for ticket in tickets:
            engine.cancel(ticket)


def test_a_request_that_cannot_begin_leaves_its_row(
    monkeypatch: pytest.MonkeyPatch, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: Text
) -> None:
    (ids,) = rows_of(text, 30)

    def fails(*_: object, **__: object) -> Callable[[], None]:
        raise RuntimeError("planted")

    with running(model, tokenizer, rows=1, limits=EngineLimits(queue=0)) as engine:
        with monkeypatch.context() as patched:
            patched.setattr("windlass.engine.scheduler.ActiveRequest", fails)
            assert not isinstance(events_of(engine.submit(request_of(ids)))[-1], Finish)
        assert len(tokens_of(engine.submit(request_of(ids)))) == 6
