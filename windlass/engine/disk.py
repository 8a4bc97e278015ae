"""The disk tier of the prefix cache: a file of each row, and beside it a record of the text that it has read."""

from __future__ import annotations

import fcntl
import hmac
import json
import logging
import os
import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from threading import Condition, Lock, Thread
from typing import Any, Final, final

import torch
from transformers import PreTrainedModel

from windlass.core.errors import PromptCacheError, UsageError, WindlassError
from windlass.core.files import check_folder, replacing
from windlass.core.types import Tokens
from windlass.engine.prefix_entry import CacheEntry, CacheKey, EntryInfo, EntrySelector, PrefixText, superfluous
from windlass.engine.request import Request, owner_of
from windlass.hf import prompt_cache
from windlass.hf.kv_cache import KVCache
from windlass.hf.prompt_cache_format import AGAIN
from windlass.hf.weights import fingerprint

LOG: Final = logging.getLogger("windlass.engine")
NAME: Final = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})-(\d{1,10})-([0-9a-f]{32})\.safetensors")
RECORD: Final = ".json"
RECORDED: Final = {
    "passes": "passes",
    "holds_all": "holds_all",
    "sound": "exact_tokens",
    "marks": "checkpoints",
    "is_text": "is_text",
    "key": "key",
    "segments": "segments",
}
"""Names of a record's values, and the fields of a `FileEntry` that they are."""
SEGMENT: Final = ".segment"
SEGMENT_NAME: Final = re.compile(r"[0-9a-f]{16}-[0-9a-f]{16}\.segment")
LOCK, SALT, SALT_BYTES = "windlass.lock", "windlass.salt", 32
LAYER_BYTES: Final = 4096  # of a file's header per layer, an upper bound
FILE_BYTES: Final = 1 << 16
ID_BYTES: Final = 4 + 4  # of a token in a file, and in its record


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


@dataclass(frozen=True, eq=False, kw_only=True)
class FileEntry(PrefixText):
    """One cache in the folder. `owner`, `shelf` and `key` are hashes. `bytes`: of the file and its record.

    `segments`: ends and numbers of the parts of its evicted tokens that other files have.
    """

    owner: str
    shelf: str
    key: str
    id: str
    bytes: int
    segments: tuple[tuple[int, str], ...] = ()

    @property
    def name(self) -> str:
        """The name of the file."""
        return f"{self.owner}-{self.shelf}-{len(self.tokens)}-{self.id}.safetensors"


@final
class DiskTier:
    """The caches in a folder, in files of at most `limit` bytes in all. The least recently used are deleted first.

    A thread of its own writes. Until a cache is written, it is `pending`. A record is written before its cache, and one
    without the other is deleted at the start. Other files of the folder are left alone. Evicted tokens of long texts
    are in segments, each of which is written once, and deleted with the last cache that needs it.

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
        self._writing: str | None = None
        self._names: dict[str, str] = {}
        self._segments = self._segments_found()  # bytes of each
        self._wanted = frozenset[str]()  # segments of the cache that is being written
        self._delete_segments()
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
        return sum(each.bytes for each in self._files.values()) + sum(self._segments.values())

    def id_of(self, kept: CacheEntry) -> str:
        """The id of a cache of these tokens, which were read in these passes."""
        return self._digest("cache", self._key(kept.key), kept.tokens.digest, kept.passes)[:32]

    def is_pending(self, kept: CacheEntry) -> bool:
        """Return True if a cache is still to be written."""
        with self._changed:
            return kept.number in self._pending

    def put(self, kept: CacheEntry) -> None:
        """Write a cache soon, unless a file serves all that it would, or it is larger than the limit.

        Pending caches that this one covers are dropped.
        """
        key = self._key(kept.key)
        with self._changed:
            is_known = any(each.key == key and each.serves_all_of(kept) for each in self._files.values())
            if is_known or kept.number in self._files or self._is_closed or _most_bytes(kept) > self.limit:
                return
            for each in [each for each in self._pending.values() if kept.covers(each)]:
                self._withdraw(each)
            self._pending[kept.number] = kept
            self._changed.notify_all()

    def withdraw(self, kept: CacheEntry) -> bool:
        """Do not write a cache. Returns False where it is being written at this moment."""
        with self._changed:
            return self._withdraw(kept)

    def _withdraw(self, kept: CacheEntry) -> bool:
        if kept.number == self._writing:
            return False
        self._pending.pop(kept.number, None)
        return True

    def longest(self, request: Request, key: CacheKey, beyond: int) -> CacheEntry | None:
        """The cache that serves most tokens of the prompt, more than `beyond`, whole. None: there is none.

        A file whose contents do not match its record is deleted and logged.
        """
        wanted = self._key(key)
        with self._changed:
            own = [each for each in self._files.values() if each.key == wanted]
        usable = [(each.usable(request), each) for each in own]
        for length, file in sorted(usable, key=lambda pair: (pair[0], pair[1].is_text), reverse=True):
            if length <= beyond:
                return None
            cache = self._loaded(file, request)
            if cache is not None:
                return CacheEntry(
                    tokens=file.tokens,
                    passes=file.passes,
                    holds_all=file.holds_all,
                    exact_tokens=file.exact_tokens,
                    checkpoints=file.checkpoints,
                    is_text=file.is_text,
                    key=key,
                    cache=cache,
                    bytes=cache.bytes_held + cache.recall_bytes,
                    number=file.id,
                )
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
                    self._writing = None if kept is None else kept.number
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
                    self._writing = None
                del kept

    @torch.no_grad()
    def _write(self, kept: CacheEntry) -> None:
        """Write a cache, and delete those of which it serves all."""
        owner, segments = owner_of(kept.key.tenant), prompt_cache.settled(kept.cache)
        file = FileEntry(
            tokens=kept.tokens,
            passes=kept.passes,
            holds_all=kept.holds_all,
            exact_tokens=kept.exact_tokens,
            checkpoints=kept.checkpoints,
            is_text=kept.is_text,
            owner=self._hash("owner", owner),
            shelf=self._hash("shelf", owner, kept.key.name),
            key=self._key(kept.key),
            id=kept.number,
            bytes=_most_bytes(kept),
            segments=tuple(segments),
        )
        path = self._folder / file.name
        with self._changed:
            self._wanted = frozenset(number for _, number in segments)
            own = [each for each in self._files.values() if each.key == file.key]
            served = [*filter(file.serves_all_of, own), *superfluous(file, own)]
            held = sum(self._segments.get(number, 0) for number in self._wanted)
            self._make_room(max(file.bytes - held, 0), served)
        try:
            self._write_segments(kept.cache, file)
            self._write_record(file)
            prompt_cache.save(kept.cache, path, self._model, None, segments)
        except BaseException:
            _record_of(path).unlink(missing_ok=True)
            raise
        finally:
            with self._changed:
                self._wanted = frozenset()
        path.chmod(0o600)  # it holds the ids of a prompt
        with self._changed:
            size = path.stat().st_size + _record_of(path).stat().st_size
            self._files[file.id] = replace(file, bytes=size)  # before others go, whose segments it has too
            self._names[file.id] = kept.key.name
            for each in served:
                self._delete(each)
            self._make_room(0)

    def _write_segments(self, cache: KVCache, file: FileEntry) -> None:
        """Write the segments that no cache has written."""
        for (start, _), (stop, number) in pairwise([(0, ""), *file.segments]):
            if number not in self._segments:
                path = self._segment(file.owner, number)
                prompt_cache.save_segment(cache, path, start, stop)
                path.chmod(0o600)
                with self._changed:
                    self._segments[number] = path.stat().st_size

    def _segment(self, owner: str, number: str) -> Path:
        return self._folder / f"{owner}-{number}{SEGMENT}"

    def _segments_found(self) -> dict[str, int]:
        found = [path for path in self._folder.glob(f"*{SEGMENT}") if SEGMENT_NAME.fullmatch(path.name)]
        return {path.name.partition("-")[2].removesuffix(SEGMENT): path.stat().st_size for path in found}

    def _delete_segments(self) -> None:
        """Delete the segments that no cache needs."""
        wanted = self._wanted.union(*({number for _, number in each.segments} for each in self._files.values()))
        for number in self._segments.keys() - wanted:
            del self._segments[number]
            for path in self._folder.glob(f"*-{number}{SEGMENT}"):
                path.unlink(missing_ok=True)

    def _write_record(self, file: FileEntry) -> None:
        fields = {name: getattr(file, field) for name, field in RECORDED.items()} | {"text": file.tokens.digest}
        told = json.dumps(fields, separators=(",", ":"))
        path = _record_of(self._folder / file.name)
        with replacing(path) as temporary:
            temporary.write_bytes(f"{self._digest(file.name, told)}\n{told}\n".encode() + bytes(file.tokens))
        path.chmod(0o600)

    def _loaded(self, file: FileEntry, request: Request) -> KVCache | None:
        """The cache of a file. None, and the file is deleted, unless it holds its tokens with the request's options."""
        path = self._folder / file.name
        try:
            own = request.options
            files = [self._segment(file.owner, number) for _, number in file.segments]
            before = prompt_cache.read_segments(file.segments, files)
            cache = prompt_cache.load(
                path,
                self._model,
                KVCache.from_options,
                policy=own.policy,
                recall_folder=own.recall_folder,
                tokenizer=None,
                before=before,
            )
            ours, its = (each.labels() | {"rollback": each.rollback} for each in (own, cache.options))
            if cache.tokens != [list(file.tokens)] or its != ours:
                raise PromptCacheError(f"{path} holds another text, or has other options than its name says")
        except WindlassError as error:
            problem = str(error).removesuffix(f" {AGAIN}")  # requests make it again by themselves
            LOG.warning("a cache on disk is not used, and was deleted: %s", problem)
            with self._changed:
                self._delete(file)
            return None
        with self._changed:
            if file.id in self._files:
                self._files[file.id] = self._files.pop(file.id)
                with suppress(OSError):
                    os.utime(path)  # keeps the order of use for the next server
        return cache

    def _found(self) -> Iterable[FileEntry]:
        """The files of the folder, the one used last at the end. A file and a record without each other are deleted."""
        found, paths = [], [path for path in self._folder.iterdir() if path.is_file() and not path.is_symlink()]
        files = [path for path in paths if NAME.fullmatch(path.name)]
        records = {path for path in paths if path.suffix == RECORD and NAME.fullmatch(f"{path.stem}.safetensors")}
        for path in records - {*map(_record_of, files)}:
            path.unlink()
        for path in files:
            file = self._recorded(path)
            if file is None:
                LOG.warning("a cache on disk has no record, or a damaged one, and was deleted: %s", path.name)
                path.unlink()
                _record_of(path).unlink(missing_ok=True)
            else:
                found.append((path.stat().st_mtime_ns, file))
        return [file for _, file in sorted(found, key=lambda each: each[0])]

    def _recorded(self, path: Path) -> FileEntry | None:
        """The file at `path` by its record. None: there is none, or it is damaged."""
        owner, shelf, _, number = path.stem.split("-")
        record = _record_of(path)
        try:
            digest, told, ids = record.read_bytes().split(b"\n", 2)
            if not hmac.compare_digest(digest.decode(), self._digest(path.name, told.decode())):
                return None
            fields: dict[str, Any] = json.loads(told)
            tokens = Tokens.of_bytes(ids)
            if tokens.digest != fields["text"]:
                return None
            size = path.stat().st_size + record.stat().st_size
        except (OSError, ValueError, TypeError):
            return None
        return FileEntry(
            tokens=tokens,
            passes=tuple(fields["passes"]),
            holds_all=fields["holds_all"],
            exact_tokens=fields["sound"],
            checkpoints=None if fields["marks"] is None else tuple(fields["marks"]),
            is_text=fields["is_text"],
            owner=owner,
            shelf=shelf,
            key=fields["key"],
            id=number,
            bytes=size,
            segments=tuple((stop, name) for stop, name in fields["segments"]),
        )

    def _make_room(self, size: int, first: Iterable[FileEntry] = ()) -> None:
        """Delete files until there is room for `size` bytes: the `first` ones, then the least recently used."""
        for each in [*first, *self._files.values()]:
            if self._bytes + size <= self.limit:
                return
            self._delete(each)

    def _delete(self, file: FileEntry) -> None:
        self._files.pop(file.id, None)
        self._names.pop(file.id, None)
        path = self._folder / file.name
        for each in (path, _record_of(path)):
            with suppress(OSError):
                each.unlink()
        self._delete_segments()

    def _is(self, wanted: EntrySelector, file: FileEntry) -> bool:
        is_own = file.owner == self._hash("owner", wanted.owner) and wanted.id in (None, file.id)
        return is_own and (wanted.name is None or file.shelf == self._hash("shelf", wanted.owner, wanted.name))

    def _told(self, file: FileEntry) -> EntryInfo:
        return EntryInfo(file.id, "prefix", self._names.get(file.id), len(file.tokens), file.bytes, "disk")

    def _digest(self, *told: Any) -> str:
        return hmac.new(self._salt, json.dumps(told).encode(), sha256).hexdigest()

    def _hash(self, *told: str) -> str:
        return self._digest(*told)[:16]

    def _key(self, key: CacheKey) -> str:
        return self._digest("key", self._model_hash, key.kind, key.tenant, key.name, key.labels)[:32]


def _record_of(path: Path) -> Path:
    """The record beside a file."""
    return path.with_suffix(RECORD)


def _most_bytes(kept: CacheEntry) -> int:
    """The most bytes of a cache's file and its record."""
    held = min(kept.bytes, kept.most_bytes)  # a file has no free slots
    return held + ID_BYTES * len(kept.tokens) + LAYER_BYTES * len(kept.cache.layers) + FILE_BYTES
