"""Reads a prompt with parts: what is kept of these is joined, the rest is read, a chunk at a time."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final, final

from transformers import PreTrainedModel

from windlass.cache.options import CacheOptions
from windlass.cache.parts import begin_after, held_positions
from windlass.cache.recurrent_layer import refuse_edit
from windlass.cache.rewritable import check_rewrite
from windlass.core.errors import UsageError
from windlass.core.step import PROMPT
from windlass.engine.chunks_recompute import Nothing, Span
from windlass.engine.feed import feed
from windlass.engine.joining import begin_of_text, divergence, own_starts, passes, read_step
from windlass.engine.kept import Kept, KeptCaches, Key
from windlass.engine.reader import PromptReader, empty_cache, forget
from windlass.engine.request import PromptParts, Request
from windlass.engine.row_bytes import RowBytes
from windlass.hf.kv_cache import KVCache

PREFIX: Final = 1  # tokens behind which each part is read: those that a prompt begins with, where that is no part
Piece = tuple[int, int]  # tokens [start, stop) of a prompt


@final
class PartsReader(PromptReader):
    """A prompt with parts. Those that `kept` has are not read; the others are, alone, and are kept for later.

    A part is read behind the token that begins the prompt, unless a part does, in a cache without a budget. It is then
    spliced: what exceeds the budget goes when the model reads on. `check_parts` has seen to it that this is nothing.

    Errors of what cannot be honoured begin with `chunks`.
    """

    def __init__(self, model: PreTrainedModel, request: Request, parts: PromptParts, kept: KeptCaches) -> None:
        super().__init__(empty_cache(model, request))
        self._model, self._request, self._parts, self._kept = model, request, parts, kept
        self._begins = begin_of_text(model)
        if request.options.budget is None:
            self.cache.reserve(len(request.prompt) + request.max_tokens + request.options.chunk)
        self._lead = min(PREFIX, parts.spans[0][0])
        self._known = set[int]()  # positions of tokens that nobody read for this request
        self._work = self._turns()

    def read(self) -> None:
        try:
            next(self._work, None)
        except UsageError as error:
            raise UsageError(f"chunks: {error}") from error

    def close(self) -> None:
        self._work.close()

    def _turns(self) -> Generator[None]:
        """All of the work, in pieces of at most a chunk."""
        refuse_edit(self.cache.recurrent, "a text with parts")
        for is_part, pieces in groupby(_pieces(self._parts.spans, len(self._request.prompt)), lambda each: each[1]):
            group = [piece for piece, _ in pieces]
            if is_part:
                yield from self._joined(group)
            else:
                yield from self._read(group[0])

    def _read(self, piece: Piece) -> Iterator[None]:
        prompt, chunk = self._request.prompt, self._request.options.chunk
        for start in range(*piece, chunk):
            ids = list(prompt[start : min(start + chunk, piece[1])])
            self.done = start + len(ids)
            is_last = self.done == len(prompt)
            logits = feed(self._model, self.cache, [ids], [len(ids) - 1] if is_last else [], PROMPT)
            forget(self.cache)
            if is_last:
                self.logits = logits[0, 0]
            yield

    def _joined(self, group: Sequence[Piece]) -> Iterator[None]:
        """Splice parts that stand behind each other, and read again what is to be."""
        prompt, mode = self._request.prompt, self._parts.recompute
        start, stop = group[0][0], group[-1][1]
        spans = [Span(*piece, is_exact=piece[0] == self._lead) for piece in group]
        begins = own_starts(self._begins, [prompt[span.start] for span in spans], spans)
        if self.cache.budget is not None:
            self.cache.reserve(stop - start + self.cache.chunk)  # what is read again is written beside what was held
        for piece in group:
            yield from self._spliced(piece)
        if not begins and isinstance(mode, Nothing):
            return
        check_rewrite(self.cache, stop)
        ids, held = dict(enumerate(prompt[start:stop], start)), held_positions(self.cache, 0)
        chosen = mode.chosen(spans, held, lambda places: divergence(self._model, self.cache, places, ids, 0))
        again = sorted(chosen | (begins & held))
        self.recomputed += len(again)
        self.cached -= len(self._known & {*again})
        for step in passes(self.cache, again, ids, 0):
            read_step(self._model, self.cache, step)
            forget(self.cache)
            yield

    def _spliced(self, piece: Piece) -> Iterator[None]:
        """Put one part where it stands. It is held for the moment of the splice only, so that it may leave."""
        request, (start, stop) = self._request, piece
        ids, prefix = request.prompt[start:stop], request.prompt[: self._lead]
        key = Key.of("part", request, part_options(request.options), prefix)
        found = [each for each in self._kept.of(key) if each.tokens == ids] if request.reuse.lookup else []
        if found:
            self._kept.use(found[0])
            self.cache.splice(found[0].cache)
            self.done, self.cached = stop, self.cached + len(ids)
            self._known |= {*range(start, stop)}
            return
        yield from self._encoded(key, ids, start)

    def _encoded(self, key: Key, ids: tuple[int, ...], start: int) -> Iterator[None]:
        """Read a part alone, put it where it stands, and keep it."""
        options = part_options(self._request.options)
        needed = RowBytes.of(self._model, options).reading(len(key.prefix) + len(ids))
        if needed > self._kept.limit:
            raise UsageError(
                f"a part of {len(ids)} tokens takes {needed:,} bytes, and this server keeps {self._kept.limit:,}; send "
                "it in smaller parts, or as text"
            )
        while (place := self._kept.reserve(needed)) is None:
            yield  # until other prompts have given back what is reserved for theirs
        try:
            cache, read = KVCache.from_options(self._model, options), [*key.prefix, *ids]
            cache.reserve(len(read))
            for at in range(0, len(read), options.chunk):
                if at:
                    yield
                piece = read[at : at + options.chunk]
                feed(self._model, cache, [piece], [], replace(PROMPT, defer_eviction=True))
                forget(cache)
                self.done = start + max(at + len(piece) - len(key.prefix), 0)
            begin_after(cache, len(key.prefix), ids)
            self.cache.splice(cache)
            if self._request.reuse.store and not any(each.tokens == ids for each in self._kept.of(key)):
                self._kept.add(Kept(key, ids, cache, cache.bytes_held), place)
        finally:
            self._kept.release(place)
        yield


def part_options(options: CacheOptions) -> CacheOptions:
    """Those of the cache that a part is read into, for a row with these: without a budget, it evicts nothing."""
    return replace(options, budget=None, window=None, batch=1, rollback=0)


def _pieces(spans: Sequence[Piece], end: int) -> Iterator[tuple[Piece, bool]]:
    """A prompt of `end` tokens as pieces in order, each with whether it is a part."""
    at = 0
    for start, stop in spans:
        if at < start:
            yield (at, start), False
        yield (start, stop), True
        at = stop
    if at < end:
        yield (at, end), False
