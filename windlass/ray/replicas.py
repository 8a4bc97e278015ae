"""The replicas of a model: started, watched, and replaced when they die."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from windlass.core.errors import WindlassError
from windlass.ray.places import Place, Places
from windlass.ray.replica import Replica, ReplicaOptions

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
