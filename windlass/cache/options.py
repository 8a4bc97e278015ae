"""The options of a cache: one record that the library, the command line, files and results share.

Policies, stores and modes are imported when a record is made: the command line's help needs no torch.
"""

from __future__ import annotations

import os
import pathlib
from dataclasses import MISSING, dataclass, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Final

from windlass.core.errors import UsageError, check_kind
from windlass.core.fields import Option, check_fields, declared, labels_of
from windlass.core.files import check_folder
from windlass.core.parse import AUTO, DEFAULT_SINKS, HALF, MAX_NUMBER, NO_MERGE, NO_RECALL, NO_SHARES, PAGE, SYSTEM

if TYPE_CHECKING:  # for type checkers only: at run time fields accept names instead of objects
    from pathlib import Path

    from windlass.cache.merging import Merge
    from windlass.cache.shares import Auto, Shares
    from windlass.core.step import Limits
    from windlass.policies import Policy
    from windlass.positions.modes import PositionMode
    from windlass.stores.base import Store

    HalfOrCount = int  # the number in use: `half` of the budget may be given as a word

DEFAULT_RECALL_STORE: Final = "int4"
MAX_DEFAULT_WINDOW: Final = 64
# Names for a shell's completion, which imports no policy. A test compares them with the registry.
POLICIES: Final = (
    *("recent", "random", "h2o", "tova", "snapkv", "key_norm"),
    *("key_diff", "lag_kv", "leverage", "compactor", "r_kv", "expected_attention"),
    *("tri_attention", "kvzip", "dmc", "by_value_norm", "smoothed", "in_chunks"),
    *("in_groups", "pyramid", "composite", "pairs", "linear_scorer"),
)
MODES: Final = ("auto", "original", "compact", "self_extend", "clamp")
STORES: Final = ("plain", "int8", "int4")
MERGES: Final = ("mean_count", "mean", "sum", "pick", "weighted")


def recall_store_of(spec: str | Store) -> Store:
    """The store that `spec` names.

    Raises: UsageError for an unknown store, for one that is not built in, as no kernel scans its bytes, and for one
    that would hold some tokens in full precision.
    """
    from windlass.stores.formats import STORES, store_of

    store = store_of(spec)
    if type(store) not in STORES.values():
        raise UsageError(f"recall_store={store!r} cannot be scanned. Use one of: {', '.join(STORES)}")
    if store.full_precision.sinks or store.full_precision.newest:
        raise UsageError(
            f"recall_store={store.name!r} asks for tokens in full precision, which a recall store does not have. "
            f'Use "plain", or leave the numbers out'
        )
    return store


def recall_folder_of(folder: str | Path | None) -> Path | None:
    """The folder as a path. Raises: UsageError for anything but a writable folder or None."""
    check_kind("recall_folder", folder, (str, os.PathLike, type(None)), "the name of a folder, or None")
    return None if folder is None else check_folder(pathlib.Path(os.fspath(folder)), "recall_folder")


def policy_of(spec: str | Policy) -> Policy:
    """The policy that `spec` names (`"snapkv"`, `"pyramid(SnapKV(pool=7))"`, `"file.py:Class"`), or `spec` itself.

    See `windlass.policies.registry`. A policy from outside (of a file, or with arguments) goes through
    `windlass.testing.check_policy`.

    Raises: PolicyError for a policy that cannot be found or made, or breaks the contract. UsageError for a class in
    place of a policy, or anything else that is neither a policy nor a name.
    """
    from windlass.policies.base import Policy
    from windlass.policies.registry import parse_policy

    if isinstance(spec, str):
        from windlass.cache.contract import check_policy

        policy, is_from_outside = parse_policy(spec)
        if is_from_outside:
            check_policy(policy)
        return policy
    check_kind("policy", spec, Policy, "a policy or its name", f"Write policy={_example(spec)}")
    return spec


def _example(given: object) -> str:
    """An example of the right call, for the class that was passed in place of a policy."""
    from windlass.policies.base import Policy

    if not isinstance(given, type) or not issubclass(given, Policy):
        return '"key_diff" or windlass.policies.KeyDiff()'
    is_whole = all(each.default is not MISSING for each in fields(given)) if is_dataclass(given) else True
    return f"{given.__name__}({'' if is_whole else '...'})"


def default_window(budget: int | None, sinks: int) -> int:
    """The default window: a quarter of the budget without the sinks, at most 64. Without a budget it is 64."""
    return MAX_DEFAULT_WINDOW if budget is None else max(1, min(MAX_DEFAULT_WINDOW, (budget - sinks) // 4))


def half_of(budget: int | None) -> int:
    """Tokens that `recall="half"` stands for, on top of the budget: half as many, in whole pages.

    Raises: UsageError without a budget, or where its half is less than a page.
    """
    if budget is None:
        raise UsageError(
            f"recall={HALF!r} is half of the budget, and there is none. Give a budget, or leave recall out"
        )
    if budget < 2 * PAGE:
        raise UsageError(
            f"recall={HALF!r} of the budget ({budget} tokens) is less than a page ({PAGE} tokens). Raise budget to at "
            f"least {2 * PAGE}, or give recall a number"
        )
    return budget // 2 // PAGE * PAGE


@dataclass(frozen=True)
class CacheOptions:
    """The options of a `KVCache`, which explains each of them. This is their only declaration.

    Policy, positions, store and merge rule may be given by name, and are held as objects. A `window` of None stays
    None, because it follows the budget when that is lowered. `limits` has its number.

    Raises: UsageError for an unknown name, a value of another type, or limits that cannot be honoured. PolicyError for
    a policy that cannot be made.
    """

    budget: int | None = declared(
        Option(
            None,
            "Maximum number of tokens that a layer keeps",
            int,
            least=1,
            most=MAX_NUMBER,
            usual="all",
            flags=("--max-kv-size",),
            label=lambda options: options.budget,
        )
    )
    policy: Policy = declared(
        Option(
            AUTO,
            "Policy that decides which tokens to keep: a name, SnapKV(pool=7), or file.py:Class",
            usual="auto, which is key_diff",
            names=POLICIES,
            metavar="NAME",
            label=lambda options: repr(options.policy),
        )
    )
    sinks: int | str = declared(
        Option(
            DEFAULT_SINKS,
            "First tokens that are never evicted, or system for the tokens of the system text",
            int,
            most=MAX_NUMBER,
            words=(SYSTEM,),
            usual=f"{DEFAULT_SINKS}, in serve {SYSTEM}",
            label=lambda options: options.sinks,
        )
    )
    window: int | None = declared(
        Option(
            None,
            "Newest tokens that are never evicted",
            int,
            least=1,
            most=MAX_NUMBER,
            usual=f"a quarter of the budget without the sinks, at most {MAX_DEFAULT_WINDOW}",
            label=lambda options: options.limits.window,
        )
    )
    chunk: int = declared(
        Option(
            512,
            "Maximum number of tokens of a prompt read in one step",
            int,
            least=1,
            most=MAX_NUMBER,
            label=lambda options: options.chunk,
        )
    )
    positions: PositionMode = declared(
        Option(
            AUTO,
            "Position mode of kept tokens: auto, original, compact, self_extend(group, window) or clamp(limit)",
            usual="auto, which reads longer texts within the trained length",
            names=MODES,
            metavar="MODE",
            label=lambda options: str(options.positions),
        )
    )
    batch: int = declared(Option(1, "Rows", int, least=1, most=MAX_NUMBER, is_typed=False))
    rollback: int = declared(
        Option(16, "Tokens that can be rolled back beside the last step", int, most=MAX_NUMBER, is_typed=False)
    )
    store: Store = declared(
        Option(
            "plain",
            "Format of cached keys and values: plain, int8, int4, or int4(sinks=4, newest=32), whose first and newest "
            "tokens stay in full precision",
            names=STORES,
            metavar="NAME",
            label=lambda options: options.store.name,
        )
    )
    merge: Merge | None = declared(
        Option(
            None,
            "A study, worse than dropping by 0.003 to 0.427 nats a token on SmolLM2-135M: rule that merges evicted "
            "tokens into kept ones, mean_count, mean, sum, pick or weighted, also as mean_count(next, threshold=0.5)",
            usual="none, which drops them",
            names=MERGES,
            metavar="RULE",
            label=lambda options: NO_MERGE if options.merge is None else str(options.merge),
        )
    )
    recall: HalfOrCount = declared(
        Option(
            0,
            f"Number of evicted tokens that each step reloads on top of the budget, a multiple of {PAGE}. {HALF}, or "
            "no value on the command line: half as many as the budget. All evicted tokens stay in the host's memory",
            int,
            most=MAX_NUMBER,
            words=(HALF,),
            alone=HALF,
            label=lambda options: options.recall,
        )
    )
    recall_store: Store = declared(
        Option(
            DEFAULT_RECALL_STORE,
            "Format of evicted tokens for --recall: plain, int8 or int4",
            names=STORES,
            metavar="NAME",
            label=lambda options: options.recall_store.name if options.recall else NO_RECALL,
        )
    )
    recall_folder: Path | None = declared(
        Option(
            None,
            "Store evicted tokens in an unnamed file in this folder, for texts larger than the host's memory",
            usual="the host's memory",
            metavar="FOLDER",
        )
    )
    shares: Shares | Auto | None = declared(
        Option(
            None,
            "Each layer's and kv head's share of the budget, a file of `windlass calibrate --shares`. auto takes those "
            "that come with Windlass for these weights, or equal shares",
            usual="equal shares",
            metavar="FILE",
            label=lambda options: NO_SHARES if options.shares is None else str(options.shares),
        )
    )

    if TYPE_CHECKING:

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
            recall: int | str = 0,
            recall_store: str | Store = DEFAULT_RECALL_STORE,
            recall_folder: str | Path | None = None,
            shares: str | Path | Shares | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        from windlass.cache.merging import merge_of
        from windlass.cache.shares import shares_of
        from windlass.policies.registry import auto, is_auto
        from windlass.positions.modes import position_mode
        from windlass.stores.formats import store_of

        has_budget = self.budget is not None
        vars(self).update(
            policy=auto(has_budget) if is_auto(self.policy) else policy_of(self.policy),
            positions=position_mode(self.positions),
            store=store_of(self.store),
            merge=merge_of(self.merge),
            recall_store=recall_store_of(self.recall_store),
            recall_folder=recall_folder_of(self.recall_folder),
            shares=shares_of(self.shares),
        )
        check_fields(self)
        if vars(self)["recall"] == HALF:
            vars(self).update(recall=half_of(self.budget))
        _check_room(self.limits)
        if self.shares is not None:
            _check_alone(self.policy)

    @property
    def limits(self) -> Limits:
        """The limits of every layer. The default window is a quarter of the budget without the sinks, at most 64.

        Where each row has the sinks of its system text, `sinks` is the least number that a row can have.
        """
        from windlass.core.step import Limits

        sinks = DEFAULT_SINKS if self.sinks == SYSTEM else int(self.sinks)
        window = default_window(self.budget, sinks) if self.window is None else self.window
        return Limits(self.budget, sinks, window, self.chunk, self.rollback, self.recall)

    def labels(self) -> dict[str, int | str | None]:
        """The options that decide which tokens a cache keeps and how it reads them, as in every row of results."""
        return labels_of(self)

    @property
    def recalled(self) -> str:
        """The recall of each step as a row of results has it: `"128 in int4"`, or `"none"`."""
        return f"{self.recall} in {self.recall_store.name}" if self.recall else NO_RECALL

    def document(self) -> dict[str, Any]:
        """All options as JSON can hold them, without the policy and the recall folder. See `from_document`."""
        limits = {"budget": self.budget, "sinks": self.sinks, "window": self.window}
        return {
            "batch": self.batch,
            "positions": str(self.positions),
            "limits": limits | {"chunk": self.chunk, "rollback": self.rollback},
            "store": self.store.name,
            "merge": None if self.merge is None else str(self.merge),
            "recall": self.recall,
            "recall_store": self.recall_store.name,
            "shares": self.shares if self.shares is None or self.shares == AUTO else self.shares.document(),
        }

    @classmethod
    def from_document(cls, document: dict[str, Any], policy: Policy) -> CacheOptions:
        """The options that `document` was made of. A missing option gets its default."""
        options = dict(document)
        if isinstance(options.get("shares"), dict):
            from windlass.cache.shares import Shares

            options["shares"] = Shares.from_document(options["shares"])
        return cls(policy=policy, **options.pop("limits"), **options)


def _check_room(limits: Limits) -> None:
    """Raises: UsageError for a budget without room for a token beside sinks and window, or a recall of half pages."""
    least = limits.sinks + limits.window + 1
    if limits.budget is not None and limits.budget < least:
        raise UsageError(
            f"budget ({limits.budget} tokens) must be at least sinks ({limits.sinks}) + window ({limits.window}) + 1, "
            f"which is {least}. Raise budget, or lower sinks or window"
        )
    if limits.recall % PAGE:
        whole = limits.recall // PAGE * PAGE
        raise UsageError(
            f"recall ({limits.recall} tokens) must be a multiple of {PAGE}, the tokens of a page. "
            f"Use {whole or PAGE}{f' or {whole + PAGE}' if whole else ''}"
        )


def _check_alone(policy: Policy) -> None:
    """Raises: UsageError for a policy that gives layers budgets of their own, beside shares, which do so too."""
    from windlass.policies.base import Budgeter, OneShot
    from windlass.policies.wrappers import find

    one_shot = find(policy, OneShot)
    is_budgeter = find(policy, Budgeter) is not None  # type: ignore[type-abstract]  # none is made
    if is_budgeter or (one_shot is not None and one_shot.shares_budget):
        raise UsageError(
            f"shares: {policy!r} sets the budget of each layer itself. Leave shares out, or give the wrapped policy"
        )
