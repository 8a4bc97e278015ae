"""Replicas of the shipped model on Ray Serve: under load one is killed, and everybody is told something."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from tests.helpers.models import MODEL
from tests.helpers.processes import descendants
from tests.helpers.serving import RawClient, ask, complete, soon
from windlass.cache.options import CacheOptions
from windlass.core.errors import UsageError
from windlass.engine.request import EngineLimits
from windlass.serve.run import DrainingServer, ServeOptions, bind

pytestmark = pytest.mark.slow  # a Ray and two processes with a model each
RETRY_S = 1.0
ROWS, QUEUE = 4, 4
SERVE = ServeOptions(
    "finder-3m", ROWS, CacheOptions(budget=64, policy="recent"), EngineLimits(queue=QUEUE), reuse_bytes=1 << 22
)
ENDLESS = {"logit_bias": {"1": -100}}  # no end of a text


class Running:
    """A front and two replicas, in a thread of their own."""

    def __init__(self) -> None:
        from windlass.serve.replicas import Front, ReplicaOptions, deploy

        self.told: list[str] = []
        self.options = ReplicaOptions(
            model=MODEL,
            dtype="float32",
            device="cpu",
            weights="auto",
            threads=1,
            serve=SERVE,
            folder=str(Path.cwd()),
        )
        replicas = deploy(self.options, 2, 0, "test", self.told.append)
        front = Front(replicas, SERVE.settings.request, SERVE.limits.unread_seconds, accept_seconds=1.0)
        self.http = DrainingServer(front, front.close, lambda: front.drain(5.0))
        self.is_over = threading.Event()
        listener = bind("127.0.0.1", 0)
        self.port = listener.getsockname()[1]
        self.threads = [
            threading.Thread(target=replicas.watch, args=(self.is_over,), daemon=True),
            threading.Thread(target=self.http.run, args=([listener],), daemon=True),
        ]
        for each in self.threads:
            each.start()
        assert soon(lambda: self.http.started)

    def end(self) -> None:
        self.is_over.set()
        self.http.end()
        for each in self.threads:
            each.join(30)
            assert not each.is_alive()


@pytest.fixture(scope="module")
def running(ray: None) -> Iterator[Running]:  # noqa: ARG001  # a Ray that runs
    pytest.importorskip("ray.serve")
    from ray import serve

    made = Running()
    yield made
    made.end()
    serve.delete("test")


def home_of(session: str) -> int:
    from windlass.serve.replicas import Affinity, key_of

    return Affinity(key_of(Headers({"x-session-id": session}), b"")).ranked((0, 1))[0]


class Asker(threading.Thread):
    """Asks for long texts of one session until it is told to end, and notes how each ended."""

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
        # A length that no end of a text cuts short: half a second of writing, or so.
        body = complete(stream=self.is_streamed, max_tokens=150, **ENDLESS)
        answer = ask(self.port, "/v1/completions", body, X_Session_Id=self.session)
        code = answer.body.partition(b'"code":"')[2].partition(b'"')[0].decode()
        is_whole = b"[DONE]" in answer.body if self.is_streamed else answer.status == 200
        return answer.headers.get("x-replica", ""), "whole" if is_whole else code


@pytest.mark.slow
def test_a_replica_is_killed_under_load(running: Running) -> None:
    names = [str(number) for number in range(8)]
    home = {name: str(home_of(name)) for name in names}
    assert set(home.values()) == {"0", "1"}
    askers = [Asker(running.port, name, number % 2 == 0) for number, name in enumerate(names)]
    for each in askers:
        each.start()
    assert soon(lambda: all(each.ends for each in askers), 120)
    assert all(end == (home[each.session], "whole") for each in askers for end in each.ends)
    os.kill(_replicas()[0], signal.SIGKILL)
    assert soon(lambda: len(running.told) == 2, 120)
    dead = running.told[0].split()[1]
    assert running.told == [f"replica {dead} died. It is restarted", f"replica {dead} serves again"]
    counts = [len(each.ends) for each in askers]
    assert soon(lambda: all(len(each.ends) > count + 1 for each, count in zip(askers, counts, strict=True)), 120)
    for each in askers:
        each.is_over.set()
    for each in askers:
        each.join(60)
        assert not each.is_alive(), "a request hangs"
    assert any(end == "replica_died" for each in askers for _, end in each.ends)
    for each in askers:
        ends = [end for _, end in each.ends]
        if home[each.session] != dead:
            assert set(each.ends) == {(home[each.session], "whole")}, "it has seen nothing of this"
        else:
            # Ray Serve sends a request elsewhere that the dead replica had not accepted.
            assert ends.count("replica_died") <= 1
            assert ends.count("whole") == len(ends) - ends.count("replica_died")
            assert each.ends[-1] == (dead, "whole"), "it is at home again"


def _replicas() -> list[int]:
    """The processes of replicas."""
    return [
        each for each in descendants(os.getpid()) if b"ServeReplica:test" in Path(f"/proc/{each}/cmdline").read_bytes()
    ]


def test_a_conversation_stays_where_its_prefix_is(running: Running) -> None:
    homes = set()
    for user in ("ann", "bob", "eve", "joe", "kim"):
        prompt = f"{user} went down the river and saw a boat and a lock and a house by the bank. " * 3
        first, second = (
            ask(running.port, "/v1/completions", complete(prompt=prompt, user=user, max_tokens=4)) for _ in "ab"
        )
        assert first.headers["x-replica"] == second.headers["x-replica"]
        homes.add(first.headers["x-replica"])
        cached = [each.document["usage"]["prompt_tokens_details"]["cached_tokens"] for each in (first, second)]
        assert cached[0] == 0
        assert cached[1] > 20
    assert homes == {"0", "1"}


@pytest.mark.slow
def test_a_full_replica_spills_over(running: Running) -> None:
    homes = []
    with ExitStack() as clients:
        for _ in range(2 * (ROWS + QUEUE)):
            client = clients.enter_context(closing(RawClient(running.port)))
            client.post("/v1/completions", complete(stream=True, max_tokens=9_000, **ENDLESS), X_Session_Id="a")
            homes.append(int(client.until(b"\r\n\r\n").partition(b"x-replica: ")[2][:1]))
        refused = ask(running.port, "/v1/completions", complete(), X_Session_Id="a")
        assert (refused.status, refused.document["error"]["code"]) == (503, "replica_busy")
    assert homes == [home_of("a")] * (ROWS + QUEUE) + [1 - home_of("a")] * (ROWS + QUEUE)
    assert soon(lambda: ask(running.port, "/v1/completions", complete(max_tokens=1)).status == 200, 30)


@pytest.mark.slow
def test_each_replica_tells_of_itself(running: Running) -> None:
    for number in range(2):
        rows = ask(running.port, f"/replicas/{number}/v1/cache").document["rows"]
        assert len(rows) <= ROWS
        assert b"windlass" in ask(running.port, f"/replicas/{number}/metrics").body
    assert ask(running.port, "/ready").document == {"status": "ready", "replicas": {"0": "ok", "1": "ok"}}


@pytest.mark.slow
def test_a_replica_that_cannot_be_started_says_why(running: Running) -> None:
    from ray import serve

    from windlass.serve.replicas import deploy

    with pytest.raises(UsageError, match=r"^/nowhere is not on"):
        deploy(replace(running.options, folder="/nowhere"), 1, 0, "bad", running.told.append)
    serve.delete("bad")
