"""`windlass serve --replicas`: the front and its replicas, from their start to an end that loses no answer."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Final

import uvicorn

from windlass.ray.front import Front
from windlass.ray.replica import ReplicaOptions
from windlass.ray.replicas import Replicas
from windlass.serve.app import with_origins
from windlass.serve.listen import CUT_SECONDS, address_of, bound, config_of

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
