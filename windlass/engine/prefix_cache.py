"""Caches of prompts' prefixes and of texts, in memory and in files, for requests to come."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Lock
from typing import Final, final

from windlass.cache.edits import holds_all, remap, takes_edits
from windlass.core.parse import DEFAULT_SINKS, SYSTEM
from windlass.engine.disk import DiskTier
from windlass.engine.prefix_entry import CacheEntry, CacheKey, EditedRow, EntryInfo, EntrySelector, superfluous
from windlass.engine.recompute import LEAST, Alignment, EditPlan, Sinks
from windlass.engine.request import Request
from windlass.hf.kv_cache import KVCache

SPARE: Final = 8  # a kept row is packed if fewer than one slot in this many holds a token
ENDS: Final = 256  # of the last messages
MOVED: Final = 16  # tokens that may be cut off a row that is moved: the end of a turn, an answer that is cut


@final
class PrefixCache:
    """Caches of at most `limit` bytes in all. The least recently used are evicted first. Safe in any thread.

    A cache under way counts too: `reserve` makes room for it in advance. `may_leave` tells whether a cache may be
    evicted.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.may_leave: Callable[[CacheEntry], bool] = lambda _: True
        self._held: list[CacheEntry] = []  # least recently used first
        self._reserved: dict[int, int] = {}
        self._lock = Lock()

    @property
    def bytes(self) -> int:
        """Bytes of all caches, reserved ones included. Never more than `limit`."""
        with self._lock:
            return self._bytes

    @property
    def _bytes(self) -> int:
        return sum(each.bytes for each in self._held) + sum(self._reserved.values())

    def of(self, key: CacheKey) -> list[CacheEntry]:
        """Entries with this key."""
        return self.matching(lambda each: each == key)

    def matching(self, matches: Callable[[CacheKey], bool]) -> list[CacheEntry]:
        """Entries whose keys match."""
        with self._lock:
            return [each for each in self._held if matches(each.key)]

    def take(self, kept: CacheEntry) -> bool:
        """Take an entry out. Returns whether it was here."""
        with self._lock:
            is_here = kept in self._held
            self._held = [each for each in self._held if each is not kept]
            return is_here

    def use(self, kept: CacheEntry) -> None:
        """Note that a cache was used. It is then evicted last."""
        with self._lock:
            if kept in self._held:
                self._held.remove(kept)
                self._held.append(kept)

    def add(self, kept: CacheEntry, place: int | None = None) -> bool:
        """Keep a cache, in a reserved `place` or in place of evicted ones. Returns whether there was room.

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
        """Reserve `size` bytes. Returns a place to be given to `add` or `release`, or None if there is no room for now.

        There will be room once other places are released, unless `size` exceeds the limit.
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

    def forget(self, wanted: EntrySelector) -> list[EntryInfo]:
        """Delete these caches. Returns a record of each."""
        with self._lock:
            found = [each for each in self._held if wanted.has(each.key, each.number)]
            self._held = [each for each in self._held if each not in found]
        return [each.stored for each in found]

    def stored(self, wanted: EntrySelector) -> list[EntryInfo]:
        """Facts about the wanted entries, the one used last first."""
        with self._lock:
            return [each.stored for each in reversed(self._held) if wanted.has(each.key, each.number)]

    def _make_room(self, size: int) -> bool:
        """Evict caches until `size` bytes are free. Evicts none and returns False where that would not be enough."""
        leaving, free = list[CacheEntry](), self.limit - self._bytes
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


class RowSource(ABC):
    """A request under way, whose row others may copy."""

    @property
    @abstractmethod
    def entry(self) -> CacheEntry | None:
        """The row, or None where it may not be kept."""


@final
class Snapshots:
    """Snapshots and rows among the caches `kept` in memory, and on `disk` too, if there is one.

    A row that is being written to disk is copied for a request, and not taken over.

    `under_way`: requests whose rows others may copy meanwhile.
    """

    def __init__(self, kept: PrefixCache, disk: DiskTier | None = None) -> None:
        self.kept, self._disk = kept, disk
        self.under_way = list[RowSource]()
        if disk is not None:
            kept.may_leave = lambda each: not disk.is_pending(each)

    @property
    def packs(self) -> bool:
        """Return True if caches are packed while they are read, as a file has them. A hit then uses the same slots."""
        return self._disk is not None

    def longest(self, request: Request) -> CacheEntry | None:
        """The longest cache that the request's prompt begins with, for the request alone. None: there is none, or the
        request looks none up. Where the logits behind the whole prompt are known, it has them.

        The row of a text that has ended is moved, unless that would lose another text. All others are copied.
        """
        if not request.reuse.lookup or not self.kept.limit:
            return None
        own = key_of(request)
        rows = self._rows(lambda key: key == own)
        best = max(rows, key=lambda each: (each.usable(request), each.is_text), default=None)
        length = 0 if best is None else best.usable(request)
        found = None if self._disk is None else self._disk.longest(request, own, length)
        if found is not None:
            best, length = found, found.usable(request)
        if best is None or not length:
            return None
        if found is not None and not self.kept.add(found):
            return found.cut(length)
        if _may_move(best, request, length) and self._take(best):
            return best.cut(length)
        self.kept.use(best)
        return best.first(length)

    def edited(self, request: Request) -> EditedRow | None:
        """The row with the most tokens of the prompt, wherever these stand, for the request alone.

        None: the request takes no such row, or begins with nearly as many tokens of one.
        """
        mode, prompt, key = request.reuse.mode, request.prompt, key_of(request)
        is_wanted = mode.name == "edited" and request.reuse.lookup and self.kept.limit > 0
        rows = self._rows(key.is_like) if is_wanted else []
        if not rows:
            return None
        alignment, plans = Alignment(tuple(prompt)), list[EditPlan]()
        for row in rows:
            sinks = Sinks(*(_sinks_of(each, request) for each in (row.key, key)))
            plans.append(EditPlan.of(alignment.to(tuple(row.tokens)), len(prompt), sinks, mode.edit_window))
        row, plan = max(zip(rows, plans, strict=True), key=lambda pair: (pair[1].cached, pair[0].is_text))
        least = LEAST + max((each.usable(request) for each in rows if each.key == key), default=0)
        gaps = tuple(plan.gaps)
        if plan.cached < least or not takes_edits(row.cache, plan.end, bool(gaps)):
            return None
        if not (_may_move(row, request, plan.cached) and self._take(row)):
            self.kept.use(row)
            row = row.first(len(row.tokens))
        remap(row.cache, plan.moves(len(row.tokens)), plan.end)
        if request.options.sinks == SYSTEM:
            row.cache.set_sinks(request.head)
        passes, exact = tuple(end for end in row.passes if end <= plan.head), min(plan.head, row.read_in_order)
        entry = replace(
            row,
            key=key,
            tokens=request.tokens[: plan.end],
            passes=passes,
            logits=None,
            logits_end=None,
            exact_tokens=exact,
        )
        return EditedRow(entry, gaps, plan.again)

    def wanted(self, request: Request) -> frozenset[int]:
        """Lengths of this prompt's prefixes that are to be cached: up to the end of a message, up to the last pass, and
        up to the last pass that it shares with a cached prompt. A prompt of one pass is cached as a whole. With recall,
        where a copy holds the whole text, only the end of the last message counts."""
        if self.kept.limit == 0 or not request.reuse.store:
            return frozenset()
        passes, known = request.pass_ends, self._of(request)
        common = max((each.tokens.shared(request.tokens) for each in known), default=0)
        ends = {
            *request.ends[-1 if request.options.recall else -ENDS :],
            *passes[-2:][:1],
            *[each for each in passes if each <= common][-1:],
        }
        return frozenset(ends - {len(each.tokens) for each in known if each.usable(request) == len(each.tokens)})

    def put(self, row: CacheEntry) -> None:
        """Keep a copy of a row under way, unless there is no room for it."""
        place = self.kept.reserve(row.most_bytes)
        if place is None:
            return
        try:
            self._add(_counted(row.first(len(row.tokens))), place)
        finally:
            self.kept.release(place)

    def keep(self, row: CacheEntry) -> None:
        """Keep the row of a text that has ended, with its cache, unless there is no room for it."""
        known = self.kept.of(row.key)
        beside = next((each for each in known if each.covers(row)), None)
        if beside is not None:
            self.kept.use(beside)
            return
        for each in known:
            if row.covers(each):
                self._take(each)
        slots = max(each.table.slots for each in row.cache.layers)
        if row.holds_all and len(row.tokens) * SPARE < slots:
            row = row.first(len(row.tokens))
        elif self._disk is not None and not row.holds_all:
            pack(row.cache)
        self._add(replace(_counted(row), is_text=True))

    def _add(self, kept: CacheEntry, place: int | None = None) -> None:
        """Keep a cache in memory if there is room, and then write it to disk too. A file holds no logits, so a prompt
        that is kept for these has none."""
        disk = self._disk if kept.logits is None or kept.is_text else None
        if disk is not None:
            kept = replace(kept, number=disk.id_of(kept))
        for each in superfluous(kept, self.kept.of(kept.key)):
            self._take(each)
        if self.kept.add(kept, place) and disk is not None:
            disk.put(kept)

    def _take(self, kept: CacheEntry) -> bool:
        """Take a cache out of memory, unless it is being written to disk. Returns whether it was there."""
        return (self._disk is None or self._disk.withdraw(kept)) and self.kept.take(kept)

    def stored(self, wanted: EntrySelector) -> list[EntryInfo]:
        """Facts about the wanted entries: first of those in memory, then of those on disk."""
        held = self.kept.stored(wanted)
        return held + _others(held, [] if self._disk is None else self._disk.stored(wanted))

    def forget(self, wanted: EntrySelector) -> list[EntryInfo]:
        """Delete these caches in memory and on disk. Returns a record of each."""
        gone = [] if self._disk is None else self._disk.forget(wanted)
        held = self.kept.forget(wanted)
        return held + _others(held, gone)

    def close(self) -> None:
        """Write the pending caches to disk, and close it. May be repeated."""
        if self._disk is not None:
            self._disk.close()

    def _of(self, request: Request) -> list[CacheEntry]:
        return self.kept.of(key_of(request))

    def _rows(self, matches: Callable[[CacheKey], bool]) -> list[CacheEntry]:
        """Rows that a request may take or copy: kept ones, and those under way that can be cut, whose keys match."""
        under_way = [entry for each in self.under_way if (entry := each.entry) is not None]
        return self.kept.matching(matches) + [each for each in under_way if each.holds_all and matches(each.key)]


def _others(held: Sequence[EntryInfo], files: Sequence[EntryInfo]) -> list[EntryInfo]:
    """Files whose caches are not also in memory."""
    numbers = {each.id for each in held}
    return [each for each in files if each.id not in numbers]


def key_of(request: Request) -> CacheKey:
    """The key of the prefixes of a request's prompt."""
    return CacheKey.of("prefix", request, request.options)


def _sinks_of(key: CacheKey, request: Request) -> int:
    """The number of first tokens that are never evicted in rows with this key, for a request with such options."""
    own, told = request.options.sinks, key.labels[-1]
    return max(told, DEFAULT_SINKS) if own == SYSTEM and isinstance(told, int) else int(own)


def pack(cache: KVCache) -> None:
    """Move tokens to the first slots, with none free behind them, as a file has them. Asks the device."""
    for layer in cache.layers:
        if not layer.is_empty:
            layer.table.count()
            layer.resize(max(layer.table.occupancy_bound, 1))


def _counted(row: CacheEntry) -> CacheEntry:
    """A row with all bytes of its cache, those of evicted tokens that can be recalled among them, and of its logits."""
    return replace(row, bytes=row.cache.bytes_held + row.cache.recall_bytes + row.logits_bytes)


def _may_move(row: CacheEntry, request: Request, length: int) -> bool:
    """Return True if no other text is lost where the request writes on after the first tokens of this very row."""
    is_end = row.is_text and request.reuse.store and len(row.tokens) - length <= MOVED
    return is_end and (not row.holds_all or len(request.prompt) <= holds_all(row.cache))
