"""Caches of the beginnings of prompts, which other prompts begin with, too.

A cache that evicts is the state after exactly so many tokens: it serves prompts that begin with all of these.
Snapshots are taken where a chunk ends, so that a prompt which goes on from one is read in the same passes as without:
the result is the same, bit by bit.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from windlass.engine.request import Request
from windlass.hf.kv_cache import KVCache

Key = tuple[object, ...]


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A cache of one row that has read `tokens`."""

    key: Key
    tokens: tuple[int, ...]
    cache: KVCache
    bytes: int


@final
class Snapshots:
    """Snapshots of at most `limit` bytes in all; those that were used longest ago leave first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._held: list[Snapshot] = []  # the one used last at the end

    @property
    def bytes(self) -> int:
        """Bytes of all of them; never more than `limit`."""
        return sum(each.bytes for each in self._held)

    def longest(self, request: Request) -> KVCache | None:
        """A copy of the longest cache that the request's prompt begins with, and goes beyond; None: there is none."""
        key, prompt = _key(request), request.prompt
        fitting = [
            each
            for each in self._held
            if each.key == key and len(each.tokens) < len(prompt) and prompt[: len(each.tokens)] == each.tokens
        ]
        best = max(fitting, key=lambda each: len(each.tokens), default=None)
        if best is None:
            return None
        self._held.remove(best)
        self._held.append(best)
        return copy.deepcopy(best.cache)

    def wanted(self, request: Request) -> frozenset[int]:
        """After how many tokens of this prompt snapshots are to be taken: where its last chunk begins, and where it
        parts from a prompt of before."""
        if self.limit == 0 or request.options.recall:
            return frozenset()
        chunk, prompt, key = request.options.chunk, request.prompt, _key(request)
        shared = [_shared(each.tokens, prompt) for each in self._held if each.key == key]
        ends = {(len(prompt) - 1) // chunk * chunk, max(shared, default=0) // chunk * chunk}
        held = {
            len(each.tokens) for each in self._held if each.key == key and prompt[: len(each.tokens)] == each.tokens
        }
        return frozenset(ends - held - {0})

    def put(self, request: Request, tokens: int, cache: KVCache) -> None:
        """Keep a copy of `cache`, which has read `tokens` of the prompt, unless it is larger than the limit."""
        size = cache.bytes_held
        if size > self.limit:
            return
        while self.bytes + size > self.limit:
            self._held.pop(0)
        self._held.append(Snapshot(_key(request), request.prompt[:tokens], copy.deepcopy(cache), size))


def _key(request: Request) -> Key:
    """What two requests must have in common to share a cache."""
    return request.tenant, *request.options.labels().values()


def _shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens both begin with."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
