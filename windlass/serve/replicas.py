"""Replicas of the server on Ray Serve: a router that keeps a conversation on its replica, and the front before them.

Ray Serve starts, checks and restarts replicas. Its own HTTP proxy is left out: behind it a router sees no body, and
errors are plain text. The front reads the body instead, and passes an affinity to the router.
"""

import asyncio
import hashlib
import json
import logging
import os
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any, Final

import torch
from fastapi import Request as HttpRequest
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from ray.serve.schema import LoggingConfig
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from windlass.core.errors import UsageError
from windlass.hf.load import load
from windlass.serve.app import make_app, with_origins
from windlass.serve.errors import NO_SESSIONS, ApiError, JsonAnswer, RequestLimits, event, stopping
from windlass.serve.middleware import BodyLimit, bare_path
from windlass.serve.run import (
    CUT_SECONDS,
    DrainingServer,
    ServeOptions,
    address_of,
    bind,
    server_of,
    start_service,
)
from windlass.serve.stream import ClientGone, unless_gone
from windlass.view.server import SchedulerWatcher, ViewApp

SESSION: Final = "x-session-id"
PREFIX: Final = 1024  # characters of a prompt that choose its replica
LOOK_SECONDS: Final = 1.0  # between two looks at the replicas
LOOK_TIMEOUT: Final = 10.0
ACCEPT_SECONDS: Final = 5.0  # timeout for a replica to accept a request
RETRY_SECONDS: Final = 1.0


@dataclass(frozen=True)
class Affinity:
    """The replicas that suit a request: replica `number` alone, or all in the order that `key` gives them."""

    key: str = ""
    number: int | None = None

    def ranked(self, numbers: Iterable[int]) -> list[int]:
        """The suitable replicas, best first, by rendezvous hashing: a lost replica moves its own keys alone."""
        if self.number is not None:
            return [number for number in numbers if number == self.number]
        key = self.key.encode("utf-8", "replace")
        return sorted(numbers, key=lambda number: hashlib.sha256(f"{number} ".encode() + key).digest())


ANY: Final = Affinity()


def key_of(headers: Headers, body: bytes) -> str:
    """The key of a conversation: its API key, and its header `X-Session-Id`, its `user` or the start of its prompt.

    Messages count up to the first of a user, so that all turns of a conversation have one key.
    """
    key = headers.get("authorization") or headers.get("x-api-key", "")
    return f"{key}\n{_conversation(headers, body)}"


def _conversation(headers: Headers, body: bytes) -> str:
    if headers.get(SESSION):
        return f"session {headers[SESSION]}"
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    if not isinstance(document, dict):
        return ""
    if isinstance(document.get("user"), str) and document["user"]:
        return f"user {document['user']}"
    turns = next((document[name] for name in ("messages", "input") if isinstance(document.get(name), list)), None)
    begun = document.get("prompt", document.get("input", "")) if turns is None else _opening(turns)
    return "prompt " + (begun if isinstance(begun, str) else json.dumps(begun))[:PREFIX]


def _opening(messages: list[Any]) -> list[Any]:
    roles = [each.get("role") if isinstance(each, dict) else None for each in messages]
    return messages[: roles.index("user") + 1] if "user" in roles else messages[:1]


class AffinityRouter(RequestRouter):
    """Ranks replicas by the affinity of a request, its first argument. A full replica spills over to the next."""

    queue_len_response_deadline_s = max_queue_len_response_deadline_s = ACCEPT_SECONDS  # a busy one is not a full one

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        # A replica's id changes when it is restarted, its number does not.
        numbered = {each.routing_stats["number"]: each for each in candidate_replicas if each.routing_stats}
        return [[numbered[number]] for number in pending_request.args[0].ranked(numbered)]


@dataclass(frozen=True)
class ReplicaOptions:
    """The model that a replica loads, and how it serves."""

    model: str
    dtype: str
    device: str
    weights: str
    threads: int
    serve: ServeOptions
    folder: str


class Replica:
    """A model and its server in a process of Ray Serve's."""

    def __init__(self, options: ReplicaOptions) -> None:
        """Raises: WindlassError as `windlass serve` does."""
        if not Path(options.folder).is_dir():
            raise UsageError(f"{options.folder} is not on {os.uname().nodename}. Run this where all machines have it")
        os.chdir(options.folder)
        torch.set_num_threads(options.threads)
        model, tokenizer = load(options.model, options.dtype, options.device, options.weights)
        asked, watch = replace(options.serve, origins=()), SchedulerWatcher()  # the front answers browsers
        self._service = start_service(model, tokenizer, asked, watch)
        page = ViewApp(watch, tokenizer, self._service.status, asked.is_shown)
        self._app = make_app(server_of(model, tokenizer, asked, self._service, NO_SESSIONS), page)

    async def answer(self, _: Affinity, scope: Scope, body: bytes) -> AsyncGenerator[int | Message]:
        """Yield the replica's number at once, and then the messages of the answer as they are written.

        The application sees a disconnect once they are no longer read.
        """
        messages, is_over = asyncio.Queue[Message | None](), asyncio.Event()
        request = iter([{"type": "http.request", "body": body}])

        async def receive() -> Message:
            for message in request:
                return message
            await is_over.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            try:
                await self._app(scope, receive, messages.put)
            finally:
                messages.put_nowait(None)

        task = asyncio.create_task(run())
        try:
            yield await self.number()
            while (message := await messages.get()) is not None:
                yield message
            await task
        finally:
            is_over.set()

    async def number(self, _: Affinity = ANY) -> int:
        """Return the replica's number, from 0. A restarted replica has the number of the lost one.

        Raises: RuntimeError once the engine has stopped.
        """
        if not self._service.status().is_alive:
            raise RuntimeError("the engine has stopped")
        return int(serve.get_replica_context().rank.rank)

    async def check_health(self) -> None:
        """Let Ray Serve restart the replica once its engine has stopped."""
        await self.number()

    async def record_routing_stats(self) -> dict[str, int]:
        """The number, for the router."""
        return {"number": await self.number()}


class ReplicaSet:
    """All replicas of a deployment. `live` has the numbers of those that last answered. `note` gets each change."""

    def __init__(self, handle: Any, count: int, note: Callable[[str], None]) -> None:
        self._handle, self.count, self._note = handle, count, note
        self.live = frozenset(range(count))

    async def answer(self, affinity: Affinity, scope: Scope, body: bytes) -> AsyncGenerator[Any]:
        """Yield the items of `Replica.answer` of the replica that suits best, and end the request when closed."""
        items = self._handle.options(stream=True).answer.remote(affinity, scope, body)
        try:
            async for item in items:
                yield item
        finally:
            items.cancel()

    def watch(self, is_over: Event) -> None:
        """Keep `live` up to date until `is_over`."""
        while not is_over.wait(LOOK_SECONDS):
            try:
                found = self._handle.broadcast("number").results(timeout_s=LOOK_TIMEOUT, return_exceptions=True)
            except TimeoutError:
                continue  # they are busy
            except (RayError, DeploymentUnavailableError):
                found = []
            live = frozenset(each for each in found if isinstance(each, int))
            for number in sorted(self.live - live):
                self._note(f"replica {number} died. It is restarted")
            for number in sorted(live - self.live):
                self._note(f"replica {number} serves again")
            self.live = live


NUMBERED: Final = "/replicas/"
OF_ONE: Final = ("/metrics", "/v1/cache")  # each replica has its own
STREAM: Final = "text/event-stream"


class Front:
    """The application that clients talk to. It hands requests to replicas, and passes answers on as they come.

    A client that takes nothing for `unread_seconds` is given up.
    """

    def __init__(
        self,
        replicas: ReplicaSet,
        limits: RequestLimits,
        unread_seconds: float,
        accept_seconds: float = ACCEPT_SECONDS,
    ) -> None:
        self._replicas, self._limits = replicas, limits
        self._unread_seconds, self._accept_seconds = unread_seconds, accept_seconds
        self.is_open, self._is_cut = True, False
        self.under_way = set[asyncio.Task[None]]()
        self._app: ASGIApp = BodyLimit(self._answer, limits.body_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            await self._app(scope, receive, send)
        except (ClientGone, ClientDisconnect):
            pass
        except ApiError as error:
            answer = error.answer(scope["path"])
            answer.headers["x-request-id"] = f"req_{secrets.token_hex(12)}"
            await answer(scope, receive, send)

    def close(self) -> None:
        """Admit no more requests."""
        self.is_open = False

    def drain(self, seconds: float) -> None:
        """Return once requests under way have ended. Those that are left after `seconds` are cut with an error."""
        until = monotonic() + seconds
        while self.under_way and monotonic() < until:
            sleep(0.05)
        self._is_cut = True
        for task in list(self.under_way):
            task.get_loop().call_soon_threadsafe(task.cancel)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = bare_path(scope)
        if path in ("/health", "/ready"):
            await self._health(path == "/ready")(scope, receive, send)
            return
        if not self.is_open:
            raise stopping()
        http = HttpRequest(scope, receive)
        try:
            async with asyncio.timeout(self._limits.body_seconds):
                body = await http.body()
        except TimeoutError:
            message = f"the body did not come within {self._limits.body_seconds:g} s"
            raise ApiError(408, message, None, "body_timeout") from None
        if path.startswith(NUMBERED):
            number, _, path = path.removeprefix(NUMBERED).partition("/")
            affinity = Affinity(number=self._number(number))
        elif path in OF_ONE or path.startswith(f"{OF_ONE[1]}/"):
            raise ApiError(404, f"each replica has its own. Ask {NUMBERED}0{path}", None, "unknown_route")
        else:
            affinity = Affinity(key_of(http.headers, body))
        if not affinity.ranked(self._replicas.live):
            raise _no_replica()
        await unless_gone(receive, self._passed(affinity, {**scope, "path": f"/{path.lstrip('/')}"}, body, send))

    async def _passed(self, affinity: Affinity, scope: Scope, body: bytes, send: Send) -> None:
        """Pass a request to a replica, and the replica's answer to the client.

        Raises: ApiError where no replica answers, and ConnectionError where an answer that is no stream breaks off.
        """
        task, head = asyncio.current_task(), None
        assert task is not None
        self.under_way.add(task)
        task.add_done_callback(self.under_way.discard)
        try:
            async with aclosing(self._replicas.answer(affinity, scope, body)) as answer:
                async with asyncio.timeout(self._accept_seconds):
                    number = await anext(answer)
                async for message in answer:
                    if message["type"] == "http.response.start":
                        head = Headers(raw=message["headers"])
                        message["headers"] = [*message["headers"], (b"x-replica", str(number).encode())]
                    await self._sent(send, message)
        except TimeoutError:
            told = "all replicas are full. Send it again"
            raise ApiError(503, told, None, "replica_busy", RETRY_SECONDS) from None
        except DeploymentUnavailableError:
            raise _no_replica() from None
        except (RayError, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and not self._is_cut:
                raise  # the client has gone
            died = ApiError(503, "the replica died. Send it again", None, "replica_died", RETRY_SECONDS)
            failed = stopping() if self._is_cut else died
            if head is None:
                raise failed from error
            if not head.get("content-type", "").startswith(STREAM):
                # The connection closes before the announced length: no client takes that for whole.
                raise ConnectionError("the replica died in the middle of an answer") from error
            await self._sent(send, {"type": "http.response.body", "body": event(failed.document())})

    async def _sent(self, send: Send, message: Message) -> None:
        try:
            async with asyncio.timeout(self._unread_seconds):
                await send(message)
        except TimeoutError:
            raise ClientGone from None

    def _number(self, number: str) -> int:
        most = self._replicas.count - 1
        if not number.isdecimal() or len(number) > 6 or int(number) > most:
            raise ApiError(404, f"there is no replica {number[:20]!r}. They are 0 to {most}", None, "unknown_route")
        return int(number)

    def _health(self, is_ready: bool) -> JsonAnswer:
        live = self._replicas.live
        if is_ready and not self.is_open:
            raise stopping()
        if not live:
            raise _no_replica()
        states = {str(number): "ok" if number in live else "down" for number in range(self._replicas.count)}
        return JsonAnswer({"status": "ready" if is_ready else "ok", "replicas": states})


def _no_replica() -> ApiError:
    return ApiError(503, "no replica is ready. They are being restarted", None, "no_replica", 5 * RETRY_SECONDS)


def deploy(options: ReplicaOptions, count: int, gpus: int, name: str, note: Callable[[str], None]) -> ReplicaSet:
    """Start `count` replicas as the application `name` of Ray Serve, and return once all of them serve.

    Raises: UsageError where a replica cannot be started.
    """
    quiet = LoggingConfig(log_level="ERROR", enable_access_log=False)
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    serve.start(proxy_location="Disabled", logging_config=quiet)
    deployment: Any = serve.deployment(
        Replica,
        num_replicas=count,
        ray_actor_options={"num_cpus": options.threads, "num_gpus": gpus},
        max_ongoing_requests=sum(rows for rows, _ in options.serve.all_rows) + options.serve.limits.queue,
        request_router_config={"request_router_class": AffinityRouter},
        health_check_period_s=LOOK_SECONDS,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=CUT_SECONDS,
        max_constructor_retry_count=1,
        logging_config=quiet,
    )
    try:
        handle: Any = serve.run(deployment.bind(options), name=name, route_prefix=None, logging_config=quiet)
    except RuntimeError as error:
        raise _start_error(name) from error
    for number in range(count):  # until the router knows each of them
        handle.number.remote(Affinity(number=number)).result()
    return ReplicaSet(handle, count, note)


def _start_error(name: str) -> UsageError:
    """The error of a replica, the last line of the traceback that Ray Serve reports."""
    [told] = [each.message for each in serve.status().applications[name].deployments.values()]
    last = told.strip().rpartition("\n")[2]
    if last.startswith("windlass."):
        return UsageError(last.partition(": ")[2])
    return UsageError(f"a replica did not start ({last}). Is there memory for one in each? Lower --replicas")


def serve_replicas(
    options: ReplicaOptions, count: int, gpus: int, say: Callable[[str], None], note: Callable[[str], None]
) -> int:
    """Serve until a signal ends it. Once all replicas serve, `say` gets the address. Returns the exit code.

    Raises: UsageError where the address is taken, or a replica cannot be started.
    """
    asked, name, is_over = options.serve, f"windlass-{secrets.token_hex(4)}", Event()
    with bind(asked.host, asked.port) as listener:
        try:
            replicas = deploy(options, count, gpus, name, note)
            front = Front(replicas, asked.settings.request, asked.limits.unread_seconds)
            drain = partial(front.drain, asked.stop_seconds)
            http = DrainingServer(with_origins(front, asked.origins), front.close, drain)
            Thread(target=replicas.watch, args=(is_over,), name="windlass-replicas", daemon=True).start()
            listener.listen()
            say(f"{address_of(asked.host, listener)}/v1 ({asked.name}, {count} replicas of {asked.rows} rows)")
            http.run(sockets=[listener])
        finally:
            is_over.set()
            serve.delete(name)
    return 0
