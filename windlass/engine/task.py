"""One request under way: from its row to its last event."""

from __future__ import annotations

from time import monotonic

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.engine.lane import Lane
from windlass.engine.reader import Reader
from windlass.engine.request import Failed, Finished, Progress, Ticket, Usage
from windlass.engine.snapshots import Snapshots
from windlass.engine.status import Phase, RowStatus
from windlass.engine.writer import Writer
from windlass.hf.kv_cache import KVCache


class Task:
    """A ticket that has a row. `is_over` once its row may be released."""

    def __init__(
        self,
        ticket: Ticket,
        lane: Lane,
        row: int,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        snapshots: Snapshots,
    ) -> None:
        self.ticket, self.lane, self.row, self.started = ticket, lane, row, monotonic()
        self.reader: Reader | None = Reader(model, ticket.request, snapshots)
        self.cached = self.reader.cached
        heads = lane.cache.heads
        self.writer = Writer(ticket.request, tokenizer, lane.cache.device, None if heads is None else heads.ranks)
        self.is_over = False
        self.seen = self.cached
        """Tokens that were read and written so far."""

    def read(self) -> None:
        """Read one more chunk of the prompt; after the last one, choose the first token."""
        reader = self.reader
        assert reader is not None, "a prompt that was read before"
        reader.read()
        self.seen = reader.done
        self.ticket.put(Progress(reader.done, len(self.ticket.request.prompt)))
        if reader.logits is not None:
            self.lane.put(self.row, reader.cache)
            self.reader = None
            self.take(reader.logits)

    def take(self, logits: torch.Tensor) -> None:
        """Choose the next token out of its (vocabulary,) logits; a text that ends with it tells what it took."""
        self.ticket.put(self.writer.choose(logits))
        self.seen += self.writer.written > 1  # the token before this one was fed
        if self.writer.reason != "interrupted":
            self.is_over = True
            self.ticket.put(Finished(self.writer.reason, self.usage()))

    def fail(self, message: str, is_ours: bool) -> None:
        """End with an error."""
        self.is_over = True
        self.ticket.put(Failed(message, is_ours))

    @property
    def cache(self) -> KVCache:
        """What holds the text."""
        return self.lane.cache if self.reader is None else self.reader.cache

    def usage(self) -> Usage:
        """What it took until now; asks the device."""
        cache, row = self.cache, self.row if self.reader is None else 0
        held = [layer.positions[row] for layer in cache.layers if not layer.is_empty]
        kept = max((int((positions >= 0).sum(-1).max()) for positions in held), default=0)
        evicted = max(self.seen - kept, 0)
        recalled = min(cache.options.recall, evicted)
        prompt = len(self.ticket.request.prompt)
        size = cache.bytes_held // cache.batch_size + cache.recall_bytes
        return Usage(prompt, self.writer.written, self.cached, self.seen, kept, evicted, recalled, size)

    def status(self, size: int) -> RowStatus:
        """What a status says of a row of so many bytes, without asking the device."""
        phase: Phase = "writing" if self.reader is None else "reading"
        return RowStatus(self.ticket.number, phase, repr(self.lane.options.policy), self.seen, self.kept, size)

    @property
    def kept(self) -> int:
        """The most that a layer holds of `seen`: what the budget allows."""
        budget = self.lane.options.budget
        return self.seen if budget is None else min(self.seen, budget)
