"""Where the rows of the model of a cache stand, its options and the rules of its layers."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from tests.helpers.cache_model_rules import MergeModel, PolicyModel

MOST_WINDOW = 64  # of a window that nobody gave


@dataclass(frozen=True)
class Rules:
    """Rules by which a layer keeps tokens. Roundings are relative."""

    policy: PolicyModel
    merge: MergeModel | None
    budget: int | None
    sinks: int
    window: int
    rollback: int
    store_sinks: int = 0
    store_newest: int = 0
    key_rounding: float = 2.0**-24
    mass_rounding: float = 2.0**-15
    recall: int = 0  # evicted tokens that a step reads again
    recall_store: str = "plain"
    has_digests: bool = False  # whether pages may be looked at by their digests first


class Leaf(NamedTuple):
    """The layer of the model, and its kv heads, of one list of slots. None: all heads."""

    layer: int
    heads: tuple[int, ...] | None = None


class RowModel(NamedTuple):
    """The place of a row in its text. `prompts` are the spans that came in steps of several columns."""

    end: int = 0
    seen: int = 0
    columns: int = 0
    since_edit: int = 0
    ids: tuple[int, ...] | None = ()
    prompts: tuple[tuple[int, int], ...] = ()

    @property
    def prompt_end(self) -> int:
        return self.prompts[-1][1] if self.prompts else 0

    def moved(self, end: int) -> "RowModel":
        spans = tuple((start, min(stop, end)) for start, stop in self.prompts if start < end)
        return self._replace(end=end, prompts=spans)


@dataclass(frozen=True)
class Options:
    """Limits of a cache. `window` is None if it follows the budget."""

    budget: int | None
    sinks: int
    window: int | None
    rollback: int
    rules: Rules  # of a layer, but for budget, sinks and window

    @property
    def window_now(self) -> int:
        if self.window is not None:
            return self.window
        if self.budget is None:
            return MOST_WINDOW
        return max(1, min(MOST_WINDOW, (self.budget - self.sinks) // 4))

    def leaf_rules(self, budgets: Sequence[int | None]) -> list[Rules]:
        """Limits of layers, or groups of heads, that keep `budgets`."""
        shared = replace(self.rules, sinks=self.sinks, window=self.window_now, rollback=self.rollback)
        return [replace(shared, budget=budget) for budget in budgets]

    @property
    def is_recalling(self) -> bool:
        return self.rules.recall > 0

    @property
    def is_possible(self) -> bool:
        return self.budget is None or self.budget >= self.sinks + self.window_now + 1
