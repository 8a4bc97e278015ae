"""Requests that wait for a row, and those that have one."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from transformers import PreTrainedModel

from windlass.cache.cache import check_sinks_fit
from windlass.cache.options import CacheOptions
from windlass.core.errors import UsageError
from windlass.core.types import bounds_of
from windlass.engine.chunks import check_parts
from windlass.engine.request import EngineLimits, QueueFullError, Request, Ticket
from windlass.engine.row_bytes import RowBytes
from windlass.engine.sequence import is_alike, shares_budget
from windlass.hf.attach import attached
from windlass.hf.forward import vocabulary_of

RETRY_SECONDS: Final = 1.0


class Admission:
    """Requests without a row, in the order of arrival in `tickets`, and those with one.

    A request counts as queued where the free rows of its kind are too few for it and those before it. The limits of the
    queue are checked when a request arrives. A row is free from the moment its request is over or cancelled, though
    the engine clears it an iteration later. Not safe in several threads: the scheduler calls it under a lock.
    """

    def __init__(self, limits: EngineLimits, kinds: Sequence[CacheOptions]) -> None:
        self._limits, self._kinds = limits, kinds
        self.tickets: list[Ticket] = []
        self._with_row: list[Ticket] = []
        self._kinds_of: dict[int, int] = {}  # by number: where the rows of a request are in `_rows`

    @property
    def tokens(self) -> int:
        """Tokens of all prompts without a row."""
        return _tokens(self.tickets)

    def add(self, tickets: Sequence[Ticket]) -> None:
        """Queue all tickets or none. Raises: QueueFullError, UsageError for more than the queue can ever hold."""
        limits, before = self._limits, self._queued(self.tickets, self._kinds_of)
        kinds = {each.number: self._kind(each.request) for each in tickets}
        for kind, count in Counter(kinds.values()).items():
            rows = self._rows[kind]
            if count > rows + limits.queue:
                raise UsageError(
                    f"the request asks for {count} texts at once, and {rows} rows and a queue of {limits.queue} take "
                    f"{rows + limits.queue}. Lower n, or send fewer prompts"
                )
        kinds |= self._kinds_of
        queued = self._queued([*self.tickets, *tickets], kinds)
        if len(queued) > max(limits.queue, len(before)):
            raise QueueFullError(
                f"no row is free, and {limits.queue} requests wait, which is the most. Try again later", RETRY_SECONDS
            )
        if before and _tokens(queued) > max(limits.queued_tokens, _tokens(before)):
            raise QueueFullError(
                f"{_tokens(before)} tokens of prompts wait, and at most {limits.queued_tokens} may. Try again later",
                RETRY_SECONDS,
            )
        self.tickets += tickets
        self._kinds_of = kinds

    def begin(self, ticket: Ticket) -> None:
        """Give a request a row."""
        self.tickets.remove(ticket)
        self._with_row.append(ticket)

    def remove(self, ticket: Ticket) -> None:
        """Forget a request that is over, with a row or without."""
        (self.tickets if ticket in self.tickets else self._with_row).remove(ticket)
        self._kinds_of.pop(ticket.number, None)

    def clear(self) -> None:
        """Forget all requests without a row."""
        for ticket in list(self.tickets):
            self.remove(ticket)

    @property
    def _rows(self) -> list[int]:
        """Rows of each kind, and caches that requests with options of their own may have."""
        return [*(kind.batch for kind in self._kinds), self._limits.alone]

    def _kind(self, request: Request) -> int:
        """The place of a request's rows in `_rows`."""
        kinds = enumerate(self._kinds)
        return next((at for at, kind in kinds if is_alike(kind, request.options)), len(self._kinds))

    def _queued(self, tickets: Sequence[Ticket], kinds: Mapping[int, int]) -> list[Ticket]:
        """The `tickets` for which no row is free. `kinds` are those of all tickets, by number."""
        free, queued = self._rows, list[Ticket]()
        for ticket in self._with_row:
            free[kinds[ticket.number]] -= not ticket.is_gone
        for ticket in [each for each in tickets if not each.is_gone]:
            kind = kinds[ticket.number]
            free[kind] -= 1
            if free[kind] < 0:
                queued.append(ticket)
        return queued


def _tokens(tickets: Sequence[Ticket]) -> int:
    return sum(len(ticket.request.prompt) for ticket in tickets)


def check_request(
    request: Request, limits: EngineLimits, model: PreTrainedModel, kinds: Sequence[CacheOptions], kept_bytes: int
) -> None:
    """Raises: UsageError for a request that an engine with these limits and rows of these `kinds` does not accept.

    `kept_bytes`: the memory limit of the prefix cache.
    """
    prompt, vocabulary = request.prompt, vocabulary_of(model)
    if not prompt:
        raise UsageError("the prompt is empty. Give at least one token")
    if len(prompt) > limits.prompt_tokens:
        raise UsageError(
            f"the prompt has {len(prompt)} tokens, and this server reads at most {limits.prompt_tokens}. Shorten it"
        )
    if not 0 <= request.max_tokens <= limits.max_tokens:
        raise UsageError(f"max_tokens must be from 0 to {limits.max_tokens} here, got {request.max_tokens}")
    if request.scores_prompt and request.parts is not None:
        raise UsageError("chunks: log probabilities of a prompt need it read in its order. Send the chunks as text")
    if request.seconds is not None and limits.seconds is not None and request.seconds > limits.seconds:
        raise UsageError(f"a request may take at most {limits.seconds:g} seconds here, got {request.seconds:g}")
    least, largest = bounds_of(prompt)
    if least < 0 or largest >= vocabulary:
        raise UsageError(f"the prompt has token ids outside of the vocabulary, 0 to {vocabulary - 1}")
    if not limits.alone and not any(is_alike(kind, request.options) for kind in kinds):
        choices = " or ".join(str(kind.labels()) for kind in kinds)
        raise UsageError(f"no row has these options, {request.options.labels()}. Take one of: {choices}")
    check_sinks_fit(request.head, request.options, len(attached(model).rotaries), request.pins)
    if request.parts is not None:
        check_parts(request.parts, len(prompt), request.options, kept_bytes)


def check_alone(model: PreTrainedModel, request: Request, limits: EngineLimits) -> None:
    """Raises: UsageError for a request whose own options take more memory than is given to one."""
    own, tokens = RowBytes.of(model, request.options), len(request.prompt) + request.max_tokens
    needed = own.recalled(tokens) + (own.reading(tokens) if request.parts is None else own.joining(tokens))
    if needed > limits.alone_bytes:
        raise UsageError(
            f"a row with these options takes {needed:,} bytes for {tokens} tokens, and this server gives "
            f"{limits.alone_bytes:,} to one. Ask for a smaller budget, or leave the options out"
        )


def recall_share(kinds: Sequence[CacheOptions], limits: EngineLimits) -> int:
    """Bytes of the tokens that one text may recall: all rows of a lane have room for the longest of them.

    A prompt under way has room of its own.
    """
    rows = sum(kind.batch for kind in kinds if kind.recall)
    return limits.recall_bytes // max(rows + min(rows, limits.reading), 1)


def check_recalled(own: RowBytes, request: Request, share: int) -> None:
    """Raises: UsageError for a text whose tokens take more bytes than one row of such may recall."""
    tokens = len(request.prompt) + request.max_tokens
    if own.options.recall and (needed := own.recalled(tokens)) > share:
        raise UsageError(
            f"recall={own.options.recall} keeps all tokens of a text, {needed:,} bytes for the {tokens} of prompt and "
            f"max_tokens, and this server gives {share:,} to a row. Lower max_tokens, shorten the prompt, or start it "
            "with a larger --recall-bytes"
        )


def check_kinds(kinds: Sequence[CacheOptions]) -> None:
    """Raises: UsageError for options of rows whose memory cannot be told beforehand, for none, and for two alike."""
    if not kinds:
        raise UsageError("a server needs rows. Give a number and options")
    for number, kind in enumerate(kinds):
        if kind.budget is None:
            raise UsageError("the rows of a server need a budget, which their memory is counted by. Give one")
        if shares_budget(kind) and kind.batch > 1:
            raise UsageError(
                f"{kind.policy!r} sets the budget of each layer for each text, which the {kind.batch} rows of one "
                "cache cannot do separately. Give it one row"
            )
        if any(is_alike(kind, other) for other in kinds[:number]):
            raise UsageError(f"two kinds of rows are alike: {kind.labels()}. Give their number in one of them")
