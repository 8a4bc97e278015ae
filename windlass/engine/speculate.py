"""Speculation: tokens that may follow are drafted, read in one pass, and taken back where the model chooses others."""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import current_thread, main_thread
from types import FrameType
from typing import Final, final

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.cache.options import CacheOptions
from windlass.core.errors import UsageError, check_kind, shown
from windlass.core.parse import near_to
from windlass.core.step import Pass
from windlass.engine.decode import likeliest
from windlass.engine.prefill import feed, feed_tokens, passes, rest_of
from windlass.hf.forward import vocabulary_of
from windlass.hf.kv_cache import KVCache
from windlass.hf.load import load
from windlass.hf.weights import weight_bytes

LOOKUP, OFF = "lookup", "off"  # the names of options
# Length of the n-gram that must match: after a hit, at first, after a miss (and the longest looked for).
SHORTEST, USUAL, MATCHED = 2, 3, 5
CANDIDATES: Final = 8  # places that are compared, at most
BUCKETS: Final = 1 << 16
NOWHERE: Final = -1


class DraftSource(ABC):
    """A text, and the tokens that may follow it. `cost`: the time to find a draft, in steps of the model."""

    cost: float = 0.0

    @abstractmethod
    def __len__(self) -> int:
        """The number of tokens of the text."""

    @abstractmethod
    def push(self, token: int) -> None:
        """Add the next token of the text."""

    @abstractmethod
    def following(self, most: int, least_match: int) -> list[int]:
        """Up to `most` tokens that may follow, at least one, or none where nothing is likely enough.

        `least_match` is a number of last tokens: the more, the surer the source is to be.
        """


@final
class LookupIndex(DraftSource):
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
        place = len(self._text)
        bucket = self._bucket(self._text[-1] if place else NOWHERE, token)
        self._text.append(token)
        self._before.append(self._latest[bucket])
        self._latest[bucket] = place

    def following(self, most: int, least_match: int) -> list[int]:
        """The `most` tokens after an earlier place where at least the last `least_match` tokens came before."""
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


@final
class DraftModel:
    """A smaller model that drafts tokens for another one with the same tokenizer.

    It reads all that the other reads, into a cache of its own with these options (default: no budget), whose `rollback`
    is raised to the longest draft. A text that begins with the last one is read from there on.

    Raises: UsageError for a model whose cache cannot take single tokens back, or options of several rows.
    """

    def __init__(self, model: PreTrainedModel, options: CacheOptions | None = None) -> None:
        options = CacheOptions() if options is None else options
        check_kind("options", options, CacheOptions, "CacheOptions or None")
        if options.batch != 1:
            raise UsageError(f"a draft model drafts one text, but its options have batch={options.batch}. Leave it out")
        rollback = max(options.rollback, LONGEST + 1)
        self.model, self._cache = model, KVCache.from_options(model, replace(options, rollback=rollback))
        check_drafts(type(model).__name__, self._cache)
        self._held = array("i")  # the tokens that the cache has read

    def following(self, text: array[int], most: int, vocabulary: int) -> list[int]:
        """The `most` tokens that are most likely to follow, one after the other, with ids below `vocabulary`.

        After an error or an interrupt the cache is empty.
        """
        try:
            logits = self._read(text)
            drafts = [int(likeliest(logits[:, :vocabulary]))]
            while len(drafts) < most:
                logits = self._next(drafts[-1])
                drafts.append(int(likeliest(logits[:, :vocabulary])))
        except BaseException:
            self._forget()
            raise
        return drafts

    def _read(self, text: array[int]) -> Tensor:
        """Read the tokens of a text that the cache lacks, at least the last one. Returns its logits."""
        ends = (len(self._held) - n for n in range(min(LONGEST + 1, len(self._held)) + 1))
        common = next((end for end in ends if end < len(text) and self._held[:end] == text[:end]), 0)
        if len(self._held) - common > LONGEST + 1:
            self._forget()
        take_back(self._cache, len(self._held) - common)
        del self._held[common:]
        rest = text[common:]
        if len(rest) > 2:  # a pass of two takes as long as two steps
            logits = rest_of(passes(self.model, self._cache, [rest.tolist()]))
            self._held.extend(rest)
            return logits
        return [self._next(token) for token in rest][-1]

    def _next(self, token: int) -> Tensor:
        logits = feed_tokens(self.model, self._cache, {0: token})
        self._held.append(token)
        return logits

    def _forget(self) -> None:
        self._cache.reset()
        del self._held[:]


@final
class DraftText(DraftSource):
    """A text of `model` that a draft model reads, once the first draft is wanted.

    It has no drafts from the first token on that the draft model's embedding lacks.
    """

    def __init__(self, drafts: DraftModel, model: PreTrainedModel) -> None:
        self._drafts, self._vocabulary, self._text = drafts, vocabulary_of(model), array("i")
        self._readable, self._can_read = vocabulary_of(drafts.model), True
        self.cost = weight_bytes(drafts.model) / weight_bytes(model)

    def __len__(self) -> int:
        return len(self._text)

    def push(self, token: int) -> None:
        self._text.append(token)
        # Models of one tokenizer may have embeddings of different sizes, padded or with tokens of their own.
        self._can_read &= token < self._readable

    def following(self, most: int, least_match: int) -> list[int]:
        return [] if not self._can_read else self._drafts.following(self._text, most, self._vocabulary)


PASS_COST: Final = 0.75  # of a pass with drafts, in steps of one token: see docs/log.md
DRAFT_COST: Final = 0.25  # of each draft
FIRST_CREDIT: Final = 3.0
MOST_CREDIT: Final = 8.0
SHARE: Final = 0.03  # of the time of a text, that drafts may cost
FIRST: Final = 4  # drafts
LONGEST: Final = 15  # drafts: a pass takes so many tokens and one more without growing


@final
class Drafter:
    """Drafts of one text, out of a source (default: the text before them), as long as that pays.

    Time is counted in steps of one token. Accepted drafts add to a credit, passes with drafts take from it, and each
    token adds a small share. A draft is made where the credit pays for its pass, so a text without repetition is hardly
    slower. No clock is asked: the same text is drafted alike.
    """

    def __init__(self, tokens: Iterable[int] = (), source: DraftSource | None = None) -> None:
        self._source = LookupIndex() if source is None else source
        self._credit, self._length, self._least_match = FIRST_CREDIT, FIRST, USUAL
        self.read(tokens)

    def read(self, tokens: Iterable[int]) -> None:
        """Add tokens of a prompt."""
        for token in tokens:
            self._source.push(token)

    def push(self, token: int) -> None:
        """Add the next token of the text."""
        self._source.push(token)
        self._credit = min(self._credit + SHARE, MOST_CREDIT)

    def draft(self, most: int) -> list[int]:
        """Tokens that may follow, at most `most`."""
        length = min(self._length, most, int((self._credit - PASS_COST) / self._draft_cost))
        return self._source.following(length, self._least_match) if length > 0 else []

    def note(self, drafted: int, accepted: int) -> None:
        """Note how many of the tokens drafted last the model has chosen."""
        if not drafted:
            return
        self._credit = min(self._credit + accepted - PASS_COST - self._draft_cost * drafted, MOST_CREDIT)
        self._least_match = SHORTEST if accepted else MATCHED
        self._length = min(2 * drafted, LONGEST) if accepted == drafted else max(accepted, FIRST)

    @property
    def _draft_cost(self) -> float:
        return DRAFT_COST + self._source.cost

    @property
    def tokens(self) -> int:
        """The number of tokens of the text."""
        return len(self._source)


Speculate = str | DraftModel | None
"""`lookup`, `off` (the same as None), or a `DraftModel`."""


def check_speculate(speculate: Speculate) -> None:
    """Raises: UsageError for a value that is not a `Speculate`."""
    if speculate not in (LOOKUP, OFF, None) and not isinstance(speculate, DraftModel):
        raise UsageError(f"speculate={shown(speculate)} is no kind of drafts. Use {LOOKUP!r}, {OFF!r}, or a DraftModel")


def check_drafts_name(name: str | None) -> None:
    """Raises: UsageError for a name of drafts that can be no model's, before the large model is loaded."""
    if name in (LOOKUP, OFF, None) or "/" in name or Path(name).exists():
        return
    raise UsageError(
        f"--speculate {name} is neither {LOOKUP!r} nor {OFF!r}, and no folder, file or hub name (owner/name) of a model"
        f"{near_to(name, (LOOKUP, OFF))}"
    )


def load_drafts(
    name: str | None, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: CacheOptions
) -> Speculate:
    """The drafts that a command line names: `lookup`, `off`, or a model, whose cache has the budget of `options`.

    Raises: UsageError for a model that is not there, or that has another tokenizer.
    """
    if name in (LOOKUP, OFF, None):
        return name
    drafts, own = load(name, device=str(model.device))
    if own.get_vocab() != tokenizer.get_vocab():
        raise UsageError(
            f"--speculate {name} reads other tokens than the model. Use a smaller model of the same family, or {LOOKUP}"
        )
    return DraftModel(drafts, CacheOptions(budget=options.budget, chunk=options.chunk))


def drafter_of(speculate: Speculate, model: PreTrainedModel, tokens: Iterable[int] = ()) -> Drafter:
    """The drafter of a new text of `model`, for drafts that are not off."""
    return Drafter(tokens, DraftText(speculate, model) if isinstance(speculate, DraftModel) else LookupIndex())


def is_drafted(speculate: Speculate, cache: KVCache) -> bool:
    """Return True if texts are to be drafted. Raises: UsageError where the cache cannot take drafts back."""
    check_speculate(speculate)
    if speculate in (OFF, None):
        return False
    check_drafts(f"speculate={shown(speculate)}", cache)
    return True


def check_drafts(asking: str, cache: KVCache) -> None:
    """Raises: UsageError where the cache cannot take single tokens back."""
    if cache.recurrent:
        raise UsageError(
            f"{asking} takes single drafts back, and {cache.recurrent[0].label} can only take back its last pass as a "
            "whole. Leave speculate out"
        )
    if cache.heads is not None:
        raise UsageError(f"{asking} drafts in one process, and there are {cache.heads.ranks.size}. Leave speculate out")


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
