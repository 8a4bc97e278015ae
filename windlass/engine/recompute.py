"""Tokens of joined chunks that are read a second time: their choice, and the passes that read them."""

import re
from abc import ABC, abstractmethod
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


def passes(cache: KVCache, positions: Sequence[int], ids: Mapping[int, int], row: int) -> Iterator[Step]:
    """Yield steps that read the tokens at these ascending positions again, in place, over cached tokens."""
    ends, prompt_ends = torch.tensor(cache.next_positions), torch.tensor(cache.rows.prompt_ends)
    for start in range(0, len(positions), cache.chunk):
        places = torch.tensor(positions[start : start + cache.chunk])
        at = torch.full((cache.batch_size, len(places)), EMPTY)
        at[row] = places
        tokens = torch.zeros_like(at)
        tokens[row] = torch.tensor([ids[place] for place in places.tolist()])
        yield Step(
            at.to(cache.device),
            tuple(len(places) * (index == row) for index in range(cache.batch_size)),
            ends.to(cache.device),
            prompt_ends.to(cache.device),
            max(cache.next_positions),
            tokens.to(cache.device),
            defer_eviction=True,
            is_prompt=True,
            is_rewrite=True,
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
        for step in passes(cache, positions, ids, row):
            with suppress(StopAtLayer):
                read_step(model, cache, step)
    finally:
        cache.divergence = None
    distances = found.of_row(row)
    found.keep()
    if cache.heads is not None and cache.heads.is_split:  # a distance is a sum over all heads
        return cache.heads.ranks.sum(distances)
    return distances
