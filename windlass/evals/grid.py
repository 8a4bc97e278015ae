"""What an evaluation or a benchmark runs: every combination of the values in the lists that a user typed."""

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from windlass.cache.options import NO_MERGE, CacheOptions
from windlass.core.errors import UsageError
from windlass.core.spec import int_parser, parse_list
from windlass.core.step import MAX_NUMBER
from windlass.evals.load import load_task
from windlass.evals.load_policy import load_policy
from windlass.evals.task import Task
from windlass.merge import Merge, merge_of
from windlass.positions.modes import position_mode
from windlass.stores.spec import store_of

ALL = "all"
OPTIONS = {"budgets": "budget", "policies": "policy"}  # of flags that are not called like their option


@dataclass(frozen=True)
class Budget:
    """A number of slots, a part of the text (`4x`: a quarter), or all of it."""

    asked: str
    slots: int | None = None
    divisor: float | None = None

    def of(self, context_tokens: int) -> int | None:
        """Slots for a text of so many tokens; None keeps them all."""
        return self.slots if self.divisor is None else int(context_tokens / self.divisor)


@dataclass(frozen=True)
class Lists:
    """What was typed; values are separated by commas.

    `options` holds lists of values of the cache's options by the name of their flag, such as `policies`. An option
    without a list is as the cache has it by default.
    """

    tasks: str
    lengths: str
    options: Mapping[str, str]


@dataclass(frozen=True)
class Settings:
    """With which cache a sample is read: `options` but for the budget, which may depend on the text."""

    budget: Budget
    options: CacheOptions

    @property
    def labels(self) -> dict[str, str]:
        """Each setting that a list may vary as text, as in a line of results."""
        labels = self.options.labels()
        varied = {name: str(labels[name]) for name in ("merge", "positions", "store")}
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
    settings = []
    for values in itertools.product(*axes.values()):
        options = dict(zip(axes, values, strict=True))
        budget = options.pop("budget", Budget(ALL))
        if budget.asked == ALL:
            options |= {"policy": None, "merge": None}
        settings.append(Settings(budget, CacheOptions(**options)))
    return Grid(
        dict(parse_list("--tasks", lists.tasks, load_task)),
        list(dict.fromkeys(parse_list("--lengths", lists.lengths, int_parser("--lengths", 1, MAX_NUMBER)))),
        list({tuple(each.labels.values()): each for each in settings}.values()),
    )


def axes_of(lists: Mapping[str, str]) -> dict[str, list[Any]]:
    """The values of each list by the name of its option, in the order of the lists; budgets are `Budget`s.

    Raises: WindlassError for what cannot be honoured.
    """
    axes: dict[str, list[Any]] = {}
    for flag, typed in lists.items():
        option = OPTIONS.get(flag, flag)
        if option == "budget":
            axes[option] = [_budget(f"--{flag}", part) for part in parse_list(f"--{flag}", typed, str)]
        else:
            axes[option] = parse_list(f"--{flag}", typed, PARSERS[option])
    return axes


def _merge(part: str) -> Merge | None:
    return None if part == NO_MERGE else merge_of(part)


def _budget(flag: str, part: str) -> Budget:
    if part == ALL:
        return Budget(part)
    if part.endswith("x"):
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?x", part) or float(part[:-1]) < 1:
            raise UsageError(f"{flag} {part!r} is not a part of the text; write 4x for a quarter of it")
        return Budget(part, divisor=float(part[:-1]))
    return Budget(part, slots=int_parser(flag, 1, MAX_NUMBER)(part))


PARSERS = {"policy": load_policy, "merge": _merge, "positions": position_mode, "store": store_of}
