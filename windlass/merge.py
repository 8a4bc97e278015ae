"""Where an evicted token's content goes: into a cell, a kept token that stands for several.

A cell is read like any token, at the position of the token that it grew from. Keys are held before
rotation, so those of different positions may be added up. A rule says how a cell takes tokens in; its
`target` says which cell: "nearest", the kept key most like the token's, or "next", the first one after
it in the text. Sinks and the newest tokens take nothing in.

Source: the count of a cell in its logit, Bolya et al. 2023 (arXiv:2210.09461), and for caches ZSMerge,
Liu et al. 2025 (arXiv:2503.10714).
"""

import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Final, final

import torch
from torch import Tensor
from torch.nn.functional import normalize

from windlass.errors import UsageError
from windlass.shapes import PerSlot, RowCounts, Scores, SlotIndex, SlotKeys, SlotPositions, SlotValues
from windlass.step import Limits
from windlass.store import Parts, Store

MERGED: Final = "merged"  # state: how many tokens a slot stands for beside its own
TARGETS: Final = ("nearest", "next")
FINENESS: Final = 2.0**16  # steps of a cosine, so that rounding does not choose between equal keys
BLOCK: Final = 256  # tokens whose cosines with all slots are alive at once
BEYOND: Final = 2**31 - 1


@dataclass(frozen=True)
class Joined:
    """Tokens on their way into cells, every head of a row by itself; floats are float32.

    `tokens` are the slots that were evicted and `cells` the slot each goes to, both (batch, kv_heads,
    evicted); `is_joined` where there is a token and a cell for it. `counts` says how many tokens each
    slot stands for, `positions` where each slot stands in the text.
    """

    keys: SlotKeys
    values: SlotValues
    counts: PerSlot
    positions: Tensor  # (batch, kv_heads, slots)
    tokens: Tensor
    cells: Tensor
    is_joined: Tensor

    def of_tokens(self, states: Tensor) -> Tensor:
        """What `states` (batch, kv_heads, slots, channels) hold for each token."""
        return states.gather(2, self.tokens[..., None].expand(-1, -1, -1, states.shape[-1]))

    def summed(self, states: Tensor) -> Tensor:
        """Per slot, the sum of what `states` (batch, kv_heads, evicted, channels) hold for the tokens that join it."""
        states = states * self.is_joined[..., None]
        whole = states.new_zeros(*self.keys.shape[:3], states.shape[-1])
        return whole.scatter_add_(2, self.cells[..., None].expand_as(states), states)

    def mean(self, states: Tensor) -> Tensor:
        """Per slot, the mean of `states` (batch, kv_heads, slots, channels) over all tokens it stands for now."""
        counts = self.counts[..., None]
        weights = self.of_tokens(counts)
        return (states * counts + self.summed(self.of_tokens(states) * weights)) / (counts + self.summed(weights))


@dataclass(frozen=True)
class Merge(ABC):
    """How evicted tokens join cells.

    Raises: UsageError for an unknown target.
    """

    target: str = "nearest"

    is_counted: ClassVar[bool] = False
    """Whether the logarithm of a cell's count is added to its logits."""

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise UsageError(f"target of a merge must be one of: {', '.join(TARGETS)}; got {self.target!r}")

    @abstractmethod
    def join(self, joined: Joined) -> tuple[SlotKeys, SlotValues]:
        """Keys and values of all slots with the tokens taken in; slots that no token joins stay as they are."""

    def __str__(self) -> str:
        name = next(name for name, kind in MERGES.items() if kind is type(self))
        return name if self.target == "nearest" else f"{name}({self.target})"


@final
@dataclass(frozen=True)
class MeanCount(Merge):
    """The mean of keys and of values over all tokens of the cell; its logit gets the logarithm of their count.

    Exact where a cell's keys are alike: n equal keys weigh n times as much as one.
    """

    is_counted = True

    def join(self, joined: Joined) -> tuple[SlotKeys, SlotValues]:
        return joined.mean(joined.keys), joined.mean(joined.values)


@final
@dataclass(frozen=True)
class Mean(Merge):
    """The mean of keys and of values over all tokens of the cell, which then weighs as much as one token.

    Source: a control; "average" of llama.cpp PR 5719.
    """

    def join(self, joined: Joined) -> tuple[SlotKeys, SlotValues]:
        return joined.mean(joined.keys), joined.mean(joined.values)


@final
@dataclass(frozen=True)
class Sum(Merge):
    """The sum of keys and of values.

    Source: a control; "sum" of llama.cpp PR 5719.
    """

    def join(self, joined: Joined) -> tuple[SlotKeys, SlotValues]:
        keys, values = (states + joined.summed(joined.of_tokens(states)) for states in (joined.keys, joined.values))
        return keys, values


@final
@dataclass(frozen=True)
class Pick(Merge):
    """Even heads keep the cell's key and value, odd ones take those of the newest token that joins.

    Source: a control; after "a head from each" of llama.cpp PR 5719.
    """

    def join(self, joined: Joined) -> tuple[SlotKeys, SlotValues]:
        places = joined.positions.gather(2, joined.tokens).masked_fill(~joined.is_joined, -1)
        newest = torch.full_like(joined.positions, -1).scatter_reduce_(2, joined.cells, places, "amax")
        # Tokens of one position count as one, of which the mean is taken.
        is_newest = (places >= 0) & (places == newest.gather(2, joined.cells))
        picked = is_newest[..., None].to(joined.keys.dtype)
        number = joined.summed(picked)
        is_odd = (torch.arange(joined.keys.shape[1], device=number.device) % 2 == 1)[None, :, None, None]
        keys, values = (
            torch.where(is_odd & (number > 0), joined.summed(joined.of_tokens(states) * picked) / number, states)
            for states in (joined.keys, joined.values)
        )
        return keys, values


@final
@dataclass(frozen=True)
class Values(Merge):
    """The cell's key stays; its value becomes the mean over all tokens of the cell.

    Source: after CaM, Zhang et al. 2024 (ICML). Differs: no chance decides, and one cell takes the
    token, not the next few.
    """

    def join(self, joined: Joined) -> tuple[SlotKeys, SlotValues]:
        return joined.keys, joined.mean(joined.values)


MERGES: dict[str, type[Merge]] = {
    "mean_count": MeanCount,
    "mean": Mean,
    "sum": Sum,
    "pick": Pick,
    "values": Values,
}


def merge_of(spec: str | Merge | None) -> Merge | None:
    """The rule that `spec` names: `"mean_count"`, `"mean_count(next)"`; a rule itself, or None for none.

    Raises: UsageError for an unknown name or target.
    """
    if spec is None or isinstance(spec, Merge):
        return spec
    match = re.fullmatch(r"\s*(\w+)\s*(?:\(\s*(\w+)\s*\))?\s*", spec)
    if match is None or match[1] not in MERGES or (match[2] or TARGETS[0]) not in TARGETS:
        raise UsageError(
            f"merge={spec!r} is not a rule; use one of: {', '.join(MERGES)}, each also as rule({TARGETS[1]})"
        )
    return MERGES[match[1]](match[2] or TARGETS[0])


def checked_merge(spec: str | Merge | None, budget: int | None, store: Store) -> Merge | None:
    """As `merge_of`. Raises: UsageError also where a cache of this budget and store cannot merge."""
    merge = merge_of(spec)
    if merge is not None and budget is None:
        raise UsageError(f"merge={merge} needs a budget: a cache without one evicts nothing that could be merged")
    if merge is not None and store.exact.sinks + store.exact.newest:
        raise UsageError(f"merge={merge} does not go with store {store.name}: a copy held exactly takes nothing in")
    return merge


def absorb(
    merge: Merge,
    store: Store,
    merged: Scores,
    positions: SlotPositions,
    evicted: SlotIndex,
    before: Tensor,
    ends: RowCounts,
    limits: Limits,
    sliding_window: int | None,
) -> tuple[Tensor, Parts]:
    """Let the tokens that were evicted join cells: changes `store` and `merged`.

    `positions` are those after the eviction; the slots `evicted` stood at `before`. `ends` is where each
    row's text goes on. Returns the slots (batch, kv_heads, evicted) that were written and what they
    held, the way back. A token that no later one could see, or for which a row has no cell, is let go.
    """
    oldest = torch.zeros_like(ends) if sliding_window is None else ends - sliding_window + 1
    is_cell = (positions >= limits.sinks) & (positions >= oldest[:, None, None])
    is_cell &= positions < ends[:, None, None] - limits.window
    is_token = (before >= 0) & (before >= oldest[:, None, None])
    positions = positions.scatter(-1, evicted, before)
    keys, values = store.keys().float(), store.values().float()
    is_joined = is_token & is_cell.any(-1, keepdim=True)
    is_next = merge.target == "next"
    cells = _next(positions, is_cell, evicted) if is_next else _nearest(keys, positions, is_cell, evicted)
    cells = cells.where(is_joined, evicted)  # itself: it is nobody's any more
    heads = keys.shape[1]
    counts = merged + 1
    joined = Joined(
        keys,
        values,
        counts.expand(-1, heads, -1),
        positions.expand(-1, heads, -1),
        *(index.expand(-1, heads, -1) for index in (evicted, cells, is_joined)),
    )
    new_keys, new_values = (
        states.gather(2, joined.cells[..., None].expand(-1, -1, -1, states.shape[-1])) for states in merge.join(joined)
    )
    held = store.take_all(joined.cells)
    dtypes = store.layout[2], store.values().dtype
    store.put(joined.cells, store.encode(new_keys.to(dtypes[0]), new_values.to(dtypes[1])))
    merged.scatter_add_(-1, cells, counts.gather(-1, evicted) * is_joined)
    return joined.cells, held


def _next(positions: SlotPositions, is_cell: Tensor, evicted: SlotIndex) -> SlotIndex:
    """For each evicted slot the first cell at or after its place in the text, else the last one."""
    places, order = positions.where(is_cell, BEYOND).sort(dim=-1)
    found = torch.searchsorted(places, positions.gather(-1, evicted))
    last = is_cell.sum(-1, keepdim=True) - 1
    return order.gather(-1, torch.minimum(found, last).clamp(min=0))


def _nearest(keys: SlotKeys, positions: SlotPositions, is_cell: Tensor, evicted: SlotIndex) -> SlotIndex:
    """For each evicted slot the cell whose key has the largest cosine with its own; of equal ones the newer.

    Where all heads of a row hold the same tokens, their mean cosine decides.
    """
    units = normalize(keys, dim=-1)
    found = []
    for some in evicted.split(BLOCK, dim=-1):
        own = units.gather(2, some.expand(-1, keys.shape[1], -1)[..., None].expand(-1, -1, -1, keys.shape[-1]))
        cosines = own @ units.transpose(-1, -2)
        if evicted.shape[1] == 1:
            cosines = cosines.mean(1, keepdim=True)
        order = ((cosines * FINENESS).round().long() << 32) + positions[:, :, None, :]
        found.append(order.masked_fill(~is_cell[:, :, None, :], torch.iinfo(torch.int64).min).argmax(-1))
    return torch.cat(found, -1)
