"""The slots of one layer of the model, for all its kv heads together or for groups of heads with slots of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.cache.decode import LayerCall
from windlass.cache.layer import SlotLayer
from windlass.cache.options import CacheOptions
from windlass.cache.shares import Heads
from windlass.core.errors import UsageError
from windlass.core.parse import AUTO
from windlass.core.step import AttentionCall, Limits
from windlass.core.types import Attended, Queries
from windlass.policies.base import Budgeter
from windlass.policies.wrappers import find


class Leaf(NamedTuple):
    """The share of one `SlotLayer`: its layer of the model, its kv heads (None: all), and its limits."""

    layer: int
    heads: Heads | None
    limits: Limits


def leaves_of(options: CacheOptions, layers: int) -> list[Leaf]:
    """The leaves of a cache, layer by layer from the bottom up."""
    limits, shares = options.limits, options.shares
    assert shares != AUTO, "shares of no model"
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
    """The limits of each layer: those of the cache, with the layer's budget if the policy gives one."""
    limits, budgeter = options.limits, find(options.policy, Budgeter)  # type: ignore[type-abstract]  # none is made
    if limits.budget is None or budgeter is None:
        return [limits] * layers
    budgets = budgeter.budgets(limits.budget, layers, limits.sinks + limits.window + 1)
    return [replace(limits, budget=budget) for budget in budgets]


Take = Callable[[SlotLayer, LayerCall], Attended]
Read = Callable[[SlotLayer, Queries, AttentionCall], Attended]


@dataclass(frozen=True)
class HeadGroups:
    """The slot `layers` of one layer of the model, each with its kv `heads`. Without heads, one slot layer has all."""

    layers: tuple[SlotLayer, ...]
    heads: tuple[Heads, ...]

    @classmethod
    def of(cls, leaves: Sequence[Leaf], layers: Sequence[SlotLayer]) -> list[HeadGroups]:
        """Group the `layers` that were made for `leaves`, in the order of the model, by layer of the model."""
        found = []
        for _, group in groupby(zip(leaves, layers, strict=True), lambda pair: pair[0].layer):
            pairs = list(group)
            heads = tuple(leaf.heads for leaf, _ in pairs if leaf.heads is not None)
            found.append(cls(tuple(layer for _, layer in pairs), heads))
        return found

    @property
    def whole(self) -> SlotLayer | None:
        """The slots of all heads together. None: heads have slots of their own."""
        return None if self.heads else self.layers[0]

    @property
    def kv_heads(self) -> int:
        """The kv heads of a layer of the model whose heads are in groups."""
        return sum(map(len, self.heads))

    def step(self, take: Take, call: LayerCall) -> Attended:
        """Take a step of each group of heads by itself. Returns the attention of all queries.

        Raises: UsageError as `calls` does.
        """
        return self.joined([take(*each) for each in zip(self.layers, self.calls(call), strict=True)])

    def calls(self, call: LayerCall) -> list[LayerCall]:
        """The call of each group of heads.

        Raises: UsageError for another number of kv heads, or an indexer, whose picks are for all heads.
        """
        if self.whole is not None:
            return [call]
        if call.keys.shape[1] != self.kv_heads:
            raise UsageError(
                f"layer {self.layers[0].index} has {call.keys.shape[1]} kv heads here, and its shares are of "
                f"{self.kv_heads}. Measure this model's with `windlass calibrate --shares`"
            )
        if call.attention.picker is not None:
            raise UsageError("shares: the indexer of this model picks tokens for all heads at once. Leave shares out")
        states = (self.split(each) for each in (call.queries, call.keys, call.values))
        each = zip(*states, self._attention_calls(call.attention), strict=True)
        return [LayerCall(q, k, v, call.step, call.mode, own) for q, k, v, own in each]

    def read(self, read: Read, queries: Queries, call: AttentionCall) -> Attended:
        """Attention of queries of a layer without keys of its own, each group of heads by itself."""
        each = zip(self.layers, self.split(queries), self._attention_calls(call), strict=True)
        return self.joined([read(*own) for own in each])

    def split(self, states: Tensor, dim: int = 1) -> list[Tensor]:
        """The part of `states`, of as many kv heads or a multiple of these, that belongs to each group."""
        if not self.heads:
            return [states]
        width = states.shape[dim] // self.kv_heads
        pieces = [[states.narrow(dim, at * width, count * width) for at, count in _runs(own)] for own in self.heads]
        return [own[0] if len(own) == 1 else torch.cat(own, dim) for own in pieces]

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """The states of all heads, joined from each group's `parts`."""
        if not self.heads:
            return parts[0]
        found: dict[int, Tensor] = {}
        for part, heads in zip(parts, self.heads, strict=True):
            found |= zip(heads, part.chunk(len(heads), 1), strict=True)
        return torch.cat([found[head] for head in range(self.kv_heads)], 1)

    def _attention_calls(self, call: AttentionCall) -> list[AttentionCall]:
        if call.sink_logits is None:
            return [call] * len(self.layers)
        return [replace(call, sink_logits=own) for own in self.split(call.sink_logits, 0)]


def _runs(heads: Heads) -> list[tuple[int, int]]:
    """The runs of consecutive numbers among rising `heads`, as (first, count)."""
    starts = [heads[0], *(head for before, head in pairwise(heads) if head != before + 1)]
    stops = [*(before + 1 for before, head in pairwise(heads) if head != before + 1), heads[-1] + 1]
    return [(start, stop - start) for start, stop in zip(starts, stops, strict=True)]
