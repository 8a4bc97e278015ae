"""Rules as a user types them, and which caches they go with."""

import re
from dataclasses import replace

from windlass.core.check import check_kind
from windlass.core.close_names import use_one_of
from windlass.core.errors import UsageError
from windlass.core.spec import parse_spec
from windlass.merge.base import Merge
from windlass.merge.rules import MERGES
from windlass.merge.targets import TARGETS
from windlass.policies.base import ACCUMULATES, Policy
from windlass.stores.base import Store

FORM = "mean_count(next, threshold=0.5)"


def merge_of(spec: str | Merge | None) -> Merge | None:
    """The rule that `spec` names: `"mean_count"`, `"mean_count(next, threshold=0.5)"`; a rule itself, or None for none.

    The settings come in any order.

    Raises: UsageError for an unknown name or setting, one given twice, or a threshold that is no cosine.
    """
    if spec is None or isinstance(spec, Merge):
        return spec
    check_kind("merge", spec, str, "a rule, its name or None", 'write merge="mean_count"')
    typed = parse_spec(spec)
    if typed is None or typed.name not in MERGES:
        raise UsageError(f"merge={spec!r} is not a rule; {use_one_of(spec, MERGES)}, or with settings: {FORM}")
    given: dict[str, str] = {}
    for name, value in (*(("", word) for word in typed.positional), *typed.named):
        if name not in ("", "threshold"):
            raise UsageError(f"merge={spec!r}: {name!r} is not a setting; the only number is threshold, as in {FORM}")
        if not name and value not in TARGETS:
            raise UsageError(f"merge={spec!r}: {value!r} is not a setting; {use_one_of(value, TARGETS)}, as in {FORM}")
        name = name or "target"
        if name in given:
            raise UsageError(f"merge={spec!r}: {name} is given twice; leave one out")
        given[name] = value
    rule = MERGES[typed.name]()
    threshold = _cosine(spec, given["threshold"]) if "threshold" in given else rule.threshold
    return replace(rule, target=given.get("target", rule.target), threshold=threshold)


def _cosine(spec: str, value: str) -> float:
    if not re.fullmatch(r"-?(\d+\.?\d*|\.\d+)(e-?\d+)?", value):
        raise UsageError(f"merge={spec!r}: threshold must be a number, got {value!r}")
    return float(value)


def checked_merge(spec: str | Merge | None, budget: int | None, store: Store, policy: Policy) -> Merge | None:
    """As `merge_of`. Raises: UsageError also where a cache of this budget, store and policy cannot merge."""
    merge = merge_of(spec)
    joins = ACCUMULATES in policy.needs.state
    if merge is not None and joins and not merge.is_mean:
        raise UsageError(
            f"merge={merge} takes no means, and {policy!r} joins tokens as they come by means alone; use "
            + ", ".join(name for name, rule in MERGES.items() if rule.is_mean)
        )
    if merge is not None and budget is None and not joins:
        raise UsageError(f"merge={merge} needs a budget: a cache without one evicts nothing that could be merged")
    if merge is not None and merge.weighs_by is not None and merge.weighs_by not in policy.needs.state:
        raise UsageError(
            f"merge={merge} takes weights from the policy, and {policy!r} gives none; use policy dmc, or mean_count"
        )
    if merge is not None and store.full_precision.sinks + store.full_precision.newest:
        raise UsageError(
            f"merge={merge} does not go with store {store.name}: a slot that is held exactly takes no other token in; "
            f"leave out its sinks and newest"
        )
    return merge
