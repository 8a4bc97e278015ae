"""The front before replicas, on servers whose engines are scripted: who is asked, and the answers to clients."""

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import uvicorn

from tests.helpers.serving import (
    Answer,
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
from windlass.engine.request import EngineLimits, Event, Finish, Piece, Request

pytest.importorskip("aiohttp")

from windlass.serve.errors import RequestLimits
from windlass.serve.front import Front, Place, Places, key_of, ranked
from windlass.serve.run import bound, config_of


class Fixed(Places):
    """Places that a test fills."""

    def __init__(self, count: int) -> None:
        self._places = [Place(number) for number in range(count)]

    @property
    def places(self) -> Sequence[Place]:
        return self._places


@dataclass
class Fronted:
    port: int
    front: Front
    places: Fixed
    served: list[Served]
    loop: asyncio.AbstractEventLoop

    def lose(self, number: int) -> None:
        """As when a replica's death is known."""
        asyncio.run_coroutine_threadsafe(self.places.places[number].close(), self.loop).result(10)

    def replica_of(self, session: str) -> int:
        return ranked(f"session {session}", range(len(self.served)))[0]

    def session_of(self, number: int) -> str:
        """One that belongs to a replica."""
        return next(name for name in map(str, range(100)) if self.replica_of(name) == number)


@contextmanager
def fronted(services: Sequence[ScriptedService], most: int = 8, **limits: Any) -> Iterator[Fronted]:
    """Servers, and a front before them, until the end of the block."""
    listener, places, loops, running = bound("127.0.0.1", 0), Fixed(len(services)), list[Any](), list[uvicorn.Server]()
    front = Front(places, most, RequestLimits(**limits))
    with ExitStack() as stack:
        served = [stack.enter_context(serving(each, hosts=("localhost",))) for each in services]

        async def run() -> None:
            for place, each in zip(places.places, served, strict=True):
                place.open(each.url)
            running.append(uvicorn.Server(config_of(front)))
            loops.append(asyncio.get_running_loop())
            await running[0].serve(sockets=[listener])
            for place in places.places:
                await place.close()

        thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
        thread.start()
        try:
            assert soon(lambda: bool(running) and running[0].started)
            yield Fronted(listener.getsockname()[1], front, places, served, loops[0])
        finally:
            for service in services:
                service.release()
            running[0].should_exit = running[0].force_exit = True
            thread.join(10)
            assert not thread.is_alive()


def test_a_key_is_the_session_or_the_user_or_how_a_prompt_begins() -> None:
    system, first = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}
    more = [{"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Where?"}]

    def key(document: str | dict[str, Any], **headers: str) -> str:
        body = document if isinstance(document, str) else json.dumps(document)
        return key_of({name.replace("_", "-"): value for name, value in headers.items()}, body.encode())

    turns = [key({"messages": [system, first]}), key({"messages": [system, first, *more]})]
    assert turns[0] == turns[1]
    assert key({"messages": [system, {"role": "user", "content": "Goodbye"}]}) != turns[0]
    assert key({"messages": [system, first], "user": "ann"}) == key({"prompt": "x", "user": "ann"}) == "user ann"
    assert key({"prompt": "x", "user": "ann"}, x_session_id="7") == "session 7"
    assert key({"prompt": "a" * 1024 + "b"}) == key({"prompt": "a" * 1024 + "c"}) != key({"prompt": "a" * 1023 + "b"})
    assert key({"prompt": [[5, 6]]}) == "prompt [[5, 6]]"
    assert key({"input": [system, first, *more]}) == turns[0]
    assert key({"input": "x"}) == key({"prompt": "x"})
    for broken in (
        "",
        "{",
        "[1]",
        "[" * 100_000,
        '{"messages": 5, "user": ""}',
        '{"messages": []}',
        '{"user": "\\ud800"}',
    ):
        assert ranked(key(broken), range(3)) in ([0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0])


def test_a_replica_that_is_away_moves_its_own_keys_alone() -> None:
    keys = [f"user {number}" for number in range(600)]
    before = {key: ranked(key, range(4))[0] for key in keys}
    after = {key: ranked(key, [0, 1, 3])[0] for key in keys}
    assert all(after[key] == before[key] for key in keys if before[key] != 2)
    moved = [after[key] for key in keys if before[key] == 2]
    assert {0, 1, 3} == set(moved)
    assert all(100 < sum(each == number for each in before.values()) < 200 for number in range(4))


def test_a_session_stays_and_answers_come_through_as_they_are() -> None:
    services = [ScriptedService(says(f"I am {number}")) for number in range(3)]
    with fronted(services) as front:
        for name in ("a", "b", "c", "d", "e"):
            number = front.replica_of(name)
            found = [ask(front.port, "/v1/chat/completions", chat(), X_Session_Id=name) for _ in range(2)]
            assert [each.headers["x-replica"] for each in found] == [str(number)] * 2
            assert [each.document["choices"][0]["message"]["content"] for each in found] == [f"I am {number}"] * 2
        through = ask(front.port, "/v1/completions", complete(user="ann", stream=True))
        number = int(through.headers["x-replica"])
        direct = ask(front.served[number].port, "/v1/completions", complete(user="ann", stream=True))
        assert _timeless(through) == _timeless(direct)
        assert _timeless(through)[:2] == (200, f"I am {number}")
        for given, code in ((complete(budgit=5), 400), (complete(model="other"), 404)):
            refused = ask(front.port, "/v1/completions", given)
            assert (refused.status, "x-request-id" in refused.headers) == (code, True)
        assert ask(front.port, "/v1/models").document["data"][0]["id"] == "finder-3m"
        assert ask(front.port, "/v1/models", None, Host="evil.example").status == 403
        assert ask(front.port, "/replicas/2/v1/cache").headers["x-replica"] == "2"
        for path, status in (
            ("/replicas/3/metrics", 404),
            ("/replicas/x/", 404),
            ("/metrics", 404),
            ("/v1/cache", 404),
            ("/v1/cache/0123", 404),
        ):
            assert ask(front.port, path).status == status
        assert ask(front.port, "/health").document == {"status": "ok", "replicas": {"0": "ok", "1": "ok", "2": "ok"}}


def _timeless(answer: Answer) -> tuple[int, str, Any]:
    """Status, text and usage of a stream: how its text is cut into events depends on when it comes."""
    lines = [line for line in answer.body.decode().split("\n\n") if line.startswith("data: {")]
    documents = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert answer.body.endswith(b"data: [DONE]\n\n")
    text = "".join(choice["text"] for each in documents for choice in each["choices"])
    return answer.status, text, documents[-1].get("usage")


def test_a_full_replica_says_when_to_come_back() -> None:
    services = [ScriptedService(events(Piece(5, "a"), None)) for _ in range(2)]
    with fronted(services, most=2) as front:
        name = front.session_of(0)
        clients = [RawClient(front.port) for _ in range(2)]
        for client in clients:
            client.post("/v1/completions", complete(stream=True), X_Session_Id=name)
            client.until(b'"a"')
        refused = ask(front.port, "/v1/completions", complete(), X_Session_Id=name)
        assert (refused.status, refused.document["error"]["code"]) == (503, "replica_busy")
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["x-request-id"].startswith("req_")
        # Sessions of the other replica do not wait for it, and a place that is left is a place.
        other = RawClient(front.port)
        other.post("/v1/completions", complete(stream=True), X_Session_Id=front.session_of(1))
        other.until(b'"a"')
        clients[0].close()
        assert soon(lambda: len(front.places.places[0].under_way) == 1)
        clients[0] = RawClient(front.port)
        clients[0].post("/v1/completions", complete(stream=True), X_Session_Id=name)
        clients[0].until(b'"a"')
        for client in (*clients, other):
            client.close()
        assert all(service.is_idle() for service in services)


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("is_reset", [False, True])
def test_a_client_that_goes_is_gone_for_the_replica(is_streamed: bool, is_reset: bool) -> None:
    service = ScriptedService(events(Piece(5, "a"), None))
    with fronted([service]) as front:
        client = RawClient(front.port)
        client.post("/v1/completions", complete(stream=is_streamed))
        if is_streamed:
            client.until(b'"a"')
        assert soon(lambda: len(service.requests) == 1)
        client.close(is_reset)
        assert service.is_idle()
        assert set(service.cancelled) == {1}
        assert soon(lambda: not front.places.places[0].under_way)


@pytest.mark.slow
def test_a_client_that_takes_nothing_is_given_up_by_the_replica() -> None:
    """Answers are not piled up in between: the replica cannot send more than the sockets hold."""
    pieces = (Piece(5, "a" * 16_384) for _ in range(4_000))
    service = ScriptedService(lambda _: iter([*pieces, None]), EngineLimits(unread_seconds=0.5))
    with fronted([service]) as front:
        client = RawClient(front.port, buffer=4096)
        client.post("/v1/completions", complete(stream=True))
        client.until(b"aaaa")
        assert soon(lambda: set(service.cancelled) == {1}, 30)
        client.close()
        assert soon(lambda: not front.places.places[0].under_way)


def pausing(request: Request) -> Iterator[Event | None]:
    """Writes a sign, and the next once it is released."""
    yield from (Piece(5, "a"), None, Piece(6, "b"), Finish("stop", usage(request, 2)))


def test_a_death_under_way_is_an_error_that_can_be_retried() -> None:
    services = [ScriptedService(pausing) for _ in range(2)]
    with fronted(services) as front:
        names = [front.session_of(number) for number in range(2)]
        clients = [RawClient(front.port) for _ in range(4)]
        for client, name, is_streamed in zip(clients, (*names, *names), (True, True, False, False), strict=True):
            client.post("/v1/completions", complete(stream=is_streamed), X_Session_Id=name)
            if is_streamed:
                client.until(b'"a"')
        assert soon(lambda: all(len(service.requests) == 2 for service in services))
        front.lose(0)
        rest = clients[0].answer_rest()
        assert b'"code":"replica_died"' in rest
        assert b"[DONE]" not in rest
        whole = clients[2].answer()
        assert (whole.status, whole.document["error"]["code"], whole.headers["retry-after"]) == (
            503,
            "replica_died",
            "1",
        )
        assert ask(front.port, "/health").document["replicas"] == {"0": "down", "1": "ok"}
        # The others go on, and the session of the dead one goes to a replica that is there.
        services[1].release()
        assert b"[DONE]" in clients[1].answer_rest()
        assert clients[3].answer().status == 200
        moved = RawClient(front.port)
        moved.post("/v1/completions", complete(stream=True), X_Session_Id=names[0])
        assert b"x-replica: 1" in moved.until(b"[DONE]")
        for client in (*clients, moved):
            client.close()
        front.lose(1)
        gone = ask(front.port, "/v1/completions", complete())
        assert (gone.status, gone.document["error"]["code"], gone.headers["retry-after"]) == (503, "no_replica", "5")
        assert ask(front.port, "/health").status == 503


def test_a_replica_that_refuses_connections_is_passed_over() -> None:
    service = ScriptedService(says("here"))
    with fronted([service, ScriptedService(says("there"))]) as front:
        front.places.places[1].url = "http://127.0.0.1:1"
        found = ask(front.port, "/v1/completions", complete(), X_Session_Id=front.session_of(1))
        assert (found.status, found.headers["x-replica"]) == (200, "0")


def test_bodies_are_limited_and_an_end_is_told() -> None:
    with fronted([ScriptedService(says("here"))], body_bytes=200, body_seconds=0.1) as front:
        assert ask(front.port, "/v1/completions", complete(prompt="a" * 300)).status == 413
        slow = RawClient(front.port)
        slow.send("POST", "/v1/completions", b"", Content_Length="5")
        assert slow.answer().status == 408
        slow.close()
        front.front.is_open = False
        refused = ask(front.port, "/v1/completions", complete())
        assert (refused.status, refused.document["error"]["code"]) == (503, "stopping")
        assert ask(front.port, "/ready").status == 503
        assert ask(front.port, "/health").status == 200
