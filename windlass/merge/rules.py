"""The rules, by name."""

from abc import ABC
from dataclasses import dataclass
from typing import Final, final

import torch
from torch import Tensor

from windlass.merge.base import FRAMES, Joined, Merge
from windlass.policies.base import WEIGHT

LEAST_LOGIT: Final = 1e-6  # below it a logit is none, and a key is not rescaled
MOST_RESCALED: Final = 2.0


@dataclass(frozen=True)
class Averaged(Merge, ABC):
    """Means over all tokens of a cell."""

    has_mean_keys = True

    def join(self, joined: Joined) -> Tensor:
        return joined.mean(joined.cells.counts, joined.tokens.counts)


@final
@dataclass(frozen=True)
class MeanCount(Averaged):
    """The mean of keys and of values over all tokens of the cell; its logit gets the logarithm of their count.

    Exact where a cell's keys are alike: n equal keys weigh n times as much as one.
    """

    name = "mean_count"
    is_counted = True


@final
@dataclass(frozen=True)
class Mean(Averaged):
    """The mean of keys and of values over all tokens of the cell, which then weighs as much as one token.

    Source: a control; "average" of llama.cpp PR 5719.
    """

    name = "mean"


@final
@dataclass(frozen=True)
class Weighted(Averaged):
    """The mean of keys and of values, weighted by what the policy says that each token weighs; the cell then weighs
    what its tokens weigh together. It counts as one token in attention.

    Source: Nawrot et al. 2024 (arXiv:2403.09636), the running weighted mean. See policy `DMC`.
    """

    target: str = "next"

    name = "weighted"
    weighs_by = WEIGHT


@final
@dataclass(frozen=True)
class Sum(Merge):
    """The sum of keys and of values.

    Source: a control; "sum" of llama.cpp PR 5719.
    """

    name = "sum"

    def join(self, joined: Joined) -> Tensor:
        is_joined = joined.groups.is_joined[..., None]
        return joined.groups.added(joined.cells.states.clone(), joined.tokens.states * is_joined)


@final
@dataclass(frozen=True)
class Pick(Merge):
    """Even heads keep the cell's key and value, odd ones take those of the newest token that joins.

    Source: a control; after "a head from each" of llama.cpp PR 5719.
    """

    name = "pick"

    def join(self, joined: Joined) -> Tensor:
        cells, groups = joined.cells.states, joined.groups
        places = joined.tokens.positions.double()  # exact for any position
        # Tokens of one position count as one, of which the mean is taken.
        is_newest = ((places == groups.largest(places)) & groups.is_joined).to(cells.dtype)
        number = groups.summed(is_newest)[..., None]
        picked = groups.added(torch.zeros_like(cells), joined.tokens.states * is_newest[..., None]) / number
        is_odd = (torch.arange(cells.shape[1], device=cells.device) % 2 == 1)[None, :, None, None]
        return torch.where(is_odd & (number > 0), picked, cells)


@final
@dataclass(frozen=True)
class Values(Merge):
    """The cell's key stays; its value becomes the mean over all tokens of the cell.

    Source: after CaM, Zhang et al. 2024 (ICML). Differs: there, chance decides whether a token joins, by its attention
    so far against that of the next m kept tokens, and each of these adds an m-th of its value to its own. That needs
    what a rule here does not have: several cells for one token, a policy that keeps everyone's attention, and draws.
    Here every token joins one cell, which takes the mean.
    """

    name = "values"
    keeps_keys = True

    def join(self, joined: Joined) -> Tensor:
        mean = joined.mean(joined.cells.counts, joined.tokens.counts)
        return torch.cat((joined.cells.states[..., : joined.head_dim], mean[..., joined.head_dim :]), -1)


@final
@dataclass(frozen=True)
class KeepKV(Merge):
    """Means weighted by what the newest query gives each token; the key is then scaled so that it gives the cell
    just what it gave its tokens together.

    With l the logit of the newest query and p the count of each token, weights are w = p exp(l), the count of the
    cell is the sum of p, and its key is scaled until its own logit is ln(sum of w / sum of p). Exact for this
    query under positions "original", for others as near as the weights stay. Tokens whose keys are less like their
    cell's than `threshold` are let go, as published; -1 lets none go.

    Source: Tian et al. 2025 (arXiv:2504.09936), equations of the merge of two entries.
    Differs: weights come from the newest query, not from a moving average over queries; that of a kv head is the
    mean of its query heads. The key is scaled by the mean key's own logit, which is the published factor where keys
    are rotated. A factor outside of 1/2 to 2, where that logit is near 0 or of the other sign, is set to that limit,
    and the cell is then not exact. Several tokens may join at once.
    """

    threshold: float = 0.8

    name = "keepkv"
    is_counted = True
    asks_query = True

    def join(self, joined: Joined) -> Tensor:
        cells, tokens, groups, head_dim = joined.cells, joined.tokens, joined.groups, joined.head_dim
        own = joined.logits(cells.states[..., :head_dim], cells.positions)
        places = tokens.positions if self.frame == FRAMES[0] else cells.positions
        coming = joined.logits(tokens.states[..., :head_dim], places).masked_fill(~groups.is_joined, -torch.inf)
        peak = torch.maximum(own, groups.largest(coming))  # so that nothing overflows
        weights = cells.counts * (own - peak).exp()[..., None], tokens.counts * (coming - peak).exp()[..., None]
        mean = joined.mean(*weights)
        total, votes = (groups.added(a.clone(), b) for a, b in (weights, (cells.counts, tokens.counts)))
        wanted = (total / votes).log()[..., 0] + peak
        got = joined.logits(mean[..., :head_dim], cells.positions)
        factor = (wanted / got).clamp(1 / MOST_RESCALED, MOST_RESCALED)
        factor = factor.where(got.abs() > LEAST_LOGIT, 1.0)[..., None]
        return torch.cat((mean[..., :head_dim] * factor, mean[..., head_dim:]), -1)


@final
@dataclass(frozen=True)
class D2O(Merge):
    """A token joins its cell with its cosine as weight, the cell's own being 1, and the sum is divided by how many
    joined, the cell included. Tokens less like their cells than a running mean are let go.

    The running mean starts as the mean cosine of the first tokens evicted, and moves half of the way to that of
    each later step.

    Source: Wan et al. 2024 (arXiv:2406.13035), equations 8 to 11. Differs: only target, threshold and merging, under
    any policy; one mean for each row and head; un-rotated keys are compared, whatever the frame.
    """

    name = "d2o"
    is_relative = True

    def join(self, joined: Joined) -> Tensor:
        assert joined.likeness is not None, "a relative rule without likeness"
        groups, weights = joined.groups, (joined.likeness * joined.groups.is_joined)[..., None]
        number = 1 + groups.summed(torch.ones_like(joined.likeness))
        return groups.added(joined.cells.states.clone(), joined.tokens.states * weights) / number[..., None]


MERGES: dict[str, type[Merge]] = {
    rule.name: rule for rule in (MeanCount, Mean, Sum, Pick, Values, KeepKV, D2O, Weighted)
}
