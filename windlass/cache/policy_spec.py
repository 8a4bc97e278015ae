"""Where a name becomes a policy, for the library and the command line alike."""

from dataclasses import MISSING, fields, is_dataclass

from windlass.cache.contract import check_policy
from windlass.core.check import check_kind
from windlass.policies import Policy
from windlass.policies.spec import parse_policy


def policy_of(spec: str | Policy) -> Policy:
    """The policy that `spec` names: `"snapkv"`, `"pyramid(SnapKV(pool=7))"`, `"file.py:Class"`; or a policy itself.

    See `windlass.policies.spec`. What comes from outside (a file, or arguments) goes through
    `windlass.testing.check_policy`.

    Raises: PolicyError for what cannot be found, made, or breaks the contract; UsageError for a class in place of a
    policy, or what is neither a policy nor a name.
    """
    if isinstance(spec, str):
        policy, is_from_outside = parse_policy(spec)
        if is_from_outside:
            check_policy(policy)
        return policy
    check_kind("policy", spec, Policy, "a policy or its name", f"write policy={_example(spec)}")
    return spec


def _example(given: object) -> str:
    """How a policy is passed, of the class that was passed in its place."""
    if not isinstance(given, type) or not issubclass(given, Policy):
        return '"key_diff" or windlass.KeyDiff()'
    is_whole = all(each.default is not MISSING for each in fields(given)) if is_dataclass(given) else True
    return f"{given.__name__}({'' if is_whole else '...'})"
