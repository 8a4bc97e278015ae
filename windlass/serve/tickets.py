"""The tickets of one HTTP request, and their events as the event loop takes them."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from windlass.core.errors import UsageError
from windlass.engine.request import Event, Failed, Finished, Request, Ticket
from windlass.engine.service import Service
from windlass.engine.status import EngineDeadError, QueueFullError
from windlass.serve.errors import ApiError, of_death, of_queue, of_usage, stopping

LOOK_SECONDS = 1.0  # between two looks at whether the engine still lives


class Gate:
    """Whether requests are admitted; closed once the server ends."""

    def __init__(self) -> None:
        self.is_open = True

    def close(self) -> None:
        """Admit none any more."""
        self.is_open = False


class Tickets:
    """All tickets of one HTTP request. They are taken together, or none is."""

    def __init__(self, service: Service, gate: Gate) -> None:
        self._service, self._gate = service, gate
        self._loop, self._wake, self._is_woken = asyncio.get_running_loop(), asyncio.Event(), False
        self._tickets: list[Ticket] = []
        self._is_cancelled = False

    def submit(self, requests: Sequence[Request]) -> None:
        """Hand the requests to the engine. Raises: ApiError where they are not taken."""
        if not self._gate.is_open:
            raise stopping()
        try:
            self._tickets = self._service.submit_all(requests, self._notify)
        except QueueFullError as error:
            raise of_queue(error) from error
        except EngineDeadError as error:
            raise of_death(error) from error
        except UsageError as error:
            raise of_usage(error) from error

    def cancel(self) -> None:
        """Let the engine end what is not over. May be repeated."""
        if self._is_cancelled:
            return
        self._is_cancelled = True
        for ticket in self._tickets:
            if not ticket.is_over:
                self._service.cancel(ticket)

    async def events(self, ping_seconds: float) -> AsyncIterator[list[tuple[int, Event]]]:
        """What came since the last time, each event with the number of its text, until all texts have ended.

        An empty list after `ping_seconds` of silence.
        """
        left, silent = set(range(len(self._tickets))), 0.0
        while left:
            self._wake.clear()
            self._is_woken = False
            found = [(at, event) for at in sorted(left) for event in self._tickets[at].take()]
            left -= {at for at, event in found if isinstance(event, Finished | Failed)}
            if found:
                silent = 0.0
                yield found
                continue
            try:
                await asyncio.wait_for(self._wake.wait(), min(LOOK_SECONDS, ping_seconds))
            except TimeoutError:
                self._check_alive()
                silent += min(LOOK_SECONDS, ping_seconds)
                if silent >= ping_seconds:
                    silent = 0.0
                    yield []

    def _check_alive(self) -> None:
        # It gives out its last events before it dies, so a ticket that has none then will never have one.
        if not self._service.status().is_alive and not any(ticket.waiting[0] for ticket in self._tickets):
            raise ApiError(503, "the engine has stopped; restart the server", None, "engine_dead")

    def _notify(self) -> None:
        """Called by the engine's thread after each event; many of them wake the loop once."""
        if not self._is_woken:
            self._is_woken = True
            try:
                self._loop.call_soon_threadsafe(self._wake.set)
            except RuntimeError:  # the loop is closed: nobody reads any more
                self._is_woken = False
