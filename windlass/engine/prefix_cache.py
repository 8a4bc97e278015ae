"""Caches of prompts' prefixes, in memory and in files, for requests to come."""

from __future__ import annotations

import copy
import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Condition, Lock, Thread
from typing import Final, Literal, final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windlass.cache.edits import holds_all, remap, takes_edits
from windlass.cache.options import CacheOptions
from windlass.core.errors import PromptCacheError, UsageError, WindlassError
from windlass.core.files import check_folder
from windlass.core.parse import DEFAULT_SINKS, SYSTEM
from windlass.engine.recompute import LEAST, Alignment, EditPlan, shared
from windlass.engine.request import Request, owner_of
from windlass.hf.kv_cache import KVCache
from windlass.hf.weights import fingerprint

Kind = Literal["prefix", "part"]
Labels = tuple[int | str | None, ...]


@dataclass(frozen=True)
class CacheKey:
    """Properties that two requests must have in common to share a cache.

    `kind`: the beginning of a prompt, or a part that was read behind the tokens of `prefix`. `labels` are those of the
    cache's options, and the tokens of the system text where these are its sinks.
    """

    kind: Kind
    tenant: str
    name: str
    labels: Labels
    prefix: tuple[int, ...] = ()

    @classmethod
    def of(cls, kind: Kind, request: Request, options: CacheOptions, prefix: tuple[int, ...] = ()) -> CacheKey:
        """The key of a request's own caches with these options."""
        sinks = request.head if options.sinks == SYSTEM else None
        return cls(kind, request.tenant, request.reuse.name, (*options.labels().values(), sinks), prefix)


SPARE: Final = 8  # a row is packed when it is kept, where only this part of its slots holds tokens
MOVED: Final = 16  # tokens that may be cut off a row that is moved: the end of a turn, an answer that is cut


@dataclass(frozen=True, eq=False)
class CacheEntry:
    """A row of a cache that has read `tokens`. Nobody writes into it. `number` names it to its owner.

    `passes`: the ends of the passes that read the prefix. Only the same passes give the same state. Tokens behind the
    last of them came in other ways.
    `logits`: (vocabulary,) of the last token, where the prefix is a whole prompt.
    `row`: the row of `cache`, the only one unless a request is writing it.
    `is_text`: the row of a request that has ended, which one request may take over.
    `holds_all`: any number of its newest tokens can be cut off, with recurrent layers back to one of the `marks`.
    `sound`: the number of first tokens that were read behind the very tokens before them (None: all).
    """

    key: CacheKey
    tokens: tuple[int, ...]
    cache: KVCache
    bytes: int
    passes: tuple[int, ...] = ()
    logits: Tensor | None = None
    row: int = 0
    is_text: bool = False
    holds_all: bool = False
    sound: int | None = None
    marks: tuple[int, ...] | None = None
    number: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def most_bytes(self) -> int:
        """The most bytes of a copy, which has free slots only where it cannot do without."""
        rows, slots = self.cache.batch_size, max(each.table.slots for each in self.cache.layers)
        own, recalled = self.cache.bytes_held // rows, self.cache.recall_bytes // rows
        is_cut = self.holds_all and self.marks is None  # states have one size
        own = own * len(self.tokens) // max(slots, 1) + FILE_BYTES if is_cut else own
        return own + recalled + (0 if self.logits is None else self.logits.nbytes)

    def usable(self, request: Request) -> int:
        """The number of its first tokens that a prompt can go on from, once the others are cut off."""
        prompt, size, mode = request.prompt, len(self.tokens), request.reuse.mode.name
        most = shared(self.tokens, prompt)
        if not (most == size == len(prompt) and self.logits is not None):
            most = min(most, len(prompt) - 1)
        if mode != "edited" and self.sound is not None:
            most = min(most, self.sound)
        read, loose = self.passes[: shared(self.passes, request.pass_ends)], (*(self.marks or ()), size, most)
        return max((end for end in (read if mode == "exact" else loose) if end <= most and self.ends(end)), default=0)

    def ends(self, tokens: int) -> bool:
        """Return True if all tokens behind its first `tokens` can be cut off."""
        return tokens == len(self.tokens) or (self.holds_all and (self.marks is None or tokens in self.marks))

    def covers(self, other: CacheEntry) -> bool:
        """Return True if nobody needs `other` beside this."""
        is_beginning = self.tokens[: len(other.tokens)] == other.tokens
        is_alike = self.passes[: len(other.passes)] == other.passes and self.read_in_order >= other.read_in_order
        is_longer = self.holds_all and all(map(self.ends, (len(other.tokens), *(other.marks or ()))))
        return is_beginning and is_alike and is_longer and other.logits is None and self.key == other.key

    def first(self, tokens: int) -> CacheEntry:
        """A copy of its first tokens."""
        cache = self.cache.copy_of_row(self.row, tokens) if self.holds_all else copy.deepcopy(self.cache)
        return replace(self, cache=cache, row=0, is_text=False).cut(tokens)

    def cut(self, tokens: int) -> CacheEntry:
        """Its first tokens, of which its cache is to have no others."""
        if self.cache.tokens_seen[0] > tokens:
            self.cache.rollback(self.cache.tokens_seen[0] - tokens)
        passes = tuple(each for each in self.passes if each <= tokens)
        logits = self.logits if tokens == len(self.tokens) else None
        return replace(
            self, tokens=self.tokens[:tokens], passes=passes, logits=logits, marks=self.cache.checkpoints_of(0)
        )

    @property
    def read_in_order(self) -> int:
        """The number of first tokens that were read behind the very tokens before them."""
        return len(self.tokens) if self.sound is None else min(self.sound, len(self.tokens))

    @property
    def stored(self) -> EntryInfo:
        """Facts about it for its owner."""
        return EntryInfo(self.number, self.key.kind, self.key.name, len(self.tokens), self.bytes, "memory")


@dataclass(frozen=True)
class EditedRow:
    """A row whose tokens were moved to where a prompt has them. `gaps`: positions whose tokens are still to be read.

    `moved`: tokens behind the first edit. `again`: tokens that it had, and that are read again.
    """

    entry: CacheEntry
    gaps: tuple[int, ...]
    moved: int
    again: int


@dataclass(frozen=True)
class EntryInfo:
    """Facts about a kept cache for its owner."""

    id: str
    kind: Kind
    name: str | None
    """Name of the prefix (None: unknown, as an earlier run of the server wrote it)."""
    tokens: int
    bytes: int
    place: Literal["memory", "disk"]


@dataclass(frozen=True)
class EntrySelector:
    """A selection of an owner's caches: all, those of one `name`, or the one with this `id`."""

    owner: str
    name: str | None = None
    id: str | None = None

    def has(self, key: CacheKey, number: str) -> bool:
        """Return True if a cache is among them."""
        is_own = owner_of(key.tenant) == self.owner
        return is_own and self.name in (None, key.name) and self.id in (None, number)


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
        with self._lock:
            return [each for each in self._held if each.key == key]

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


LOG: Final = logging.getLogger("windlass.engine")
NAME: Final = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})-(\d{1,10})-([0-9a-f]{32})\.safetensors")
LOCK, SALT, SALT_BYTES = "windlass.lock", "windlass.salt", 32
LAYER_BYTES: Final = 4096  # of a file's header per layer, an upper bound
FILE_BYTES: Final = 1 << 16


def salt_of(folder: Path) -> bytes:
    """The secret of a folder, which its file names are derived from. A folder without one gets a new one.

    Raises: UsageError for a path that is no folder, and for a secret that is damaged.
    """
    path = check_folder(folder, "the folder for caches") / SALT
    try:
        if not path.exists():
            new = folder / f".windlass-{secrets.token_hex(8)}.tmp"
            new.touch(mode=0o600)
            new.write_bytes(secrets.token_bytes(SALT_BYTES))
            with suppress(FileExistsError):  # another server has just made one
                os.link(new, path)
            new.unlink()
        salt = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be made or read: {error.strerror}. Give another folder") from error
    if len(salt) != SALT_BYTES:
        raise UsageError(f"{path} is damaged. Delete it, and the files beside it, which nobody can find any more")
    return salt


@dataclass
class File:
    """One cache in the folder."""

    owner: str
    shelf: str
    tokens: int
    id: str
    bytes: int

    @property
    def name(self) -> str:
        return f"{self.owner}-{self.shelf}-{self.tokens}-{self.id}.safetensors"


@final
class DiskTier:
    """The caches in a folder, in files of at most `limit` bytes in all. The least recently used are deleted first.

    A thread of its own writes. Until a cache is written, it is `pending`. Other files of the folder are left alone.

    Raises: UsageError for a path that is no folder, or a folder that another server has.
    """

    def __init__(self, folder: Path, limit: int, model: PreTrainedModel) -> None:
        self._salt, self._folder, self.limit, self._model = salt_of(folder), folder, limit, model
        self._model_hash = fingerprint(model)
        self._lock_file = (folder / LOCK).open("w")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock_file.close()
            raise UsageError(
                f"the folder {folder} is that of a server that runs. Give each a folder of its own"
            ) from None
        for left in folder.glob(".windlass-*.tmp"):  # of a server that was killed
            left.unlink(missing_ok=True)
        self._changed, self._writes = Condition(), Lock()
        self._files = {each.id: each for each in self._found()}  # least recently used first
        self._pending: dict[str, CacheEntry] = {}
        self._names: dict[str, str] = {}
        self._is_closed = False
        self._make_room(0)
        self._thread = Thread(target=self._run, name="windlass-disk", daemon=True)
        self._thread.start()

    @property
    def bytes(self) -> int:
        """Bytes of all files. Never more than `limit`."""
        with self._changed:
            return self._bytes

    @property
    def _bytes(self) -> int:
        return sum(each.bytes for each in self._files.values())

    def id_of(self, key: CacheKey, tokens: tuple[int, ...], passes: tuple[int, ...]) -> str:
        """The id of a cache of these tokens, which were read in these passes."""
        return self._ids(key, tokens, passes, [len(tokens)])[0]

    def is_pending(self, kept: CacheEntry) -> bool:
        """Return True if a cache is still to be written."""
        with self._changed:
            return kept.number in self._pending

    def put(self, kept: CacheEntry) -> None:
        """Write a cache soon, unless there is a file of it, or it is larger than the limit."""
        with self._changed:
            if kept.number not in self._files and not self._is_closed and _most_bytes(kept) <= self.limit:
                self._pending[kept.number] = kept
                self._changed.notify_all()

    def longest(self, request: Request, key: CacheKey, beyond: int) -> CacheEntry | None:
        """The longest cache of a true prefix of the prompt, of more than `beyond` tokens. None: there is none.

        A file whose contents do not match its name is deleted and logged.
        """
        prompt = request.prompt
        shelf = self._hash("shelf", owner_of(key.tenant), key.name)
        with self._changed:
            lengths = {each.tokens for each in self._files.values() if each.shelf == shelf}
        passes = request.pass_ends
        fitting = [each for each in passes[:-1] if each > beyond and each in lengths]
        for length, number in reversed([*zip(fitting, self._ids(key, prompt, passes, fitting), strict=True)]):
            with self._changed:
                file = self._files.get(number)
            if file is None:
                continue
            cache = self._loaded(file, request, prompt[:length])
            if cache is not None:
                read = tuple(each for each in passes if each <= length)
                return CacheEntry(key, prompt[:length], cache, cache.bytes_held, read, number=number)
        return None

    def stored(self, wanted: EntrySelector) -> list[EntryInfo]:
        """Facts about the wanted files, the one used last first."""
        with self._changed:
            return [self._told(each) for each in reversed(self._files.values()) if self._is(wanted, each)]

    def forget(self, wanted: EntrySelector) -> list[EntryInfo]:
        """Delete these files, and write none of these that are pending. Returns a record of each deleted file."""
        with self._writes, self._changed:  # not while a file is written, which would appear afterwards
            for number, kept in list(self._pending.items()):
                if wanted.has(kept.key, number):
                    del self._pending[number]
            found = [each for each in self._files.values() if self._is(wanted, each)]
            for each in found:
                self._delete(each)
            return [self._told(each) for each in found]

    def close(self) -> None:
        """Write the pending caches, and let other servers have the folder. May be repeated."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        self._thread.join()
        self._lock_file.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._pending or self._is_closed)
                if not self._pending:
                    return
            with self._writes:
                with self._changed:
                    kept = next(iter(self._pending.values()), None)
                if kept is None:
                    continue
                try:
                    self._write(kept)
                except WindlassError as error:
                    LOG.warning("a cache was not written: %s", error)
                except Exception:
                    LOG.exception("a cache was not written")
                with self._changed:
                    self._pending.pop(kept.number, None)
                del kept

    @torch.no_grad()
    def _write(self, kept: CacheEntry) -> None:
        owner = self._hash("owner", owner_of(kept.key.tenant))
        shelf = self._hash("shelf", owner_of(kept.key.tenant), kept.key.name)
        file = File(owner, shelf, len(kept.tokens), kept.number, _most_bytes(kept))
        with self._changed:
            self._make_room(file.bytes)
        path = self._folder / file.name
        kept.cache.save(path)
        path.chmod(0o600)  # it holds the ids of a prompt
        file.bytes = path.stat().st_size
        with self._changed:
            self._files[file.id], self._names[file.id] = file, kept.key.name
            self._make_room(0)

    def _loaded(self, file: File, request: Request, tokens: tuple[int, ...]) -> KVCache | None:
        """The cache of a file. None, and the file is deleted, unless it holds `tokens` with the request's options."""
        path = self._folder / file.name
        try:
            own = request.options
            cache = KVCache.load(path, self._model, policy=own.policy, recall_folder=own.recall_folder)
            ours, its = (each.labels() | {"rollback": each.rollback} for each in (own, cache.options))
            if cache.tokens != [list(tokens)] or its != ours:
                raise PromptCacheError(f"{path} holds another text, or has other options than its name says")
        except WindlassError as error:
            LOG.warning("a cache on disk is not used, and was deleted: %s", error)
            with self._changed:
                self._delete(file)
            return None
        with self._changed:
            if file.id in self._files:
                self._files[file.id] = self._files.pop(file.id)
                with suppress(OSError):
                    os.utime(path)  # keeps the order of use for the next server
        return cache

    def _found(self) -> Iterable[File]:
        """The files of the folder, the one used last at the end."""
        found = []
        for path in self._folder.iterdir():
            match, status = NAME.fullmatch(path.name), path.lstat()
            if match is not None and path.is_file() and not path.is_symlink():
                owner, shelf, tokens, number = match.groups()
                found.append((status.st_mtime_ns, File(owner, shelf, int(tokens), number, status.st_size)))
        return [file for _, file in sorted(found, key=lambda each: each[0])]

    def _make_room(self, size: int) -> None:
        """Delete the least recently used files until there is room for `size` bytes."""
        while self._files and self._bytes + size > self.limit:
            self._delete(next(iter(self._files.values())))

    def _delete(self, file: File) -> None:
        self._files.pop(file.id, None)
        self._names.pop(file.id, None)
        with suppress(OSError):
            (self._folder / file.name).unlink()

    def _is(self, wanted: EntrySelector, file: File) -> bool:
        is_own = file.owner == self._hash("owner", wanted.owner) and wanted.id in (None, file.id)
        return is_own and (wanted.name is None or file.shelf == self._hash("shelf", wanted.owner, wanted.name))

    def _told(self, file: File) -> EntryInfo:
        return EntryInfo(file.id, "prefix", self._names.get(file.id), file.tokens, file.bytes, "disk")

    def _hash(self, *said: str) -> str:
        return hmac.new(self._salt, json.dumps(said).encode(), hashlib.sha256).hexdigest()[:16]

    def _ids(self, key: CacheKey, tokens: tuple[int, ...], passes: tuple[int, ...], lengths: list[int]) -> list[str]:
        """Ids of caches of prefixes of `tokens`, of rising `lengths`, read in passes that end at `passes`."""
        said = ["cache", self._model_hash, key.kind, key.tenant, key.name, key.labels]
        digest, ids, at = hmac.new(self._salt, json.dumps(said).encode() + b"\n", hashlib.sha256), [], 0
        ends = frozenset(passes)
        for length in lengths:
            pieces = enumerate(tokens[at:length], at + 1)
            digest.update("".join(f"{token} {'| ' * (end in ends)}" for end, token in pieces).encode())
            ids.append(digest.copy().hexdigest()[:32])
            at = length
        return ids


def _most_bytes(kept: CacheEntry) -> int:
    """The most bytes of a cache's file."""
    return kept.bytes + 4 * len(kept.tokens) + LAYER_BYTES * len(kept.cache.layers) + FILE_BYTES


class RowSource(ABC):
    """A request under way, whose row others may copy."""

    @property
    @abstractmethod
    def entry(self) -> CacheEntry | None:
        """The row, or None where it may not be kept."""


@final
class Snapshots:
    """Snapshots and rows among the caches `kept` in memory, and on `disk` too, if there is one.

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
        request looks none up. One of the whole prompt has its logits.

        The row of a text that has ended is moved, unless that would lose another text. All others are copied.
        """
        if not request.reuse.lookup or not self.kept.limit:
            return None
        best = max(self._rows(request), key=lambda each: (each.usable(request), each.is_text), default=None)
        length = 0 if best is None else best.usable(request)
        if self._disk is not None:
            found = self._disk.longest(request, key_of(request), length)
            if found is not None:
                self.kept.add(replace(found, cache=copy.deepcopy(found.cache)))
                return found
        if best is None or not length:
            return None
        if _may_move(best, request, length) and self.kept.take(best):
            return best.cut(length)
        self.kept.use(best)
        return best.first(length)

    def edited(self, request: Request) -> EditedRow | None:
        """The row with the most tokens of the prompt, wherever these stand, for the request alone.

        None: the request takes no such row, or begins with nearly as many tokens of one.
        """
        mode, prompt = request.reuse.mode, request.prompt
        rows = self._rows(request) if mode.name == "edited" and request.reuse.lookup and self.kept.limit else []
        if not rows:
            return None
        alignment, sinks = Alignment(prompt), request.options.sinks
        protected = max(request.head, DEFAULT_SINKS) if sinks == SYSTEM else int(sinks)
        plans = [EditPlan.of(alignment.to(row.tokens), len(prompt), protected, mode.edit_window) for row in rows]
        row, plan = max(zip(rows, plans, strict=True), key=lambda pair: (pair[1].cached, pair[0].is_text))
        gaps, least = tuple(plan.gaps), LEAST + max(each.usable(request) for each in rows)
        if plan.cached < least or not takes_edits(row.cache, plan.end, bool(gaps)):
            return None
        if not (_may_move(row, request, plan.cached) and self.kept.take(row)):
            self.kept.use(row)
            row = row.first(len(row.tokens))
        remap(row.cache, plan.moves(len(row.tokens)), plan.end)
        passes, sound = tuple(end for end in row.passes if end <= plan.head), min(plan.head, row.read_in_order)
        entry = replace(row, tokens=prompt[: plan.end], passes=passes, logits=None, sound=sound)
        return EditedRow(entry, gaps, plan.cached - plan.head, plan.again)

    def wanted(self, request: Request) -> frozenset[int]:
        """Lengths of this prompt's prefixes that are to be cached: up to the end of a message, up to the last pass, and
        up to the last pass that it shares with a cached prompt. A prompt of one pass is cached as a whole. With recall,
        where a copy holds the whole text, only the end of the last message counts."""
        if self.kept.limit == 0 or not request.reuse.store:
            return frozenset()
        prompt, passes, known = request.prompt, request.pass_ends, self._of(request)
        common = max((shared(each.tokens, prompt) for each in known), default=0)
        ends = {
            *request.ends[-1 if request.options.recall else 0 :],
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
            kept = row.first(len(row.tokens))
            logits = None if kept.logits is None else kept.logits.clone()
            size = _bytes_of(kept.cache) + (0 if logits is None else logits.nbytes)
            kept = replace(kept, logits=logits, bytes=size)
            # A file holds no logits, and is found by its passes.
            is_written = kept.logits is None and kept.passes[-1:] == (len(kept.tokens),)
            if self._disk is not None and is_written:
                kept = replace(kept, number=self._disk.id_of(kept.key, kept.tokens, kept.passes))
            if self.kept.add(kept, place) and self._disk is not None and is_written:
                self._disk.put(kept)
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
            if row.covers(each) and self.kept.may_leave(each):
                self.kept.take(each)
        slots = max(each.table.slots for each in row.cache.layers)
        if row.holds_all and len(row.tokens) * SPARE < slots:
            row = row.first(len(row.tokens))
        self.kept.add(replace(row, bytes=_bytes_of(row.cache), is_text=True))

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

    def _rows(self, request: Request) -> list[CacheEntry]:
        """Rows that a request may take or copy: those that are kept, and those under way that can be cut."""
        key = key_of(request)
        under_way = [entry for each in self.under_way if (entry := each.entry) is not None]
        return self.kept.of(key) + [each for each in under_way if each.holds_all and each.key == key]


def _others(held: Sequence[EntryInfo], files: Sequence[EntryInfo]) -> list[EntryInfo]:
    """Files whose caches are not also in memory."""
    numbers = {each.id for each in held}
    return [each for each in files if each.id not in numbers]


def key_of(request: Request) -> CacheKey:
    """The key of the prefixes of a request's prompt."""
    return CacheKey.of("prefix", request, request.options)


def _bytes_of(cache: KVCache) -> int:
    """All bytes of a cache, those of evicted tokens that can be recalled among them."""
    return cache.bytes_held + cache.recall_bytes


def _may_move(row: CacheEntry, request: Request, length: int) -> bool:
    """Return True if no other text is lost where the request writes on after the first tokens of this very row."""
    is_end = row.is_text and request.reuse.store and len(row.tokens) - length <= MOVED
    return is_end and (not row.holds_all or len(request.prompt) <= holds_all(row.cache))
