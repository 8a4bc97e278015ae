"""Many texts at once: one thread owns the model and its caches, and lets requests read and write in turn.

An iteration reads a chunk of tokens, of one prompt or of several short ones, or is a decode step of every lane. Where
there is work of both kinds they alternate. So no decode step waits longer than a chunk, a prompt that comes alone waits
for no step, and a long prompt holds no short one back, because prompts are read in turn. A request waits until it has a
row. From then on it owns all the memory that it can need.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Condition, Thread
from time import monotonic
from typing import Final, final

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.cache.cache import check_across_ranks
from windlass.cache.options import CacheOptions
from windlass.cache.state import CacheState
from windlass.core.errors import WindlassError
from windlass.core.ranks import Ranks
from windlass.engine.admission import (
    Admission,
    check_alone,
    check_kinds,
    check_recalled,
    check_request,
    recall_share,
)
from windlass.engine.disk import DiskTier
from windlass.engine.prefix_cache import PrefixCache, Snapshots
from windlass.engine.prefix_entry import EntryInfo, EntrySelector
from windlass.engine.request import EngineDeadError, EngineLimits, EngineStatus, Failure, Request, Ticket
from windlass.engine.row_bytes import RowBytes, Sizes, most_held, replace_batch
from windlass.engine.sequence import ActiveRequest, Lane, is_alike
from windlass.engine.speculate import OFF, Speculate, drafter_of, is_drafted
from windlass.hf.kv_cache import KVCache
from windlass.kernels import cpu


class Watcher(ABC):
    """Looks at the contents of rows. An engine calls `step` after each pass, where `is_watched`, and nothing else."""

    is_watched: bool

    @abstractmethod
    def step(self, cache: CacheState, row: int = 0, number: int = 0, is_last: bool = False) -> None:
        """Look at row `row` of `cache`, which a pass has changed. It holds the text of request `number`. `is_last`: the
        pass was its last."""


class Service(ABC):
    """Takes requests from any thread, and answers each through its ticket."""

    limits: EngineLimits

    options: CacheOptions
    """Default options of a row. A request may ask for others."""

    @property
    def kinds(self) -> Sequence[CacheOptions]:
        """The kinds of rows, smallest in bytes first."""
        return (self.options,)

    def submit(self, request: Request, notify: Callable[[], None] | None = None) -> Ticket:
        """Take one request. See `submit_all`."""
        return self.submit_all([request], notify)[0]

    @abstractmethod
    def submit_all(self, requests: Sequence[Request], notify: Callable[[], None] | None = None) -> list[Ticket]:
        """Take all of these requests, or none. When there are events of a ticket, the engine's thread calls `notify`.

        Raises: UsageError for a prompt or options that cannot be served, naming those that can. QueueFullError.
        EngineDeadError.
        """

    @abstractmethod
    def cancel(self, ticket: Ticket) -> None:
        """End a request between two steps, whatever its phase. No event comes after this. May be repeated."""

    @abstractmethod
    def status(self) -> EngineStatus:
        """The state of the engine between two steps, as of the latest one."""

    def stored(self, wanted: EntrySelector) -> Sequence[EntryInfo]:
        """Entries kept of earlier requests, the latest used first. An engine that keeps nothing says so."""
        return ()

    def forget(self, wanted: EntrySelector) -> Sequence[EntryInfo]:
        """Delete these cached prefixes. Returns a record of each. Requests under way have copies of their own."""
        return ()

    @abstractmethod
    def stop(self, seconds: float = 0.0) -> None:
        """Refuse new requests, end those not done after `seconds`, and end the thread. May be repeated."""


@final
class Notices:
    """Calls of the clients' `notify`. During a step of many texts they wait, because a client's thread that wakes up
    takes the interpreter from the engine's."""

    def __init__(self) -> None:
        self._held: dict[Callable[[], None], None] | None = None

    def give(self, notify: Callable[[], None]) -> None:
        """Call it, now or at the end of the step."""
        if self._held is None:
            notify()
        else:
            self._held[notify] = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """A step, at whose end each is called once."""
        held = self._held = {}
        try:
            yield
        finally:
            self._held = None
            for notify in held:
                notify()


@dataclass
class Totals:
    """Counts that only grow."""

    prompt: int = 0
    written: int = 0
    cached: int = 0
    errors: int = 0
    cancelled: int = 0
    steps: int = 0
    evicted: int = 0

    def count(self, task: ActiveRequest) -> None:
        """Add a request that is over."""
        self.prompt += min(task.seen, len(task.ticket.request.prompt))
        self.cached += task.cached
        self.written += task.writer.written
        self.evicted += task.seen - task.kept


LOG: Final = logging.getLogger("windlass.engine")
ERRORS: Final = 3  # errors in a row after which the engine is dead
ALL: Final = "all"  # name of the count of errors in all work. The steps of each lane have counts of their own
ALONE: Final = "alone"  # lanes of one request, all together


class ErrorCounter:
    """Does work, and counts errors in a row: of all work, and of the steps of each lane. So prompts that are read well
    do not hide a lane whose steps fail. `is_fatal`: the first error of the engine's own is raised, because other ranks
    may not have met it."""

    def __init__(self, totals: Totals, is_fatal: bool) -> None:
        self._totals, self._is_fatal = totals, is_fatal
        self._in_a_row = Counter[str | int]()

    @property
    def is_over(self) -> bool:
        """Return True if there were too many errors."""
        return any(count >= ERRORS for count in self._in_a_row.values())

    def do(self, tasks: Sequence[ActiveRequest], work: Callable[[], None], lane: Lane | None = None) -> bool:
        """Run `work`, and let its error fail only these `tasks`. `lane`: the lane that it is a step of.

        Returns False where the error was the engine's own.
        """
        counts = [ALL] if lane is None else [ALL, ALONE if lane.is_alone else id(lane)]
        errors = self._totals.errors
        try:
            work()
            if self._totals.errors == errors:  # a single request of the step may have failed
                for name in counts:
                    self._in_a_row.pop(name, None)
        except WindlassError as error:
            for task in tasks:
                task.fail(str(error), is_ours=False)
        except Exception as error:
            if self._is_fatal:
                raise
            LOG.exception("a step failed")
            self._totals.errors += 1
            self._in_a_row.update(counts)
            for task in tasks:
                task.fail(f"the engine failed: {type(error).__name__}", is_ours=True)
            return False
        return True


BEAT: Final = 1.0  # seconds between iterations of an idle engine, which show other ranks that it is alive


@dataclass(frozen=True)
class StepInput:
    """Input of an iteration. `tickets` wait for a row, in order. `cancelled` are numbers of requests that nobody waits
    for, and `late` those of requests that have failed, with the reasons. `is_over`: there is no iteration any more."""

    is_over: bool
    tickets: Sequence[Ticket]
    cancelled: frozenset[int]
    late: Mapping[int, str]

    @classmethod
    def of(
        cls,
        is_over: bool,
        tickets: Sequence[Ticket],
        cancelled: Iterable[int],
        tasks: Sequence[ActiveRequest],
        limits: EngineLimits,
    ) -> StepInput:
        """The input of the iteration that begins now: `tickets` wait, `tasks` are under way."""
        reasons = {task.ticket.number: _late(task, limits) for task in tasks}
        reasons |= {ticket.number: ticket.late(limits.seconds) for ticket in tickets}
        late = {number: failed.message for number, failed in reasons.items() if failed is not None}
        return cls(is_over, list(tickets), frozenset(cancelled), late)

    def drop(self, tasks: Sequence[ActiveRequest], waiting: Admission) -> int:
        """End requests that were cancelled, in any phase, and those that are late. Returns the count of cancelled."""
        gone = [task for task in tasks if task.ticket.number in self.cancelled]
        for task in gone:
            task.is_over = True
        for task in tasks:
            if task.ticket.number in self.late and not task.is_over:
                task.fail(self.late[task.ticket.number], is_ours=False)
        unread = [ticket for ticket in self.tickets if ticket.number in self.cancelled]
        late = [ticket for ticket in self.tickets if ticket.number in self.late and ticket not in unread]
        for ticket in unread + late:
            waiting.remove(ticket)
        for ticket in late:
            ticket.put(Failure(self.late[ticket.number], is_ours=False))
        return len(gone) + len(unread)

    @property
    def wanted(self) -> list[Ticket]:
        """The tickets that may have a row."""
        return [each for each in self.tickets if each.number not in self.cancelled and each.number not in self.late]


@dataclass(frozen=True)
class _StepMessage:
    """An iteration as rank 0 sends it: only the new tickets, without the fields that only rank 0 reads."""

    is_over: bool
    arrived: tuple[tuple[int, Request], ...]
    cancelled: frozenset[int]
    late: Mapping[int, str] = field(default_factory=dict)


@final
class Lockstep:
    """The engine of one rank among those of the others. All of them call the same methods, in the same order."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self._newest = ranks, 0

    @classmethod
    def of(cls, cache: KVCache) -> Lockstep | None:
        """The lockstep of an engine with such caches. None if one process holds all of the model."""
        return None if cache.heads is None else cls(cache.heads.ranks)

    @property
    def leads(self) -> bool:
        """Return True if clients come to this rank."""
        return self._ranks.is_first

    def tell(self, iteration: StepInput) -> None:
        """Send the iteration that rank 0 begins to the other ranks."""
        new = tuple((each.number, _bare(each.request)) for each in iteration.tickets if each.number > self._newest)
        self._newest = max([self._newest, *(number for number, _ in new)])
        self._ranks.broadcast_object(_StepMessage(iteration.is_over, new, iteration.cancelled, iteration.late))

    def take(self, waiting: list[Ticket]) -> StepInput:
        """The iteration that rank 0 begins. Adds the tickets that are new there to those that are `waiting`."""
        told = self._ranks.broadcast_object(_StepMessage(False, (), frozenset()))
        waiting += [Ticket(number, request) for number, request in told.arrived]
        return StepInput(told.is_over, list(waiting), told.cancelled, told.late)


def _bare(request: Request) -> Request:
    """A request as the other ranks need it. They choose no tokens and report none."""
    return replace(request, grammar=None, top_logprobs=None, logit_bias={})


def _try(keep: Callable[[], None]) -> None:
    """Keep a row. An error loses the row, and no request."""
    try:
        keep()
    except Exception:
        LOG.exception("a row was not kept")


def _late(task: ActiveRequest, limits: EngineLimits) -> Failure | None:
    """The failure of a request whose events nobody took, or that took too long. None: neither."""
    count, seconds = task.ticket.waiting
    if count > limits.unread_events and seconds > limits.unread_seconds:
        return Failure("its events were not taken", is_ours=False)
    return task.ticket.late(limits.seconds)


@final
class Scheduler(Service):
    """Serves requests in `rows`: so many of each kind of options. Most requests get the first kind.

    `reuse_bytes` bounds the cached prefixes in memory. A `disk` holds prefixes too. `watcher` looks at rows.
    `speculate` is the default for requests that set none. Call `start` to begin.

    Raises: UsageError for no rows, options without a budget, several rows of a policy that shares one budget among
    layers, two kinds that are alike, and `speculate` with a model whose cache cannot take drafts back.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        rows: Sequence[tuple[int, CacheOptions]],
        limits: EngineLimits | None = None,
        reuse_bytes: int = 0,
        watcher: Watcher | None = None,
        disk: DiskTier | None = None,
        speculate: Speculate = None,
    ) -> None:
        self.limits = EngineLimits() if limits is None else limits
        self._watcher = watcher
        self._model, self._tokenizer = model, tokenizer
        kinds = [replace_batch(options, count) for count, options in rows]
        check_kinds(kinds)
        self.options = replace_batch(kinds[0])
        self.row_bytes = tuple(RowBytes.of(model, kind) for kind in kinds)
        self._lanes = [Lane(model, kind, keeps_room=reuse_bytes > 0) for kind in kinds]
        self._lockstep = Lockstep.of(self._lanes[0].cache)
        self._speculate = speculate if is_drafted(speculate, self._lanes[0].cache) else OFF
        self._tasks: list[ActiveRequest] = []
        self._reading = deque[ActiveRequest]()
        self._waiting = Admission(self.limits, kinds)
        self._snapshots, self._totals = Snapshots(PrefixCache(reuse_bytes), disk), Totals()
        self._changed, self._cancelled, self._notices = Condition(), set[int](), Notices()
        self._guard, self._number = ErrorCounter(self._totals, self._lockstep is not None), 0
        self._stops_at: float | None = None
        self._is_dead = self._has_read = False
        self._sizes, self._limit = Sizes(), self.bytes_limit
        self._status = self._told()
        self._threads = torch.get_num_threads()  # each thread has a number of its own
        self._thread = Thread(target=self.run, name="windlass-engine", daemon=True)
        self.has_failed = False
        """True if the engine ended by an error."""

    @property
    def bytes_limit(self) -> int:
        """The most that `EngineStatus.bytes_held` can be: rows, prompts under way, and cached prefixes."""
        counts = [lane.options.batch for lane in self._lanes]
        return most_held(self.row_bytes, counts, self.limits, self._snapshots.kept.limit)

    @property
    def kinds(self) -> Sequence[CacheOptions]:
        longest = self.limits.prompt_tokens + self.limits.max_tokens
        return [each.options for each in sorted(self.row_bytes, key=lambda each: each.writing(longest))]

    def start(self) -> None:
        """Let the engine's thread run."""
        cpu.end_pool()
        self._thread.start()

    def wait(self) -> None:
        """Return once the engine's thread has ended."""
        self._thread.join()

    def submit_all(self, requests: Sequence[Request], notify: Callable[[], None] | None = None) -> list[Ticket]:
        kinds = [lane.options for lane in self._lanes]
        for request in requests:
            check_request(request, self.limits, self._model, kinds, self._snapshots.kept.limit)
            check_across_ranks(request.options, self._lanes[0].cache.heads)
            is_drafted(request.speculate, self._lanes[0].cache)
            for own in self.row_bytes:
                if is_alike(own.options, request.options):
                    check_recalled(own, request, recall_share(kinds, self.limits))
        with self._changed:
            if self._is_dead or self._stops_at is not None:
                raise EngineDeadError("the engine has stopped. Start the server again")
            told = None if notify is None else partial(self._notices.give, notify)
            tickets = [Ticket(self._number + at, each, told) for at, each in enumerate(requests, 1)]
            self._waiting.add(tickets)
            self._number += len(tickets)
            self._changed.notify_all()
        return tickets

    def cancel(self, ticket: Ticket) -> None:
        with self._changed:
            if not ticket.is_over:
                ticket.is_cancelled = True
                self._cancelled.add(ticket.number)
                self._changed.notify_all()

    def status(self) -> EngineStatus:
        return self._status

    def stored(self, wanted: EntrySelector) -> Sequence[EntryInfo]:
        return self._snapshots.stored(wanted)

    def forget(self, wanted: EntrySelector) -> Sequence[EntryInfo]:
        return self._snapshots.forget(wanted)

    def stop(self, seconds: float = 0.0) -> None:
        with self._changed:
            if self._stops_at is None:
                self._stops_at = monotonic() + seconds
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self._snapshots.close()

    def run(self) -> None:
        """Run the engine. A rank that follows rank 0 calls it in place of `start`, and returns when that ends."""
        torch.set_num_threads(self._threads)
        try:
            self._end(self._served())
        except BaseException:  # of any kind: nobody may wait for an engine that has ended
            LOG.exception("the engine ended")
            self._totals.errors += 1
            self.has_failed = True
            self._end("the engine has failed. See its log")

    def _served(self) -> str:
        """Iterate until the end. Returns the reason of the end."""
        while True:
            iteration = self._next_iteration()
            if iteration.is_over:
                return "the engine was stopped"
            with self._changed:
                self._totals.cancelled += iteration.drop(self._tasks, self._waiting)
            self._retire()
            self._iterate(iteration)
            if self._guard.is_over:
                self.has_failed = True
                return "the engine has failed. See its log"
            self._status = self._told()

    def _next_iteration(self) -> StepInput:
        """Wait until there is work, here or on rank 0, and return the iteration's input."""
        lockstep = self._lockstep
        if lockstep is not None and not lockstep.leads:
            return lockstep.take(self._waiting.tickets)
        with self._changed:
            beat = None if lockstep is None else BEAT
            self._changed.wait_for(lambda: self._has_work or self._stops_at is not None, beat)
            is_over = self._stops_at is not None and (monotonic() >= self._stops_at or not self._has_work)
            iteration = StepInput.of(is_over, self._waiting.tickets, self._cancelled, self._tasks, self.limits)
            self._cancelled.clear()
        if lockstep is not None:
            lockstep.tell(iteration)
        return iteration

    @property
    def _has_work(self) -> bool:
        return bool(self._tasks or self._waiting.tickets or self._cancelled)

    @torch.no_grad()
    def _iterate(self, iteration: StepInput) -> None:
        self._admit(iteration)
        writing = [task for task in self._tasks if task.reader is None]
        self._has_read = bool(self._reading) and not (self._has_read and writing)
        if self._has_read:
            self._read_chunk(iteration)
        else:
            for lane in {id(task.lane): task.lane for task in writing}.values():
                self._write(lane, [task for task in writing if task.lane is lane])
        self._retire()

    def _read_chunk(self, iteration: StepInput) -> None:
        """Read as many prompts as are done within a chunk of tokens, but at least one pass."""
        left = self.options.chunk
        while True:
            task = self._reading.popleft()
            left -= task.next_read
            self._read(task)
            self._retire()
            self._admit(iteration)
            if not self._reading or self._reading[0].next_read > left:
                return

    def _read(self, task: ActiveRequest) -> None:
        """Read one chunk of a prompt, which then waits for its next turn behind the others."""
        self._guard.do([task], task.read)
        self._show(task)
        self._finish(task)
        if task.reader is not None:
            self._reading.append(task)

    def _write(self, lane: Lane, writing: Sequence[ActiveRequest]) -> None:
        """Write one more token of each text in a lane. An error of the engine's own loses the lane's contents."""

        for task in writing:
            _try(task.keep_beginning)

        def step() -> None:
            logits = lane.step({task.row: task.next_tokens() for task in writing})
            self._totals.steps += 1
            with self._notices.held():
                for task in writing:
                    self._guard.do([task], partial(task.take, logits[task.row]), lane)
            for task in writing:
                self._show(task)
                self._finish(task)

        if not self._guard.do(writing, step, lane):
            lane.reset()

    def _finish(self, task: ActiveRequest) -> None:
        """Report the end of a request, if it has ended. Its row is kept before, so that the next turn finds it."""
        if task.is_over:
            _try(task.keep)
            task.finish()

    def _show(self, task: ActiveRequest) -> None:
        """Show the watcher a request's row."""
        if self._watcher is not None and self._watcher.is_watched:
            try:
                self._watcher.step(task.cache, task.index, task.ticket.number, task.is_over)
            except Exception:
                LOG.exception("nothing is shown any more")
                self._watcher = None

    def _admit(self, iteration: StepInput) -> None:
        """Give rows to waiting requests, in order. One that waits for one kind of row holds none of another back."""
        for ticket in iteration.wanted:
            if len(self._reading) >= self.limits.reading:
                return
            if ticket not in self._waiting.tickets:  # it began earlier in the iteration
                continue
            lane = row = None
            try:
                lane = self._lane_for(ticket.request)
                row = None if lane is None else lane.take()
                if lane is None or row is None:
                    continue
                asked = ticket.request.speculate or self._speculate
                drafter = None if asked == OFF else drafter_of(asked, self._model)
                task = ActiveRequest(
                    ticket,
                    lane,
                    row,
                    model=self._model,
                    tokenizer=self._tokenizer,
                    snapshots=self._snapshots,
                    drafter=drafter,
                )
                self._tasks.append(task)
                self._reading.append(task)
                self._snapshots.under_way.append(task)
                with self._changed:
                    self._waiting.begin(ticket)
            except Exception as error:
                is_ours = not isinstance(error, WindlassError)
                if is_ours and self._lockstep is not None:
                    raise
                if is_ours:
                    LOG.exception("a request could not begin")
                    self._totals.errors += 1
                ticket.put(Failure(f"the engine failed: {type(error).__name__}" if is_ours else str(error), is_ours))
                if lane is not None and row is not None:
                    lane.give_back(row)
                with self._changed:
                    self._waiting.remove(ticket)

    def _lane_for(self, request: Request) -> Lane | None:
        """The lane of such requests, or a new one for this request. None: `limits.alone` requests have one
        already.

        Raises: WindlassError for a request that cannot have a cache of its own.
        """
        for lane in self._lanes:
            if lane.serves(request.options):
                return lane
        if sum(task.lane.is_alone for task in self._tasks) >= self.limits.alone:
            return None
        check_alone(self._model, request, self.limits)
        keeps_room = self._snapshots.kept.limit > 0
        return Lane(self._model, replace_batch(request.options), is_alone=True, keeps_room=keeps_room)

    def _retire(self) -> None:
        """Free the rows of requests that are over."""
        for task in [task for task in self._tasks if task.is_over]:
            self._totals.count(task)
            _try(task.keep)
            task.close()
            self._tasks.remove(task)
            self._snapshots.under_way.remove(task)
            if task in self._reading:
                self._reading.remove(task)
            if not task.lane.is_alone:
                task.lane.release(task.row)
            with self._changed:
                self._waiting.remove(task.ticket)

    def _end(self, why: str) -> None:
        with self._changed:
            self._is_dead = True
            waiting = list(self._waiting.tickets)
            self._waiting.clear()
        for task in self._tasks:
            task.fail(why, is_ours=True)
        for ticket in waiting:
            ticket.put(Failure(why, is_ours=True))
        self._retire()
        self._status = self._told()

    def _told(self) -> EngineStatus:
        caches = [lane.cache for lane in self._lanes]
        caches += [task.cache for task in self._tasks if task.reader is not None or task.lane.is_alone]
        sizes = self._sizes.of(caches, is_exact=not self._tasks)  # no other count may follow soon
        of_cache = {id(cache): size // cache.batch_size for cache, size in zip(caches, sizes, strict=True)}
        totals = self._totals
        return EngineStatus(
            is_alive=not self._is_dead,
            rows=tuple(task.status(of_cache[id(task.cache)]) for task in self._tasks),
            free_rows=sum(len(lane.free) for lane in self._lanes),
            total_rows=sum(lane.options.batch for lane in self._lanes),
            queued=len(self._waiting.tickets),
            queued_tokens=self._waiting.tokens,
            bytes_held=sum(sizes) + self._snapshots.kept.bytes,
            bytes_limit=self._limit,
            prompt_tokens_total=totals.prompt,
            written_tokens_total=totals.written,
            cached_tokens_total=totals.cached,
            errors_total=totals.errors,
            cancelled_total=totals.cancelled,
            steps_total=totals.steps,
            evicted_total=totals.evicted,
        )
