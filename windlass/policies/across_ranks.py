"""Policies on a rank that has some heads of a model: which rank alone, which ask the others, and which are refused."""

from dataclasses import dataclass, replace
from typing import Final

from windlass.core.errors import PolicyError
from windlass.core.shapes import Scores
from windlass.parallel.heads import RankHeads
from windlass.policies.base import Observation, Policy, Slots
from windlass.policies.composite import Composite
from windlass.policies.in_chunks import InChunks
from windlass.policies.in_groups import InGroups
from windlass.policies.interfaces import Initializer
from windlass.policies.pairs import Pairs
from windlass.policies.pyramid import Pyramid
from windlass.policies.recent import Recent
from windlass.policies.smoothed import Smoothed
from windlass.policies.tova import TOVA
from windlass.policies.wrapper import Wrapper, changes_keys, find

# Of those that rank all heads alike: what looks at no head, so that all ranks come to the same,
ALIKE: Final = (Recent, Pairs)
# what reads of attention nothing but its sum over the heads,
SUMMED: Final = (TOVA,)
# and wrappers that look at nothing but the scores of the policy inside.
OF_SCORES: Final = (Smoothed, InChunks, InGroups, Pyramid, Composite)


@dataclass(frozen=True, repr=False)
class SummedMass(Wrapper):
    """A policy that is shown the attention of all heads of all ranks, as one head: one all-reduce at each observation.

    What it keeps is then the same on every rank.
    """

    heads: RankHeads

    def __repr__(self) -> str:
        return repr(self.policy)

    def observe(self, slots: Slots, observation: Observation) -> None:
        mass = self.heads.ranks.sum(observation.mass.sum(1, keepdim=True))
        self.policy.observe(slots, replace(observation, mass=mass))

    def score(self, slots: Slots) -> Scores:
        return self.policy.score(slots)


def across_ranks(policy: Policy, heads: RankHeads | None) -> Policy:
    """The policy that is to rank in a cache with these `heads`: mostly `policy` itself; without ranks always.

    Raises: PolicyError, naming the policy, where ranks that have some of the heads would come to different rankings
    for what is one ranking in a single process.
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
        f"{policy!r} ranks all heads of a layer alike, and each of {heads.ranks.size} ranks has only some of them; "
        "take one that ranks each head by itself (H2O, SnapKV, KeyDiff), or TOVA or Recent, which are served"
    )


def _of_keys(policy: Policy) -> Policy:
    """`policy`, where it looks at keys and values alone: all ranks hold the same of these, and have other queries."""
    if policy.observed_queries == 0 and find(policy, Initializer) is None and not changes_keys(policy):  # type: ignore[type-abstract]  # none is made
        return policy
    raise PolicyError(
        f"{policy!r} ranks by queries, and here each rank has some of the query heads that read the same keys; take "
        "one that ranks by keys (KeyDiff, KeyNorm, LagKV), or Recent"
    )
