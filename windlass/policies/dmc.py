"""Tokens that the model itself decides to accumulate."""

from dataclasses import dataclass
from typing import ClassVar, Final

import torch

from windlass import kernels
from windlass.core.errors import PolicyError
from windlass.core.shapes import NewKeys, Queries, Scores
from windlass.policies.along_text import ranks, to_slots
from windlass.policies.base import ACCUMULATES, WEIGHT, Arrival, Policy, Slots

JOINS: Final = "joins"  # state: 1 where a token is to go into the one that came after it


@dataclass(frozen=True)
class DMC(Policy):
    """Gives up tokens that the model wants accumulated into the one after them, the oldest first.

    For models that were trained so, with `merge="weighted"`: each kv head decides, token by token, whether a
    token joins the one before it, so that runs of tokens become one cell, their weighted mean. One `channel` of
    the un-rotated keys and queries is kept for that, and takes no part in attention: with x the channel, a token
    accumulates where sigmoid(x of its key + `bias`) > 1/2, and it weighs sigmoid(x of its query + `weight_bias`),
    the mean over the query heads of its kv head. A token that is to be joined by none after it is evicted only
    when nothing else is left, the oldest first. Without `merge` all these tokens are dropped, as a control.

    Source: Nawrot et al. 2024 (arXiv:2403.09636); `channel=-1`, the cell at the place of its newest token and
    the mean over query heads are of the authors' code (NVIDIA Megatron-LM, contrib/dmc).
    Differs: tokens join when the budget asks for room and they have left the window, not as they come: until then
    queries see them one by one. The budget is the same for all heads, so what a head does not need of it holds
    tokens that have not joined yet. Runs may have any length; there, sums are cut to the last 12 tokens. Sinks join
    nothing. The channel is 0 before keys are rotated, so its partner still turns; there, it is 0 afterwards, too.
    """

    bias: int | float = -5.0
    weight_bias: int | float = 5.0
    channel: int = 0

    state: ClassVar[tuple[str, ...]] = (ACCUMULATES, WEIGHT, JOINS)

    def __post_init__(self) -> None:
        if self.channel not in (0, -1):  # others lie elsewhere once interleaved channels are halves
            raise PolicyError(f"DMC: channel must be 0, the first, or -1, the last, got {self.channel}")

    def arrive(self, queries: Queries, keys: NewKeys) -> Arrival:
        decisions, weights = keys[..., self.channel].float(), queries[..., self.channel].float()
        weights = weights.unflatten(1, (keys.shape[1], -1)).mean(2)
        queries, keys = queries.clone(), keys.clone()
        queries[..., self.channel] = keys[..., self.channel] = 0.0
        weights = (weights + self.weight_bias).sigmoid() + torch.finfo(queries.dtype).eps
        return Arrival(queries, keys, {ACCUMULATES: (decisions + self.bias > 0).float(), WEIGHT: weights})

    def score(self, slots: Slots) -> Scores:
        order = kernels.text_order(slots.positions)
        positions = slots.positions.gather(-1, order)
        accumulates, joins = (slots.state[name].gather(-1, order) for name in (ACCUMULATES, JOINS))
        following = positions.roll(-1, -1)
        following[..., -1] = -1
        # Once the token after it has joined a later one, that one's decision is not about this token.
        joins = torch.where(following == positions + 1, accumulates.roll(-1, -1), joins)
        slots.state[JOINS].scatter_(-1, order, joins)
        is_free = (following > positions) & (following < slots.next_positions[:, None, None] - slots.window)
        goes = is_free & (joins > 0)
        return to_slots(ranks(1 - goes.int()), order)
