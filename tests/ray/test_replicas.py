"""Replicas of the shipped model under load: one is killed, and everybody is told something."""

import asyncio
import json
import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.models import MODEL
from tests.helpers.serving import RawClient, ask, complete, soon
from windlass.cache.options import CacheOptions
from windlass.engine.request import EngineLimits
from windlass.serve.run import ServeOptions, bound

RETRY_S = 1.0
SERVE = ServeOptions("finder-3m", 4, CacheOptions(budget=64, policy="recent"), EngineLimits(queue=8))


class Running:
    """A front and two replicas, in a thread of their own."""

    def __init__(self) -> None:
        from windlass.serve.front import Front
        from windlass.serve.replicas import FrontServer, ReplicaOptions, Replicas

        self.told: list[str] = []
        self.options = ReplicaOptions(MODEL, "float32", "cpu", "auto", 1, SERVE, str(Path.cwd()), True)
        self.listener = bound("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.error: BaseException | None = None

        async def run() -> None:
            self.loop = asyncio.get_running_loop()
            self.replicas = Replicas(self.options, 2, 0, self.told.append)
            try:
                await self.replicas.start()
                front = Front(self.replicas, 12, SERVE.settings.request)
                self.server = FrontServer(front, self.replicas, 5.0)
                await self.server.serve(sockets=[self.listener])
            except BaseException as error:
                self.error = error
            finally:
                await self.replicas.end(0.0)

        self.thread = threading.Thread(target=lambda: asyncio.run(run()), daemon=True)
        self.thread.start()
        assert soon(lambda: self.error is not None or ("server" in vars(self) and self.server.started), 120), self.error


@pytest.fixture(scope="module")
def running(ray: None) -> Iterator[Running]:  # noqa: ARG001  # a Ray that runs
    made = Running()
    yield made
    made.loop.call_soon_threadsafe(made.server.end)
    made.thread.join(60)
    assert not made.thread.is_alive()
    assert made.error is None
    assert made.replicas.live == []


class Asker(threading.Thread):
    """Asks for long texts of one session until it is told to end; notes how each ended."""

    def __init__(self, port: int, session: str, is_streamed: bool) -> None:
        super().__init__(daemon=True)
        self.port, self.session, self.is_streamed = port, session, is_streamed
        self.ends: list[tuple[str, str]] = []
        self.is_over = threading.Event()

    def run(self) -> None:
        while not self.is_over.is_set():
            self.ends.append(self._asked())
            if self.ends[-1][1] == "replica_died":
                self.is_over.wait(RETRY_S)  # as the answer asks for

    def _asked(self) -> tuple[str, str]:
        """The replica that answered, and how it ended."""
        client = RawClient(self.port)
        try:
            # A length that no end of a text cuts short: half a second of writing, or so.
            body = complete(stream=self.is_streamed, max_tokens=150, logit_bias={"1": -100})
            client.post("/v1/completions", body, X_Session_Id=self.session)
            head = client.until(b"\r\n\r\n")
            replica = head.partition(b"x-replica: ")[2][:1].decode()
            if b"text/event-stream" in head:
                rest = client.answer_rest()
                return replica, "whole" if b"data: [DONE]" in rest else _code(rest)
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
            document = json.loads(client._exactly(length))
            return replica, "whole" if "choices" in document else str(document["error"]["code"])
        finally:
            client.close()


def _code(rest: bytes) -> str:
    return rest.partition(b'"code":"')[2].partition(b'"')[0].decode()


@pytest.mark.slow
def test_a_replica_is_killed_under_load(running: Running) -> None:
    from windlass.serve.front import ranked

    names = [str(number) for number in range(8)]
    home = {name: str(ranked(f"session {name}", (0, 1))[0]) for name in names}
    assert set(home.values()) == {"0", "1"}
    askers = [Asker(running.port, name, number % 2 == 0) for number, name in enumerate(names)]
    for each in askers:
        each.start()
    assert soon(lambda: all(each.ends for each in askers), 120)
    assert {end for each in askers for end in each.ends} == {
        (home[each.session], "whole") for each in askers for _ in "a"
    }
    process = ray_get(running, running.replicas.actors[0].process.remote())
    os.kill(process, signal.SIGKILL)
    assert soon(lambda: any("replica 0 died" in line for line in running.told), 30)
    assert soon(lambda: "replica 0 serves again" in running.told, 120)
    counts = [len(each.ends) for each in askers]
    assert soon(lambda: all(len(each.ends) > count + 1 for each, count in zip(askers, counts, strict=True)), 120)
    for each in askers:
        each.is_over.set()
    for each in askers:
        each.join(60)
        assert not each.is_alive(), "a request hangs"
    for each in askers:
        ends = [end for _, end in each.ends]
        if home[each.session] == "1":
            assert set(each.ends) == {("1", "whole")}, "it has seen nothing of this"
        else:
            assert ends.count("replica_died") == 1
            assert ends.count("whole") == len(ends) - 1
            assert each.ends[-1] == ("0", "whole"), "it is at home again"
    assert running.told == ["replica 0 died (its process ended); it is started again", "replica 0 serves again"]


def ray_get(running: Running, reference: Any) -> Any:
    async def get() -> Any:
        return await reference

    return asyncio.run_coroutine_threadsafe(get(), running.loop).result(30)


def test_each_replica_tells_of_itself(running: Running) -> None:
    for number in range(2):
        rows = ask(running.port, f"/replicas/{number}/v1/cache").document["rows"]
        assert len(rows) <= 4
        assert b"windlass" in ask(running.port, f"/replicas/{number}/metrics").body
    assert ask(running.port, "/ready").document == {"status": "ready", "replicas": {"0": "ok", "1": "ok"}}


@pytest.mark.slow
def test_a_replica_that_cannot_be_started_says_why(running: Running) -> None:
    from windlass.core.errors import UsageError
    from windlass.serve.replicas import Replicas

    async def start() -> None:
        options = replace(running.options, folder="/nowhere")
        replicas = Replicas(options, 1, 0, running.told.append)
        try:
            await replicas.start()
        finally:
            await replicas.end(0.0)

    with pytest.raises(UsageError, match="/nowhere is not on"):
        asyncio.run_coroutine_threadsafe(start(), running.loop).result(60)
