"""Whole and streamed answers, cancelled when the client disconnects."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from time import monotonic
from typing import Any, Final, TypeVar

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from windlass.core.errors import UsageError
from windlass.engine.request import (
    EngineDeadError,
    Event,
    Failure,
    Finish,
    Piece,
    Progress,
    QueueFullError,
    Request,
    Ticket,
)
from windlass.engine.scheduler import Service
from windlass.serve.chat import AnswerDocuments, PartialText
from windlass.serve.errors import ApiError, comment, of_death, of_failure, of_queue, of_usage, stopping
from windlass.serve.metrics import Metrics
from windlass.view.server import disconnected

LOOK_SECONDS = 1.0  # between two checks of the engine


class Gate:
    """Admission of requests. The gate is open until the server begins to end."""

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
        """Let the engine end the texts that are not over. May be repeated."""
        if self._is_cancelled:
            return
        self._is_cancelled = True
        for ticket in self._tickets:
            if not ticket.is_over:
                self._service.cancel(ticket)

    async def events(self, ping_seconds: float) -> AsyncIterator[list[tuple[int, Event]]]:
        """Yield the events since the last time, each with the number of its text, until all texts have ended.

        An empty list after `ping_seconds` of silence.
        """
        left, silent = set(range(len(self._tickets))), 0.0
        while left:
            self._wake.clear()
            self._is_woken = False
            found = [(at, event) for at in sorted(left) for event in self._tickets[at].take()]
            left -= {at for at, event in found if isinstance(event, Finish | Failure)}
            if found:
                silent = 0.0
                yield found
                continue
            try:
                async with asyncio.timeout(min(LOOK_SECONDS, ping_seconds)):
                    await self._wake.wait()
            except TimeoutError:
                self._check_alive()
                silent += min(LOOK_SECONDS, ping_seconds)
                if silent >= ping_seconds:
                    silent = 0.0
                    yield []

    def _check_alive(self) -> None:
        # The engine gives out its last events before it dies, so a ticket without events gets no more.
        if not self._service.status().is_alive and not any(ticket.waiting[0] for ticket in self._tickets):
            raise ApiError(503, "the engine has stopped. Restart the server", None, "engine_dead")

    def _notify(self) -> None:
        """Wake the loop, once for many events. The engine's thread calls this."""
        if not self._is_woken:
            self._is_woken = True
            try:
                self._loop.call_soon_threadsafe(self._wake.set)
            except RuntimeError:  # the loop is closed: nobody reads any more
                self._is_woken = False


Outcome = TypeVar("Outcome")
CANCEL_SECONDS: Final = 0.05  # until a task that still runs is cancelled again


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Return the outcome of `work`, which is cancelled once the client closes its connection. Read the body before.

    Raises: ClientGone then.
    """
    task, gone = asyncio.create_task(work), asyncio.create_task(disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        await asyncio.gather(_ended(task), _ended(gone))


async def _ended(task: "asyncio.Task[Any]") -> None:
    """Cancel a task until it has ended: before Python 3.12, `asyncio.wait_for` may swallow a cancellation."""
    while not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=CANCEL_SECONDS)


class AnswerStream:
    """The texts of one HTTP request as they come, in the documents of its route.

    Once all have ended, and before the client is told so, they are kept.
    """

    def __init__(
        self,
        tickets: Tickets,
        form: AnswerDocuments,
        texts: Sequence[PartialText],
        metrics: Metrics,
        ping_seconds: float,
        keep: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._keep = keep
        self._tickets, self._form, self._texts = tickets, form, texts
        self._metrics, self._ping_seconds = metrics, ping_seconds
        self._started, self._latest = monotonic(), 0.0

    async def whole(self) -> dict[str, Any]:
        """The whole answer. Raises: ApiError where a text fails."""
        async for found in self._events():
            for at, pieces, last in _by_text(found):
                self._texts[at].add(pieces)
                if last is not None:
                    self._texts[at].end(last)
        if self._keep is not None:
            await self._keep()
        return self._form.answer(self._texts)

    async def chunks(self) -> AsyncIterator[bytes]:
        """Yield the events of a stream. A stream that fails ends with an error."""
        openings = [each for at in range(len(self._texts)) for each in self._form.opening(at)]
        yield b"".join(map(self._form.wire, openings))
        try:
            async for found in self._events():
                yield self._part(found) or self._form.waiting()
            if self._keep is not None:
                await self._keep()
        except ApiError as error:
            yield self._form.failure(error)
            return
        yield self._form.ending(self._texts)

    def _part(self, found: list[tuple[int, Event]]) -> bytes:
        lines = [comment(f"read {each.done} of {each.total}") for _, each in found if isinstance(each, Progress)]
        for at, pieces, last in _by_text(found):
            written = self._texts[at]
            said = written.add(pieces)
            if last is not None:
                said = said.then(written.end(last))
            if any(said) or (pieces and self._form.head.top_logprobs is not None):
                lines += map(self._form.wire, self._form.deltas(at, said, pieces))
            if last is not None:
                lines += map(self._form.wire, self._form.closing(at, written))
        return b"".join(lines)

    async def _events(self) -> AsyncIterator[list[tuple[int, Event]]]:
        echoes = [each.echo for each in self._texts]
        if any(echoes) and self._form.head.top_logprobs is None:  # else they come with log probabilities
            yield [(at, echo.piece) for at, echo in enumerate(echoes) if echo is not None]
        async for found in self._tickets.events(self._ping_seconds):
            if any(isinstance(each, Piece) for _, each in found):
                now = monotonic()
                self._metrics.wrote(now - (self._latest or self._started), not self._latest)
                self._latest = now
            shown = [(at, echoes[at], each) for at, each in found if not isinstance(each, Failure)]
            yield [(at, one) for at, echo, each in shown for one in ([each] if echo is None else echo.before(each))]
            for _, each in found:
                if isinstance(each, Failure):
                    raise of_failure(each)


def _by_text(found: list[tuple[int, Event]]) -> list[tuple[int, list[Piece], Finish | None]]:
    """The pieces of each text, and its end if it came."""
    numbers = sorted({at for at, each in found if isinstance(each, Piece | Finish)})
    return [
        (
            number,
            [each for at, each in found if at == number and isinstance(each, Piece)],
            next((each for at, each in found if at == number and isinstance(each, Finish)), None),
        )
        for number in numbers
    ]


class EventStream(StreamingResponse):
    """A streamed answer. `close` is called at its end, whatever that is.

    A client that takes nothing for `send_seconds` is given up.
    """

    def __init__(self, chunks: AsyncIterator[bytes], send_seconds: float, close: Callable[[], None]) -> None:
        super().__init__(chunks, headers={"cache-control": "no-cache"}, media_type="text/event-stream")
        self._chunks, self._send_seconds, self._close = chunks, send_seconds, close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_gone(receive, self._sent(send))
        finally:
            self._close()

    async def _sent(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for chunk in self._chunks:
            if chunk:
                await self._within(send({"type": "http.response.body", "body": chunk, "more_body": True}))
        await self._within(send({"type": "http.response.body", "body": b"", "more_body": False}))

    async def _within(self, sending: Any) -> None:
        try:
            async with asyncio.timeout(self._send_seconds):
                await sending
        except (TimeoutError, OSError):
            raise ClientGone from None
