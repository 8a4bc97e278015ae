"""Caches of the beginnings of prompts, which other prompts begin with, too.

A cache that evicts is the state after exactly so many tokens: it serves prompts that begin with all of these.
Snapshots are taken where a pass ends, and serve prompts whose passes end there as well. So a prompt that goes on from
one is read in the same passes as without: the result is the same, bit by bit.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import final

from torch import Tensor

from windlass.engine.disk import DiskTier
from windlass.engine.kept import Kept, KeptCaches, Key, Stored, Wanted
from windlass.engine.request import Request
from windlass.hf.kv_cache import KVCache


@final
class Snapshots:
    """Snapshots among what is `kept` in memory, and on `disk` too, if there is one."""

    def __init__(self, kept: KeptCaches, disk: DiskTier | None = None) -> None:
        self.kept, self._disk = kept, disk
        if disk is not None:
            kept.may_leave = lambda each: not disk.is_pending(each)

    @property
    def packs(self) -> bool:
        """Whether caches are packed as they are read: as a file has them, so that a hit goes on in the same slots."""
        return self._disk is not None

    def longest(self, request: Request) -> Kept | None:
        """The longest cache that the request's prompt begins with, as a copy; None: there is none, or the request looks
        none up. One of the whole prompt has its logits."""
        if not request.reuse.lookup:
            return None
        fitting = [each for each in self._of(request) if _serves(each, request)]
        best = max(fitting, key=lambda each: len(each.tokens), default=None)
        if self._disk is not None:
            found = self._disk.longest(request, _key(request), 0 if best is None else len(best.tokens))
            if found is not None:
                self.kept.add(replace(found, cache=copy.deepcopy(found.cache)))
                return found
        if best is None:
            return None
        self.kept.use(best)
        return replace(best, cache=copy.deepcopy(best.cache))

    def wanted(self, request: Request) -> frozenset[int]:
        """After how many tokens of this prompt snapshots are to be taken: where a message ends, where the last pass
        begins, and where it parts from a prompt of before. A prompt of one pass is kept as a whole."""
        if self.kept.limit == 0 or request.options.recall or not request.reuse.store:
            return frozenset()
        prompt, passes, known = request.prompt, request.pass_ends, self._of(request)
        shared = max((_shared(each.tokens, prompt) for each in known), default=0)
        ends = {*request.ends, *passes[-2:][:1], *[each for each in passes if each <= shared][-1:]}
        return frozenset(ends - {len(each.tokens) for each in known if _serves(each, request)})

    def put(self, request: Request, tokens: int, cache: KVCache, logits: Tensor | None) -> None:
        """Keep a copy of `cache`, which has read `tokens` of the prompt, unless there is no room for it.

        `logits`: those of the last token, where that is all of the prompt.
        """
        key, read = _key(request), request.prompt[:tokens]
        passes = tuple(each for each in request.pass_ends if each <= tokens)
        size = cache.bytes_held + (0 if logits is None else logits.nbytes)
        place = self.kept.reserve(size)
        if place is None:
            return
        try:
            kept = Kept(key, read, copy.deepcopy(cache), size, passes, None if logits is None else logits.clone())
            is_written = self._disk is not None and logits is None  # a file holds no logits
            if self._disk is not None and is_written:
                kept = replace(kept, number=self._disk.id_of(key, read, passes))
            if self.kept.add(kept, place) and self._disk is not None and is_written:
                self._disk.put(kept)
        finally:
            self.kept.release(place)

    def stored(self, wanted: Wanted) -> list[Stored]:
        """What is kept of these: first that in memory."""
        held = self.kept.stored(wanted)
        return held + _others(held, [] if self._disk is None else self._disk.stored(wanted))

    def forget(self, wanted: Wanted) -> list[Stored]:
        """Let go of what is kept of these; returns what that was."""
        gone = [] if self._disk is None else self._disk.forget(wanted)
        held = self.kept.forget(wanted)
        return held + _others(held, gone)

    def close(self) -> None:
        """Nothing more is kept; what is still to be written is. May be repeated."""
        if self._disk is not None:
            self._disk.close()

    def _of(self, request: Request) -> list[Kept]:
        return self.kept.of(_key(request))


def _others(held: Sequence[Stored], files: Sequence[Stored]) -> list[Stored]:
    """Those files whose caches are not in memory, too."""
    numbers = {each.id for each in held}
    return [each for each in files if each.id not in numbers]


def _key(request: Request) -> Key:
    return Key.of("prefix", request, request.options)


def _serves(kept: Kept, request: Request) -> bool:
    """Whether a prompt begins with what a cache has read, in the same passes."""
    size, passes = len(kept.tokens), kept.passes
    is_whole = size == len(request.prompt)
    is_alike = request.prompt[:size] == kept.tokens and request.pass_ends[: len(passes)] == passes
    return is_alike and (not is_whole or kept.logits is not None)


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
