"""What only some policies need: a policy derives the interface beside `Policy`.

The cache looks them up with `find`, in the policy and then in what it wraps, so that a wrapper repeats none.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from torch import Tensor

from windlass.core.decode import Ranking
from windlass.core.model_info import ModelInfo
from windlass.core.shapes import NewKeys, Queries

PerToken = dict[str, Tensor]


class OneShot(ABC):  # noqa: B024  # every member has a default
    """Ranks a first text as a whole.

    `engine.prefill` holds it whole, whatever the budget, and evicts what is over budget at its end.
    """

    scoring_chunk: int = 0
    """Tokens in each step of a second pass over the text, before that eviction; 0: no second pass. The policy
    observes these steps, and the cache keeps nothing else of them. Their `mass` is not a sum, but the largest
    probability that one query head of one query gave the slot."""

    shares_budget: bool = False
    """Whether the eviction ranks the tokens of all layers together, so that layers keep different numbers."""


class Budgeter(ABC):
    """Gives each layer a budget of its own."""

    @abstractmethod
    def budgets(self, budget: int, layers: int, least: int) -> list[int]:
        """Tokens that each layer keeps, from the bottom up: `budget` on average, and no layer below `least`."""


@dataclass(frozen=True)
class NewTokens:
    """A step's tokens before they are written: what attention reads of them, and the state that they start with.

    `state` is (batch, kv_heads, tokens) each, or (batch, 1, tokens) with `per_head=False`.
    """

    queries: Queries
    keys: NewKeys
    state: PerToken = field(default_factory=dict)


class Trained(ABC):  # noqa: B024  # every member has a default
    """Serves the models that were trained, or measured, for it."""

    def check(self, model: ModelInfo) -> None:  # noqa: B027  # not all are bound to one model
        """Called when a cache is made. Raises: PolicyError where the policy cannot serve this model."""

    def preprocess(self, queries: Queries, keys: NewKeys, layer: int) -> NewTokens:
        """Called with each step's un-rotated queries and keys, which it must leave as they are: read out what the
        model was trained to put there, and return the queries and keys without it. `layer` is their index."""
        return NewTokens(queries, keys)


class Initializer(ABC):
    """Gives tokens the state that they start with, by their own queries and keys, when they come.

    So a score that does not depend on other tokens is made once, and costs nothing when tokens are evicted.
    """

    @abstractmethod
    def initial_state(self, queries: Queries, keys: NewKeys, layer: int, heads: tuple[int, ...] | None) -> PerToken:
        """State by its name, (batch, kv_heads, tokens), or (batch, 1, tokens) with `per_head=False`.

        `queries` and `keys` are un-rotated, those of the kv `heads` of `layer`, None: of all of them, and of padding
        tokens anything; they must be left as they are. State that is not given, and that of tokens which come without
        queries (`KVCache.from_rotated`), starts at 0.
        """


class Recency(ABC):  # noqa: B024  # every member has a default
    """Keeps the sinks and the newest tokens, always.

    Attention is then masked to just those, so that no result depends on the size of a chunk. A wrapper ranks by
    something else, so this interface is not looked up in what it wraps.
    """

    keeps_newest: bool = True


class Ranked(ABC):
    """Observes one query per row, and scores slots, in a way that kernels know, so that decode is one call of one.

    A class that inherits `ranking` may score otherwise, so this interface counts for the class that defines it alone.
    """

    @property
    @abstractmethod
    def ranking(self) -> Ranking:
        """What a kernel does in the place of `observe` and `score`."""
