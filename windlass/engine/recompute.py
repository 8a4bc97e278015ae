"""Passes over tokens in the middle of a text: recomputed tokens of joined parts, new tokens of an edited history.

`Alignment` finds the tokens that an edited history shares with the text before the edit.
"""

import re
from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import ceil
from typing import Final, NamedTuple, final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windlass.cache.recompute import Divergence, StopAtLayer
from windlass.core.errors import UsageError, check_kind, real_number, whole_number
from windlass.core.parse import MAX_NUMBER, near_to, parse_spec
from windlass.core.positions import EMPTY
from windlass.core.step import Pass, Step
from windlass.core.types import shared
from windlass.hf.forward import forward
from windlass.hf.kv_cache import KVCache


class Span(NamedTuple):
    """Place of a part in a text. `is_exact`: the part was encoded after the very text that precedes it here."""

    start: int
    stop: int
    is_exact: bool

    @property
    def stale(self) -> range:
        """The positions of tokens that may need a second reading."""
        return range(0) if self.is_exact else range(self.start, self.stop)


Measure = Callable[[Sequence[int]], Tensor]
"""Measure how far one layer's held values of the tokens at these positions are from freshly computed ones."""


class Recompute(ABC):
    """Chooses tokens. A frozen dataclass of numbers, whose text `recompute_of` reads back."""

    @abstractmethod
    def chosen(self, spans: Sequence[Span], held: set[int], measure: Measure) -> set[int]:
        """Select positions within `spans`. `held`: positions of tokens that were not evicted."""


@final
@dataclass(frozen=True)
class Nothing(Recompute):
    """No token: parts stay as they were read alone."""

    def chosen(self, spans: Sequence[Span], held: set[int], measure: Measure) -> set[int]:
        return set()

    def __str__(self) -> str:
        return "none"


@final
@dataclass(frozen=True)
class First(Recompute):
    """The first `tokens` of every part.

    Source: EPIC, Hu et al. 2025 (arXiv:2410.15332), LegoLink.
    Differs: a part need not begin with a token of its own that marks a text's start.
    """

    tokens: int

    def __post_init__(self) -> None:
        whole_number("first's tokens", self.tokens, 1, MAX_NUMBER)

    def chosen(self, spans: Sequence[Span], held: set[int], measure: Measure) -> set[int]:
        return {position for span in spans for position in span.stale[: self.tokens]} & held

    def __str__(self) -> str:
        return f"first({self.tokens})"


@final
@dataclass(frozen=True)
class Divergent(Recompute):
    """Recompute the `share` of all tokens whose second-layer values differ most from the values they would have here.

    Source: CacheBlend, Yao et al. 2024 (arXiv:2405.16444), section 4.3.
    Differs: a token attends to tokens up to itself only, and the selected tokens are read from the first layer on.
    """

    share: float = 0.16

    def __post_init__(self) -> None:
        if not 0 < real_number("divergent's share", self.share) <= 1:
            raise UsageError(f"divergent's share must be above 0 and at most 1, got {self.share}")

    def chosen(self, spans: Sequence[Span], held: set[int], measure: Measure) -> set[int]:
        candidates = sorted({position for span in spans for position in span.stale} & held)
        if not candidates:
            return set()
        distances = measure(candidates)
        count = min(ceil(self.share * sum(span.stop - span.start for span in spans)), len(candidates))
        best = distances.argsort(descending=True, stable=True)[:count].tolist()
        return {candidates[at] for at in best}

    def __str__(self) -> str:
        return f"divergent({self.share:g})"


@final
@dataclass(frozen=True)
class Everything(Recompute):
    """Every token: as if the text had been read anew."""

    def chosen(self, spans: Sequence[Span], held: set[int], measure: Measure) -> set[int]:
        return {position for span in spans for position in span.stale} & held

    def __str__(self) -> str:
        return "all"


NAMES: Final = ("none", "first", "divergent", "all")
FORMS: Final = "none, first(16), divergent(0.16), all"


def recompute_of(spec: str | Recompute) -> Recompute:
    """The rule that `spec` names, or `spec` itself.

    Raises: UsageError for another name, or numbers that the rule does not take.
    """
    if isinstance(spec, Recompute):
        return spec
    check_kind("recompute", spec, str, "a mode or its name", f"Use one of: {FORMS}")
    typed = parse_spec(spec)
    if typed is not None and not typed.named:
        match typed.name, typed.positional:
            case "none", ():
                return Nothing()
            case "all", ():
                return Everything()
            case "first", (tokens,) if re.fullmatch(r"\d{1,10}", tokens):
                return First(int(tokens))
            case "divergent", ():
                return Divergent()
            case "divergent", (share,) if re.fullmatch(r"\d?\.?\d{1,9}", share):
                return Divergent(float(share))
    raise UsageError(f"recompute={spec!r} is no mode. Use one of: {FORMS}{near_to(spec, NAMES)}")


LOOKED_AT: Final = 1  # the attention layer in which `Divergent` compares values


def begin_of_text(model: PreTrainedModel) -> int | None:
    """The token that begins a text, as the model's config names it."""
    found = model.config.get_text_config().bos_token_id
    return None if found is None else int(found)


def own_starts(begins: int | None, firsts: Sequence[int], spans: Sequence[Span]) -> set[int]:
    """Return the positions of beginning-of-text tokens in parts that do not begin a text here.

    `firsts`: the first id of each part.
    """
    pairs = zip(firsts, spans, strict=True)
    return {span.start for first, span in pairs if first == begins and span.start > 0 and not span.is_exact}


def rewrite_steps(
    cache: KVCache, positions: Sequence[int], ids: Mapping[int, int], row: int, is_insert: bool = False
) -> Iterator[Step]:
    """Yield steps that read the tokens at these ascending positions again, in place, over cached tokens.

    `is_insert`: they are no tokens of the cache yet, and fill the gaps of its text.
    """
    ends, prompt_ends = torch.tensor(cache.next_positions), torch.tensor(cache.rows.prompt_ends)
    for start in range(0, len(positions), cache.chunk):
        places = torch.tensor(positions[start : start + cache.chunk])
        at = torch.full((cache.batch_size, len(places)), EMPTY)
        at[row] = places
        tokens = torch.zeros_like(at)
        tokens[row] = torch.tensor([ids[place] for place in places.tolist()])
        yield Step(
            positions=at.to(cache.device),
            lengths=tuple(len(places) * (index == row) for index in range(cache.batch_size)),
            next_positions=ends.to(cache.device),
            prompt_ends=prompt_ends.to(cache.device),
            end=max(cache.next_positions),
            ids=tokens.to(cache.device),
            defer_eviction=not is_insert,
            is_prompt=True,
            is_rewrite=not is_insert,
            is_insert=is_insert,
            sinks=cache.rows.sinks(cache.device) if is_insert else None,
        )


def read_step(model: PreTrainedModel, cache: KVCache, step: Step) -> None:
    """Let the model read one of these steps."""
    assert step.ids is not None, "a step of tokens without ids"
    forward(model, step.ids, None, cache, [], Pass(step=step))


def divergence(
    model: PreTrainedModel, cache: KVCache, positions: Sequence[int], ids: Mapping[int, int], row: int
) -> Tensor:
    """Distances of the tokens' values in the second layer from those of a fresh read, at these positions.

    The layer then has the new values.
    """
    layers = cache.by_layer
    if len(layers) <= LOOKED_AT:
        raise UsageError("recompute=divergent compares values of the second attention layer, and this model has one")
    layer = layers[LOOKED_AT].whole
    if layer is None:
        raise UsageError("recompute=divergent can't be combined with shares. Use first(16), or leave shares out")
    found = Divergence(LOOKED_AT, layer)
    cache.divergence = found
    try:
        for step in rewrite_steps(cache, positions, ids, row):
            with suppress(StopAtLayer):
                read_step(model, cache, step)
    finally:
        cache.divergence = None
    distances = found.of_row(row)
    found.keep()
    if cache.heads is not None and cache.heads.is_split:  # a distance is a sum over all heads
        return cache.heads.ranks.all_reduce(distances)
    return distances


GRAM: Final = 8  # tokens by which equal runs are found
LEAST: Final = 2 * GRAM  # tokens of a run that is worth a pass of its own around it
STRETCH: Final = 64


def _extension(one: tuple[int, ...], first: int, other: tuple[int, ...], second: int) -> int:
    """The number of tokens that both share, from `first` on in `one` and from `second` on in `other`."""
    size, stretch = 0, STRETCH
    while True:
        more = shared(one[first + size : first + size + stretch], other[second + size : second + size + stretch])
        size += more
        if more < stretch:
            return size
        stretch *= 2


class Match(NamedTuple):
    """A run of `size` equal tokens, from `old` on in one text and from `new` on in another."""

    old: int
    new: int
    size: int

    def cut(self, start: int, stop: int) -> "Match":
        """The run without its first `start` and its last `stop` tokens."""
        return Match(self.old + start, self.new + start, self.size - start - stop)


class Sinks(NamedTuple):
    """Numbers of first tokens that are never evicted: of the row as it is, and of the prompt that it becomes."""

    old: int
    new: int

    def parts(self, run: Match) -> list[Match]:
        """The parts of a run without the tokens that would come to stand among these, and may have been evicted."""
        start = min(max(self.old - run.old, 0), run.size)
        stop = min(max(self.new - run.new, 0), run.size)
        return [run] if stop <= start else [run.cut(0, run.size - start), run.cut(stop, 0)]


@final
class Alignment:
    """Finds runs of a prompt in other texts, in time that grows with their tokens, whatever these are."""

    def __init__(self, prompt: tuple[int, ...]) -> None:
        self._prompt = prompt
        self._starts: dict[tuple[int, ...], int] = {}  # of runs of `GRAM` tokens that the prompt has once
        for start in range(len(prompt) - GRAM + 1):
            gram = prompt[start : start + GRAM]
            self._starts[gram] = -1 if gram in self._starts else start

    def to(self, old: tuple[int, ...]) -> list[Match]:
        """Runs of at least `LEAST` tokens, and the common beginning of any length, in the order of both texts.

        The longest come first: others give way where they overlap them, or stand on the other side of them.
        """
        head = shared(old, self._prompt)
        found = [Match(0, 0, head)] if head else []
        for run in sorted(self._runs(old, head), key=lambda each: -each.size):
            at = bisect(found, run.new, key=lambda each: each.new)
            before, after = found[max(at - 1, 0) : at], found[at : at + 1]
            start = max([0, *(max(each.old + each.size - run.old, each.new + each.size - run.new) for each in before)])
            stop = max([0, *(max(run.old - each.old, run.new - each.new) + run.size for each in after)])
            if run.size - start - stop >= LEAST:
                found.insert(at, run.cut(start, stop))
        return found

    def _runs(self, old: tuple[int, ...], head: int) -> Iterator[Match]:
        """Runs behind the common beginning that have a gram which the prompt has once, and the common end."""
        rest, end = min(len(old), len(self._prompt)) - head, head
        tail = shared(old[: -rest - 1 : -1], self._prompt[: -rest - 1 : -1])
        yield Match(len(old) - tail, len(self._prompt) - tail, tail)
        for at in range(head, len(old) - GRAM + 1, GRAM):
            here = self._starts.get(old[at : at + GRAM], -1)
            if at < end or here < head:
                continue
            start, stop = at, at + GRAM
            while start > end and here > head and old[start - 1] == self._prompt[here - 1]:
                start, here = start - 1, here - 1
            size = stop - start + _extension(old, stop, self._prompt, here + stop - start)
            yield Match(start, here, size)
            end = start + size


@dataclass(frozen=True)
class EditPlan:
    """A prompt's tokens that a row has: equal `runs` of both, in order. `again`: more of them, which are read again."""

    runs: tuple[Match, ...] = ()
    again: int = 0

    @classmethod
    def of(cls, runs: Sequence[Match], tokens: int, sinks: Sinks, window: int) -> "EditPlan":
        """The plan for a prompt of so many tokens, whose last is read in any case.

        `window`: tokens behind each edit to be read again.
        """
        found = list[Match]()
        parts = [part for each in runs for part in sinks.parts(each)]
        again = sum(each.size for each in runs) - sum(part.size for part in parts)
        for run in parts:
            is_edit = run.new > 0 or run.old > 0
            begin = min(window * is_edit, run.size)
            kept = run.cut(begin, max(run.new + run.size - tokens + 1, 0))
            is_taken = kept.size >= (LEAST if is_edit else 1)
            again += begin if is_taken else begin + kept.size
            if is_taken:
                found.append(kept)
        return cls(tuple(found), again)

    @property
    def cached(self) -> int:
        """Tokens that are not read."""
        return sum(run.size for run in self.runs)

    @property
    def end(self) -> int:
        """One past the last of them in the prompt."""
        return self.runs[-1].new + self.runs[-1].size if self.runs else 0

    @property
    def head(self) -> int:
        """The number of tokens before the first edit."""
        return self.runs[0].size if self.runs and self.runs[0].old == self.runs[0].new == 0 else 0

    def moves(self, tokens: int) -> list[int]:
        """The new position of each of the row's tokens, EMPTY for those that the prompt lacks."""
        found = [EMPTY] * tokens
        for run in self.runs:
            found[run.old : run.old + run.size] = range(run.new, run.new + run.size)
        return found

    @property
    def gaps(self) -> list[int]:
        """The positions before `end` that no token of the row takes."""
        starts = [0, *(run.new + run.size for run in self.runs)]
        return [at for start, run in zip(starts, self.runs, strict=False) for at in range(start, run.new)]
