"""What the scheduler tells of itself."""

from dataclasses import dataclass
from typing import Literal

from windlass.core.errors import WindlassError

Phase = Literal["waiting", "reading", "writing"]


class QueueFullError(WindlassError):
    """No more requests are taken for now; try again after `seconds`."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class EngineDeadError(WindlassError):
    """The engine has stopped, and takes no request any more."""


@dataclass(frozen=True)
class EngineLimits:
    """What the scheduler takes: `queue` requests that wait, of `queued_tokens` in all, a prompt of `prompt_tokens`.

    `unread_events` of a ticket may wait for `unread_seconds`; then its request is cancelled. `reading` prompts are read
    in turn. `alone` requests may have other options than the rows have; each then has a cache of its own, of at most
    `alone_bytes`. `seconds`: of a request from its arrival to its end; None: as long as it takes.
    """

    queue: int = 64
    queued_tokens: int = 1_000_000
    prompt_tokens: int = 1_000_000
    max_tokens: int = 32_768
    unread_events: int = 256
    unread_seconds: float = 30.0
    reading: int = 2
    alone: int = 1
    alone_bytes: int = 1 << 30
    seconds: float | None = None


@dataclass(frozen=True)
class RowStatus:
    """A request under way: `seen` tokens read and written so far, of which a layer keeps `kept` at most."""

    number: int
    phase: Phase
    lane: str
    seen: int
    kept: int
    bytes: int


@dataclass(frozen=True)
class EngineStatus:
    """The engine between two steps. `bytes_held` of all caches never exceeds `bytes_limit`.

    `is_alive`: its thread runs; after three errors in a row it does not. Totals count since the start.
    """

    is_alive: bool
    rows: tuple[RowStatus, ...]
    free_rows: int
    total_rows: int
    queued: int
    queued_tokens: int
    bytes_held: int
    bytes_limit: int
    prompt_tokens_total: int
    written_tokens_total: int
    cached_tokens_total: int
    errors_total: int
    cancelled_total: int
    steps_total: int
    evicted_total: int
