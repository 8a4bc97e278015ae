"""Parts of a text, each read once and then joined in any order.

`encode` reads a part and caches its keys and values before RoPE, with its ids. `join` concatenates parts in a row of a
cache: positions are integers, so no key is changed. A joined part has not attended to the text before it, and
`recompute` selects tokens that are read again in place.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Final, final

import torch
from transformers import PreTrainedModel

from windlass.cache.edits import begin_after, check_rewrite, held_positions
from windlass.cache.options import CacheOptions
from windlass.cache.recurrent import refuse_edit
from windlass.core.errors import UsageError, check_kind, whole_number
from windlass.core.parse import SYSTEM
from windlass.core.step import PROMPT
from windlass.core.types import Tokens
from windlass.engine.generate import check_reading, checked_prompts, read_whole
from windlass.engine.prefill import Progress, PromptReader, empty_cache, feed
from windlass.engine.prefix_cache import PrefixCache
from windlass.engine.prefix_entry import CacheEntry, CacheKey
from windlass.engine.recompute import Divergent as Divergent
from windlass.engine.recompute import Everything as Everything
from windlass.engine.recompute import First as First
from windlass.engine.recompute import Nothing as Nothing
from windlass.engine.recompute import Recompute as Recompute
from windlass.engine.recompute import (
    Span,
    begin_of_text,
    divergence,
    own_starts,
    read_step,
    recompute_of,
    rewrite_steps,
)
from windlass.engine.request import PromptParts, Request
from windlass.engine.row_bytes import RowBytes
from windlass.hf.kv_cache import KVCache
from windlass.policies.base import OneShot
from windlass.policies.wrappers import find


@final
@dataclass(frozen=True, eq=False)
class Part:
    """A part of a text: its `ids`, and a cache of one row that read them behind the tokens of `prefix`."""

    ids: tuple[int, ...]
    prefix: tuple[int, ...]
    cache: KVCache

    @property
    def bytes_held(self) -> int:
        """Bytes of the part's keys, values and policy state."""
        return self.cache.bytes_held

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"Part({len(self.ids)} tokens, {self.bytes_held} bytes)"


@final
@dataclass(frozen=True)
class JoinReport:
    """Result of `join`: the positions [start, stop) of each part, and those that were read again, in order."""

    spans: tuple[tuple[int, int], ...]
    recomputed: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all parts."""
        return sum(stop - start for start, stop in self.spans)


@torch.no_grad()
def encode(
    model: PreTrainedModel,
    ids: Sequence[int],
    options: CacheOptions | None = None,
    prefix: Sequence[int] = (),
    progress: Progress | None = None,
) -> Part:
    """Read a part of a text once, after the tokens of `prefix`, which are not part of the result.

    `options`: the part's cache, with the policy and store of the cache that the part will join. A `budget` evicts once
    the whole part was read. `prefix`: the start of every text, such as a system prompt or the beginning-of-text token.
    Without it a part's own first tokens become the attention sinks.

    Raises: UsageError for no tokens, and for models with recurrent layers or a cache that can't be joined.
    """
    check_kind("options", options, (CacheOptions, type(None)), "CacheOptions or None")
    cache = KVCache.from_options(model, replace(options or CacheOptions(), batch=1))
    check_reading(model, cache, progress)
    refuse_edit(cache.recurrent, "chunks.encode")
    (own,) = checked_prompts(model, cache, [ids])
    read = [*checked_prompts(model, cache, [prefix])[0], *own] if len(prefix) else own
    read_whole(model, cache, [read], progress, replace(PROMPT, defer_eviction=True))
    begin_after(cache, len(read) - len(own), own)
    return Part(tuple(own), tuple(read[: len(read) - len(own)]), cache)


@torch.no_grad()
def join(
    model: PreTrainedModel,
    cache: KVCache,
    parts: Sequence[Part],
    recompute: str | Recompute = "none",
    row: int = 0,
    at: int | None = None,
) -> JoinReport:
    """Concatenate `parts` in a row of `cache`, after its text or at position `at`.

    `recompute` selects tokens that are read again: "none", "first(16)" of each part, "divergent(0.16)" of all tokens,
    "all". A part that follows the very text it was encoded after needs none. A beginning-of-text token
    (`bos_token_id`) that starts a later part is always read again. Evicted tokens of a part are not read again. Tokens
    beyond the budget of `cache` are evicted when the model reads on.

    Raises: UsageError for parts that do not fit the cache or can't be recomputed. The cache is unchanged then.
    """
    check_reading(model, cache, None)
    mode = recompute_of(recompute)
    for number, part in enumerate(parts):
        check_kind(f"part {number}", part, Part, "a Part", "Make it with windlass.chunks.encode")
    row = whole_number("row", row, 0, cache.batch_size - 1)
    before, end = cache.text, cache.next_positions[row]
    at = end if at is None else whole_number("at", at, 0, end)
    spans = _spans(cache, parts, row, at)
    added = sum(map(len, parts))
    starts = own_starts(begin_of_text(model), [part.ids[0] for part in parts], spans)
    if parts and (starts or not isinstance(mode, Nothing)):
        check_rewrite(cache, max(*cache.next_positions, end + added), parts[0].cache)
        cache.reserve(added + min(added, cache.chunk))  # tokens read again are written beside the held ones
    done = 0
    try:
        for part, span in zip(parts, spans, strict=True):
            cache.splice(part.cache, row=row, at=span.start)
            done = span.stop - at
        ids = {
            span.start + place: token
            for part, span in zip(parts, spans, strict=True)
            for place, token in enumerate(part.ids)
        }
        held = held_positions(cache, row)
        chosen = mode.chosen(spans, held, lambda positions: divergence(model, cache, positions, ids, row))
        positions = sorted(chosen | (starts & held))
        for step in rewrite_steps(cache, positions, ids, row):
            read_step(model, cache, step)
    except BaseException:
        if done:
            cache.drop(at, at + done, row)
            if at < end:
                cache.shift(at + done, end + done, -done, row)
        cache.rows = before.rows
        raise
    return JoinReport(tuple((span.start, span.stop) for span in spans), tuple(positions))


def _text(cache: KVCache, row: int) -> list[int] | None:
    """Return the ids of a row by position, or None if they are not known."""
    its = cache.rows.rows[row]
    return its.tokens if its.tokens_seen == its.next_position else None


def _spans(cache: KVCache, parts: Sequence[Part], row: int, at: int) -> list[Span]:
    """The spans that the parts will take, the first of them from `at`."""
    known, spans = _text(cache, row), list[Span]()
    before = None if known is None else known[:at]
    for part in parts:
        spans.append(Span(at, at + len(part), before is not None and (*before,) == part.prefix))
        at, before = at + len(part), None if before is None else [*before, *part.ids]
    return spans


def check_parts(parts: PromptParts, tokens: int, options: CacheOptions, kept_bytes: int) -> None:
    """Check the parts of a prompt of `tokens` tokens, for a row with these options and a prefix cache of `kept_bytes`.

    Limits of a model itself are reported once it runs. Parts that are wholly recomputed are plain text, and only
    their order is checked.

    Raises: UsageError, whose text begins with `chunks`.
    """
    end = 0
    for start, stop in parts.spans:
        if not end <= start < stop:
            raise UsageError(f"chunks: the parts must be in order and have tokens, got {parts.spans}")
        end = stop
    if not parts.spans or end >= tokens:
        raise UsageError("chunks: the prompt must have parts, and text behind the last one, which the reply follows")
    if isinstance(parts.recompute, Everything):
        return
    way_out = 'or ask for recompute "all", which reads parts as text'
    if kept_bytes == 0:
        raise UsageError(f"chunks: this server keeps no parts. Start it with memory for them (--reuse), {way_out}")
    if find(options.policy, OneShot) is not None:
        raise UsageError(
            f"chunks: policy {options.policy!r} ranks a prompt when all of it is held. Choose another policy, {way_out}"
        )
    if options.recall:
        raise UsageError(
            f"chunks: recall={options.recall} would need a second copy of each part. Leave recall out, {way_out}"
        )
    if options.merge is not None:
        raise UsageError(f"chunks: merge={options.merge} joins tokens. Serve rows without merge, {way_out}")
    if options.budget is not None and end > options.budget:
        raise UsageError(
            f"chunks: up to the end of the last part there are {end} tokens, and a row keeps {options.budget}. Parts "
            f"are joined whole: ask for a larger budget, {way_out}"
        )


PREFIX: Final = 1  # tokens before each part when it is read, unless the prompt begins with a part
Piece = tuple[int, int]  # tokens [start, stop) of a prompt


@final
class PartsReader(PromptReader):
    """Reader of a prompt with parts. Parts in the prefix cache `kept` are not read. Others are read alone and added.

    A part is read after the prompt's first token, unless a part begins the prompt, in a cache without a budget. It is
    then spliced. Tokens beyond the budget would be evicted when the model reads on, but `check_parts` rules them out.

    Messages of a UsageError begin with `chunks`.
    """

    def __init__(self, model: PreTrainedModel, request: Request, parts: PromptParts, kept: PrefixCache) -> None:
        super().__init__(empty_cache(model, request))
        self._model, self._request, self._parts, self._kept = model, request, parts, kept
        self._begins = begin_of_text(model)
        if request.options.budget is None:
            self.cache.reserve(len(request.prompt) + request.max_tokens + request.options.chunk)
        self._lead = min(PREFIX, parts.spans[0][0])
        self._known = set[int]()  # positions of tokens that came from cached parts
        self._work = self._turns()

    def read(self) -> None:
        try:
            next(self._work, None)
        except UsageError as error:
            raise UsageError(f"chunks: {error}") from error

    def keep(self) -> None:
        pass  # its parts are kept as they are read

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
            self.cache.forget_steps()
            if is_last:
                self.logits = logits[0, 0]
            yield

    def _joined(self, group: Sequence[Piece]) -> Iterator[None]:
        """Splice adjacent parts, and recompute the selected tokens."""
        prompt, mode = self._request.prompt, self._parts.recompute
        start, stop = group[0][0], group[-1][1]
        spans = [Span(*piece, is_exact=piece[0] == self._lead) for piece in group]
        begins = own_starts(self._begins, [prompt[span.start] for span in spans], spans)
        if self.cache.budget is not None:
            self.cache.reserve(stop - start + self.cache.chunk)  # tokens read again are written beside the held ones
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
        for step in rewrite_steps(self.cache, again, ids, 0):
            read_step(self._model, self.cache, step)
            self.cache.forget_steps()
            yield

    def _spliced(self, piece: Piece) -> Iterator[None]:
        """Splice one part into its place. A cached part is held during the splice only, so it may be evicted later."""
        request, (start, stop) = self._request, piece
        ids, prefix = request.tokens[start:stop], tuple(request.prompt[: self._lead])
        key = CacheKey.of("part", request, part_options(request.options), prefix)
        found = [each for each in self._kept.of(key) if each.tokens == ids] if request.reuse.lookup else []
        if found:
            self._kept.use(found[0])
            self.cache.splice(found[0].cache)
            self.done, self.cached = stop, self.cached + len(ids)
            self._known |= {*range(start, stop)}
            return
        yield from self._encoded(key, ids, start)

    def _encoded(self, key: CacheKey, ids: Tokens, start: int) -> Iterator[None]:
        """Read a part alone, splice it into its place, and cache it."""
        options = part_options(self._request.options)
        needed = RowBytes.of(self._model, options).reading(len(key.prefix) + len(ids))
        if needed > self._kept.limit:
            raise UsageError(
                f"a part of {len(ids)} tokens takes {needed:,} bytes, and this server keeps {self._kept.limit:,}. Send "
                "it in smaller parts, or as text"
            )
        while (place := self._kept.reserve(needed)) is None:
            yield  # until other prompts have released their reservations
        try:
            cache, read = KVCache.from_options(self._model, options), [*key.prefix, *ids]
            cache.reserve(len(read))
            if options.sinks == SYSTEM:
                cache.set_sinks(0)  # a part has no system text
            for at in range(0, len(read), options.chunk):
                if at:
                    yield
                piece = read[at : at + options.chunk]
                feed(self._model, cache, [piece], [], replace(PROMPT, defer_eviction=True))
                cache.forget_steps()
                self.done = start + max(at + len(piece) - len(key.prefix), 0)
            begin_after(cache, len(key.prefix), ids)
            self.cache.splice(cache)
            if self._request.reuse.store and not any(each.tokens == ids for each in self._kept.of(key)):
                self._kept.add(CacheEntry(tokens=ids, key=key, cache=cache, bytes=cache.bytes_held), place)
        finally:
            self._kept.release(place)
        yield


def part_options(options: CacheOptions) -> CacheOptions:
    """Options of the cache that a part is read into, for a row with these: without a budget, it evicts nothing."""
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
