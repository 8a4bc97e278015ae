"""DMC: the model was trained to decide which tokens to merge into the ones after them."""

from dataclasses import dataclass
from typing import Final

import torch

from windlass import kernels
from windlass.core.errors import PolicyError
from windlass.core.types import NewKeys, Queries, Scores
from windlass.policies.base import (
    ACCUMULATES,
    WEIGHT,
    ModelSpecific,
    Needs,
    NewTokens,
    Policy,
    Slots,
    lexsort_ranks,
    scatter_sorted,
)

JOINS: Final = "joins"  # state: 1 where a token is to be merged into the one after it


@dataclass(frozen=True)
class DMC(Policy, ModelSpecific):
    """Accumulates tokens with the one before them as they come, where the model says so.

    Over budget, the oldest ones go. For models that were trained so, with `merge="weighted"`, with a budget or without
    one: each kv head decides, token by token, whether a token is accumulated with the one before it, so that runs of
    tokens become one merged token, their weighted mean. Without a budget memory grows with the runs of the head that
    has most. One `channel` of the un-rotated keys and queries is reserved for that, and takes no part in attention:
    with x the channel, a token accumulates where sigmoid(x of its key + `bias`) > 1/2, and its weight is sigmoid(x of
    its query + `weight_bias`), the mean over the query heads of its kv head. With a budget, runs beyond it are merged
    into the next ones, the oldest first. Without `merge` nothing is accumulated: tokens over budget are dropped, first
    the tokens that the one after them would have taken in, as a control.

    Source: Nawrot et al. 2024 (arXiv:2403.09636). `channel=-1`, a merged token at the position of its newest one and
    the mean over query heads are of the authors' code (NVIDIA Megatron-LM, contrib/dmc).
    Differs: a budget is the same for all heads. Runs may have any length. There, sums are cut to the last 12 tokens.
    Sinks are accumulated with nothing. The channel is 0 before keys are rotated, so its partner still rotates. There,
    it is 0 afterwards, too.
    """

    bias: int | float = -5.0
    weight_bias: int | float = 5.0
    channel: int = 0

    needs = Needs(state=(ACCUMULATES, WEIGHT, JOINS))

    def __post_init__(self) -> None:
        if self.channel not in (0, -1):  # others lie elsewhere once interleaved channels are halves
            raise PolicyError(f"DMC: channel must be 0, the first, or -1, the last, got {self.channel}")

    def preprocess(self, queries: Queries, keys: NewKeys, layer: int) -> NewTokens:
        decisions, weights = keys[..., self.channel].float(), queries[..., self.channel].float()
        weights = weights.unflatten(1, (keys.shape[1], -1)).mean(2)
        queries, keys = queries.clone(), keys.clone()
        queries[..., self.channel] = keys[..., self.channel] = 0.0
        weights = (weights + self.weight_bias).sigmoid() + torch.finfo(queries.dtype).eps
        return NewTokens(queries, keys, {ACCUMULATES: (decisions + self.bias > 0).float(), WEIGHT: weights})

    def score(self, slots: Slots) -> Scores:
        order = kernels.argsort_positions(slots.positions)
        positions = slots.positions.gather(-1, order)
        accumulates, joins = (slots.state[name].gather(-1, order) for name in (ACCUMULATES, JOINS))
        following = positions.roll(-1, -1)
        following[..., -1] = -1
        # If the next token was merged into a later one, the later one's decision is not about this token.
        joins = torch.where(following == positions + 1, accumulates.roll(-1, -1), joins)
        slots.state[JOINS].scatter_(-1, order, joins)
        is_free = (following > positions) & (following < slots.next_positions[:, None, None] - slots.window)
        is_merged = is_free & (joins > 0)
        return scatter_sorted(lexsort_ranks(1 - is_merged.int()), order)
