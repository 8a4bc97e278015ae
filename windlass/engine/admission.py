"""Requests that wait for a row."""

from collections.abc import Sequence
from typing import Final

from transformers import PreTrainedModel

from windlass.cache.options import CacheOptions
from windlass.core.errors import UsageError
from windlass.engine.lane import is_alike, shares_budget
from windlass.engine.parts_check import check_parts
from windlass.engine.request import Request, Ticket
from windlass.engine.row_bytes import RowBytes
from windlass.engine.status import EngineLimits, QueueFullError
from windlass.hf.forward import vocabulary_of

RETRY_SECONDS: Final = 1.0


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


def check_request(
    request: Request, limits: EngineLimits, model: PreTrainedModel, kinds: Sequence[CacheOptions], kept_bytes: int
) -> None:
    """Raises: UsageError for what an engine with these limits, and rows of these `kinds`, does not take; `kept_bytes`
    are for what it keeps from one request to the next."""
    prompt, vocabulary = request.prompt, vocabulary_of(model)
    if not prompt:
        raise UsageError("the prompt is empty; give at least one token")
    if len(prompt) > limits.prompt_tokens:
        raise UsageError(
            f"the prompt has {len(prompt)} tokens, and this server reads at most {limits.prompt_tokens}; shorten it"
        )
    if not 0 <= request.max_tokens <= limits.max_tokens:
        raise UsageError(f"max_tokens must be from 0 to {limits.max_tokens} here, got {request.max_tokens}")
    if request.scores_prompt and request.parts is not None:
        raise UsageError("chunks: log probabilities of a prompt need it read in its order; send the chunks as text")
    if request.seconds is not None and limits.seconds is not None and request.seconds > limits.seconds:
        raise UsageError(f"a request may take at most {limits.seconds:g} seconds here, got {request.seconds:g}")
    if min(prompt) < 0 or max(prompt) >= vocabulary:
        raise UsageError(f"the prompt has token ids outside of the vocabulary, 0 to {vocabulary - 1}")
    if not limits.alone and not any(is_alike(kind, request.options) for kind in kinds):
        told = "; ".join(str(kind.labels()) for kind in kinds)
        raise UsageError(f"no row has these options, {request.options.labels()}; take one of: {told}")
    if request.parts is not None:
        check_parts(request.parts, len(prompt), request.options, kept_bytes)


def check_alone(model: PreTrainedModel, request: Request, limits: EngineLimits) -> None:
    """Raises: UsageError for a request whose own options take more memory than is given to one."""
    own, tokens = RowBytes.of(model, request.options), len(request.prompt) + request.max_tokens
    needed = own.recalled(tokens) + (own.reading(tokens) if request.parts is None else own.joining(tokens))
    if needed > limits.alone_bytes:
        raise UsageError(
            f"a row with these options takes {needed:,} bytes for {tokens} tokens, and this server gives "
            f"{limits.alone_bytes:,} to one; ask for a smaller budget, or leave the options out"
        )


def check_kinds(kinds: Sequence[CacheOptions]) -> None:
    """Raises: UsageError for options of rows whose memory cannot be told beforehand, for none, and for two alike."""
    if not kinds:
        raise UsageError("a server needs rows; give a number and options")
    for number, kind in enumerate(kinds):
        if kind.budget is None:
            raise UsageError("the rows of a server need a budget, which their memory is counted by; give one")
        if kind.recall:
            raise UsageError(
                f"recall={kind.recall} for the rows of a server, whose memory would grow with each text; leave it to "
                "requests, which then have a cache of their own"
            )
        if shares_budget(kind) and kind.batch > 1:
            raise UsageError(
                f"{kind.policy!r} decides with each text what each layer keeps, which {kind.batch} rows of one cache "
                "cannot do each for itself; give it one row"
            )
        if any(is_alike(kind, other) for other in kinds[:number]):
            raise UsageError(f"two kinds of rows are alike: {kind.labels()}; give their number in one of them")
