"""Caches of texts that were read, kept in memory for requests to come, in so many bytes and no more."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Literal, final

from torch import Tensor

from windlass.cache.options import CacheOptions
from windlass.core.limits import SYSTEM
from windlass.engine.request import Request, owner_of
from windlass.hf.kv_cache import KVCache

Kind = Literal["prefix", "part"]
Labels = tuple[int | str | None, ...]


@dataclass(frozen=True)
class Key:
    """What two requests must have in common to share a cache.

    `kind`: the beginning of a prompt, or a part that was read behind the tokens of `prefix`. `labels` are those of the
    cache's options, and the tokens of the system text where these are its sinks.
    """

    kind: Kind
    tenant: str
    name: str
    labels: Labels
    prefix: tuple[int, ...] = ()

    @classmethod
    def of(cls, kind: Kind, request: Request, options: CacheOptions, prefix: tuple[int, ...] = ()) -> Key:
        """That of a request's own caches with these options."""
        sinks = request.head if options.sinks == SYSTEM else None
        return cls(kind, request.tenant, request.reuse.name, (*options.labels().values(), sinks), prefix)


@dataclass(frozen=True, eq=False)
class Kept:
    """A cache of one row that has read `tokens`; nobody writes into it. `number` names it to its owner.

    `passes`: where the passes ended in which a prefix was read, of which only the same ones give the same state.
    `logits`: (vocabulary,) of the last token, where the prefix is a whole prompt.
    """

    key: Key
    tokens: tuple[int, ...]
    cache: KVCache
    bytes: int
    passes: tuple[int, ...] = ()
    logits: Tensor | None = None
    number: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def stored(self) -> Stored:
        """What its owner is told of it."""
        return Stored(self.number, self.key.kind, self.key.name, len(self.tokens), self.bytes, "memory")


@dataclass(frozen=True)
class Stored:
    """What an owner is told of a cache that is kept for it."""

    id: str
    kind: Kind
    name: str | None
    """None: not known any more, for it was written by an earlier run of the server."""
    tokens: int
    bytes: int
    place: Literal["memory", "disk"]


@dataclass(frozen=True)
class Wanted:
    """Which of its caches an owner means: all, those of one `name`, or the one with this `id`."""

    owner: str
    name: str | None = None
    id: str | None = None

    def has(self, key: Key, number: str) -> bool:
        """Whether a cache is among them."""
        is_own = owner_of(key.tenant) == self.owner
        return is_own and self.name in (None, key.name) and self.id in (None, number)


@final
class KeptCaches:
    """Caches of at most `limit` bytes in all; those that were used longest ago leave first. Safe in any thread.

    What is being made counts too: `reserve` gives it room before it is there. `may_leave` says of a cache that it need
    not stay.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.may_leave: Callable[[Kept], bool] = lambda _: True
        self._held: list[Kept] = []  # the one used last at the end
        self._reserved: dict[int, int] = {}
        self._lock = Lock()

    @property
    def bytes(self) -> int:
        """Bytes of all of them, and those that are reserved; never more than `limit`."""
        with self._lock:
            return self._bytes

    @property
    def _bytes(self) -> int:
        return sum(each.bytes for each in self._held) + sum(self._reserved.values())

    def of(self, key: Key) -> list[Kept]:
        """Those with this key."""
        with self._lock:
            return [each for each in self._held if each.key == key]

    def use(self, kept: Kept) -> None:
        """Note that a cache was used, so that it stays longer than others."""
        with self._lock:
            if kept in self._held:
                self._held.remove(kept)
                self._held.append(kept)

    def add(self, kept: Kept, place: int | None = None) -> bool:
        """Keep a cache, in a reserved `place` or where others leave; returns whether there was room.

        A reserved place is given back in any case.
        """
        with self._lock:
            if place is not None:
                self._reserved.pop(place, None)
            if not self._make_room(kept.bytes):
                return False
            self._held.append(kept)
            return True

    def reserve(self, size: int) -> int | None:
        """A place of so many bytes, to be given to `add` or `release`; None: there is none for now.

        There will be one once others have been given back, unless `size` exceeds the limit.
        """
        with self._lock:
            if not self._make_room(size):
                return None
            place = max(self._reserved, default=0) + 1
            self._reserved[place] = size
            return place

    def release(self, place: int) -> None:
        """Give a reserved place back. May be repeated."""
        with self._lock:
            self._reserved.pop(place, None)

    def forget(self, wanted: Wanted) -> list[Stored]:
        """Let go of these; returns what they were."""
        with self._lock:
            found = [each for each in self._held if wanted.has(each.key, each.number)]
            self._held = [each for each in self._held if each not in found]
        return [each.stored for each in found]

    def stored(self, wanted: Wanted) -> list[Stored]:
        """What is to be told of these, the one used last first."""
        with self._lock:
            return [each.stored for each in reversed(self._held) if wanted.has(each.key, each.number)]

    def _make_room(self, size: int) -> bool:
        """Let others leave until there is room for `size` bytes; none does where that would not be enough."""
        leaving, free = list[Kept](), self.limit - self._bytes
        for each in self._held:
            if free >= size:
                break
            if self.may_leave(each):
                leaving.append(each)
                free += each.bytes
        if free < size:
            return False
        self._held = [each for each in self._held if each not in leaving]
        return True
