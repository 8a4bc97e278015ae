"""The rules, by name."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from windlass.merge.base import Merge, MergeBatch
from windlass.policies.base import WEIGHT


@final
@dataclass(frozen=True)
class MeanCount(Merge):
    """The mean of keys and of values over all merged tokens; the logarithm of their count is added to the logit.

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

    Source: a control; "average" of llama.cpp PR 5719.
    """

    name = "mean"

    def combine(self, batch: MergeBatch) -> Tensor:
        return batch.mean()


@final
@dataclass(frozen=True)
class Weighted(Merge):
    """The mean of keys and of values with the policy's weights; the slot then has the sum of the merged weights.

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

    Source: a control; "sum" of llama.cpp PR 5719.
    """

    name = "sum"
    is_mean = False

    def combine(self, batch: MergeBatch) -> Tensor:
        is_merged = batch.groups.is_merged[..., None]
        return batch.groups.add(batch.targets.states, batch.tokens.states * is_merged)


@final
@dataclass(frozen=True)
class Pick(Merge):
    """Even heads keep the target's key and value; odd heads take those of the newest token merged into it.

    Source: a control; after "a head from each" of llama.cpp PR 5719.
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
