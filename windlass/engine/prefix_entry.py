"""Rows that prompts may go on from: their keys, the texts that they have read, and facts for their owners."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeVar

from torch import Tensor

from windlass.cache.options import CacheOptions
from windlass.core.parse import SYSTEM
from windlass.core.types import Tokens, shared
from windlass.engine.request import Request, owner_of
from windlass.hf.kv_cache import KVCache

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
        sinks = request.kept if options.sinks == SYSTEM else None
        return cls(kind, request.tenant, request.reuse.name, (*options.labels().values(), sinks), prefix)

    def is_like(self, other: CacheKey) -> bool:
        """Return True if their rows differ in system texts at most, neither of them with pins."""
        are_sinks = not any(isinstance(each.labels[-1], str) for each in (self, other))
        return are_sinks and replace(self, labels=self.labels[:-1]) == replace(other, labels=other.labels[:-1])


SLOT_BYTES: Final = 1 << 16  # of a copy, beside its tokens


@dataclass(frozen=True, eq=False, kw_only=True)
class PrefixText:
    """The `tokens` that a row has read, and the way in which it read them.

    `passes`: the ends of the passes that read the prefix. Only the same passes give the same state. Tokens behind the
    last of them came in other ways.
    `holds_all`: any number of its newest tokens can be cut off, with recurrent layers back to one of the `checkpoints`.
    `exact_tokens`: the number of first tokens that were read behind the very tokens before them (None: all).
    `logits_end`: the number of its first tokens behind which the logits are known (None: nowhere).
    `is_text`: the row of a request that has ended, which one request may take over.
    """

    tokens: Tokens
    passes: tuple[int, ...] = ()
    holds_all: bool = False
    exact_tokens: int | None = None
    checkpoints: tuple[int, ...] | None = None
    logits_end: int | None = None
    is_text: bool = False

    @property
    def read_in_order(self) -> int:
        """The number of first tokens that were read behind the very tokens before them."""
        return len(self.tokens) if self.exact_tokens is None else min(self.exact_tokens, len(self.tokens))

    def begins(self, other: PrefixText | Request) -> bool:
        """Return True if another text begins with all of it."""
        return other.tokens.starts_with(self.tokens)

    def usable(self, request: Request) -> int:
        """The number of its first tokens that a prompt can go on from, once the others are cut off."""
        if not self.holds_all and not self.begins(request):
            return 0
        prompt, size, mode = request.prompt, len(self.tokens), request.reuse.mode.name
        most = self.tokens.shared(request.tokens)
        if not most == len(prompt) == self.logits_end:
            most = min(most, len(prompt) - 1)
        if mode != "edited" and self.exact_tokens is not None:
            most = min(most, self.exact_tokens)
        read, loose = self.passes[: shared(self.passes, request.pass_ends)], (*(self.checkpoints or ()), size, most)
        return max((end for end in (read if mode == "exact" else loose) if end <= most and self.ends(end)), default=0)

    def ends(self, tokens: int) -> bool:
        """Return True if all tokens behind its first `tokens` can be cut off."""
        return tokens == len(self.tokens) or (
            self.holds_all and (self.checkpoints is None or tokens in self.checkpoints)
        )

    def serves_all_of(self, other: PrefixText) -> bool:
        """Return True if nobody needs `other`, of the same key, beside this."""
        is_prompt = other.logits_end is not None and not other.is_text
        if not self.holds_all or (is_prompt and other.logits_end != self.logits_end) or not other.begins(self):
            return False
        is_alike = self.passes[: len(other.passes)] == other.passes and self.read_in_order >= other.read_in_order
        return is_alike and all(map(self.ends, (len(other.tokens), *(other.checkpoints or ()))))


MOST, NEWEST = 8, 4  # beginnings of one text, each in a row of its own, and the longest of them
Row = TypeVar("Row", bound=PrefixText)


def superfluous(row: PrefixText, others: Iterable[Row]) -> list[Row]:
    """Find the beginnings of a text beyond `MOST` among the `others`, which have the key of a row that has evicted.

    The first to go is the one without which the fewest tokens lie between two others, but for the newest ones.
    """
    if row.holds_all:
        return []
    sizes, found = len(row.tokens), list[Row]()
    begins = [each for each in others if not each.holds_all and len(each.tokens) < sizes]
    begins = sorted((each for each in begins if each.begins(row)), key=_size)
    while len(begins) > MOST:
        ends = [0, *map(_size, begins), sizes]
        at = min(range(len(begins) - NEWEST), key=lambda at: ends[at + 2] - ends[at])
        found.append(begins.pop(at))
    return found


def _size(row: PrefixText) -> int:
    return len(row.tokens)


@dataclass(frozen=True, eq=False, kw_only=True)
class CacheEntry(PrefixText):
    """A row of a cache. Nobody writes into it. `number` names it to its owner.

    `logits`: (vocabulary,) of the last token of a prompt, at `logits_end`.
    `row`: the row of `cache`, the only one unless a request is writing it.
    """

    key: CacheKey
    cache: KVCache
    bytes: int
    logits: Tensor | None = None
    row: int = 0
    number: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def most_bytes(self) -> int:
        """The most bytes of a copy, which has free slots only where it cannot do without."""
        rows, slots = self.cache.batch_size, max(each.table.slots for each in self.cache.layers)
        own, recalled = self.cache.bytes_held // rows, self.cache.recall_bytes // rows
        is_cut = self.holds_all and self.checkpoints is None  # states have one size
        own = own * len(self.tokens) // max(slots, 1) + SLOT_BYTES if is_cut else own
        return own + recalled + self.logits_bytes

    @property
    def logits_bytes(self) -> int:
        """Bytes of its logits."""
        return 0 if self.logits is None else self.logits.nbytes

    def covers(self, other: CacheEntry) -> bool:
        """Return True if nobody needs `other` beside this."""
        return self.key == other.key and self.serves_all_of(other)

    def first(self, tokens: int) -> CacheEntry:
        """A copy of its first tokens."""
        cache = self.cache.copy_of_row(self.row, tokens) if self.holds_all else copy.deepcopy(self.cache)
        return replace(self, cache=cache, row=0, is_text=False).cut(tokens)

    def cut(self, tokens: int) -> CacheEntry:
        """Its first tokens, of which its cache is to have no others."""
        if self.cache.tokens_seen[0] > tokens:
            self.cache.rollback(self.cache.tokens_seen[0] - tokens)
        passes, checkpoints = tuple(each for each in self.passes if each <= tokens), self.cache.checkpoints_of(0)
        found = replace(self, tokens=self.tokens[:tokens], passes=passes, checkpoints=checkpoints)
        return found if (self.logits_end or 0) <= tokens else replace(found, logits=None, logits_end=None)

    @property
    def stored(self) -> EntryInfo:
        """Facts about it for its owner."""
        return EntryInfo(self.number, self.key.kind, self.key.name, len(self.tokens), self.bytes, "memory")


@dataclass(frozen=True)
class EditedRow:
    """A row whose tokens were moved to where a prompt has them. `gaps`: positions whose tokens are still to be read.

    `again`: tokens that it had, and that are read again.
    """

    entry: CacheEntry
    gaps: tuple[int, ...]
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
