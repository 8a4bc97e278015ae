"""One request under way: its row, its tokens, its events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.cache.edits import arrange_rows, holds_all, put_row
from windlass.cache.options import CacheOptions
from windlass.core.errors import UsageError
from windlass.core.ranks import Ranks
from windlass.engine.chunks import PartsReader
from windlass.engine.decode import Sampler, agreed_token, likeliest, logprobs_of, weakened
from windlass.engine.generate import RowText
from windlass.engine.prefill import PromptReader, Reader, feed_tokens
from windlass.engine.prefix_cache import RowSource, Snapshots, key_of
from windlass.engine.prefix_entry import CacheEntry
from windlass.engine.recompute import Everything
from windlass.engine.request import (
    Failure,
    Finish,
    Logprob,
    Phase,
    Piece,
    Progress,
    PromptLogprobs,
    Request,
    RowStatus,
    Ticket,
    Usage,
)
from windlass.engine.sampling import FinishReason
from windlass.engine.speculate import Drafter, most_drafts, read_drafted, take_back
from windlass.engine.text import TextStream
from windlass.hf.kv_cache import KVCache
from windlass.policies.base import OneShot
from windlass.policies.wrappers import find


class Writer:
    """Chooses the tokens of one request, by a generator of its own. They are the same in any batch.

    With several `ranks`, rank 0 chooses for all of them.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        self.request, self._ranks = request, ranks
        # The repetition penalty is part of the logits of reported log probabilities: `_adjusted` has it.
        self._sampler = Sampler(replace(request.sampling, repetition_penalty=1.0), [request.prompt], device)
        stream = TextStream.after(tokenizer, request.prompt, request.stops, request.hidden)
        self._row = RowText(stream, request.max_tokens)
        self._counts = Counter[int]()
        self._seen: Tensor | None = None  # (vocabulary,) bool: tokens of the prompt and the text, for the penalty
        adjusts = request.logit_bias or request.presence_penalty or request.frequency_penalty or request.grammar
        adjusts = adjusts or request.top_logprobs is not None or request.sampling.repetition_penalty != 1.0
        self._is_plain = request.sampling.temperature == 0.0 and not adjusts

    @property
    def written(self) -> int:
        """Tokens so far."""
        return len(self._row.tokens)

    @property
    def left(self) -> int:
        """The most tokens that may follow."""
        return self._row.left

    @property
    def reason(self) -> FinishReason:
        """The reason why the text has ended. "interrupted" while it goes on."""
        return self._row.reason

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text. None: there was none."""
        return self._row.stopped_by

    @property
    def token(self) -> int:
        """The latest token."""
        return self._row.tokens[-1]

    def choose(self, logits: Tensor) -> Piece:
        """The next token, from its (vocabulary,) logits.

        Raises: UsageError where the grammar allows no token.
        """
        logprobs: tuple[Logprob, ...] = ()

        def chosen() -> int:
            nonlocal logprobs
            if self._is_plain:
                return int(likeliest(logits[None]))
            scores = self._adjusted(logits.float())
            self._sampler.prepare()
            token = int(self._sampler.choose(scores[None]))
            if self._seen is not None:
                self._seen[token] = True
            if self.request.grammar is not None:
                self.request.grammar.accept(token)
            logprobs = self._logprobs(scores, token)
            return token

        token, offset = agreed_token(self._ranks, chosen), self._row.length
        self._counts[token] += 1
        return Piece(token, self._row.taken(self._row.step(token)), logprobs, offset)

    def _adjusted(self, scores: Tensor) -> Tensor:
        """Logits after, in this order, biases, the repetition penalty, which counts the prompt, the penalties that
        OpenAI defines, which do not, and the grammar, which hides tokens that it does not allow."""
        request, repetition = self.request, self.request.sampling.repetition_penalty
        scores = _added(scores, request.logit_bias)
        if repetition != 1.0:
            if self._seen is None:
                self._seen = torch.zeros_like(scores, dtype=torch.bool)
                self._seen[torch.tensor([*request.prompt], device=scores.device)] = True
            scores = weakened(scores, self._seen, repetition)
        if request.presence_penalty or request.frequency_penalty:
            penalties = {
                token: -request.presence_penalty - count * request.frequency_penalty
                for token, count in self._counts.items()
            }
            scores = _added(scores, penalties)
        if request.grammar is not None:
            allowed = request.grammar.allowed().to(scores.device)
            if not bool(allowed.any()):
                raise UsageError(
                    "the grammar allows no token here. Let the schema allow an end, or ask for another one"
                )
            scores = scores.masked_fill(~allowed[: len(scores)], -torch.inf)
        return scores

    def _logprobs(self, scores: Tensor, token: int) -> tuple[Logprob, ...]:
        if self.request.top_logprobs is None:
            return ()
        return logprobs_of(scores[None], [token], self.request.top_logprobs)[0]


def _added(scores: Tensor, numbers: Mapping[int, float]) -> Tensor:
    """Logits with a number added for each of some tokens."""
    if not numbers:
        return scores
    ids = torch.tensor(list(numbers), device=scores.device)
    return scores.index_add(0, ids, torch.tensor(list(numbers.values()), device=scores.device).float())


PATIENCE: Final = 32  # steps in a row with half of the rows idle, after which the cache is shrunk


class Lane:
    """`options.batch` rows, each free or of one request.

    A step computes every row that the cache has, so it has as many as write: 1, 2, 4 and so on up to all. They lie in
    its first rows, which is why a row of the lane may stand at different indices of the cache at different times. Rows
    are moved when one more is needed, and when half of them were idle for `PATIENCE` steps.

    A row that writes alone takes over the cache it was read into, if that has evicted nothing. `keeps_room`: it also
    keeps the slots for a chunk, so that the next turn of its conversation moves nothing. `is_alone`: the only row is of
    one request, whose options no other lane has. It always takes over its cache, as does the only row of a policy whose
    layers share the budget anew for each text.
    """

    def __init__(
        self, model: PreTrainedModel, options: CacheOptions, is_alone: bool = False, keeps_room: bool = False
    ) -> None:
        self._model, self.options, self.is_alone, self._keeps_room = model, options, is_alone, keeps_room
        self.policy = repr(options.policy)  # which the status of each row names in each step
        self.cache = self._empty()
        self.free = list(range(options.batch))
        self._takes_over = is_alone or shares_budget(options)
        self._index: dict[int, int] = {}  # index in the cache of each row put there
        self._idle_steps = 0
        self._is_moving = False

    def serves(self, options: CacheOptions) -> bool:
        """Return True if a request with these options may take a row."""
        return is_alike(options, self.options)

    def take(self) -> int | None:
        """Take a free row. None: there is none."""
        return self.free.pop(0) if self.free else None

    def index(self, row: int) -> int:
        """The index in the cache of a row that was put there."""
        return self._index[row]

    def put(self, row: int, cache: KVCache) -> None:
        """Move the contents of a cache of one row into the row."""
        if self._is_moving and not self._index:  # no request is left
            self.reset()
        is_whole = holds_all(cache) >= cache.tokens_seen[0]  # else its tokens are to lie as beside other rows
        if self._takes_over or (is_whole and not self._index and cache.options.rollback == self.options.rollback):
            self.cache, self._index, self._idle_steps = cache, {row: 0}, 0
            cache.keep_room(self._keeps_room and is_whole)
            return
        rows = self._rows_for(len(self._index) + 1)
        if rows > self.cache.batch_size or (rows < self.cache.batch_size and not self._index):
            self._arrange(rows)
        taken = set(self._index.values())
        index = self._index[row] = next(each for each in range(self.cache.batch_size) if each not in taken)
        put_row(self.cache, index, cache, is_clear=True)

    def detach(self, row: int, tokens: int) -> KVCache:
        """A cache with the text of a row. `tokens`: the text holds so many, all of them (0: some are evicted).

        The cache itself, where no other row is in it. The row is then empty.
        """
        if self.cache.batch_size > 1 or holds_all(self.cache) < tokens:
            return self.cache.copy_of_row(self._index[row])
        del self._index[row]
        cache, self.cache = self.cache, self._empty()
        return cache

    def release(self, row: int) -> None:
        """Clear a row that was taken. It is free again."""
        index = self._index.pop(row, None)
        has_recalled = self.options.recall > 0 and not self._index  # memory that grew with the texts
        if index is not None and (self._takes_over or has_recalled):
            self.reset()
        elif index is not None and not self._is_moving:  # else `reset` will
            self.cache.clear_row(index)
        self.give_back(row)

    def give_back(self, row: int) -> None:
        """Free a row that was taken, but not written to."""
        self.free.append(row)
        self.free.sort()

    @property
    def is_single(self) -> bool:
        """Return True if the cache has one row, which may have drafts."""
        return self.cache.batch_size == 1

    def step(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Feed each of some rows its next token, with drafts behind it if the lane `is_single`. Call `take_back` then.

        Returns the (tokens, vocabulary) logits of each.

        Raises: RuntimeError where rows were lost, because an error ended a move of them.
        """
        if self._is_moving:
            raise RuntimeError("the rows were lost while they were moved")
        rows = self._rows_for(len(self._index))
        self._idle_steps = self._idle_steps + 1 if rows < self.cache.batch_size else 0
        if self._idle_steps > PATIENCE:
            self._arrange(rows)
        if max(map(len, tokens.values())) > 1:
            return {row: read_drafted(self._model, self.cache, own) for row, own in tokens.items()}
        logits = feed_tokens(self._model, self.cache, {self._index[row]: own[0] for row, own in tokens.items()})
        self.cache.forget_steps()  # nothing else is rolled back
        return {row: logits[self._index[row], None] for row in tokens}

    def take_back(self, drafts: int) -> None:
        """Take back so many drafts of the latest step, which the only row has read. The others stay."""
        take_back(self.cache, drafts)
        self.cache.forget_steps()

    def reset(self) -> None:
        """Empty all rows after an error, those that are taken too."""
        self.cache.reset()
        self._index, self._idle_steps, self._is_moving = {}, 0, False

    def _rows_for(self, count: int) -> int:
        """The number of rows that the cache needs for `count` that write: a power of two, at most the batch."""
        return min(1 << max(count - 1, 0).bit_length(), self.options.batch)

    def _empty(self) -> KVCache:
        return KVCache.from_options(self._model, replace(self.options, batch=1))

    def _arrange(self, rows: int) -> None:
        """Resize the cache to so many rows, those that write first."""
        self.cache.keep_room(False)
        kept = sorted(self._index, key=self._index.__getitem__)
        self._is_moving = True
        arrange_rows(self.cache, [*map(self.index, kept), *[None] * (rows - len(kept))])
        self._is_moving = False
        self._index = {row: index for index, row in enumerate(kept)}
        self._idle_steps = 0


def is_alike(one: CacheOptions, other: CacheOptions) -> bool:
    """Return True if two requests with these options may share a cache."""
    return one.labels() == other.labels()


def shares_budget(options: CacheOptions) -> bool:
    """Return True if each text decides how much of the budget each layer keeps, which rows of one cache cannot."""
    one_shot = find(options.policy, OneShot)
    return one_shot is not None and one_shot.shares_budget


class ActiveRequest(RowSource):
    """A ticket that has a row. `is_over` once its row may be released."""

    def __init__(
        self,
        ticket: Ticket,
        lane: Lane,
        row: int,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        snapshots: Snapshots,
        drafter: Drafter | None = None,
    ) -> None:
        self._drafter, self._drafts = drafter, list[int]()
        self.ticket, self.lane, self.row = ticket, lane, row
        self.reader: PromptReader | None = _reader_of(model, ticket.request, snapshots)
        self.cached, self.recomputed = self.reader.cached, 0
        self._snapshots, self._may_be_kept = snapshots, self.reader.may_be_kept and ticket.request.reuse.store
        self._passes, self._holds_all = self.reader.passes, 0
        self._logits: Tensor | None = None  # behind the prompt, for requests that ask the same
        self._moved, self._exact_tokens = self.reader.moved, self.reader.exact_tokens
        self._finish: Finish | None = None
        heads = lane.cache.heads
        self.writer = Writer(ticket.request, tokenizer, lane.cache.device, None if heads is None else heads.ranks)
        self.is_over = False
        self.seen = self.cached
        """Number of tokens read and written so far."""

    def read(self) -> None:
        """Read one more chunk of the prompt. After the last one, choose the first token, and only then keep and move
        the row."""
        reader = self.reader
        assert reader is not None, "a prompt that was read before"
        reader.read()
        self.seen, self.cached, self.recomputed = reader.seen, reader.cached, reader.recomputed
        if self._drafter is not None:
            self._drafter.read(self.ticket.request.prompt[self._drafter.tokens : reader.done])
        self.ticket.put(Progress(reader.done, len(self.ticket.request.prompt)))
        if reader.logits is None:
            return
        if self.ticket.request.scores_prompt:
            self.ticket.put(PromptLogprobs(tuple(reader.logprobs)))
        if self.ticket.request.max_tokens:
            self.take(reader.logits[None].clone())
        else:
            self._end("length")
        reader.keep()
        if self._may_be_kept and self._snapshots.kept.limit:
            self._logits = reader.logits
        if not self.is_over:
            self._passes, self._holds_all = reader.passes, holds_all(reader.cache)
            self.lane.put(self.row, reader.cache)
            self.reader = None

    @property
    def next_read(self) -> int:
        """The most tokens that the next pass over its prompt reads."""
        assert self.reader is not None, "a prompt that was read before"
        return min(self.lane.options.chunk, len(self.ticket.request.prompt) - self.reader.done)

    def next_tokens(self) -> list[int]:
        """The tokens that the next pass reads: the latest one, and drafts behind it if no other text has a row."""
        self._drafts = []
        if self._drafter is not None and self.lane.is_single:
            most = self.writer.left - 1
            if self.seen < self._holds_all:  # a step ends there, before which `keep_beginning` copies the row
                most = min(most, self._holds_all - self.seen - 1)
            self._drafts = self._drafter.draft(most_drafts(self.cache, most))
        return [self.writer.token, *self._drafts]

    def take(self, logits: torch.Tensor) -> None:
        """Choose tokens from the (tokens, vocabulary) logits of a pass, as long as they are its drafts, and one more.

        A text that ends with one of them is to `finish`.
        """
        accepted = -1
        try:
            for number, draft in enumerate([*self._drafts, None]):
                self.ticket.put(self.writer.choose(logits[number]))
                accepted += 1
                self.seen += self.writer.written > 1  # the token before this one was fed
                if self._drafter is not None:
                    self._drafter.push(self.writer.token)
                if self.writer.token != draft or self.writer.reason != "interrupted":
                    break
        finally:
            if self._drafts:
                self.lane.take_back(len(self._drafts) - max(accepted, 0))
        if self._drafter is not None:
            self._drafter.note(len(self._drafts), accepted)
        if self.writer.reason != "interrupted":
            self._end(self.writer.reason)

    def _end(self, reason: FinishReason) -> None:
        self.is_over, self._finish = True, Finish(reason, self.usage(), self.writer.stopped_by)

    def fail(self, message: str, is_ours: bool) -> None:
        """End the request with an error. After one of ours nobody knows what its row holds."""
        self.is_over = True
        self._may_be_kept = self._may_be_kept and not is_ours
        self.ticket.put(Failure(message, is_ours))

    def finish(self) -> None:
        """Report the end of a text."""
        if self._finish is not None:
            self.ticket.put(self._finish)

    def keep(self) -> None:
        """Give the row to the prefix cache, which then has all that was read and written. May be repeated."""
        entry = self.entry
        self._may_be_kept = False
        if entry is not None and self._snapshots.kept.limit:
            whole = len(entry.tokens) * entry.holds_all
            cache = entry.cache if self.reader is not None else self.lane.detach(self.row, whole)
            self._snapshots.keep(replace(entry, cache=cache, row=0, is_text=True))

    def keep_beginning(self) -> None:
        """Keep a copy of a text that is about to lose tokens: other texts may begin as it does."""
        entry = self.entry if self.seen == self._holds_all and self._snapshots.kept.limit else None
        if entry is not None:
            self._snapshots.put(entry)

    @property
    def entry(self) -> CacheEntry | None:
        if not self._may_be_kept:
            return None
        key, tokens = key_of(self.ticket.request), self.cache.rows.rows[self.index].ids
        passes, most = self._passes, self._holds_all
        if self.reader is not None:
            passes, most = self.reader.passes, holds_all(self.reader.cache)
        if not tokens:
            return None
        is_all = len(tokens) <= most
        logits = self._logits if is_all else None
        return CacheEntry(
            tokens=tokens,
            passes=passes,
            holds_all=is_all,
            exact_tokens=self._exact_tokens,
            checkpoints=self.cache.checkpoints_of(self.index),
            key=key,
            cache=self.cache,
            bytes=0,
            logits=logits,
            logits_end=None if logits is None else len(self.ticket.request.prompt),
            row=self.index,
        )

    def close(self) -> None:
        """Release the memory reserved for the rest of its prompt."""
        if self.reader is not None:
            self.reader.close()

    @property
    def cache(self) -> KVCache:
        """The cache that holds the text."""
        return self.lane.cache if self.reader is None else self.reader.cache

    @property
    def index(self) -> int:
        """The row of `cache` that holds it."""
        return self.lane.index(self.row) if self.reader is None else 0

    def usage(self) -> Usage:
        """Usage until now. Asks the device."""
        cache, row = self.cache, self.index
        kept = self.seen
        if holds_all(cache, row) < kept:
            held = [layer.positions[row] for layer in cache.layers_to_read if not layer.is_empty]
            kept = max((int((positions >= 0).sum(-1).max()) for positions in held), default=0)
        evicted = max(self.seen - kept, 0)
        recalled = min(cache.options.recall, evicted)
        prompt = len(self.ticket.request.prompt)
        size = (cache.bytes_held + cache.recall_bytes) // cache.batch_size
        return Usage(
            prompt=prompt,
            written=self.writer.written,
            cached=self.cached,
            seen=self.seen,
            kept=kept,
            evicted=evicted,
            recalled=recalled,
            bytes=size,
            recomputed=self.recomputed,
            moved=self._moved,
        )

    def status(self, size: int) -> RowStatus:
        """Status of a row of so many bytes, without asking the device."""
        phase: Phase = "writing" if self.reader is None else "reading"
        return RowStatus(self.ticket.number, phase, self.lane.policy, self.seen, self.kept, size)

    @property
    def kept(self) -> int:
        """The most tokens of `seen` that a layer holds: at most the budget, or all while a prompt is held whole."""
        budget, is_held_whole = self.lane.options.budget, self.reader is not None and self.reader.is_whole
        return self.seen if budget is None or is_held_whole else min(self.seen, budget)


def _reader_of(model: PreTrainedModel, request: Request, snapshots: Snapshots) -> PromptReader:
    """The reader of a request's prompt. Parts whose tokens are all read again are read like any text."""
    parts = request.parts
    if parts is None or isinstance(parts.recompute, Everything):
        return Reader(model, request, snapshots)
    return PartsReader(model, request, parts, snapshots.kept)
