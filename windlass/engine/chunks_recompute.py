"""Which tokens of joined parts are read a second time, now that other text stands before them."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Final, NamedTuple, final

from torch import Tensor

from windlass.core.check import check_kind, real_number, whole_number
from windlass.core.close_names import near_to
from windlass.core.errors import UsageError
from windlass.core.limits import MAX_NUMBER
from windlass.core.spec import parse_spec


class Span(NamedTuple):
    """Where a part stands, and whether what stands before it is what its tokens have read already."""

    start: int
    stop: int
    is_exact: bool

    @property
    def stale(self) -> range:
        """The positions of tokens that may need a second reading."""
        return range(0) if self.is_exact else range(self.start, self.stop)


Measure = Callable[[Sequence[int]], Tensor]
"""How far the values of the tokens at these positions are from what they would be, in one layer."""


class Recompute(ABC):
    """Chooses tokens. A frozen dataclass of numbers, whose text `recompute_of` reads back."""

    @abstractmethod
    def chosen(self, spans: Sequence[Span], held: set[int], measure: Measure) -> set[int]:
        """Positions out of `spans`; `held` are those of tokens that were not evicted."""


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
    """The `share` of all tokens whose values in the second layer differ most from what they would be here.

    Source: CacheBlend, Yao et al. 2024 (arXiv:2405.16444), section 4.3.
    Differs: a token sees what stands up to it, and nothing behind; the chosen tokens are read from the first layer on.
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
    """What `spec` names, or what it is. Raises: UsageError for another name, or numbers that it does not take."""
    if isinstance(spec, Recompute):
        return spec
    check_kind("recompute", spec, str, "a mode or its name", f"use one of: {FORMS}")
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
    raise UsageError(f"recompute={spec!r} is no mode; use one of: {FORMS}{near_to(spec, NAMES)}")
