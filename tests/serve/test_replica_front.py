"""The front before replicas, on engines that are scripted: the replica that is asked, and the answers to clients.

Replicas are applications in this process. A stand-in for the handle of Ray Serve ranks them as the router does.
"""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from tests.helpers.serving import (
    NAME,
    Answer,
    RawClient,
    ScriptedService,
    ask,
    chat,
    complete,
    events,
    says,
    soon,
    usage,
    words,
)
from windlass.engine.request import Event, Finish, Piece, Request

pytest.importorskip("ray.serve")

from ray.exceptions import RayActorError

from windlass.serve.app import Server, make_app
from windlass.serve.errors import RequestLimits, ServerSettings
from windlass.serve.replicas import ANY, Affinity, Front, Replica, ReplicaSet, key_of
from windlass.serve.run import DrainingServer, bind


class Scripted(Replica):
    """A replica in this process, whose engine is scripted."""

    def __init__(self, service: ScriptedService, settings: ServerSettings, number: int) -> None:
        self._service, self._app, self._number = service, self._mortal, number
        self._server = make_app(Server(service, words(), settings))
        self.under_way = set[asyncio.Task[None]]()

    async def number(self, _: Affinity = ANY) -> int:
        return self._number

    async def _mortal(self, scope: Scope, receive: Receive, send: Send) -> None:
        task = asyncio.ensure_future(self._server(scope, receive, send))
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)
        try:
            await task
        except asyncio.CancelledError:
            raise RayActorError from None

    def die(self) -> None:
        for task in tuple(self.under_way):  # other threads end theirs meanwhile
            task.get_loop().call_soon_threadsafe(task.cancel)


class ScriptedSet(ReplicaSet):
    """Replicas of which each takes `most` requests."""

    def __init__(self, replicas: Sequence[Scripted], most: int) -> None:
        self.all, self.most, self.count = replicas, most, len(replicas)
        self.live = frozenset(range(self.count))

    async def answer(self, affinity: Affinity, scope: Scope, body: bytes) -> AsyncGenerator[Any]:
        free = [each for each in affinity.ranked(self.live) if len(self.all[each].under_way) < self.most]
        if not free:
            await asyncio.Event().wait()
        async with aclosing(self.all[free[0]].answer(affinity, scope, body)) as items:
            async for item in items:
                yield item

    def lose(self, number: int) -> None:
        """Let a replica die."""
        self.live -= {number}
        self.all[number].die()


@dataclass
class Fronted:
    port: int
    front: Front
    http: DrainingServer
    replicas: ScriptedSet

    def replica_of(self, session: str) -> int:
        key = key_of(Headers({"x-session-id": session}), b"")
        return Affinity(key).ranked(range(self.replicas.count))[0]

    def session_of(self, number: int) -> str:
        """One that belongs to a replica."""
        return next(name for name in map(str, range(100)) if self.replica_of(name) == number)


@contextmanager
def fronted(
    services: Sequence[ScriptedService],
    most: int = 8,
    keys: tuple[str, ...] = (),
    unread_seconds: float = 60.0,
    stop_seconds: float = 0.0,
    **limits: Any,
) -> Iterator[Fronted]:
    """A front before applications, until the end of the block."""
    settings = ServerSettings(NAME, keys, hosts=("localhost",))
    replicas = ScriptedSet([Scripted(each, settings, number) for number, each in enumerate(services)], most)
    front = Front(replicas, RequestLimits(**limits), unread_seconds, accept_seconds=0.3)
    http = DrainingServer(front, front.close, lambda: front.drain(stop_seconds))
    listener = bind("127.0.0.1", 0)
    thread = threading.Thread(target=http.run, args=([listener],), daemon=True)
    thread.start()
    try:
        assert soon(lambda: http.started)
        yield Fronted(listener.getsockname()[1], front, http, replicas)
    finally:
        for service in services:
            service.release()
        http.should_exit = http.force_exit = True
        thread.join(10)
        assert not thread.is_alive()


def key(document: str | dict[str, Any], **headers: str) -> str:
    body = document if isinstance(document, str) else json.dumps(document)
    return key_of(Headers({name.replace("_", "-"): value for name, value in headers.items()}), body.encode())


def test_a_key_is_the_session_or_the_user_or_how_a_prompt_begins() -> None:
    system, first = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}
    more = [{"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Where?"}]
    turns = [key({"messages": [system, first]}), key({"messages": [system, first, *more]})]
    assert turns[0] == turns[1]
    assert key({"messages": [system, {"role": "user", "content": "Goodbye"}]}) != turns[0]
    assert key({"messages": [system, first], "user": "ann"}) == key({"prompt": "x", "user": "ann"}) == "\nuser ann"
    assert key({"prompt": "x", "user": "ann"}, x_session_id="7") == "\nsession 7"
    assert key({"prompt": "a" * 1024 + "b"}) == key({"prompt": "a" * 1024 + "c"}) != key({"prompt": "a" * 1023 + "b"})
    assert key({"prompt": [[5, 6]]}) == "\nprompt [[5, 6]]"
    assert key({"input": [system, first, *more]}) == turns[0]
    assert key({"input": "x"}) == key({"prompt": "x"})
    assert key({"user": "ann"}, authorization="Bearer a") != key({"user": "ann"}, authorization="Bearer b")
    for broken in (
        "",
        "{",
        "[1]",
        "[" * 100_000,
        '{"messages": 5, "user": ""}',
        '{"messages": []}',
        '{"user": "\\ud800"}',
    ):
        assert sorted(Affinity(key(broken)).ranked(range(3))) == [0, 1, 2]


def test_a_replica_that_is_away_moves_its_own_keys_alone() -> None:
    keys = [f"user {number}" for number in range(600)]
    before = {each: Affinity(each).ranked(range(4))[0] for each in keys}
    after = {each: Affinity(each).ranked([3, 0, 1])[0] for each in keys}
    assert all(after[each] == before[each] for each in keys if before[each] != 2)
    moved = [after[each] for each in keys if before[each] == 2]
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
        assert _told(through) == f"I am {through.headers['x-replica']}"
        for given, code in ((complete(budgit=5), 400), (complete(model="other"), 404)):
            refused = ask(front.port, "/v1/completions", given)
            assert (refused.status, "x-request-id" in refused.headers) == (code, True)
        assert ask(front.port, "/v1/models").document["data"][0]["id"] == NAME
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


def _told(answer: Answer) -> str:
    """The text of a stream."""
    lines = [line for line in answer.body.decode().split("\n\n") if line.startswith("data: {")]
    assert (answer.status, answer.body.endswith(b"data: [DONE]\n\n")) == (200, True)
    return "".join(choice["text"] for each in lines for choice in json.loads(each[6:])["choices"])


def test_a_key_is_asked_for_by_the_replica() -> None:
    with fronted([ScriptedService(says("here"))], keys=("12345678",)) as front:
        refused = ask(front.port, "/v1/completions", complete())
        assert (refused.status, refused.document["error"]["code"]) == (401, "invalid_api_key")
        assert ask(front.port, "/v1/completions", complete(), Authorization="Bearer 12345678").status == 200
        assert ask(front.port, "/health").status == 200


def test_full_replicas_say_when_to_come_back() -> None:
    services = [ScriptedService(events(Piece(5, "a"), None)) for _ in range(2)]
    with fronted(services, most=1) as front:
        name = front.session_of(0)
        clients = [RawClient(front.port) for _ in range(2)]
        for client, replica in zip(clients, (b"0", b"1"), strict=True):
            client.post("/v1/completions", complete(stream=True), X_Session_Id=name)
            assert b"x-replica: " + replica in client.until(b'"a"'), "a full replica spills over"
        refused = ask(front.port, "/v1/completions", complete(), X_Session_Id=name)
        assert (refused.status, refused.document["error"]["code"]) == (503, "replica_busy")
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["x-request-id"].startswith("req_")
        clients[0].close()
        assert soon(lambda: not front.replicas.all[0].under_way)
        again = RawClient(front.port)
        again.post("/v1/completions", complete(stream=True), X_Session_Id=name)
        assert b"x-replica: 0" in again.until(b'"a"'), "a place that is left is a place"
        for client in (again, clients[1]):
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
        assert soon(lambda: not front.front.under_way)


@pytest.mark.slow
def test_a_client_that_takes_nothing_is_given_up() -> None:
    pieces = (Piece(5, "a" * 16_384) for _ in range(4_000))
    service = ScriptedService(lambda _: iter([*pieces, None]))
    with fronted([service], unread_seconds=0.5) as front:
        client = RawClient(front.port, buffer=4096)
        client.post("/v1/completions", complete(stream=True))
        client.until(b"aaaa")
        assert soon(lambda: set(service.cancelled) == {1}, 30)
        client.close()
        assert soon(lambda: not front.front.under_way)


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
        front.replicas.lose(0)
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
        assert ask(front.port, "/replicas/0/metrics").document["error"]["code"] == "no_replica"
        front.replicas.lose(1)
        gone = ask(front.port, "/v1/completions", complete())
        assert (gone.status, gone.document["error"]["code"], gone.headers["retry-after"]) == (503, "no_replica", "5")
        assert ask(front.port, "/health").status == 503


def test_bodies_are_limited() -> None:
    with fronted([ScriptedService(says("here"))], body_bytes=200, body_seconds=0.1) as front:
        assert ask(front.port, "/v1/completions", complete(prompt="a" * 300)).status == 413
        slow = RawClient(front.port)
        slow.send("POST", "/v1/completions", b"", Content_Length="5")
        assert slow.answer().status == 408
        slow.close()


def test_an_end_is_told_and_cuts_requests_after_a_while() -> None:
    service = ScriptedService(pausing)
    with fronted([service], stop_seconds=1.0) as front:
        streamed, whole = RawClient(front.port), RawClient(front.port)
        streamed.post("/v1/completions", complete(stream=True))
        streamed.until(b'"a"')
        whole.post("/v1/completions", complete())
        assert soon(lambda: len(service.requests) == 2)
        front.http.handle_exit(0, None)
        refused = ask(front.port, "/v1/completions", complete())
        assert (refused.status, refused.document["error"]["code"]) == (503, "stopping")
        assert ask(front.port, "/ready").status == 503
        assert ask(front.port, "/health").status == 200
        assert b'"code":"stopping"' in streamed.answer_rest()
        assert whole.answer().document["error"]["code"] == "stopping"
        assert soon(lambda: len(service.cancelled) == 2)
        for client in (streamed, whole):
            client.close()


def test_a_replica_whose_engine_has_stopped_is_not_healthy() -> None:
    replica = object.__new__(Replica)
    replica._service = ScriptedService(says("here"))
    replica._service.is_alive = False
    with pytest.raises(RuntimeError, match="the engine has stopped"):
        asyncio.run(replica.check_health())
