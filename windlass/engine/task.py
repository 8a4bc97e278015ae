"""One request under way: from its row to its last event."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.engine.chunks_recompute import Everything
from windlass.engine.lane import Lane
from windlass.engine.parts_reader import PartsReader
from windlass.engine.reader import PromptReader, Reader
from windlass.engine.request import Failed, Finished, Progress, PromptLogprobs, Request, Ticket, Usage
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
        self.ticket, self.lane, self.row = ticket, lane, row
        self.reader: PromptReader | None = _reader_of(model, ticket.request, snapshots)
        self.cached, self.recomputed = self.reader.cached, 0
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
        self.seen, self.cached, self.recomputed = reader.seen, reader.cached, reader.recomputed
        self.ticket.put(Progress(reader.done, len(self.ticket.request.prompt)))
        if reader.logits is None:
            return
        if self.ticket.request.scores_prompt:
            self.ticket.put(PromptLogprobs(tuple(reader.logprobs)))
        if not self.ticket.request.max_tokens:
            self.is_over = True
            self.ticket.put(Finished("length", self.usage()))
        else:
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

    def close(self) -> None:
        """Give back what is held for the rest of its prompt."""
        if self.reader is not None:
            self.reader.close()

    @property
    def cache(self) -> KVCache:
        """What holds the text."""
        return self.lane.cache if self.reader is None else self.reader.cache

    @property
    def index(self) -> int:
        """Which row of `cache` does."""
        return self.lane.index(self.row) if self.reader is None else 0

    def usage(self) -> Usage:
        """What it took until now; asks the device."""
        cache, row = self.cache, self.index
        held = [layer.positions[row] for layer in cache.layers if not layer.is_empty]
        kept = max((int((positions >= 0).sum(-1).max()) for positions in held), default=0)
        evicted = max(self.seen - kept, 0)
        recalled = min(cache.options.recall, evicted)
        prompt = len(self.ticket.request.prompt)
        size = cache.bytes_held // cache.batch_size + cache.recall_bytes
        own = self.seen, kept, evicted, recalled, size, self.recomputed
        return Usage(prompt, self.writer.written, self.cached, *own)

    def status(self, size: int) -> RowStatus:
        """What a status says of a row of so many bytes, without asking the device."""
        phase: Phase = "writing" if self.reader is None else "reading"
        return RowStatus(self.ticket.number, phase, repr(self.lane.options.policy), self.seen, self.kept, size)

    @property
    def kept(self) -> int:
        """The most that a layer holds of `seen`: what the budget allows."""
        budget, is_held_whole = self.lane.options.budget, self.reader is not None and self.reader.is_whole
        return self.seen if budget is None or is_held_whole else min(self.seen, budget)
        budget = self.lane.options.budget
        return self.seen if budget is None else min(self.seen, budget)


def _reader_of(model: PreTrainedModel, request: Request, snapshots: Snapshots) -> PromptReader:
    """What reads its prompt: parts of which every token is read again are text like any other."""
    parts = request.parts
    if parts is None or isinstance(parts.recompute, Everything):
        return Reader(model, request, snapshots)
    return PartsReader(model, request, parts, snapshots.kept)
