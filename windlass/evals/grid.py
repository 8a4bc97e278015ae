"""What an evaluation or a benchmark runs: every combination of the values in the lists that a user typed."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from windlass.cache.options import CacheOptions
from windlass.cache.policy_spec import policy_of
from windlass.cache.recall_options import recall_store_of
from windlass.cache.shares import Shares
from windlass.cache.shares_file import shares_of
from windlass.core.errors import UsageError
from windlass.core.limits import MAX_NUMBER
from windlass.core.spec import NO_MERGE, NO_SHARES, int_parser, parse_list
from windlass.evals.budgets import ALL, Budget, budget_of
from windlass.evals.case import VARIED
from windlass.evals.depths import depth_of
from windlass.evals.load import load_task
from windlass.evals.task import Task
from windlass.merge import Merge, merge_of
from windlass.policies import Recent
from windlass.positions.modes import Original, position_mode
from windlass.stores.spec import store_of

OPTIONS = {"budgets": "budget", "policies": "policy"}  # of flags that are not called like their option


@dataclass(frozen=True)
class Lists:
    """What was typed; values are separated by commas.

    `options` holds lists of values of the cache's options by the name of their flag, such as `policies`. An option
    without a list is as the cache has it by default. Without `depths` an answer stands anywhere.
    """

    tasks: str
    lengths: str
    options: Mapping[str, str]
    depths: str | None = None


@dataclass(frozen=True)
class Settings:
    """With which cache a sample is read: `options` but for the budget, which may depend on the text."""

    budget: Budget
    options: CacheOptions

    @property
    def labels(self) -> dict[str, str]:
        """Each setting that a list may vary as text, as in a line of results."""
        labels = self.options.labels() | {"recalled": self.options.recalled}
        varied = {name: str(labels[name]) for name in VARIED}
        return {"policy": str(labels["policy"]), "asked_budget": self.budget.asked, **varied}


@dataclass(frozen=True)
class Grid:
    """Everything that is combined; tasks by label."""

    tasks: dict[str, Task]
    lengths: list[int]
    settings: list[Settings]


def grid_of(lists: Lists) -> Grid:
    """The product of all lists; what was named twice is run once.

    A budget of `all` evicts nothing under any policy or rule, so it is run once, under the default ones.

    Raises: WindlassError for what cannot be honoured.
    """
    axes = axes_of(lists.options)
    usual: dict[str, Any] = {"policy": Recent(), "positions": Original()}  # named in results, so never "auto"
    settings = []
    for values in itertools.product(*axes.values()):
        options = dict(zip(axes, values, strict=True))
        budget = options.pop("budget", Budget(ALL))
        if budget.asked == ALL:
            options |= {"policy": Recent(), "merge": None, "shares": None, "recall": 0}
        if not options.get("recall"):
            options.pop("recall_store", None)
        settings.append(Settings(budget, CacheOptions(**usual | options)))
    return Grid(
        tasks_of(lists),
        list(dict.fromkeys(parse_list("--lengths", lists.lengths, int_parser("--lengths", 1, MAX_NUMBER)))),
        list({tuple(each.labels.values()): each for each in settings}.values()),
    )


def tasks_of(lists: Lists) -> dict[str, Task]:
    """Each task at each depth, by label: `passkey`, or `passkey@0.5` where depths were typed.

    Raises: UsageError for what cannot be found, read or made, and for a task that has no one place for an answer.
    """
    tasks = dict(parse_list("--tasks", lists.tasks, load_task))
    if lists.depths is None:
        return tasks
    placed = {}
    for label, task in tasks.items():
        for depth in parse_list("--depth", lists.depths, depth_of):
            made = task.at(depth)
            if made is None:
                raise UsageError(f"task {label} has no one place where its answer stands; leave out --depth")
            placed[f"{label}@{depth:g}"] = made
    return placed


def axes_of(lists: Mapping[str, str]) -> dict[str, list[Any]]:
    """The values of each list by the name of its option, in the order of the lists; budgets are `Budget`s.

    Raises: WindlassError for what cannot be honoured.
    """
    axes: dict[str, list[Any]] = {}
    for flag, typed in lists.items():
        option = OPTIONS.get(flag, flag)
        if option == "budget":
            axes[option] = [budget_of(f"--{flag}", part) for part in parse_list(f"--{flag}", typed, str)]
        else:
            axes[option] = parse_list(f"--{flag}", typed, PARSERS[option])
    return axes


def _merge(part: str) -> Merge | None:
    return None if part == NO_MERGE else merge_of(part)


def _shares(part: str) -> Shares | None:
    return None if part == NO_SHARES else shares_of(part)


PARSERS = {
    "policy": policy_of,
    "merge": _merge,
    "positions": position_mode,
    "store": store_of,
    "shares": _shares,
    "recall": int_parser("--recall", 0, MAX_NUMBER),
    "recall_store": recall_store_of,
}
