"""Requests to the scheduler, and the events that answer them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from threading import Condition
from time import monotonic
from typing import Final, Literal, get_args

from torch import Tensor

from windlass.cache.options import CacheOptions
from windlass.core.errors import UsageError, WindlassError, whole_number
from windlass.core.parse import MAX_NUMBER, near_to, parse_ints, parse_spec
from windlass.core.types import Tokens
from windlass.engine.recompute import Recompute
from windlass.engine.sampling import FinishReason, Sampling
from windlass.engine.text import Stops


class Grammar(ABC):
    """Limits on the next token of a text. One object serves one text."""

    @abstractmethod
    def allowed(self) -> Tensor:
        """(vocabulary,) bool: the tokens that may come next."""

    @abstractmethod
    def accept(self, token: int) -> None:
        """Note that `token` came."""


ReuseName = Literal["exact", "prefix", "edited"]
REUSES: Final = get_args(ReuseName)
EDIT_WINDOW: Final = 64  # tokens read again behind each edit, if no number is given (docs/log.md, edited histories)
FORMS: Final = "exact, prefix, edited, edited(16)"


@dataclass(frozen=True)
class ReuseMode:
    """The cached tokens that a request takes.

    `exact`: only tokens that were read in the passes in which it would read them itself, so that its text is the same
    to the bit. `prefix`: also the tokens of answers, which were written one by one. `edited`: also tokens that stood
    behind another text, at their new positions. The first `edit_window` of them behind each edit are read again.
    """

    name: ReuseName = "exact"
    edit_window: int = 0

    @classmethod
    def of(cls, spec: str) -> ReuseMode:
        """The mode that `spec` names. Raises: UsageError for another name or number."""
        typed = parse_spec(spec)
        for name in REUSES:
            if typed is not None and typed.name == name:
                numbers = parse_ints(f"reuse={spec!r}", typed, ("edit_window",) if name == "edited" else ())
                window = numbers.get("edit_window", EDIT_WINDOW if name == "edited" else 0)
                return cls(name, whole_number("reuse: edit_window", window, 0, MAX_NUMBER))
        raise UsageError(f"reuse={spec!r} is no mode. Use one of: {FORMS}{near_to(spec, REUSES)}")

    def __str__(self) -> str:
        return f"edited({self.edit_window})" if self.name == "edited" else self.name


EXACT: Final = ReuseMode()
PREFIX: Final = ReuseMode("prefix")


@dataclass(frozen=True)
class Reuse:
    """A request's use of cached prefixes. `lookup`: it looks one up. `store`: its own is cached. Requests of
    another `name` do not share them. `mode`: the cached tokens that it takes.
    """

    lookup: bool = True
    store: bool = True
    name: str = ""
    mode: ReuseMode = EXACT


@dataclass(frozen=True)
class PromptParts:
    """Parts of a prompt that are read once each, wherever they stand: the [start, stop) `spans` of its tokens, in
    order. The rest is read between and behind them. `recompute` says which of their tokens are read again in place."""

    spans: tuple[tuple[int, int], ...]
    recompute: Recompute


@dataclass(frozen=True)
class Request:
    """One text to be written after the token ids of `prompt`, in a row of a cache with these `options`."""

    prompt: Sequence[int]
    options: CacheOptions
    max_tokens: int
    """Most tokens to write. 0 writes nothing."""
    stops: Stops
    sampling: Sampling = field(default_factory=Sampling)
    presence_penalty: float = 0.0
    """Subtracted once from the logit of each token that the text has written."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token as often as the text has it."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logit of a token id."""
    top_logprobs: int | None = None
    """Return log probabilities with each token: its own, and those of so many of the likeliest (None: none).

    They follow from the logits after penalties and bias, before the temperature."""
    scores_prompt: bool = False
    """Return log probabilities of the prompt's tokens, by the model's own logits. Uses no cached prefix."""
    grammar: Grammar | None = None
    tenant: str = ""
    """Only requests of the same tenant share cached prefixes. Its text up to the first `/` names the owner."""
    seconds: float | None = None
    """Timeout, from `arrived` on (None: the engine's limit)."""
    arrived: float | None = None
    """Value of `time.monotonic` when it came, before its prompt was tokenized (None: when it is submitted)."""
    reuse: Reuse = Reuse()
    parts: PromptParts | None = None
    """Parts of the prompt that are joined, not read in order (None: no parts)."""
    ends: tuple[int, ...] = ()
    """Number of prompt tokens before the end of each message, where known."""
    head: int = 0
    """Number of tokens of the system text, with all that the chat template puts before a user's first message."""
    pins: tuple[tuple[int, int], ...] = ()
    """Ranges [start, stop) of its tokens behind the head that are never evicted."""
    hidden: frozenset[int] | None = None
    """Special tokens that have no text (None: all of them)."""
    speculate: str | None = None
    """Drafts, see `engine.speculate` (None: the engine's default)."""

    @property
    def kept(self) -> int | str:
        """The tokens that are never evicted, as a part of a key."""
        return f"{self.head} {self.pins}" if self.pins else self.head

    @cached_property
    def tokens(self) -> Tokens:
        """The prompt."""
        return Tokens.of(self.prompt)

    @cached_property
    def pass_ends(self) -> tuple[int, ...]:
        """The ends of the passes over the prompt: at the end of each message, and after each chunk of it.

        Each end follows from the messages before it alone, so that prompts with a common prefix are read alike.
        """
        found, last = list[int](), len(self.prompt)
        stops = [*(end for end in self.ends if end < last), last]
        for start, stop in pairwise([0, *stops]):
            found += [*range(start + self.options.chunk, stop, self.options.chunk), stop]
        return tuple(found)


def tenant_of(owner: str, user: str) -> str:
    """The tenant of one of an owner's users."""
    return f"{owner}/{user}"


def owner_of(tenant: str) -> str:
    """The owner of a tenant. An owner may have several tenants."""
    return tenant.partition("/")[0]


@dataclass(frozen=True)
class Usage:
    """Usage of a request. `seen`: tokens of prompt and text that the cache has read. `kept`: the most of them that a
    layer holds. `evicted`: the others. `recalled`: evicted tokens that each step may read. `cached`: tokens of the
    prompt that were not read for this request. `moved`: those of them behind the first edit of the row. `recomputed`:
    tokens of its parts, or behind an edit, that were read again in their place. `bytes` are those of its row."""

    prompt: int
    written: int
    cached: int
    seen: int
    kept: int
    evicted: int
    recalled: int
    bytes: int
    recomputed: int = 0
    moved: int = 0


@dataclass(frozen=True)
class Progress:
    """`done` of the prompt's `total` tokens are read."""

    done: int
    total: int


@dataclass(frozen=True)
class Logprob:
    """The log probability of a token."""

    token: int
    value: float


@dataclass(frozen=True)
class PromptLogprobs:
    """Log probabilities of each token of the prompt but the first: its own, then the likeliest."""

    logprobs: tuple[tuple[Logprob, ...], ...]


@dataclass(frozen=True)
class Piece:
    """One more token, and the text that it gives out: empty where it is part of a character or may become a stop.

    `logprobs`: its own first, then the likeliest, if they were asked for. `offset`: characters of the text before the
    token's own, which may begin in the middle of one.
    """

    token: int
    text: str
    logprobs: tuple[Logprob, ...] = ()
    offset: int = 0


@dataclass(frozen=True)
class Finish:
    """The text has ended, by the stop string `stopped_by` if there was one."""

    reason: FinishReason
    usage: Usage
    stopped_by: str | None = None


@dataclass(frozen=True)
class Failure:
    """The end of a text by an error. `is_ours`: the error is the engine's, not the request's."""

    message: str
    is_ours: bool


Event = Progress | PromptLogprobs | Piece | Finish | Failure


class Ticket:
    """An accepted request and its events. The engine's thread calls `notify` for new ones. It must not wait.

    Any thread may take the events.
    """

    def __init__(self, number: int, request: Request, notify: Callable[[], None] | None = None) -> None:
        self.number, self.request = number, request
        self._arrived = monotonic() if request.arrived is None else request.arrived
        self._notify, self._events = notify, deque[tuple[float, Event]]()
        self._changed = Condition()
        self._is_over = False
        self.is_cancelled = False
        """True if nobody waits for the request's events any more."""

    def put(self, event: Event) -> None:
        """Give out an event. Events after the last one are dropped."""
        with self._changed:
            if self._is_over:
                return
            if isinstance(event, Progress) and self._events and isinstance(self._events[-1][1], Progress):
                self._events.pop()
            self._events.append((monotonic(), event))
            self._is_over = isinstance(event, Finish | Failure)
            self._changed.notify_all()
        if self._notify is not None:
            self._notify()

    def take(self, timeout: float | None = 0.0) -> list[Event]:
        """All events since the last call. Waits up to `timeout` seconds for one, None: for ever."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._events), timeout)
            events = [event for _, event in self._events]
            self._events.clear()
            return events

    @property
    def is_over(self) -> bool:
        """Return True if the last event was given out."""
        return self._is_over

    @property
    def is_gone(self) -> bool:
        """Return True if its row is free again, or will be before the engine's next iteration."""
        return self._is_over or self.is_cancelled

    @property
    def waiting(self) -> tuple[int, float]:
        """The number of events that nobody has taken, and the age of the oldest in seconds."""
        with self._changed:
            return len(self._events), monotonic() - self._events[0][0] if self._events else 0.0

    def late(self, seconds: float | None) -> Failure | None:
        """The failure of a request that took longer than its own `seconds`, or without these than the given ones.

        None: it has not.
        """
        most = seconds if self.request.seconds is None else self.request.seconds
        if most is None or monotonic() - self._arrived <= most:
            return None
        return Failure(f"the request took longer than {most:g} seconds", is_ours=False)


Phase = Literal["waiting", "reading", "writing"]


class QueueFullError(WindlassError):
    """The queue takes no more requests for now. Try again after `seconds`."""

    def __init__(self, message: str, seconds: float) -> None:
        super().__init__(message)
        self.seconds = seconds


class EngineDeadError(WindlassError):
    """The engine has stopped, and takes no request any more."""


@dataclass(frozen=True)
class EngineLimits:
    """Limits of the scheduler."""

    queue: int = 64
    """Most requests that wait."""
    queued_tokens: int = 1_000_000
    """Most tokens of all prompts that wait."""
    prompt_tokens: int = 1_000_000
    max_tokens: int = 32_768
    unread_events: int = 256
    """A request fails once more of its events wait, and the oldest has waited longer than `unread_seconds`."""
    unread_seconds: float = 30.0
    reading: int = 2
    """Prompts that are read in turn."""
    alone: int = 1
    """Requests with options that no row has. Each of them has a cache of its own."""
    alone_bytes: int = 1 << 30
    """Most bytes of such a cache."""
    recall_bytes: int = 1 << 30
    """Most bytes of the tokens that rows may recall, see `recall_share`."""
    seconds: float | None = None
    """Longest time of a request, from its arrival to its end. None: no limit."""


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

    `is_alive`: its thread runs. Three errors in a row end it. Totals count since the start.
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
