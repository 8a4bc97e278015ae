"""Caches of the beginnings of prompts in files, which outlive the server.

A file is a prompt cache. Its name is made of keyed hashes, so that it tells nothing of a prompt and whose it is, and
so that a prompt finds its own files only. What a file holds is compared all the same before it is used.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import logging
import os
import re
import secrets
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Lock, Thread
from typing import Final, final

import torch
from transformers import PreTrainedModel

from windlass.core.errors import PromptCacheError, UsageError, WindlassError
from windlass.core.files import check_folder
from windlass.engine.kept import Kept, Key, Stored, Wanted
from windlass.engine.request import Request, owner_of
from windlass.hf import prompt_cache
from windlass.hf.fingerprint import fingerprint
from windlass.hf.kv_cache import KVCache

LOG: Final = logging.getLogger("windlass.engine")
NAME: Final = re.compile(r"([0-9a-f]{16})-([0-9a-f]{16})-(\d{1,10})-([0-9a-f]{32})\.safetensors")
LOCK, SALT, SALT_BYTES = "windlass.lock", "windlass.salt", 32
LAYER_BYTES: Final = 4096  # of a file's header, and more than each layer and its tensors take there
FILE_BYTES: Final = 1 << 16


def salt_of(folder: Path) -> bytes:
    """The secret of a folder, by which its names are made; a new one where it has none.

    Raises: UsageError for what is no folder, and for a secret that is damaged.
    """
    path = check_folder(folder, "the folder for caches") / SALT
    try:
        if not path.exists():
            new = folder / f".windlass-{secrets.token_hex(8)}.tmp"
            new.touch(mode=0o600)
            new.write_bytes(secrets.token_bytes(SALT_BYTES))
            with suppress(FileExistsError):  # another server made one just now
                os.link(new, path)
            new.unlink()
        salt = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} cannot be made or read: {error.strerror}; give another folder") from error
    if len(salt) != SALT_BYTES:
        raise UsageError(f"{path} is damaged; delete it, and the files beside it, which nobody can find any more")
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
    """The caches in a folder, in files of at most `limit` bytes in all; those used longest ago are deleted first.

    A thread of its own writes. Until a cache is written, it is `pending`. Other files of the folder are left alone.

    Raises: UsageError for what is no folder, or one that another server has.
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
                f"the folder {folder} is that of a server that runs; give each a folder of its own"
            ) from None
        for left in folder.glob(".windlass-*.tmp"):  # of a server that was killed
            left.unlink(missing_ok=True)
        self._changed, self._writes = Condition(), Lock()
        self._files = {each.id: each for each in self._found()}  # the one used last at the end
        self._pending: dict[str, Kept] = {}
        self._names: dict[str, str] = {}
        self._is_closed = False
        self._make_room(0)
        self._thread = Thread(target=self._run, name="windlass-disk", daemon=True)
        self._thread.start()

    @property
    def bytes(self) -> int:
        """Of all files; never more than `limit`."""
        with self._changed:
            return self._bytes

    @property
    def _bytes(self) -> int:
        return sum(each.bytes for each in self._files.values())

    def id_of(self, key: Key, tokens: tuple[int, ...], passes: tuple[int, ...]) -> str:
        """What a cache of these tokens, which were read in these passes, is called."""
        return self._ids(key, tokens, passes, [len(tokens)])[0]

    def is_pending(self, kept: Kept) -> bool:
        """Whether a cache is still to be written."""
        with self._changed:
            return kept.number in self._pending

    def put(self, kept: Kept) -> None:
        """Write a cache soon, unless there is a file of it, or it is larger than the limit."""
        with self._changed:
            if kept.number not in self._files and not self._is_closed and _most_bytes(kept) <= self.limit:
                self._pending[kept.number] = kept
                self._changed.notify_all()

    def longest(self, request: Request, key: Key, beyond: int) -> Kept | None:
        """The longest cache that the prompt goes beyond, of more than `beyond` tokens; None: there is none.

        A file that does not hold what its name says is deleted, and the log tells it.
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
                return Kept(key, prompt[:length], cache, cache.bytes_held, read, number=number)
        return None

    def stored(self, wanted: Wanted) -> list[Stored]:
        """What is to be told of these files, the one used last first."""
        with self._changed:
            return [self._told(each) for each in reversed(self._files.values()) if self._is(wanted, each)]

    def forget(self, wanted: Wanted) -> list[Stored]:
        """Delete these files, and write none of these that are pending; returns what they were."""
        with self._writes, self._changed:  # not while one is written, which would appear afterwards
            for number, kept in list(self._pending.items()):
                if wanted.has(kept.key, number):
                    del self._pending[number]
            found = [each for each in self._files.values() if self._is(wanted, each)]
            for each in found:
                self._delete(each)
            return [self._told(each) for each in found]

    def close(self) -> None:
        """Write what is pending, and let others have the folder. May be repeated."""
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
    def _write(self, kept: Kept) -> None:
        owner = self._hash("owner", owner_of(kept.key.tenant))
        shelf = self._hash("shelf", owner_of(kept.key.tenant), kept.key.name)
        file = File(owner, shelf, len(kept.tokens), kept.number, _most_bytes(kept))
        with self._changed:
            self._make_room(file.bytes)
        path = self._folder / file.name
        prompt_cache.save(kept.cache, path, self._model)
        path.chmod(0o600)  # it holds the ids of a prompt
        file.bytes = path.stat().st_size
        with self._changed:
            self._files[file.id], self._names[file.id] = file, kept.key.name
            self._make_room(0)

    def _loaded(self, file: File, request: Request, tokens: tuple[int, ...]) -> KVCache | None:
        """The cache of a file, once it is known to be the state after `tokens` in a row like the request's."""
        path = self._folder / file.name
        try:
            cache = prompt_cache.load(path, self._model, request.options.policy)
            ours, its = (each.labels() | {"rollback": each.rollback} for each in (request.options, cache.options))
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
                    os.utime(path)  # so that the next server knows the order
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
        """Delete files until there is room for so many bytes."""
        while self._files and self._bytes + size > self.limit:
            self._delete(next(iter(self._files.values())))

    def _delete(self, file: File) -> None:
        self._files.pop(file.id, None)
        self._names.pop(file.id, None)
        with suppress(OSError):
            (self._folder / file.name).unlink()

    def _is(self, wanted: Wanted, file: File) -> bool:
        is_own = file.owner == self._hash("owner", wanted.owner) and wanted.id in (None, file.id)
        return is_own and (wanted.name is None or file.shelf == self._hash("shelf", wanted.owner, wanted.name))

    def _told(self, file: File) -> Stored:
        return Stored(file.id, "prefix", self._names.get(file.id), file.tokens, file.bytes, "disk")

    def _hash(self, *said: str) -> str:
        return hmac.new(self._salt, json.dumps(said).encode(), hashlib.sha256).hexdigest()[:16]

    def _ids(self, key: Key, tokens: tuple[int, ...], passes: tuple[int, ...], lengths: list[int]) -> list[str]:
        """What caches of the first tokens are called, for `lengths` that rise, read in passes that end at `passes`."""
        said = ["cache", self._model_hash, key.kind, key.tenant, key.name, key.labels]
        digest, ids, at = hmac.new(self._salt, json.dumps(said).encode() + b"\n", hashlib.sha256), [], 0
        ends = frozenset(passes)
        for length in lengths:
            pieces = enumerate(tokens[at:length], at + 1)
            digest.update("".join(f"{token} {'| ' * (end in ends)}" for end, token in pieces).encode())
            ids.append(digest.copy().hexdigest()[:32])
            at = length
        return ids


def _most_bytes(kept: Kept) -> int:
    """What a file of a cache takes at most."""
    return kept.bytes + 4 * len(kept.tokens) + LAYER_BYTES * len(kept.cache.layers) + FILE_BYTES
