"""What an evaluation runs: its cases, out of the lists that a user typed."""

import itertools
import re
from dataclasses import dataclass

from windlass.core.errors import UsageError
from windlass.core.spec import list_of, whole_number
from windlass.core.step import MOST
from windlass.evals.load import load_task
from windlass.evals.task import Task
from windlass.merge import Merge, merge_of
from windlass.policies import Policy, Recent
from windlass.policies.load import load_policy
from windlass.positions.modes import PositionMode, position_mode
from windlass.stores.base import Store
from windlass.stores.low_bit import store_of

ALL = "all"
NONE = "none"


@dataclass(frozen=True)
class Lists:
    """What was typed; values are separated by commas."""

    tasks: str = "passkey"
    policies: str = "recent,key_diff"
    budgets: str = "all,4x"
    lengths: str = "500"
    merge: str = NONE
    positions: str = "original"
    store: str = "plain"


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
class Settings:
    """With which cache a sample is read."""

    policy: Policy
    budget: Budget
    merge: Merge | None
    positions: PositionMode
    store: Store

    @property
    def labels(self) -> dict[str, str]:
        """Each setting as text, as in a line of results."""
        return {
            "policy": repr(self.policy),
            "asked_budget": self.budget.asked,
            "merge": NONE if self.merge is None else str(self.merge),
            "positions": str(self.positions),
            "store": self.store.name,
        }


@dataclass(frozen=True)
class Grid:
    """Everything that is combined; tasks by label."""

    tasks: dict[str, Task]
    lengths: list[int]
    settings: list[Settings]


def grid_of(lists: Lists) -> Grid:
    """The product of all lists; what was named twice is run once.

    A budget of `all` evicts nothing under any policy or rule, so it is run once, as `Recent` without one.

    Raises: WindlassError for what cannot be honoured.
    """
    axes = (
        list_of("--policies", lists.policies, load_policy),
        list_of("--budgets", lists.budgets, _budget),
        list_of("--merge", lists.merge, _merge),
        list_of("--positions", lists.positions, position_mode),
        list_of("--store", lists.store, store_of),
    )
    settings = [
        Settings(Recent(), budget, None, positions, store)
        if budget.asked == ALL
        else Settings(policy, budget, merge, positions, store)
        for policy, budget, merge, positions, store in itertools.product(*axes)
    ]
    return Grid(
        dict(list_of("--tasks", lists.tasks, load_task)),
        list(dict.fromkeys(list_of("--lengths", lists.lengths, whole_number("--lengths", 1, MOST)))),
        list({tuple(each.labels.values()): each for each in settings}.values()),
    )


def _merge(part: str) -> Merge | None:
    return None if part == NONE else merge_of(part)


def _budget(part: str) -> Budget:
    if part == ALL:
        return Budget(part)
    if part.endswith("x"):
        if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?x", part) or float(part[:-1]) < 1:
            raise UsageError(f"--budgets {part!r} is not a part of the text; write 4x for a quarter of it")
        return Budget(part, divisor=float(part[:-1]))
    return Budget(part, slots=whole_number("--budgets", 1, MOST)(part))
