"""Replicas of a server in processes of Ray's, and the front that hands requests to them."""

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread
from types import FrameType
from typing import Any, Final

import ray
import torch
import uvicorn
from ray.exceptions import RayActorError, RayError, RayTaskError

from windlass.core.errors import UsageError, WindlassError
from windlass.engine.scheduler import Service
from windlass.hf.load import load
from windlass.serve.app import with_origins
from windlass.serve.front import Front, Place, Places
from windlass.serve.run import (
    CUT_SECONDS,
    HttpServer,
    ServeOptions,
    address_of,
    bound,
    config_of,
    server_of,
    started_service,
)
from windlass.view.server import SchedulerWatcher

LOOPBACK = "127.0.0.1"
LOOK_SECONDS = 1.0  # between two looks whether the engine runs


@dataclass(frozen=True)
class ReplicaOptions:
    """What a replica loads, and how it serves. `is_local`: the front runs on its machine, and nobody else asks it."""

    model: str
    dtype: str
    device: str
    weights: str
    threads: int
    serve: ServeOptions
    folder: str
    is_local: bool


class Replica:
    """What runs in a process of Ray's; its methods are called side by side."""

    def __init__(self) -> None:
        self._http: HttpServer | None = None
        self._service: Service | None = None
        self._thread: Thread | None = None
        self._is_ending = Event()

    def start(self, asked: ReplicaOptions) -> str:
        """Load the model and serve; returns where, as `http://127.0.0.1:40123`. Raises: WindlassError as `serve`."""
        if not Path(asked.folder).is_dir():
            raise UsageError(f"{asked.folder} is not on {os.uname().nodename}; run this where all machines have it")
        os.chdir(asked.folder)
        torch.set_num_threads(asked.threads)
        host = LOOPBACK if asked.is_local else ray.util.get_node_ip_address()
        options = replace(asked.serve, host=host, port=0, origins=())  # the front tells browsers
        model, tokenizer = load(asked.model, asked.dtype, asked.device, asked.weights)
        listener = bound(options.host, 0)
        watch = SchedulerWatcher()
        self._service = started_service(model, tokenizer, options, watch)
        self._http = server_of(model, tokenizer, options, self._service, watch)
        listener.listen()
        self._thread = Thread(target=self._http.run, args=([listener],), name="windlass-replica", daemon=True)
        self._thread.start()
        return f"http://{host}:{listener.getsockname()[1]}"

    def wait(self) -> None:
        """Returns once the server has ended. Raises: RuntimeError where its engine has stopped, or it fell over."""
        assert self._thread is not None
        assert self._service is not None
        while self._thread.is_alive():
            self._thread.join(LOOK_SECONDS)
            if not (self._service.status().is_alive or self._is_ending.is_set()):
                raise RuntimeError("the engine has stopped")
        if not self._is_ending.is_set():
            raise RuntimeError("the server has ended")

    def end(self) -> None:
        """Take no more requests, and end once those under way are finished or cut."""
        self._is_ending.set()
        if self._http is not None:
            self._http.end()

    def process(self) -> int:
        """Its id."""
        return os.getpid()


MOST_PAUSE_S: Final = 60.0  # between two tries to start a replica again


class Replicas(Places):
    """So many replicas, each of which is started again whenever it dies. `note` is told of that.

    To be used in one event loop.
    """

    def __init__(self, options: ReplicaOptions, count: int, gpus: int, note: Callable[[str], None]) -> None:
        self._options, self._note = options, note
        kind: Any = ray.remote(Replica)
        self._kind = kind.options(num_cpus=options.threads, num_gpus=gpus, max_restarts=0, max_concurrency=4)
        self._places = [Place(number) for number in range(count)]
        self.actors: dict[int, Any] = {}
        self._is_ending = False
        self._keepers: list[asyncio.Task[None]] = []

    @property
    def places(self) -> Sequence[Place]:
        return self._places

    async def start(self) -> None:
        """Returns once all of them serve. Raises: WindlassError where one cannot be started at all."""
        started = [asyncio.get_running_loop().create_future() for _ in self.places]
        self._keepers = [
            asyncio.create_task(self._keep(place, first)) for place, first in zip(self.places, started, strict=True)
        ]
        await asyncio.gather(*started)

    async def end(self, seconds: float) -> None:
        """Let the replicas finish what is under way, for so long at most, and then end them."""
        self._is_ending = True
        calls = [actor.end.remote() for actor in self.actors.values()]
        for call in calls:
            with suppress(RayError):
                await call
        if self._keepers:
            await asyncio.wait(self._keepers, timeout=seconds)
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)

    async def _keep(self, place: Place, first: "asyncio.Future[None]") -> None:
        pause = 1.0
        while not self._is_ending:
            actor = self.actors[place.number] = self._kind.remote()
            try:
                place.open(await actor.start.remote(self._options))
                pause = 1.0
                if first.done():
                    self._note(f"replica {place.number} serves again")
                else:
                    first.set_result(None)
                await actor.wait.remote()
            except RayError as error:
                if not first.done():
                    first.set_exception(_cause(error))
                    return
                if not self._is_ending:
                    self._note(f"replica {place.number} died ({_reason(error)}); it is started again")
            finally:
                await place.close()
                ray.kill(actor)
            if not self._is_ending:
                await asyncio.sleep(pause)
                pause = min(2 * pause, MOST_PAUSE_S)


def _cause(error: RayError) -> BaseException:
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, WindlassError | MemoryError) else error


def _reason(error: RayError) -> str:
    """Why a replica is gone, in a few words."""
    cause = _cause(error)
    if isinstance(cause, RayTaskError):
        cause = cause.cause or cause
    return "its process ended" if isinstance(cause, RayActorError) else str(cause).strip().rpartition("\n")[2]


END_SECONDS: Final = 2 * CUT_SECONDS  # for replicas to end, beyond what requests under way have


class FrontServer(uvicorn.Server):
    """Runs until a signal comes: then no request is admitted, and those under way are finished or cut."""

    def __init__(self, front: Front, replicas: Replicas, stop_seconds: float, origins: Sequence[str] = ()) -> None:
        super().__init__(config_of(with_origins(front, origins)))
        self._front, self._replicas, self._stop_seconds = front, replicas, stop_seconds
        self._ending: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End, and on a second signal at once."""
        self._loop.call_soon_threadsafe(self.end)

    def end(self) -> None:
        """Admit nothing more; the server ends when the replicas have."""
        self._front.is_open = False
        if self._ending is not None:
            self.should_exit = self.force_exit = True
            return
        self._ending = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        try:
            await self._replicas.end(self._stop_seconds + END_SECONDS)
        finally:
            self.should_exit = True


def serve_replicas(
    options: ReplicaOptions, count: int, gpus: int, say: Callable[[str], None], note: Callable[[str], None]
) -> int:
    """Serve until a signal ends it; `say` is told the address once all replicas stand. Returns the exit code.

    Raises: WindlassError where the address cannot be had, or a replica cannot be started.
    """
    with bound(options.serve.host, options.serve.port) as listener:
        asyncio.run(_served(listener, options, count, gpus, say, note))
    return 0


async def _served(
    listener: socket.socket,
    options: ReplicaOptions,
    count: int,
    gpus: int,
    say: Callable[[str], None],
    note: Callable[[str], None],
) -> None:
    asked = options.serve
    replicas = Replicas(options, count, gpus, note)
    try:
        await replicas.start()
        front = Front(replicas, asked.rows + asked.limits.queue, asked.settings.request)
        server = FrontServer(front, replicas, asked.stop_seconds, asked.origins)
        listener.listen()
        say(f"{address_of(asked.host, listener)}/v1 ({asked.name}, {count} replicas of {asked.rows} rows)")
        await server.serve(sockets=[listener])
    finally:
        await replicas.end(0.0)
