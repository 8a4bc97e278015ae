"""Parts of a text that are read once each, and put together in any order.

`encode` reads a part and keeps its keys and values, un-rotated, with its ids. `join` puts parts behind each other into
a row of a cache: positions are integers, so no key is touched. A part has then not seen the text before it; `recompute`
says which of its tokens are read again, where they stand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from transformers import PreTrainedModel

from windlass.cache.options import CacheOptions
from windlass.cache.parts import begin_after, held_positions
from windlass.cache.recurrent_layer import refuse_edit
from windlass.cache.rewritable import check_rewrite
from windlass.core.check import check_kind, whole_number
from windlass.core.errors import UsageError
from windlass.core.step import PROMPT
from windlass.engine.arguments import check_reading, checked_prompts
from windlass.engine.chunks_recompute import Divergent as Divergent
from windlass.engine.chunks_recompute import Everything as Everything
from windlass.engine.chunks_recompute import First as First
from windlass.engine.chunks_recompute import Nothing as Nothing
from windlass.engine.chunks_recompute import Recompute as Recompute
from windlass.engine.chunks_recompute import Span, recompute_of
from windlass.engine.generate import read_whole
from windlass.engine.joining import begin_of_text, divergence, own_starts, passes, read_step
from windlass.engine.passes import Progress
from windlass.hf.kv_cache import KVCache


@final
@dataclass(frozen=True, eq=False)
class Part:
    """A part of a text: its `ids`, and a cache of one row that read them behind the tokens of `prefix`."""

    ids: tuple[int, ...]
    prefix: tuple[int, ...]
    cache: KVCache

    @property
    def bytes_held(self) -> int:
        """Bytes of its keys and values, and of what its policy noted."""
        return self.cache.bytes_held

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"Part({len(self.ids)} tokens, {self.bytes_held} bytes)"


@final
@dataclass(frozen=True)
class Joined:
    """What `join` did: the positions [start, stop) of each part, and those that were read again, in order."""

    spans: tuple[tuple[int, int], ...]
    recomputed: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens of all parts."""
        return sum(stop - start for start, stop in self.spans)

    @property
    def reused(self) -> int:
        """Tokens that were not read again."""
        return self.tokens - len(self.recomputed)


@torch.no_grad()
def encode(
    model: PreTrainedModel,
    ids: Sequence[int],
    options: CacheOptions | None = None,
    prefix: Sequence[int] = (),
    progress: Progress | None = None,
) -> Part:
    """A part of a text, read once: behind the tokens of `prefix`, which are not kept.

    `options` are those of its cache: of the same policy and store as the cache that it is to go to. A `budget` cuts it
    at once, after all of it was read. A `prefix` is what stands at the start of every text, such as a system prompt or
    the token that begins one: without it a part's first tokens become what attention rests on.

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
) -> Joined:
    """Put `parts` behind each other into a row of `cache`: after its text, or at position `at`.

    `recompute` says which of their tokens are read again: "none", "first(16)" of each part, "divergent(0.16)" of all
    tokens, "all". A part that follows just what it was encoded after needs none of it; a token that begins a text
    (`bos_token_id`) and starts another part is always read again; of a part that was cut only what is left. What
    exceeds the budget of `cache` goes when the model reads on.

    Raises: UsageError for parts that do not fit the cache, and for what can't be recomputed; nothing is changed.
    """
    check_reading(model, cache, None)
    mode = recompute_of(recompute)
    for number, part in enumerate(parts):
        check_kind(f"part {number}", part, Part, "a Part", "windlass.chunks.encode makes them")
    row = whole_number("row", row, 0, cache.batch_size - 1)
    before, end = cache.text, cache.next_positions[row]
    at = end if at is None else whole_number("at", at, 0, end)
    spans = _spans(cache, parts, row, at)
    added = sum(map(len, parts))
    starts = own_starts(begin_of_text(model), [part.ids[0] for part in parts], spans)
    if parts and (starts or not isinstance(mode, Nothing)):
        check_rewrite(cache, max(*cache.next_positions, end + added), parts[0].cache)
        cache.reserve(added + min(added, cache.chunk))  # what is read again is written beside what was held
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
        _read_again(model, cache, positions, ids, row)
    except BaseException:
        if done:
            cache.drop(at, at + done, row)
            if at < end:
                cache.shift(at + done, end + done, -done, row)
        cache.rows = before.rows
        raise
    return Joined(tuple((span.start, span.stop) for span in spans), tuple(positions))


@torch.no_grad()
def read_again(
    model: PreTrainedModel, cache: KVCache, positions: Sequence[int], row: int = 0, ids: Sequence[int] | None = None
) -> int:
    """Let the model read the tokens at `positions` of a row again, where they stand; returns how many there were.

    Each sees what stands up to it. Tokens that no layer holds any more are left out. `ids` are those of the tokens at
    `positions`; None takes them from the cache, which knows them as long as no edit has moved the text.

    Raises: UsageError for positions that are none of the row's, ids that are not known, and what can't be recomputed.
    """
    check_reading(model, cache, None)
    row = whole_number("row", row, 0, cache.batch_size - 1)
    end = cache.next_positions[row]
    places = [whole_number("a position", each, 0, end - 1) for each in positions]
    if ids is None:
        known = _text(cache, row)
        if known is None:
            raise UsageError("the cache does not know which tokens stand where, after an edit; give their ids")
        ids = [known[place] for place in places]
    if len(ids) != len(places):
        raise UsageError(f"{len(ids)} ids for {len(places)} positions; give one for each")
    check_rewrite(cache, max(cache.next_positions))
    held = sorted({*places} & held_positions(cache, row))
    _read_again(model, cache, held, dict(zip(places, ids, strict=True)), row)
    return len(held)


def _text(cache: KVCache, row: int) -> list[int] | None:
    """The ids of a row by position; None where they are not known."""
    its = cache.rows.rows[row]
    return its.tokens if its.tokens_seen == its.next_position else None


def _spans(cache: KVCache, parts: Sequence[Part], row: int, at: int) -> list[Span]:
    """Where the parts will stand, the first of them at `at`."""
    known, spans = _text(cache, row), list[Span]()
    before = None if known is None else known[:at]
    for part in parts:
        spans.append(Span(at, at + len(part), before is not None and (*before,) == part.prefix))
        at, before = at + len(part), None if before is None else [*before, *part.ids]
    return spans


def _read_again(
    model: PreTrainedModel, cache: KVCache, positions: Sequence[int], ids: Mapping[int, int], row: int
) -> None:
    for step in passes(cache, positions, ids, row):
        read_step(model, cache, step)
