"""Which slots a cache has: for each layer of the model those of all its kv heads together, or of heads of one size."""

from dataclasses import replace
from typing import NamedTuple

from windlass.cache.options import CacheOptions
from windlass.cache.shares import Heads
from windlass.core.step import Limits
from windlass.policies.interfaces import Budgeter
from windlass.policies.wrapper import find


class Leaf(NamedTuple):
    """What one `SlotLayer` holds: of which layer of the model, of which of its kv heads (None: all), and how much."""

    layer: int
    heads: Heads | None
    limits: Limits


def leaves_of(options: CacheOptions, layers: int) -> list[Leaf]:
    """The leaves of a cache, layer by layer from the bottom up."""
    limits, shares = options.limits, options.shares
    if shares is None:
        return [Leaf(layer, None, own) for layer, own in enumerate(_layer_limits(options, layers))]
    budgets = None if limits.budget is None else shares.budgets(limits)
    leaves = []
    for layer in range(layers):
        groups = shares.groups(layer)
        if len(groups) < 2:
            own = limits if not groups or budgets is None else replace(limits, budget=budgets[layer][0])
            leaves.append(Leaf(layer, None, own))
            continue
        for number, heads in enumerate(groups):
            own = limits if budgets is None else replace(limits, budget=budgets[layer][number])
            leaves.append(Leaf(layer, heads, own))
    return leaves


def _layer_limits(options: CacheOptions, layers: int) -> list[Limits]:
    """The limits of each layer: those of the cache, but for what the policy lets it keep."""
    limits, budgeter = options.limits, find(options.policy, Budgeter)  # type: ignore[type-abstract]  # none is made
    if limits.budget is None or budgeter is None:
        return [limits] * layers
    budgets = budgeter.budgets(limits.budget, layers, limits.sinks + limits.window + 1)
    return [replace(limits, budget=budget) for budget in budgets]
