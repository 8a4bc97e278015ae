"""The policy contract: which tokens a layer keeps.

A policy scores the slots of one layer, and the cache evicts the tokens with the lowest scores over budget. Each
layer does four things in each step, in this order: write, attend, observe, evict.

A policy declares `needs` and `observed_queries`, and has two methods: `score`, and `observe` if it ranks by
attention. For special needs there are interfaces beside `Policy`: `OneShot`, `Budgeter`, `ModelSpecific`,
`Initializer`, `Recency`, `LayersAsRows`, `KernelPolicy`.

You may rely on:
1. `slots` are those of layer `slots.layer`, of `slots.layers`, and where its heads lie in groups, of its kv heads
   `slots.heads`. A token keeps its slot until it is evicted, except when the cache packs its slots, between a prompt
   and the tokens generated after it, or sorts them, in `divide`. With `LayersAsRows`
   they are rows of several layers.
2. State is 0 when its token is written, or the value of an `Initializer`, and moves with the token. State named "token"
   is the token's id. State written by `score` is kept in rows over budget only, as if each row were alone.
3. `slots.statistics` holds the values that your `observe` put there. It is rolled back, saved and copied with its row.
4. Slots are not in the order of the text: sort by `slots.positions` before you pool along the text. Sort stably:
   tokens that share a position, after `divide`, are in order.
5. The first `sinks` positions and the last `window` tokens are never evicted, whatever you return.
6. Every kv head of a row holds the same number of tokens, perhaps different ones, but where tokens join as they come.
7. `observation.mass` is attention probability, summed over the observed queries and over the query heads that
   share a kv head. It is 0 in free slots. A finished row observes nothing. Where other layers of the model share the
   layer's keys, you are shown the layer's own queries, and none of theirs.
8. With `Needs(mass=False)` you are shown queries, and a `mass` of no slots. If you ask for all queries, those of a
   long step come in two calls, each query once. Otherwise `observe` is called once a step.

You owe:
1. A score of shape (batch, kv_heads, slots), or (batch, 1, slots) with `per_head=False`. NaN ranks lowest, free
   slots are ignored, and of equal scores the newer token is kept.
2. No writes but into `slots.state`, in place, and in `observe` new tensors (batch, ...) into `slots.statistics`.
3. A frozen dataclass of numbers, policies and names of files. One object serves all layers and texts. Its `repr`
   is the row label in every result.
4. No host synchronisation (`.item()`, `.cpu()`), a docstring with `Source:` and `Differs:`, and with `Chunks:` where a
   score depends on where chunks end. `windlass.testing.check_policy` passes, and `check_on_models`, which tries it on
   tiny models of every kind.

`budget`, `sinks`, `window`, `chunk` and `positions` belong to the cache, so any policy works with any of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from windlass.core.inputs import PackedStates, Ranking
from windlass.core.types import (
    ModelInfo,
    NewKeys,
    PerSlot,
    Queries,
    QueryPositions,
    RowCounts,
    Scores,
    SlotIndex,
    SlotKeys,
    SlotPositions,
    SlotValues,
)
from windlass.stores.base import Store

TOKEN: Final = "token"  # state: the token's id, which float32 holds exactly up to 2**24
WEIGHT: Final = "token_weight"  # state: the token's weight in a merged token, for rules of merging that use it
ACCUMULATES: Final = "token_accumulates"
"""State: 1 if the token joins the one before it. A policy that declares it computes it in `preprocess`. With a merge
rule of means the cache then joins tokens as they come, with a budget or without one."""
INITIAL_STATE: Final = {TOKEN: "token ids", WEIGHT: "learned weights", ACCUMULATES: "learned decisions"}
"""State that is known only when its token is written, with its name in errors."""


@dataclass(frozen=True)
class Needs:
    """State that the cache keeps for a policy.

    `state` names tensors of one number per slot, `statistics` tensors (batch, ...) of the whole layer, which `observe`
    puts into `slots.statistics`. `per_head`: each kv head ranks its own tokens. With False all heads of a row share one
    ranking. `mass`: the policy reads the attention of the observed queries. A policy that reads the queries alone says
    False, which costs far less.
    """

    state: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()
    per_head: bool = True
    mass: bool = True


@dataclass(frozen=True)
class Slots:
    """One layer as a policy sees it: read-only but for `state` and `statistics`.

    `positions` are the tokens' indices in the text, negative in free slots, with one row of heads where `per_head` is
    False. `next_positions` is where the text of each row goes on. `prompt_ends` is one past the last token that came in
    a pass of several, drafts aside. `rotate` rotates states (batch, any heads, n, head_dim) to positions (batch, 1 or
    as many heads, 1 or n) of the text read so far. `step_angles` gives cos and sin, per channel pair, of the rotation
    from one position to the next, scaled as the model scales its rotated states, or None where the layer does not
    rotate. `query_gain` gives None, or the factors (head_dim) of a rotated query: weights of norms that the model
    applies after RoPE. The first `sinks` and the last `window` tokens are never evicted. `layer` is the index of the
    layer, of `layers` in all. `heads` are the numbers of the kv heads that have these slots, or None for all heads of
    the layer.
    """

    store: Store
    positions: SlotPositions
    state: dict[str, Scores]
    next_positions: RowCounts
    prompt_ends: RowCounts
    rotate: Callable[[Tensor, Tensor], Tensor]
    step_angles: Callable[[], tuple[Tensor, Tensor] | None] = lambda: None
    query_gain: Callable[[], Tensor | None] = lambda: None
    statistics: dict[str, Tensor] = field(default_factory=dict)
    sinks: int = 0
    window: int = 0
    layer: int = 0
    layers: int = 1
    heads: tuple[int, ...] | None = None

    def keys(self) -> SlotKeys:
        """Un-rotated keys."""
        return self.store.keys()

    def packed_keys(self) -> PackedStates:
        """The same keys as the store packs them, for `kernels`, which read low-bit codes in place."""
        return self.store.packed_keys()

    def values(self) -> SlotValues:
        """Values."""
        return self.store.values()

    def rotated_keys(self) -> SlotKeys:
        """Keys rotated to their own positions in the text, times `query_gain`. Costs one rotation of all slots.

        Their products with rotated queries are the model's logits, but for its scale.
        """
        rotated, gain = self.rotate(self.store.keys(), self.positions.clamp(min=0)), self.query_gain()
        return rotated if gain is None else rotated * gain


@dataclass(frozen=True)
class Observation:
    """Observation of a step: `mass`, see the contract, and the observed queries.

    `queries` are un-rotated, newest first, and `positions` theirs: EMPTY where a row observed fewer. Where `mass`
    is that of all queries of a long step, `queries` are the newest of them only.
    """

    mass: PerSlot
    queries: Queries
    positions: QueryPositions


class Policy(ABC):
    """Ranks the tokens of a layer. The lowest scores are evicted first."""

    needs: Needs = Needs()
    """State, statistics and observations that the cache keeps for the policy."""

    observed_queries: int | None = 0
    """Number of a step's last queries that the policy observes (0 is fastest, None means all)."""

    def observe(self, slots: Slots, observation: Observation) -> None:  # noqa: B027  # most policies observe nothing
        """Update `slots.state` and `slots.statistics` by the attention of the step."""

    @abstractmethod
    def score(self, slots: Slots) -> Scores:
        """The rank of every slot. Called only when a layer is over budget."""


PerToken = dict[str, Tensor]


class OneShot(ABC):  # noqa: B024  # every member has a default
    """Ranks a first text as a whole.

    `engine.prefill` holds it whole, whatever the budget, and evicts the tokens over budget at its end.
    """

    scoring_chunk: int = 0
    """Number of tokens in each step of a second pass over the text, before the eviction (0: no second pass).

    The policy observes these steps, and the cache stores none of their tokens. Their `mass` is not a sum, but the
    largest probability that one query head of one query gave the slot."""

    shares_budget: bool = False
    """True if the eviction ranks the tokens of all layers together. Layers then keep different numbers of tokens."""


class Budgeter(ABC):
    """Gives each layer a budget of its own."""

    @abstractmethod
    def budgets(self, budget: int, layers: int, least: int) -> list[int]:
        """Tokens that each layer keeps, from the bottom up: `budget` on average, and no layer below `least`."""


@dataclass(frozen=True)
class NewTokens:
    """A step's tokens before they are written, as attention reads them, and their initial state.

    `state` is (batch, kv_heads, tokens) each, or (batch, 1, tokens) with `per_head=False`.
    """

    queries: Queries
    keys: NewKeys
    state: PerToken = field(default_factory=dict)


class ModelSpecific(ABC):  # noqa: B024  # every member has a default
    """Serves the models that were trained, or measured, for it."""

    def check(self, model: ModelInfo) -> None:  # noqa: B027  # not all are bound to one model
        """Called when a cache is made. Raises: PolicyError where the policy cannot serve this model."""

    def preprocess(self, queries: Queries, keys: NewKeys, layer: int) -> NewTokens:
        """Remove trained signals from the un-rotated queries and keys of each step.

        Called with the step's queries and keys, which must not be changed in place. Read the signal that the model was
        trained to put there, and return queries and keys without it. `layer` is their index.
        """
        return NewTokens(queries, keys)


class Initializer(ABC):
    """Gives tokens the state that they start with, by their own queries and keys, when they come.

    So a score that does not depend on other tokens is made once, and costs nothing when tokens are evicted.
    """

    @abstractmethod
    def initial_state(self, queries: Queries, keys: NewKeys, layer: int, heads: tuple[int, ...] | None) -> PerToken:
        """State by its name, (batch, kv_heads, tokens), or (batch, 1, tokens) with `per_head=False`.

        `queries` and `keys` are un-rotated, of the kv `heads` of `layer` (None: all of them), with arbitrary values for
        padding tokens. They must not be changed. State that is not given, and that of tokens which come without queries
        (`KVCache.from_rotated`), starts at 0.
        """


class Recency(ABC):  # noqa: B024  # every member has a default
    """Keeps the sinks and the newest tokens, always.

    Attention is then masked to just those, so that the size of a chunk does not decide which tokens a query sees. Read
    at ranks, sinks are farther away in a longer chunk, whose tokens count, too. A wrapper ranks by other scores, so
    this interface is not looked up in the wrapped policy.
    """

    keeps_newest: bool = True


class LayersAsRows(ABC):  # noqa: B024  # it has no members
    """Ranks every layer by the same rule, and reads neither `slots.layer` nor `slots.heads`.

    In decode all layers may then come in one call, as rows of one batch. A subclass may rank otherwise, so this
    interface counts for a class that names it as a base itself, and where that is a wrapper, for the wrapped one too.
    """


class KernelPolicy(ABC):
    """Observes one query per row, and scores slots, in a way that kernels know, so that decode is one call of one.

    A class that inherits `ranking` may score otherwise, so this interface counts for the class that defines it alone.
    """

    @property
    @abstractmethod
    def ranking(self) -> Ranking:
        """Work of a kernel in the place of `observe` and `score`."""


def gather_sorted(states: Tensor, order: SlotIndex) -> Tensor:
    """`states` (batch, kv_heads, slots, channels) in the order of the text, which `kernels.argsort_positions` gives."""
    heads = torch.arange(states.shape[0] * states.shape[1], device=order.device).view(*states.shape[:2], 1)
    rows = (heads * states.shape[2] + order).flatten()
    # Copying whole rows is several times as fast as `gather`, which copies single numbers.
    return states.flatten(0, 2).index_select(0, rows).view(*order.shape, -1)


def scatter_sorted(scores: Scores, order: SlotIndex) -> Scores:
    """Scores in the order of the text, put back into the order of the slots."""
    return torch.empty_like(scores).scatter_(-1, order, scores)


def lexsort_ranks(*keys: Tensor) -> Scores:
    """Rank each entry by the first of `keys`, equal ones by the second, and so on, and at last by their index."""
    order = torch.arange(keys[0].shape[-1], device=keys[0].device).expand_as(keys[0])
    for key in reversed(keys):
        order = order.gather(-1, key.gather(-1, order).argsort(dim=-1, stable=True))
    return order.argsort(dim=-1).float()
