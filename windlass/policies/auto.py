"""The policy of a cache for which nobody chose one."""

from windlass.core.spec import AUTO
from windlass.policies.base import Policy
from windlass.policies.key_diff import KeyDiff
from windlass.policies.recent import Recent


def is_auto(policy: object) -> bool:
    """Whether nobody chose a policy: None, or the word "auto" in any case."""
    return policy is None or (isinstance(policy, str) and policy.strip().lower() == AUTO)


def auto(has_budget: bool = True) -> Policy:
    """What `policy="auto"` is: the best of those that read a text once, see docs/findings.md.

    A cache without a budget evicts nothing; it gets `Recent`, which ranks heads alike, so that they share positions.
    """
    return KeyDiff() if has_budget else Recent()
