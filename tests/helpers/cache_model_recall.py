"""The evicted tokens that the model of a cache remembers, and the choice of those that a step reads again."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tests.helpers.cache_model_tokens import Kind, phases

Array = NDArray[Any]
PAGE = 8  # tokens, neighbours in the order in which they were written
DECIDING = 16  # newest queries of a step, by which all of its queries recall
DISTANCE = 128  # at which these look for tokens
STEPS = 256  # of a logarithm of a share to 1: closer ones count as equal


class Noted(NamedTuple):
    """A cache after a step: the positions that it held, and the positions that the step recalled, page by page.

    `candidates` is the number of pages that were scored token by token, or 0 for all.
    """

    held: list[list[list[int]]]
    recalled: list[list[list[int]]] | None
    candidates: int


class Memory(NamedTuple):
    """All tokens written to a row, in that order: (kv_heads, tokens, channels) as the recall store decodes them.

    `positions` are -1 for removed tokens. `read_keys` and `read_values` are read by attention where tokens are recalled
    into slots. `largest` and `least` (kv_heads, pages, channels) are digests.
    """

    positions: Array
    keys: Array
    values: Array
    read_keys: Array
    read_values: Array
    largest: Array
    least: Array

    @property
    def tokens(self) -> int:
        """How many it has, dropped ones included."""
        return len(self.positions)

    def cut(self, tokens: int) -> "Memory":
        """The first `tokens` of it. The digest of a page knows those that were there."""
        keys, values, read_keys, read_values = (part[:, :tokens] for part in self[1:5])
        largest, least = (part[:, : -(-tokens // PAGE)] for part in self[5:])
        return Memory(self.positions[:tokens], keys, values, read_keys, read_values, largest, least)

    def moved(self, move: Callable[[int], int | None]) -> "Memory":
        """The memory with tokens elsewhere in the text, as `move` gives. None removes one."""
        places = [-1 if p < 0 else move(p) for p in self.positions.tolist()]
        return self._replace(positions=np.array([-1 if p is None else p for p in places], dtype=np.int64))


class Choice(NamedTuple):
    """Which tokens of a memory one kv head reads again: their indices.

    `is_doubtful`: the cache may have chosen others, unseen. `is_settled`: it was seen to choose others, by rounding.
    """

    tokens: Array
    is_doubtful: bool = False
    is_settled: bool = False


class NotAChoice(AssertionError):
    """The cache recalls a token that no rounding can explain."""


class Search(NamedTuple):
    """One kv head looks for at most `pages` pages of `memory`, by queries (members, tokens, channels).

    `candidates` is the number of pages that are scored token by token, or 0 for all.
    """

    kind: Kind
    queries: Array
    memory: Memory
    head: int
    pages: int
    candidates: int
    is_coded: bool

    def chosen(self, held: Sequence[int], noted: list[int] | None) -> Choice:
        """Tokens that a head with the tokens `held` recalls. `noted` are the positions that the cache recalled.

        Raises: NotAChoice.
        """
        is_recallable = self.memory.positions >= 0
        is_recallable[list(held)] = False
        is_page = np.asarray(by_page(is_recallable, False).any(-1))
        number = int(is_page.sum())
        is_cut = 0 < self.candidates < number
        if number <= self.pages and not is_cut:
            return self.everything(np.flatnonzero(is_recallable), noted)
        peaks, slack = self.peaks(is_recallable)
        is_sure, is_possible = is_page, is_page
        if is_cut:
            is_sure, is_possible = self.candidate_pages(is_page)
            peaks = np.where(is_possible, peaks, -np.inf)
        worth = worth_of(peaks)
        count = min(self.pages, number)
        own = np.sort(np.argsort(-np.round(worth * STEPS), kind="stable")[:count])
        if noted is None:
            rest = without(is_possible, own)
            near = 2 * slack + 1 / STEPS
            is_close = not np.array_equal(is_sure, is_possible) or worth[rest].max() >= worth[own].min() - near
            return Choice(self.tokens_of(own, is_recallable), is_doubtful=bool(is_close))
        found, is_ambiguous = self.found(noted, is_recallable, worth)
        self.check(found, own, worth, slack, peaks, is_sure, is_possible)
        return Choice(self.tokens_of(found, is_recallable), is_ambiguous, not np.array_equal(found, own))

    def everything(self, wanted: Array, noted: list[int] | None) -> Choice:
        """All that may be recalled: there is no choice."""
        found = None if noted is None else sorted(p for p in noted if p >= 0)
        truth = sorted(self.memory.positions[wanted].tolist())
        if found is not None and found != truth:
            raise NotAChoice(f"recalls positions {found}, expected {truth}, which are all")
        return Choice(wanted)

    def tokens_of(self, pages: Array, is_recallable: Array) -> Array:
        """The tokens of pages that may be recalled."""
        own = (pages[:, None] * PAGE + np.arange(PAGE)).ravel()
        own = own[own < len(is_recallable)]
        return own[is_recallable[own]]

    def asked(self) -> tuple[Array, Array]:
        """Queries as they are multiplied with un-rotated keys, and how far a rounding may take each number."""
        pairs = self.queries.shape[-1] // 2
        turn = phases(self.kind.angles, pairs)[DISTANCE]
        each = (self.queries[..., :pairs] + 1j * self.queries[..., pairs:]) * turn * self.kind.scale
        asked = np.concatenate((each.real, each.imag), -1).reshape(-1, 2 * pairs)
        if not self.is_coded:
            return asked, np.zeros_like(asked)
        steps = np.maximum(np.abs(asked).max(-1, keepdims=True) / 127, 1e-38)
        codes = asked / steps
        return np.round(codes) * steps, steps * (np.abs(codes - np.floor(codes) - 0.5) < 1e-3)

    def products(self, keys: Array) -> tuple[Array, float]:
        """Products of each query with keys (tokens, channels), and how far rounding may take them."""
        asked, off = self.asked()
        sizes = np.abs(keys).T
        return asked @ keys.T, float((np.abs(asked) @ sizes * 1e-5 + off @ sizes).max(initial=0.0)) + 1e-6

    def peaks(self, is_recallable: Array) -> tuple[Array, float]:
        """(queries, pages): the largest product of each query with a token of each page."""
        products, slack = self.products(self.memory.keys[self.head])
        return by_page(np.where(is_recallable, products, -np.inf), -np.inf).max(-1), slack

    def candidate_pages(self, is_page: Array) -> tuple[Array, Array]:
        """Which pages are surely looked at, and which may be: those whose digests promise most (Quest)."""
        (asked, off), slack = self.asked(), 1e-6
        most = np.zeros((len(asked), len(is_page)))
        for part, digest in ((asked.clip(min=0), self.memory.largest), (asked.clip(max=0), self.memory.least)):
            keys = digest[self.head]
            most += part @ keys.T
            slack += float((np.abs(part) @ np.abs(keys).T * 1e-5 + off @ np.abs(keys).T).max())
        worth = worth_of(np.where(is_page, most, -np.inf))
        order = np.sort(worth[is_page])[::-1]
        last, next_one, near = order[self.candidates - 1], order[self.candidates], 2 * slack + 1 / STEPS
        is_possible = is_page & (worth >= last - near)
        return is_page & (worth > next_one + near), is_possible

    def found(self, noted: list[int], is_recallable: Array, worth: Array) -> tuple[Array, bool]:
        """The pages that `noted` positions are of, and whether they may be of others."""
        patterns = by_page(np.where(is_recallable, self.memory.positions, -1), -1)
        pages: dict[tuple[int, ...], list[int]] = {}
        for page in np.argsort(-worth, kind="stable").tolist():
            pages.setdefault(tuple(patterns[page].tolist()), []).append(page)
        result, is_ambiguous = [], False
        for start in range(0, len(noted), PAGE):
            pattern = tuple(noted[start : start + PAGE])
            if max(pattern) < 0:
                continue
            if not pages.get(pattern):
                raise NotAChoice(f"recalls positions {pattern}, which are no page of those that may be recalled")
            is_ambiguous |= len(pages[pattern]) > 1
            result.append(pages[pattern].pop(0))
        return np.sort(np.array(result, dtype=np.int64)), is_ambiguous

    def check(
        self, found: Array, own: Array, worth: Array, slack: float, peaks: Array, is_sure: Array, is_possible: Array
    ) -> None:
        """Raises: NotAChoice where rounding cannot make `found` of `own`, the best pages."""
        what = f"recalls pages {found.tolist()}, expected {own.tolist()}"
        if len(found) != len(own) or not is_possible[found].all():
            raise NotAChoice(what)
        if not np.array_equal(is_sure, is_possible):
            return  # shares are of unknown sets
        rest = without(is_possible, found)
        if not len(rest):
            return
        least = np.round((worth[rest] - slack) * STEPS).max()
        if least > np.round((worth[found] + slack) * STEPS).min():
            raise NotAChoice(f"{what}: {worth[rest].max():.6g} is more than {worth[found].min():.6g}")
        for page in found.tolist():
            earlier = rest[rest < page]
            if len(earlier) and (peaks[:, earlier] == peaks[:, page : page + 1]).all(0).any():
                raise NotAChoice(f"{what}: of equal pages the earlier comes first")


def without(is_page: Array, pages: Array) -> Array:
    """The pages that `is_page` tells, but for some."""
    is_left = is_page.copy()
    is_left[pages] = False
    return np.flatnonzero(is_left)


def by_page(each: Array, filler: object) -> Array:
    """(..., tokens) as (..., pages, 8)."""
    rest = -each.shape[-1] % PAGE
    padded = np.concatenate((each, np.full((*each.shape[:-1], rest), filler, dtype=each.dtype)), -1)
    return padded.reshape(*each.shape[:-1], -1, PAGE)


def worth_of(peaks: Array) -> Array:
    """The largest share of each page, as a logarithm, in the softmax of any query (queries, pages)."""
    top = peaks.max(-1, keepdims=True)
    weights = np.exp(peaks - top.clip(min=-1e300))
    rows, best = np.arange(len(peaks)), weights.argmax(-1)
    rest = weights.copy()
    rest[rows, best] = 0  # beside the largest, whose odds a difference of sums would lose
    others = rest.sum(-1)
    total = (others + weights[rows, best])[:, None] - weights
    total[rows, best] = others
    with np.errstate(divide="ignore"):
        odds: Array = (np.log(weights) - np.log(total)).max(0)
    # Of shares up to a half their logarithm, beyond that of the odds, less that of 2.
    return np.where(odds > 0, odds - np.log(2), odds - np.log1p(np.exp(np.minimum(odds, 0))))
