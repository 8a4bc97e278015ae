"""The options of a cache: one record that the library, the command line, files and results share."""

import os
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, Final

from windlass.cache.contract import check_policy
from windlass.cache.merging import Merge, merge_of
from windlass.cache.shares import Shares, shares_of
from windlass.core.errors import UsageError, check_kind
from windlass.core.files import check_folder
from windlass.core.parse import (
    AUTO,
    DEFAULT_SINKS,
    NO_MERGE,
    NO_RECALL,
    NO_SHARES,
    SYSTEM,
    check_limits,
    default_window,
)
from windlass.core.step import Limits
from windlass.policies import Policy
from windlass.policies.base import Budgeter, OneShot
from windlass.policies.registry import auto, is_auto, parse_policy
from windlass.policies.wrapper import find
from windlass.positions.modes import PositionMode, position_mode
from windlass.stores.base import Store
from windlass.stores.formats import STORES, store_of

DEFAULT_RECALL_STORE: Final = "int4"


def recall_store_of(spec: str | Store) -> Store:
    """The store that `spec` names.

    Raises: UsageError for an unknown one, one of another's making, whose bytes no scan knows, and one that would hold
    some tokens in full precision.
    """
    store = store_of(spec)
    if type(store) not in STORES.values():
        raise UsageError(f"recall_store={store!r} is none that can be scanned; use one of: {', '.join(STORES)}")
    if store.full_precision.sinks or store.full_precision.newest:
        raise UsageError(
            f"recall_store={store.name!r} asks for tokens in full precision, which a recall store does not have; "
            f'use "plain", or leave the numbers out'
        )
    return store


def recall_folder_of(folder: str | Path | None) -> Path | None:
    """The folder as a path. Raises: UsageError for what is no folder."""
    check_kind("recall_folder", folder, (str, os.PathLike, type(None)), "the name of a folder, or None")
    return None if folder is None else check_folder(Path(os.fspath(folder)), "recall_folder")


def policy_of(spec: str | Policy) -> Policy:
    """The policy that `spec` names: `"snapkv"`, `"pyramid(SnapKV(pool=7))"`, `"file.py:Class"`; or a policy itself.

    See `windlass.policies.registry`. What comes from outside (a file, or arguments) goes through
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


@dataclass(frozen=True, init=False)
class CacheOptions:
    """What a `KVCache` is asked for; there each option is explained.

    Policy, positions, store and merge rule may be given by name, and are held as objects. A `window` of None is kept as
    None, because it follows the budget when that is lowered; `limits` has its number.

    Raises: UsageError for an unknown name, a value of another type, or limits that cannot be honoured; PolicyError for
    a policy that cannot be made.
    """

    budget: int | None
    policy: Policy
    sinks: int | str
    window: int | None
    chunk: int
    positions: PositionMode
    batch: int
    rollback: int
    store: Store
    merge: Merge | None
    recall: int
    recall_store: Store
    recall_folder: Path | None
    shares: Shares | None

    def __init__(
        self,
        budget: int | None = None,
        policy: str | Policy | None = AUTO,
        sinks: int | str = DEFAULT_SINKS,
        window: int | None = None,
        chunk: int = 512,
        positions: str | PositionMode = AUTO,
        batch: int = 1,
        rollback: int = 16,
        store: str | Store = "plain",
        merge: str | Merge | None = None,
        recall: int = 0,
        recall_store: str | Store = DEFAULT_RECALL_STORE,
        recall_folder: str | Path | None = None,
        shares: str | Path | Shares | None = None,
    ) -> None:
        vars(self).update(
            budget=budget,
            policy=auto(budget is not None) if is_auto(policy) or policy is None else policy_of(policy),
            sinks=sinks,
            window=window,
            chunk=chunk,
            positions=position_mode(positions),
            batch=batch,
            rollback=rollback,
            store=store_of(store),
            merge=merge_of(merge),
            recall=recall,
            recall_store=recall_store_of(recall_store),
            recall_folder=recall_folder_of(recall_folder),
            shares=shares_of(shares),
        )
        vars(self).update(check_limits(vars(self)))
        if self.shares is not None:
            _check_alone(self.policy)

    @property
    def limits(self) -> Limits:
        """What every layer is told; where no window is given, it is a quarter of what the sinks leave, at most 64.

        Sinks are the least number of them where each row has those of its system text.
        """
        sinks = DEFAULT_SINKS if self.sinks == SYSTEM else int(self.sinks)
        window = default_window(self.budget, sinks) if self.window is None else self.window
        return Limits(self.budget, sinks, window, self.chunk, self.rollback, self.recall)

    def labels(self) -> dict[str, int | str | None]:
        """The options that decide what a cache keeps and how it is read, as every row of results has them."""
        limits = self.limits
        return {
            "budget": self.budget,
            "sinks": self.sinks,
            "window": limits.window,
            "chunk": self.chunk,
            "policy": repr(self.policy),
            "positions": str(self.positions),
            "store": self.store.name,
            "merge": NO_MERGE if self.merge is None else str(self.merge),
            "recall": self.recall,
            "recall_store": self.recall_store.name if self.recall else "none",
            "shares": NO_SHARES if self.shares is None else str(self.shares),
        }

    @property
    def recalled(self) -> str:
        """What each step recalls, as a row of results says it: `"128 in int4"`, or `"none"`."""
        return f"{self.recall} in {self.recall_store.name}" if self.recall else NO_RECALL

    def document(self) -> dict[str, Any]:
        """All options but the policy, and a folder of this machine, as JSON can hold them; see `from_document`."""
        limits = {"budget": self.budget, "sinks": self.sinks, "window": self.window}
        return {
            "batch": self.batch,
            "positions": str(self.positions),
            "limits": limits | {"chunk": self.chunk, "rollback": self.rollback},
            "store": self.store.name,
            "merge": None if self.merge is None else str(self.merge),
            "recall": self.recall,
            "recall_store": self.recall_store.name,
            "shares": None if self.shares is None else self.shares.document(),
        }

    @classmethod
    def from_document(cls, document: dict[str, Any], policy: Policy) -> "CacheOptions":
        """The options that `document` was made of; an option that it lacks is the default one."""
        options = dict(document)
        if options.get("shares") is not None:
            options["shares"] = Shares.from_document(options["shares"])
        return cls(policy=policy, **options.pop("limits"), **options)


def _check_alone(policy: Policy) -> None:
    """Raises: UsageError for a policy that gives layers budgets of their own, beside shares that do."""
    one_shot = find(policy, OneShot)
    is_budgeter = find(policy, Budgeter) is not None  # type: ignore[type-abstract]  # none is made
    if is_budgeter or (one_shot is not None and one_shot.shares_budget):
        raise UsageError(
            f"shares: {policy!r} says itself what each layer keeps; leave shares out, or give what it wraps"
        )
