"""Caches of the beginnings of prompts, which other prompts begin with, too.

A cache that evicts is the state after exactly so many tokens: it serves prompts that begin with all of these.
Snapshots are taken where a chunk ends, so that a prompt which goes on from one is read in the same passes as without:
the result is the same, bit by bit.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import final

from windlass.engine.kept import Kept, KeptCaches, Key, Stored, Wanted
from windlass.engine.request import Request
from windlass.hf.kv_cache import KVCache


@final
class Snapshots:
    """Snapshots among what is `kept`."""

    def __init__(self, kept: KeptCaches) -> None:
        self.kept = kept

    def longest(self, request: Request) -> KVCache | None:
        """A copy of the longest cache that the request's prompt begins with, and goes beyond; None: there is none, or
        the request looks none up."""
        if not request.reuse.lookup:
            return None
        prompt = request.prompt
        fitting = [each for each in self._of(request) if len(each.tokens) < len(prompt) and _begins(prompt, each)]
        best = max(fitting, key=lambda each: len(each.tokens), default=None)
        if best is None:
            return None
        self.kept.use(best)
        return copy.deepcopy(best.cache)

    def wanted(self, request: Request) -> frozenset[int]:
        """After how many tokens of this prompt snapshots are to be taken: where its last chunk begins, and where it
        parts from a prompt of before."""
        if self.kept.limit == 0 or request.options.recall or not request.reuse.store:
            return frozenset()
        chunk, prompt, known = request.options.chunk, request.prompt, self._of(request)
        shared = [_shared(each.tokens, prompt) for each in known]
        ends = {(len(prompt) - 1) // chunk * chunk, max(shared, default=0) // chunk * chunk}
        held = {len(each.tokens) for each in known if _begins(prompt, each)}
        return frozenset(ends - held - {0})

    def put(self, request: Request, tokens: int, cache: KVCache) -> None:
        """Keep a copy of `cache`, which has read `tokens` of the prompt, unless there is no room for it."""
        place = self.kept.reserve(cache.bytes_held)
        if place is None:
            return
        try:
            kept = Kept(_key(request), request.prompt[:tokens], copy.deepcopy(cache), cache.bytes_held)
            self.kept.add(kept, place)
        finally:
            self.kept.release(place)

    def stored(self, wanted: Wanted) -> list[Stored]:
        """What is kept of these."""
        return self.kept.stored(wanted)

    def forget(self, wanted: Wanted) -> list[Stored]:
        """Let go of what is kept of these; returns what that was."""
        return self.kept.forget(wanted)

    def _of(self, request: Request) -> list[Kept]:
        return self.kept.of(_key(request))


def _key(request: Request) -> Key:
    return Key.of("prefix", request, request.options)


def _begins(prompt: tuple[int, ...], kept: Kept) -> bool:
    """Whether a prompt begins with what a cache has read."""
    return prompt[: len(kept.tokens)] == kept.tokens


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
