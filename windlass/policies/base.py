"""The policy contract: which tokens a layer keeps.

A policy ranks the slots of one layer; the cache evicts the lowest-ranked tokens over budget. Per
layer and step the order is always write, attend, observe, evict.

You may rely on:
1. `slots` belong to one layer. A token keeps its slot until it is evicted, except between a
   prompt and the tokens generated after it, when the cache packs its slots once.
2. A token's state is 0 when it is written, or what `arrive` says, and moves with it. State that you
   name "token" is the token's id; then a text that comes without ids is refused.
3. Slot order is not text order: sort by `slots.positions` before pooling along the text.
4. The first `sinks` positions and the last `window` tokens are never evicted, whatever you return.
5. Every kv head of a row holds the same number of tokens, perhaps different ones.
6. `seen.mass` is attention probability summed over the observed queries and over the query heads
   that share a kv head; it is 0 in free slots. A finished row observes nothing. In a second reading
   (`repeat`) it is the largest that one query head of one query gave.
7. `slots.statistics` is yours: what `observe` put there under the names that you declare in
   `statistics`, such as a mean over all queries so far. Empty before that. It is rolled back, saved
   and copied with its row, and its bytes are counted.

You owe:
1. A score of shape (batch, kv_heads, slots), or (batch, 1, slots) where `per_head` is False. NaN
   ranks lowest, free slots are ignored, and of equal scores the newer token is kept.
2. No writes but into `slots.state`, in place, and into `slots.statistics`, in `observe`, by putting
   new tensors (batch, ...) in the place of the old ones.
3. A frozen dataclass of plain numbers, or of another policy, or of a file's name: one object serves all
   layers and texts, and its `repr` is the row label in every result.
4. No host synchronisation (`.item()`, `.cpu()`).
5. A docstring with `Source:` and `Differs:`.
6. `windlass.testing.check_policy` passes.

Not yours: `budget`, `sinks`, `window`, `chunk`, `positions`. They belong to the cache, so that any
policy can be combined with any of them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windlass.core.errors import PolicyError
from windlass.core.packed import Held
from windlass.core.shapes import (
    NewKeys,
    PerSlot,
    Queries,
    QueryPositions,
    RowCounts,
    Scores,
    SlotKeys,
    SlotPositions,
    SlotValues,
    TokenIds,
)
from windlass.stores.base import Store

TOKEN: Final = "token"  # state: the token's id, which float32 holds exactly up to 2**24
WEIGHT: Final = "token_weight"  # state: what the token weighs in a cell, for rules of merging that ask
ACCUMULATES: Final = "token_accumulates"  # state: 1 where the token is to join the one before it
BORN: Final = {TOKEN: "token ids", WEIGHT: "learned weights", ACCUMULATES: "learned decisions"}
"""State that a token comes with, in words: it cannot be had later."""
UNKNOWN: Final = {TOKEN: -1.0, WEIGHT: 1.0}  # such state, of tokens that came when it was not kept; else 0


@dataclass(frozen=True)
class Slots:
    """One layer as a policy sees it: read-only but for `state` and `statistics`.

    `positions` are the tokens' indices in the text, negative in free slots, with one row of heads
    where `per_head` is False. `next_positions` is where each row's text goes on; `prompt_ends` is
    one past the last token that came in a step of several tokens. `rotated` turns states (batch, any
    heads, n, head_dim) to positions (batch, 1 or as many heads, 1 or n) of the text read so far.
    `one_turn` gives cos and sin, per channel pair, of the turn from one position to the next, scaled
    as the model scales what it rotates, or None where the layer does not rotate. `sinks` and `window` say
    which tokens are not evicted in any case.
    """

    store: Store
    positions: SlotPositions
    state: dict[str, Scores]
    next_positions: RowCounts
    prompt_ends: RowCounts
    rotated: Callable[[Tensor, Tensor], Tensor]
    one_turn: Callable[[], tuple[Tensor, Tensor] | None] = lambda: None
    statistics: dict[str, Tensor] = field(default_factory=dict)
    sinks: int = 0
    window: int = 0

    def keys(self) -> SlotKeys:
        """Un-rotated keys."""
        return self.store.keys()

    def held_keys(self) -> Held:
        """The same as they lie in memory, for `kernels`, which read low-bit codes in place."""
        return self.store.held_keys()

    def values(self) -> SlotValues:
        """Values."""
        return self.store.values()

    def rotated_keys(self) -> SlotKeys:
        """Keys turned to their own positions in the text; costs one rotation of all slots."""
        return self.rotated(self.store.keys(), self.positions.clamp(min=0))


@dataclass(frozen=True)
class Arrival:
    """New tokens as a policy lets them in: what attention is given of them, and the state that they start with.

    `state` is (batch, kv_heads, tokens) each, or (batch, 1, tokens) where `per_head` is False.
    """

    queries: Queries
    keys: NewKeys
    state: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Observation:
    """What a policy is shown after a step.

    `queries` are the observed ones, un-rotated, newest first, and `positions` theirs: EMPTY where a
    row observed fewer.
    """

    mass: PerSlot
    queries: Queries
    positions: QueryPositions


class Policy(ABC):
    """Ranks the tokens of a layer; higher scores are kept."""

    state: ClassVar[tuple[str, ...]] = ()
    """Names of per-slot tensors kept for you."""

    statistics: ClassVar[tuple[str, ...]] = ()
    """Names of tensors of a whole layer, (batch, ...), that `observe` puts into `slots.statistics`."""

    per_head: ClassVar[bool] = True
    """Whether each kv head ranks its own tokens. False: one ranking for all heads of a row."""

    is_recency: ClassVar[bool] = False
    """Whether sinks plus the newest tokens are kept, always. Then attention is masked to just
    those, so that no result depends on the size of a chunk."""

    is_one_shot: ClassVar[bool] = False
    """Whether `engine.prefill` holds a first text whole, and cuts it to the budget once it was read."""

    shares_budget: ClassVar[bool] = False
    """Whether such a cut ranks the tokens of all layers together, so that each gets a budget of its own."""

    repeat: int = 0
    """How many tokens of a first text `engine.prefill` reads a second time at once, after the whole of it; 0: none.
    They are observed, and forgotten again. Only if `is_one_shot`."""

    observed_queries: int | None = 0
    """How many of a step's last queries are observed; 0: none (fast), None: all."""

    def check(self, model: PreTrainedModel) -> None:  # noqa: B027  # most policies serve any model
        """Called when a cache is made. Raises: PolicyError where the policy cannot serve this model."""

    def arrive(self, queries: Queries, keys: NewKeys) -> Arrival:
        """What a step's tokens come with, called before they are written: for models that were trained to keep
        something for the policy in their un-rotated queries and keys. Most do not, and nothing is changed."""
        return Arrival(queries, keys)

    @abstractmethod
    def score(self, slots: Slots) -> Scores:
        """The rank of every slot; called only when a layer is over budget."""

    def budgets(self, budget: int, layers: int, least: int) -> list[int]:
        """What each layer keeps, from the bottom up: `budget` on average, and no layer below `least`."""
        return [budget] * layers

    def observe(self, slots: Slots, seen: Observation) -> None:  # noqa: B027  # most policies observe nothing
        """Update `slots.state` and `slots.statistics` from what the step attended to."""


def at_start(state: dict[str, Scores], born: dict[str, Tensor]) -> list[tuple[Tensor, Tensor | float]]:
    """What is kept per slot, and what it is for new tokens, for `kernels.write_all`: what they came with, else 0."""
    known = {name: born[name].expand(-1, tensor.shape[1], -1) for name, tensor in state.items() if name in born}
    return [(tensor, known.get(name, 0.0)) for name, tensor in state.items()]


def unknown_state(names: tuple[str, ...], positions: SlotPositions) -> dict[str, Scores]:
    """State of tokens that came while none was kept."""
    return {name: torch.full_like(positions, UNKNOWN.get(name, 0.0), dtype=torch.float32) for name in names}


@contextmanager
def policy_errors(policy: Policy, layer: int) -> Iterator[None]:
    """Re-raise whatever a policy raises as a PolicyError that names it and the layer."""
    try:
        yield
    except PolicyError:
        raise
    except Exception as error:
        raise PolicyError(f"{policy!r} in layer {layer}: {type(error).__name__}: {error}") from error


def arrived(
    policy: Policy, layer: int, queries: Queries, keys: NewKeys, ids: TokenIds | None
) -> tuple[Queries, NewKeys, dict[str, Tensor]]:
    """What attention is given of new tokens, and the state that they come with, `ids` (batch, tokens) included."""
    with policy_errors(policy, layer):
        arrival = policy.arrive(queries, keys)
    for what, given, wanted in (("queries", arrival.queries, queries), ("keys", arrival.keys, keys)):
        if given.shape != wanted.shape:
            raise PolicyError(
                f"{policy!r} in layer {layer}: arrive gives {what} of shape {tuple(given.shape)}, "
                f"expected {tuple(wanted.shape)}"
            )
    born = arrival.state if ids is None else {TOKEN: ids[:, None], **arrival.state}
    return arrival.queries, arrival.keys, born


def scores_of(policy: Policy, layer: int, slots: Slots) -> Scores:
    """The rank of every slot, as the policy has it. Raises: PolicyError that names it and the layer."""
    with policy_errors(policy, layer):
        score = policy.score(slots)
    if score.shape != slots.positions.shape:
        raise PolicyError(
            f"{policy!r} in layer {layer}: score has shape {tuple(score.shape)}, "
            f"expected {tuple(slots.positions.shape)} (batch, kv_heads, slots)"
        )
    return score
