"""A client that leaves, by FIN or by RST, in every phase of its request: the engine is told at once."""

import asyncio
from collections.abc import Iterator

import pytest
from starlette.types import Message

from tests.helpers.serving import (
    RawClient,
    ScriptedService,
    Served,
    ask,
    chat,
    complete,
    events,
    says,
    serving,
    soon,
    usage,
)
from windlass.engine.request import EngineLimits, Event, Finish, Piece, Progress, Request
from windlass.serve.stream import ClientGone, unless_gone

PHASES: dict[str, tuple[Event | None, ...]] = {
    "queued": (None,),
    "first chunk of the prompt": (Progress(1, 9), None),
    "last chunk of the prompt": (Progress(1, 9), Progress(9, 9), None),
    "first token": (Progress(9, 9), Piece(5, "a"), None),
    "later token": (Progress(9, 9), *(Piece(5, "a") for _ in range(40)), None),
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(ScriptedService(says("x")), ping_seconds=0.05) as server:
        yield server


@pytest.mark.parametrize("is_reset", [False, True], ids=["fin", "rst"])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("phase", PHASES)
def test_the_engine_is_told_that_a_client_has_gone(
    served: Served, phase: str, is_streamed: bool, is_reset: bool
) -> None:
    service = served.service
    service.script = events(*PHASES[phase])
    client, before = RawClient(served.port), len(service.requests)
    client.post("/v1/chat/completions", chat(stream=is_streamed))
    assert soon(lambda: len(service.requests) == before + 1)
    if is_streamed:
        client.until(b"waiting")  # all that the script gives has come
    number = before + 1
    assert number not in service.cancelled
    client.close(is_reset)
    assert soon(lambda: number in service.cancelled)
    assert service.is_idle()
    service.script = says("next")
    assert ask(served.port, "/v1/completions", complete()).document["choices"][0]["text"] == "next"


@pytest.mark.parametrize("is_reset", [False, True], ids=["fin", "rst"])
def test_an_answer_that_is_over_is_not_cancelled(served: Served, is_reset: bool) -> None:
    served.service.script = says("done")
    client, before = RawClient(served.port), len(served.service.requests)
    client.post("/v1/chat/completions", chat(stream=True))
    client.until(b"[DONE]")
    client.close(is_reset)
    assert served.service.is_idle()
    assert before + 1 not in served.service.cancelled
    assert ask(served.port, "/health").status == 200


def test_all_texts_of_a_request_are_cancelled(served: Served) -> None:
    served.service.script = events(Progress(1, 2), None)
    client, before = RawClient(served.port), len(served.service.requests)
    client.post("/v1/completions", complete(n=3, prompt=["a", "b"]))
    assert soon(lambda: len(served.service.requests) == before + 6)
    client.close()
    assert soon(lambda: {*range(before + 1, before + 7)} <= {*served.service.cancelled})


def test_a_client_that_does_not_read_is_given_up() -> None:
    """Its socket's buffers are full. The engine writes on, and is told after `unread_seconds`."""

    def endless(request: Request) -> Iterator[Event | None]:
        for _ in range(200):
            yield Piece(5, "x" * 100_000)
        yield None
        yield Finish("stop", usage(request, 200))

    service = ScriptedService(endless, EngineLimits(unread_seconds=0.3))
    with serving(service, ping_seconds=0.05) as served:
        client = RawClient(served.port, buffer=4096)
        client.post("/v1/completions", complete(stream=True, max_tokens=4000))
        assert soon(lambda: 1 in service.cancelled)
        service.script = says("ok")
        assert ask(served.port, "/v1/completions", complete()).status == 200
        client.close(is_reset=True)


def test_a_slow_reader_holds_nobody_up(served: Served) -> None:
    def much(request: Request) -> Iterator[Event | None]:
        for _ in range(100):
            yield Piece(5, "x" * 100_000)
        yield Finish("stop", usage(request, 100))

    served.service.script = much
    slow = RawClient(served.port, buffer=4096)
    slow.post("/v1/completions", complete(stream=True))
    slow.until(b"data: ")
    served.service.script = says("quick")
    for _ in range(5):
        assert ask(served.port, "/v1/completions", complete()).document["choices"][0]["text"] == "quick"
    answer = slow.answer_rest()
    assert answer.count(b"x" * 1000) == 100 * 100
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    slow.close()


def test_work_that_misses_a_cancellation_is_cancelled_again() -> None:
    """As `asyncio.wait_for` does before Python 3.12, where the awaited task ends at the same moment."""
    ends = list[str]()

    async def work() -> None:
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            ends.append("missed")
        try:
            await asyncio.sleep(30)
        finally:
            ends.append("ended")

    async def receive() -> Message:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def asked() -> None:
        with pytest.raises(ClientGone):
            await unless_gone(receive, work())
        assert ends == ["missed", "ended"]

    asyncio.run(asked())
