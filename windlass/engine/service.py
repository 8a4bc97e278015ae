"""What a server asks of an engine that writes many texts at once."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from windlass.cache.options import CacheOptions
from windlass.cache.state import CacheState
from windlass.engine.kept import Stored, Wanted
from windlass.engine.request import Request, Ticket
from windlass.engine.status import EngineLimits, EngineStatus


class Watcher(ABC):
    """Looks at what rows hold. An engine calls `step` after each pass, where `is_watched`, and nothing else."""

    is_watched: bool

    @abstractmethod
    def step(self, cache: CacheState, row: int = 0, number: int = 0, is_last: bool = False) -> None:
        """A pass has changed row `row` of `cache`, which holds the text of request `number`; `is_last`: for good."""


class Service(ABC):
    """Takes requests from any thread, and answers each through its ticket."""

    limits: EngineLimits

    options: CacheOptions
    """Of the rows that most requests are meant for: what a request has that asks for nothing else."""

    @property
    def kinds(self) -> Sequence[CacheOptions]:
        """Of all rows there are: each kind once, that of the fewest bytes first."""
        return (self.options,)

    def submit(self, request: Request, notify: Callable[[], None] | None = None) -> Ticket:
        """Take one request; see `submit_all`."""
        return self.submit_all([request], notify)[0]

    @abstractmethod
    def submit_all(self, requests: Sequence[Request], notify: Callable[[], None] | None = None) -> list[Ticket]:
        """Take all of these requests, or none; after each event of a ticket the engine's thread calls `notify`.

        Raises: UsageError for a prompt or options that cannot be served, saying what can; QueueFullError;
        EngineDeadError.
        """

    @abstractmethod
    def cancel(self, ticket: Ticket) -> None:
        """Let a request end between two steps, whatever its phase; no event comes after this. May be repeated."""

    @abstractmethod
    def status(self) -> EngineStatus:
        """What the engine is between two steps, as of the latest one."""

    def stored(self, wanted: Wanted) -> Sequence[Stored]:
        """What is kept of earlier requests, the latest used first; an engine that keeps nothing says so."""
        return ()

    def forget(self, wanted: Wanted) -> Sequence[Stored]:
        """Let go of what is kept, and say what that was; requests under way have copies of their own."""
        return ()

    @abstractmethod
    def stop(self, seconds: float = 0.0) -> None:
        """Take nothing more, end what is not done after so many seconds, and let the thread end. May be repeated."""
