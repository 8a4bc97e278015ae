"""The policy of a cache for which nobody chose one."""

from typing import Final

from windlass.policies.base import Policy
from windlass.policies.key_diff import KeyDiff
from windlass.policies.recent import Recent

AUTO: Final = "auto"


def auto(has_budget: bool = True) -> Policy:
    """What `policy="auto"` is: the best of those that read a text once, see docs/findings.md.

    A cache without a budget evicts nothing; it gets `Recent`, which ranks heads alike, so that they share positions.
    """
    return KeyDiff() if has_budget else Recent()
