"""Requests that wait for a row."""

from windlass.engine.request import Ticket
from windlass.engine.status import EngineLimits, QueueFullError

RETRY_SECONDS = 1.0


class Admission:
    """The queue, in the order of arrival. Its limits are counted when a request arrives."""

    def __init__(self, limits: EngineLimits) -> None:
        self._limits = limits
        self.tickets: list[Ticket] = []

    @property
    def tokens(self) -> int:
        """Of all prompts that wait."""
        return sum(len(ticket.request.prompt) for ticket in self.tickets)

    def add(self, ticket: Ticket) -> None:
        """Let it wait. Raises: QueueFullError."""
        limits, tokens = self._limits, self.tokens + len(ticket.request.prompt)
        if len(self.tickets) >= limits.queue:
            raise QueueFullError(f"{limits.queue} requests wait, and no more may; try again later", RETRY_SECONDS)
        if self.tickets and tokens > limits.queued_tokens:
            raise QueueFullError(
                f"{self.tokens} tokens of prompts wait, and at most {limits.queued_tokens} may; try again later",
                RETRY_SECONDS,
            )
        self.tickets.append(ticket)

    def remove(self, ticket: Ticket) -> None:
        """It has a row, or nobody waits for it."""
        self.tickets.remove(ticket)

    def clear(self) -> None:
        """Nobody waits any more."""
        self.tickets.clear()
