"""Speculation: tokens that may follow are drafted, read in one pass, and taken back where the model chooses others."""

from __future__ import annotations

import signal
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import current_thread, main_thread
from types import FrameType
from typing import Final, final

from torch import Tensor
from transformers import PreTrainedModel

from windlass.core.errors import UsageError, shown
from windlass.core.step import Pass
from windlass.engine.prefill import feed, feed_tokens
from windlass.hf.kv_cache import KVCache

LOOKUP, OFF = "lookup", "off"  # the names of options
SHORTEST, USUAL, MATCHED = 2, 3, 5  # last tokens that came before: after a hit, at first, and after a miss
CANDIDATES: Final = 8  # places that are compared, at most
BUCKETS: Final = 1 << 16
NOWHERE: Final = -1


@final
class LookupIndex:
    """A text and the places of its pairs of tokens. A token takes constant time and 8 bytes.

    `_latest` has for each hash the place of the latest pair, and `_before` for each place the one before it.

    Source: prompt lookup decoding, Saxena 2023 (github.com/apoorvumang/prompt-lookup-decoding). Differs: of the latest
    places the longest match counts, the text may overlap its own draft, and the places are found by hash chains as in
    LZ77.
    """

    def __init__(self) -> None:
        self._text, self._before = array("i"), array("i")
        self._latest = array("i", [NOWHERE]) * BUCKETS

    def __len__(self) -> int:
        return len(self._text)

    def push(self, token: int) -> None:
        """Add the next token of the text."""
        place = len(self._text)
        bucket = self._bucket(self._text[-1] if place else NOWHERE, token)
        self._text.append(token)
        self._before.append(self._latest[bucket])
        self._latest[bucket] = place

    def following(self, most: int, least_match: int) -> list[int]:
        """The `most` tokens after an earlier place where the last tokens came before. Empty where there is none.

        At least the last `least_match` tokens came before there.
        """
        text, place = self._text, len(self._text) - 1
        best, length, tries = NOWHERE, least_match - 1, CANDIDATES
        while place > 0 and tries and length < MATCHED and (place := self._before[place]) > 0:
            found = self._match(place)
            if found > length:
                best, length = place, found
            tries -= 1
        if best == NOWHERE:
            return []
        period = len(text) - 1 - best  # a draft that is longer repeats itself
        return [text[best + 1 + ahead % period] for ahead in range(most)]

    def _match(self, place: int) -> int:
        """The number of last tokens of the text that also end at `place`, at most `MATCHED`."""
        text, end, most = self._text, len(self._text) - 1, min(MATCHED, place + 1)
        return next((n for n in range(most) if text[place - n] != text[end - n]), most)

    def _bucket(self, one: int, other: int) -> int:
        return (one * 0x9E3779B1 ^ other * 0x85EBCA6B) >> 7 & BUCKETS - 1


PASS_COST: Final = 0.75  # of a pass with drafts, in steps of one token: see docs/log.md
DRAFT_COST: Final = 0.25  # of each draft
FIRST_CREDIT: Final = 3.0
MOST_CREDIT: Final = 8.0
SHARE: Final = 0.03  # of the time of a text, that drafts may cost
FIRST: Final = 4  # drafts
LONGEST: Final = 15  # drafts: a pass takes so many tokens and one more without growing


@final
class Drafter:
    """Drafts of one text, by what came before in it, as long as that pays.

    Time is counted in steps of one token. Accepted drafts add to a credit, passes with drafts take from it, and each
    token adds a small share. A draft is made where the credit pays for its pass, so a text without repetition is hardly
    slower. No clock is asked: the same text is drafted alike.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._index, self._credit, self._length, self._least_match = LookupIndex(), FIRST_CREDIT, FIRST, USUAL
        self.read(tokens)

    def read(self, tokens: Iterable[int]) -> None:
        """Add tokens of a prompt."""
        for token in tokens:
            self._index.push(token)

    def push(self, token: int) -> None:
        """Add the next token of the text."""
        self._index.push(token)
        self._credit = min(self._credit + SHARE, MOST_CREDIT)

    def draft(self, most: int) -> list[int]:
        """Tokens that may follow, at most `most`."""
        length = min(self._length, most, int((self._credit - PASS_COST) / DRAFT_COST))
        return self._index.following(length, self._least_match) if length > 0 else []

    def note(self, drafted: int, accepted: int) -> None:
        """Note how many of the tokens drafted last the model has chosen."""
        if not drafted:
            return
        self._credit = min(self._credit + accepted - PASS_COST - DRAFT_COST * drafted, MOST_CREDIT)
        self._least_match = SHORTEST if accepted else MATCHED
        self._length = min(2 * drafted, LONGEST) if accepted == drafted else max(accepted, FIRST)

    @property
    def tokens(self) -> int:
        """The number of tokens of the text."""
        return len(self._index)


def is_lookup(speculate: object) -> bool:
    """Return True for `lookup`, and False for `off` or None. Raises: UsageError for anything else."""
    if speculate not in (LOOKUP, OFF, None):
        raise UsageError(f"speculate={shown(speculate)} is no kind of drafts. Use {LOOKUP!r} or {OFF!r}")
    return speculate == LOOKUP


def is_drafted(speculate: object, cache: KVCache) -> bool:
    """Return True if texts are to be drafted. Raises: UsageError where the cache cannot take drafts back."""
    if not is_lookup(speculate):
        return False
    if cache.recurrent:
        raise UsageError(
            f"speculate={speculate!r} takes single drafts back, and {cache.recurrent[0].label} can only take back its "
            "last pass as a whole. Leave speculate out"
        )
    if cache.heads is not None:
        raise UsageError(
            f"speculate={speculate!r} needs one process, and there are {cache.heads.ranks.size}. Leave it out"
        )
    return True


def most_drafts(cache: KVCache, most: int) -> int:
    """`most`, or 0 where a longer text is rotated otherwise, so that a draft would change how a token is read."""
    end = max(cache.next_positions) + 1
    rotaries = [each for each in cache.rotaries if each is not None]
    most = min(most, LONGEST)
    return most if all(each.same_table(end, end + most) for each in rotaries) else 0


def read_drafted(model: PreTrainedModel, cache: KVCache, tokens: Sequence[int]) -> Tensor:
    """Read a token of a cache's only row, and drafts behind it. Returns their (tokens, vocabulary) logits."""
    if len(tokens) == 1:
        return feed_tokens(model, cache, {0: tokens[0]})
    return feed(model, cache, [list(tokens)], [*range(len(tokens))], Pass(drafts=len(tokens) - 1))[0]


def take_back(cache: KVCache, tokens: int) -> None:
    """Take back the newest `tokens` of a cache's only row. Ctrl-C waits until that is done."""
    if tokens:
        with uninterrupted():
            cache.rollback(tokens)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let Ctrl-C wait until the block has ended. In other threads nothing changes, as Python interrupts none."""
    before = signal.getsignal(signal.SIGINT)
    if not callable(before) or current_thread() is not main_thread():
        yield
        return
    waiting: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: waiting.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting:
            before(*waiting[-1])
