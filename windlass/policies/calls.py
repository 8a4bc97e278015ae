"""How the cache calls a policy: shapes are checked, and errors name the policy and the layer."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor

from windlass.core.errors import PolicyError
from windlass.core.ranks import RankHeads
from windlass.core.types import NewKeys, Queries, Scores, TokenIds
from windlass.policies.base import TOKEN, WEIGHT, Initializer, ModelSpecific, Observation, Policy, Slots
from windlass.policies.pairs import Pairs
from windlass.policies.recent import Recent
from windlass.policies.tova import TOVA
from windlass.policies.wrappers import Composite, InChunks, InGroups, Pyramid, Smoothed, Wrapper, changes_keys, find

UNKNOWN_STATE: Final = {TOKEN: -1.0, WEIGHT: 1.0}  # of tokens written before the policy declared it. Other state is 0


@contextmanager
def policy_errors(policy: Policy, layer: int) -> Iterator[None]:
    """Re-raise whatever a policy raises as a PolicyError that names it and the layer."""
    try:
        yield
    except PolicyError:
        raise
    except Exception as error:
        raise PolicyError(f"{policy!r} in layer {layer}: {type(error).__name__}: {error}") from error


def scores_of(policy: Policy, layer: int, slots: Slots) -> Scores:
    """The rank of every slot, as the policy gives it.

    Raises: PolicyError for whatever the policy raises, and for scores of another shape.
    """
    with policy_errors(policy, layer):
        score = policy.score(slots)
    if score.shape != slots.positions.shape:
        raise PolicyError(
            f"{policy!r} in layer {layer}: score has shape {tuple(score.shape)}, "
            f"expected {tuple(slots.positions.shape)} (batch, kv_heads, slots)"
        )
    return score


def observe(policy: Policy, layer: int, slots: Slots, seen: Observation) -> None:
    """Let the policy observe. Raises: PolicyError for whatever it raises."""
    with policy_errors(policy, layer):
        policy.observe(slots, seen)


def preprocess(
    policy: Policy, layer: int, queries: Queries, keys: NewKeys, ids: TokenIds | None
) -> tuple[Queries, NewKeys, dict[str, Tensor]]:
    """The queries and keys that attention reads, and the state that the new tokens start with, their ids included.

    Raises: PolicyError for whatever the policy raises, and for queries or keys of another shape.
    """
    ids_state = {} if ids is None else {TOKEN: ids[:, None]}
    trained = find(policy, ModelSpecific)
    if trained is None:
        return queries, keys, ids_state
    with policy_errors(policy, layer):
        new = trained.preprocess(queries, keys, layer)
    for what, given, wanted in (("queries", new.queries, queries), ("keys", new.keys, keys)):
        if given.shape != wanted.shape:
            raise PolicyError(
                f"{policy!r} in layer {layer}: preprocess gives {what} of shape {tuple(given.shape)}, "
                f"expected {tuple(wanted.shape)}"
            )
    return new.queries, new.keys, {**ids_state, **new.state}


def initial_state(
    policy: Policy, layer: int, heads: tuple[int, ...] | None, queries: Queries, keys: NewKeys
) -> dict[str, Tensor]:
    """The state that the policy gives new tokens for their queries and keys.

    Raises: PolicyError for whatever the policy raises, and for state of another shape.
    """
    initializer = find(policy, Initializer)  # type: ignore[type-abstract]  # none is made
    if initializer is None:
        return {}
    with policy_errors(policy, layer):
        state = initializer.initial_state(queries, keys, layer, heads)
    expected = keys.shape[0], keys.shape[1] if policy.needs.per_head else 1, keys.shape[2]
    for name, tensor in state.items():
        if tuple(tensor.shape) != expected:
            raise PolicyError(
                f"{policy!r} in layer {layer}: initial_state gives {name!r} of shape {tuple(tensor.shape)}, "
                f"expected {expected}"
            )
    return state


def initial_writes(state: dict[str, Scores], initial_state: dict[str, Tensor]) -> list[tuple[Tensor, Tensor | float]]:
    """Initial values of each tensor of state for new tokens, as `kernels.write_all` takes them (default: 0)."""
    known = {
        name: initial_state[name].expand(-1, tensor.shape[1], -1)
        for name, tensor in state.items()
        if name in initial_state
    }
    return [(tensor, known.get(name, 0.0)) for name, tensor in state.items()]


# Policies that rank all heads alike: these read no head, so all ranks compute the same scores.
ALIKE: Final = (Recent, Pairs)
# These read only the sum of attention over the heads.
SUMMED: Final = (TOVA,)
# These wrappers read only the scores of the wrapped policy.
OF_SCORES: Final = (Smoothed, InChunks, InGroups, Pyramid, Composite)


@dataclass(frozen=True, repr=False)
class SummedMass(Wrapper):
    """A policy that is shown the attention of all heads of all ranks, as one head: one all-reduce at each observation.

    Every rank then keeps the same tokens.
    """

    heads: RankHeads

    def __repr__(self) -> str:
        return repr(self.policy)

    def observe(self, slots: Slots, observation: Observation) -> None:
        mass = self.heads.ranks.all_reduce(observation.mass.sum(1, keepdim=True))
        self.policy.observe(slots, replace(observation, mass=mass))

    def score(self, slots: Slots) -> Scores:
        return self.policy.score(slots)


def across_ranks(policy: Policy, heads: RankHeads | None) -> Policy:
    """The policy that ranks in a cache with these `heads`, mostly `policy` itself. Without ranks it always is.

    Raises: PolicyError, naming the policy, where ranks with some of the heads would disagree about a ranking that one
    process makes once.
    """
    if heads is None or (not heads.is_split and heads.has_all_queries):
        return policy
    if not heads.is_split:
        return _of_keys(policy)
    if policy.needs.per_head or type(policy) in ALIKE:
        return policy
    if type(policy) in SUMMED:
        return SummedMass(policy, heads)
    if isinstance(policy, Wrapper) and type(policy) in OF_SCORES:
        return replace(policy, policy=across_ranks(policy.policy, heads))
    raise PolicyError(
        f"{policy!r} ranks all heads of a layer alike, and each of {heads.ranks.size} ranks has only some of them. "
        "Take one that ranks each head by itself (H2O, SnapKV, KeyDiff), or TOVA or Recent, which are served"
    )


def _of_keys(policy: Policy) -> Policy:
    """`policy`, where it looks at keys and values alone: all ranks hold the same of these, and have other queries."""
    if policy.observed_queries == 0 and find(policy, Initializer) is None and not changes_keys(policy):  # type: ignore[type-abstract]  # none is made
        return policy
    raise PolicyError(
        f"{policy!r} ranks by queries, and here each rank has some of the query heads that read the same keys. Take "
        "one that ranks by keys (KeyDiff, KeyNorm, LagKV), or Recent"
    )
