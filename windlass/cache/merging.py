"""Merging: the choice of a kept slot for each evicted token, and the rules that combine them."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Final, final

import torch
from torch import Tensor
from torch.nn.functional import normalize

from windlass import kernels
from windlass.core.errors import UsageError, check_kind, real_number
from windlass.core.parse import parse_spec, use_one_of
from windlass.core.types import RowCounts, Scores, SlotIndex, SlotKeys, SlotPositions
from windlass.policies.base import ACCUMULATES, WEIGHT, Policy
from windlass.stores.base import Parts, Store


@dataclass(frozen=True)
class TokenGroups:
    """The evicted tokens of a layer, grouped by target slot. Tensors are (batch, score_heads or kv_heads, evicted).

    `targets[i]`: the slot that takes token i, or its own slot where the token is dropped.
    `is_merged[i]`: whether token i is merged, not dropped.
    `representative[i]`: index of an arbitrary but fixed evicted token with the same target. Group sums are
    scattered there.
    """

    targets: SlotIndex
    is_merged: Tensor
    representative: Tensor

    def expand(self, heads: int) -> "TokenGroups":
        """The same groups in all `heads`, where the policy ranks them alike."""
        return TokenGroups(
            *(each.expand(-1, heads, -1) for each in (self.targets, self.is_merged, self.representative))
        )

    def add(self, base: Tensor, states: Tensor) -> Tensor:
        """For each token, its `base` plus the sum of `states` over its group: (batch, heads, evicted, channels).

        `base` must be the same for all tokens of a group, and `states` 0 where a token is dropped.
        """
        batch, heads, tokens, channels = base.shape
        starts = torch.arange(0, batch * heads * tokens, tokens, device=base.device).view(batch, heads, 1)
        rows = (self.representative + starts).flatten()
        total = base.reshape(-1, channels).index_add(0, rows, states.reshape(-1, channels))
        return total.index_select(0, rows).view(base.shape)

    def sum(self, numbers: Tensor) -> Tensor:
        """For each token, the sum of `numbers` (batch, heads, evicted) over the merged tokens of its group."""
        numbers = numbers * self.is_merged
        return self.add(torch.zeros_like(numbers)[..., None], numbers[..., None])[..., 0]

    def max(self, numbers: Tensor) -> Tensor:
        """For each token, the largest of `numbers` over the merged tokens of its group, or -inf."""
        largest = torch.full_like(numbers, -torch.inf)
        largest.scatter_reduce_(2, self.representative, numbers.masked_fill(~self.is_merged, -torch.inf), "amax")
        return largest.gather(2, self.representative)


def group_by_target(targets: SlotIndex, is_merged: Tensor, slots: int) -> TokenGroups:
    """The groups of evicted tokens that go to `targets`, in a layer of `slots` slots."""
    tokens = torch.arange(targets.shape[-1], device=targets.device).expand_as(targets)
    last = torch.zeros(*targets.shape[:2], slots, dtype=tokens.dtype, device=targets.device)
    return TokenGroups(targets, is_merged, last.scatter_(2, targets, tokens).gather(2, targets))


MERGED: Final = "merged"  # how many evicted tokens a slot stands for beside its own


def holds_merged_tokens(positions: SlotPositions, state: dict[str, Tensor]) -> bool:
    """Return True if any held slot of a layer stands for several tokens. Waits for the device."""
    return MERGED in state and bool(((state[MERGED] > 0) & (positions >= 0)).any())


COSINE_STEPS: Final = 2.0**16  # cosines are compared in steps, so that rounding does not choose between equal keys
BLOCK: Final = 256  # evicted tokens whose cosines with all targets are in memory at once
NO_POSITION: Final = 2**31 - 1  # above any position


@dataclass(frozen=True)
class MergeCandidates:
    """Evicted tokens, and the kept slots that may take them.

    `keys` are those of all slots, before RoPE. `positions` are those before the eviction.
    """

    keys: SlotKeys
    positions: SlotPositions
    is_target: Tensor  # (batch, score_heads, slots): whether a slot may take tokens
    evicted: SlotIndex


def next_target(candidates: MergeCandidates) -> SlotIndex:
    """For each evicted token the first target at or after its position, else the last one."""
    positions, order = candidates.positions.where(candidates.is_target, NO_POSITION).sort(dim=-1, stable=True)
    rank = torch.searchsorted(positions, candidates.positions.gather(-1, candidates.evicted))
    last = candidates.is_target.sum(-1, keepdim=True) - 1
    return order.gather(-1, torch.minimum(rank, last).clamp(min=0))


def nearest_target(candidates: MergeCandidates) -> SlotIndex:
    """For each evicted token the target whose key has the largest cosine with its own. The newest of equal ones wins.

    Where the policy ranks all heads of a row alike, the mean cosine over the heads decides.
    """
    count = max(1, candidates.is_target.shape[-1] - candidates.evicted.shape[-1])  # no more slots are held
    # Flipped: among tokens at one position the newest lies in the highest slot.
    flipped = candidates.positions.where(candidates.is_target, -1).flip(-1)
    positions, order = flipped.sort(dim=-1, descending=True, stable=True)
    order = flipped.shape[-1] - 1 - order
    # Slots that are no targets are sorted last. The newest target replaces them: of equal ones the first is found.
    targets = order.where(positions >= 0, order[..., :1])[..., :count]
    own_keys = _unit_keys(candidates.keys, candidates.evicted)
    target_keys = _unit_keys(candidates.keys, targets).mT * (COSINE_STEPS / _heads_in_one(candidates.keys, targets))
    newness = torch.arange(count, 0, -1, dtype=own_keys.dtype, device=own_keys.device)
    best = []
    for keys in own_keys.split(BLOCK, dim=2):
        cosines = (keys @ target_keys).round_()
        below = cosines.sub_(cosines.amax(-1, keepdim=True))  # 0, or -1 and less: only equal ones stay above 0
        best.append(torch.add(newness, below, alpha=count, out=below).amax(-1))  # in half the time of argmax
    return targets.gather(-1, count - torch.cat(best, -1).long())


Target = Callable[[MergeCandidates], SlotIndex]
TARGETS: dict[str, Target] = {"nearest": nearest_target, "next": next_target}
"""Functions that choose a target slot for each evicted token. Without a target, any slot is returned."""


def cosine_with_target(keys: SlotKeys, evicted: SlotIndex, targets: SlotIndex) -> Tensor:
    """The cosine of each evicted token's key with that of its target, (batch, score_heads, evicted).

    Where the policy ranks all heads of a row alike, the mean over the heads.
    """
    products = _unit_keys(keys, targets) * _unit_keys(keys, evicted)
    return products.sum(-1) / _heads_in_one(keys, targets)


def _heads_in_one(keys: SlotKeys, index: SlotIndex) -> int:
    """Number of heads in each row of `_unit_keys`."""
    return keys.shape[1] // index.shape[1]


def _unit_keys(keys: SlotKeys, index: SlotIndex) -> Tensor:
    """The keys at `index` as float32 unit vectors, (batch, score_heads, n, channels).

    Where `index` has one row for all heads, their vectors stand side by side.
    """
    units = normalize(kernels.read(keys, index).float(), dim=-1)
    return units if index.shape[1] == keys.shape[1] else units.transpose(1, 2).flatten(2)[:, None]


@dataclass(frozen=True)
class TokenStates:
    """Contents of some slots, as float32.

    `states` are keys and values side by side. `weights` are the numbers of tokens in the slots, or the policy's weights
    where the rule has `weighs_by`. A token that is dropped has weight 0.
    """

    states: Tensor  # (batch, kv_heads, n, head_dim + value_dim)
    weights: Tensor  # (batch, kv_heads, n, 1)
    positions: Tensor  # (batch, kv_heads, n)


@dataclass(frozen=True)
class MergeBatch:
    """The evicted tokens of one layer and step, and the contents of their target slots, in the same order."""

    targets: TokenStates
    tokens: TokenStates
    groups: TokenGroups

    def mean(self) -> Tensor:
        """For each token, the weighted mean over its target and all tokens of its group."""
        targets, tokens = self.targets, self.tokens
        total = self.groups.add(targets.states * targets.weights, tokens.states * tokens.weights)
        return total.div_(self.groups.add(targets.weights, tokens.weights))


@dataclass(frozen=True)
class Merge(ABC):
    """A rule by which a kept slot takes evicted tokens.

    `target` picks the slot: `nearest` by the cosine of keys, or `next` in the text. A token whose key has a smaller
    cosine with that of its target than `threshold` is dropped.

    Raises: UsageError for an unknown target, or a threshold that is no cosine.
    """

    target: str = "nearest"
    threshold: float = -1.0

    name: ClassVar[str]
    """The rule's name in options and labels."""

    is_counted: ClassVar[bool] = False
    """True if attention adds the logarithm of a slot's count to its logits."""

    is_mean: ClassVar[bool] = True
    """True if a slot stores weighted means of its tokens' keys and values. Tokens may then join as they come."""

    weighs_by: ClassVar[str | None] = None
    """Name of the policy's state that weights the means (None: weighted by counts)."""

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise UsageError(f"target of a merge must be one of: {', '.join(TARGETS)}, got {self.target!r}")
        if not -1 <= real_number("threshold of a merge", self.threshold) <= 1:
            raise UsageError(f"threshold of a merge must be a cosine from -1 to 1, got {self.threshold}")

    @abstractmethod
    def combine(self, batch: MergeBatch) -> Tensor:
        """For each token, the keys and values of its target slot once the whole group is merged into it.

        The result is float32 (batch, kv_heads, evicted, head_dim + value_dim), the same for all tokens of a group.
        Where a token is dropped it may be anything finite.
        """

    @property
    def state(self) -> tuple[str, ...]:
        """Names of the state per slot that merging needs."""
        return (MERGED,)

    def __str__(self) -> str:
        """The shortest text that `merge_of` reads as this rule."""
        default = {each.name: each.default for each in fields(self)}
        words = [] if self.target == default["target"] else [self.target]
        if self.threshold != default["threshold"]:
            words.append(f"threshold={repr(self.threshold).removesuffix('.0')}")
        return self.name + (f"({', '.join(words)})" if words else "")


MIN_WEIGHT: Final = 1e-30  # least divisor, as a free slot has weight 0


@dataclass(frozen=True)
class LayerView:
    """One layer after an eviction, as merging reads it."""

    store: Store
    positions: SlotPositions  # after the eviction
    state: dict[str, Tensor]
    next_positions: RowCounts
    sinks: int | Tensor  # (batch, 1, 1) where rows differ
    window: int
    sliding_window: int | None
    attention_chunk: int | None = None


@dataclass(frozen=True)
class SlotContent:
    """Contents of some slots: the parts of their keys and values in the store, and state, both by name."""

    parts: Parts
    state: dict[str, Tensor]


@dataclass(frozen=True)
class MergePlan:
    """The contents of the slots that a merge writes, before and after it. Both are copies: planning changes nothing.

    `targets` names for each evicted token the slot that takes it. A dropped token has its own slot there. The eviction
    emptied that slot, so nothing reads it.
    """

    targets: SlotIndex
    before: SlotContent
    after: SlotContent

    def apply(self, store: Store, state: dict[str, Tensor]) -> None:
        """Write the merged tokens into the layer's `store` and `state`, in place."""
        _write(store, state, self.targets, self.after)

    def revert(self, store: Store, state: dict[str, Tensor]) -> None:
        """Write the former contents of the slots back, whether `apply` was done, done in part, or not at all."""
        _write(store, state, self.targets, self.before)


def plan_merge(merge: Merge, layer: LayerView, evicted: SlotIndex, evicted_positions: SlotIndex) -> MergePlan:
    """Plan how `merge` takes the tokens of the slots `evicted`, which stood at `evicted_positions` (below 0: no token).

    A kept slot may take tokens unless it is a sink, in the window, or so old that the model's sliding window or chunk
    hides it from the next query. A token is dropped where a row and head has no such slot, where its key is too unlike
    its target's, or where it is too old itself. Changes nothing.
    """
    ends = layer.next_positions[:, None, None]
    oldest = torch.zeros_like(ends) if layer.sliding_window is None else ends - layer.sliding_window + 1
    if layer.attention_chunk is not None:
        oldest = oldest.maximum(ends - ends % layer.attention_chunk)
    is_target = (layer.positions >= layer.sinks) & (layer.positions >= oldest)
    is_target &= layer.positions < ends - layer.window
    is_merged = (evicted_positions >= 0) & (evicted_positions >= oldest) & is_target.any(-1, keepdim=True)
    positions = layer.positions.scatter(-1, evicted, evicted_positions)
    candidates = MergeCandidates(layer.store.keys(), positions, is_target, evicted)
    targets = TARGETS[merge.target](candidates)
    if merge.threshold > -1:
        is_merged &= cosine_with_target(candidates.keys, evicted, targets) >= merge.threshold - 1 / COSINE_STEPS
    groups = group_by_target(targets.where(is_merged, evicted), is_merged, is_target.shape[-1])
    return _plan_of(merge, layer, candidates, groups)


def _plan_of(merge: Merge, layer: LayerView, candidates: MergeCandidates, groups: TokenGroups) -> MergePlan:
    keys, values, evicted, targets = candidates.keys, layer.store.values(), candidates.evicted, groups.targets
    heads, head_dim = keys.shape[1], keys.shape[3]
    adds = {MERGED: layer.state[MERGED] + 1}
    if merge.weighs_by is not None:
        adds[merge.weighs_by] = layer.state[merge.weighs_by].clamp(min=MIN_WEIGHT)
    weights = adds[merge.weighs_by or MERGED]

    def states_at(index: SlotIndex, scale: Tensor | float) -> TokenStates:
        states = torch.cat((kernels.read(keys, index), kernels.read(values, index)), -1).float()
        slot_weights = (weights.gather(-1, index) * scale).expand(-1, heads, -1)[..., None]
        return TokenStates(states, slot_weights, candidates.positions.gather(-1, index).expand(-1, heads, -1))

    batch = MergeBatch(states_at(targets, 1.0), states_at(evicted, groups.is_merged), groups.expand(heads))
    merged = merge.combine(batch)
    parts = layer.store.parts_of(merged[..., :head_dim].to(keys.dtype), merged[..., head_dim:].to(values.dtype))
    state = {name: layer.state[name].gather(-1, targets) for name in adds}
    grown = {name: state[name] + groups.sum(adds[name].gather(-1, evicted)) for name in adds}
    return MergePlan(targets, SlotContent(layer.store.take_all(targets), state), SlotContent(parts, grown))


def _write(store: Store, state: dict[str, Tensor], targets: SlotIndex, content: SlotContent) -> None:
    # Tokens of one group write the same numbers to the same slot, so the order does not matter.
    store.put(targets, content.parts, [(state[name], new) for name, new in content.state.items()])


def log_counts(merge: Merge | None, state: dict[str, Tensor]) -> Scores | None:
    """Terms to add to each slot's logits: log(n) for a slot of n tokens. None: the rule does not count."""
    return None if merge is None or not merge.is_counted else state[MERGED].log1p()


@final
@dataclass(frozen=True)
class MeanCount(Merge):
    """The mean of keys and of values over all merged tokens. The logarithm of their count is added to the logit.

    Exact where the merged keys are equal: n equal keys weigh n times as much as one.

    Source: the count in the logit, Bolya et al. 2023 (arXiv:2210.09461), and for caches ZSMerge, Liu et al. 2025
    (arXiv:2503.10714).
    """

    name = "mean_count"
    is_counted = True

    def combine(self, batch: MergeBatch) -> Tensor:
        return batch.mean()


@final
@dataclass(frozen=True)
class Mean(Merge):
    """The mean of keys and of values over all merged tokens, which together weigh as much as one token.

    Source: a control, "average" of llama.cpp PR 5719.
    """

    name = "mean"

    def combine(self, batch: MergeBatch) -> Tensor:
        return batch.mean()


@final
@dataclass(frozen=True)
class Weighted(Merge):
    """The mean of keys and of values with the policy's weights. The slot then has the sum of the merged weights.

    In attention the merged tokens count as one.

    Source: Nawrot et al. 2024 (arXiv:2403.09636), the running weighted mean. See policy `DMC`.
    """

    target: str = "next"

    name = "weighted"
    weighs_by = WEIGHT

    def combine(self, batch: MergeBatch) -> Tensor:
        return batch.mean()


@final
@dataclass(frozen=True)
class Sum(Merge):
    """The sum of keys and of values.

    Source: a control, "sum" of llama.cpp PR 5719.
    """

    name = "sum"
    is_mean = False

    def combine(self, batch: MergeBatch) -> Tensor:
        is_merged = batch.groups.is_merged[..., None]
        return batch.groups.add(batch.targets.states, batch.tokens.states * is_merged)


@final
@dataclass(frozen=True)
class Pick(Merge):
    """Even heads keep the target's key and value. Odd heads take those of the newest token merged into it.

    Source: a control, after "a head from each" of llama.cpp PR 5719.
    """

    name = "pick"
    is_mean = False

    def combine(self, batch: MergeBatch) -> Tensor:
        kept, groups = batch.targets.states, batch.groups
        positions = batch.tokens.positions.double()  # exact for any position
        # Several tokens of a group may have the same position, after `divide`: then their mean is taken.
        is_newest = ((positions == groups.max(positions)) & groups.is_merged).to(kept.dtype)
        number = groups.sum(is_newest)[..., None]
        newest = groups.add(torch.zeros_like(kept), batch.tokens.states * is_newest[..., None]) / number
        is_odd = (torch.arange(kept.shape[1], device=kept.device) % 2 == 1)[None, :, None, None]
        return torch.where(is_odd & (number > 0), newest, kept)


MERGES: dict[str, type[Merge]] = {rule.name: rule for rule in (MeanCount, Mean, Sum, Pick, Weighted)}


FORM = "mean_count(next, threshold=0.5)"


def merge_of(spec: str | Merge | None) -> Merge | None:
    """The rule that `spec` names, such as `"mean_count"` or `"mean_count(next, threshold=0.5)"`, or `spec` itself.

    The settings come in any order.

    Raises: UsageError for an unknown name or setting, one given twice, or a threshold that is no cosine.
    """
    if spec is None or isinstance(spec, Merge):
        return spec
    check_kind("merge", spec, str, "a rule, its name or None", 'Write merge="mean_count"')
    typed = parse_spec(spec)
    if typed is None or typed.name not in MERGES:
        raise UsageError(f"merge={spec!r} is not a rule. {use_one_of(spec, MERGES)}, or with settings: {FORM}")
    given: dict[str, str] = {}
    for name, value in (*(("", word) for word in typed.positional), *typed.named):
        if name not in ("", "threshold"):
            raise UsageError(f"merge={spec!r}: {name!r} is not a setting. The only number is threshold, as in {FORM}")
        if not name and value not in TARGETS:
            raise UsageError(f"merge={spec!r}: {value!r} is not a setting. {use_one_of(value, TARGETS)}, as in {FORM}")
        name = name or "target"
        if name in given:
            raise UsageError(f"merge={spec!r}: {name} is given twice. Leave one out")
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
            f"merge={merge} takes no means, and {policy!r} joins new tokens by means only. Use "
            + ", ".join(name for name, rule in MERGES.items() if rule.is_mean)
        )
    if merge is not None and budget is None and not joins:
        raise UsageError(f"merge={merge} needs a budget: a cache without one evicts nothing that could be merged")
    if merge is not None and merge.weighs_by is not None and merge.weighs_by not in policy.needs.state:
        raise UsageError(
            f"merge={merge} takes weights from the policy, and {policy!r} gives none. Use policy dmc, or mean_count"
        )
    if merge is not None and store.full_precision.sinks + store.full_precision.newest:
        raise UsageError(
            f"merge={merge} does not go with store {store.name}: a slot that is held exactly takes no other token in. "
            f"Leave out its sinks and newest"
        )
    return merge


__all__ = [
    "LayerView",
    "MERGED",
    "MERGES",
    "Mean",
    "MeanCount",
    "Merge",
    "MergeBatch",
    "MergePlan",
    "Pick",
    "Sum",
    "TARGETS",
    "Weighted",
    "checked_merge",
    "holds_merged_tokens",
    "log_counts",
    "merge_of",
    "plan_merge",
]
