"""A policy around another one, and where to look for what only some policies offer."""

from abc import ABC
from dataclasses import dataclass
from typing import TypeVar

from windlass.core.errors import PolicyError
from windlass.core.inputs import Ranking
from windlass.policies.base import KernelPolicy, ModelSpecific, Needs, Observation, OneShot, Policy, Recency, Slots

Interface = TypeVar("Interface")


@dataclass(frozen=True)
class Wrapper(Policy, ABC):
    """A policy around another one: it needs and observes what that one does, and scores in its own way."""

    policy: Policy

    def __post_init__(self) -> None:
        if not isinstance(self.policy, Policy):
            raise PolicyError(f"{type(self).__name__}: policy must be another policy, got {self.policy!r}")

    @property
    def needs(self) -> Needs:  # type: ignore[override]  # what is wrapped decides
        return self.policy.needs

    @property
    def observed_queries(self) -> int | None:  # type: ignore[override]  # what is wrapped decides
        return self.policy.observed_queries

    def observe(self, slots: Slots, observation: Observation) -> None:
        self.policy.observe(slots, observation)


def find(policy: Policy, interface: type[Interface]) -> Interface | None:
    """The policy that offers `interface`: this one, or else the first that does of those it wraps."""
    if isinstance(policy, interface):
        return policy
    return find(policy.policy, interface) if isinstance(policy, Wrapper) else None


def scoring_chunk(policy: Policy) -> int:
    """Tokens in each step of the second pass that a policy asks for; 0: none."""
    one_shot = find(policy, OneShot)
    return 0 if one_shot is None else one_shot.scoring_chunk


def keeps_newest(policy: Policy) -> bool:
    """Return True if a policy keeps just the sinks and the newest tokens."""
    return isinstance(policy, Recency) and policy.keeps_newest


def changes_keys(policy: Policy) -> bool:
    """Return True if attention reads other queries and keys than the model's."""
    trained = find(policy, ModelSpecific)
    return trained is not None and type(trained).preprocess is not ModelSpecific.preprocess


def ranking_of(policy: Policy) -> Ranking | None:
    """Work of a kernel in the place of a policy's methods. None if the policy itself must be asked."""
    return policy.ranking if isinstance(policy, KernelPolicy) and "ranking" in vars(type(policy)) else None
