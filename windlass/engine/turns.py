"""What a turn of the engine begins with. Where several processes hold the model, rank 0 decides it for all of them.

Each rank has a scheduler of its own, which does the same as that of rank 0: a turn follows from the requests under way,
and from what is told here. What depends on time, on clients, or on what a client asked of rank 0 alone, is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, final

from windlass.engine.admission import Admission
from windlass.engine.request import Failed, Request, Ticket
from windlass.engine.status import EngineLimits
from windlass.engine.task import Task
from windlass.hf.kv_cache import KVCache
from windlass.parallel.ranks import Ranks

BEAT: Final = 1.0  # seconds between two turns of an engine that has nothing to do, by which ranks know of one another


@dataclass(frozen=True)
class Turn:
    """`tickets` wait for a row, the first first; `cancelled` are numbers of requests that nobody waits for, and `late`
    those of requests that have failed, with the reasons. `is_over`: there is no turn any more."""

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
        tasks: Sequence[Task],
        limits: EngineLimits,
    ) -> Turn:
        """The one that begins now, with so many waiting and under way."""
        reasons = {task.ticket.number: _late(task, limits) for task in tasks}
        reasons |= {ticket.number: ticket.late(limits.seconds) for ticket in tickets}
        late = {number: failed.message for number, failed in reasons.items() if failed is not None}
        return cls(is_over, list(tickets), frozenset(cancelled), late)

    def drop(self, tasks: Sequence[Task], waiting: Admission) -> int:
        """Let go what was cancelled, in whatever phase, and what is late; returns how many were cancelled."""
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
            ticket.put(Failed(self.late[ticket.number], is_ours=False))
        return len(gone) + len(unread)

    @property
    def wanted(self) -> list[Ticket]:
        """Those that may have a row."""
        return [each for each in self.tickets if each.number not in self.cancelled and each.number not in self.late]


@dataclass(frozen=True)
class _Told:
    """A turn as it travels: of tickets those that are new, without what only rank 0 goes by."""

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
        """That of an engine with such caches; None where one process holds all of the model."""
        return None if cache.heads is None else cls(cache.heads.ranks)

    @property
    def leads(self) -> bool:
        """Whether clients come to this rank."""
        return self._ranks.is_first

    def tell(self, turn: Turn) -> None:
        """Let the others take the turn that rank 0 begins."""
        new = tuple((each.number, _bare(each.request)) for each in turn.tickets if each.number > self._newest)
        self._newest = max([self._newest, *(number for number, _ in new)])
        self._ranks.told_by_first(_Told(turn.is_over, new, turn.cancelled, turn.late))

    def take(self, waiting: list[Ticket]) -> Turn:
        """The turn that rank 0 begins; what is new there is added to those that are `waiting`."""
        told = self._ranks.told_by_first(_Told(False, (), frozenset()))
        waiting += [Ticket(number, request) for number, request in told.arrived]
        return Turn(told.is_over, list(waiting), told.cancelled, told.late)


def _bare(request: Request) -> Request:
    """A request as the other ranks need it: they choose no tokens, and tell nobody what those are."""
    return replace(request, grammar=None, top_logprobs=None, logit_bias={})


def _late(task: Task, limits: EngineLimits) -> Failed | None:
    """Why a request is not to go on, if it took too long."""
    count, seconds = task.ticket.waiting
    if count > limits.unread_events and seconds > limits.unread_seconds:
        return Failed("its events were not taken", is_ours=False)
    return task.ticket.late(limits.seconds)
