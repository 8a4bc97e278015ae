"""LagKV: how far keys and values spread, relative to the block of tokens that follows."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.linalg import vector_norm

from windlass import kernels
from windlass.core.errors import PolicyError
from windlass.core.types import Scores, SlotIndex
from windlass.policies.base import LayersAsRows, Needs, Policy, Slots, gather_sorted, scatter_sorted

MIN_RANGE: Final = 1e-6  # of a channel over a block: where tokens are repeated it is 0
UNRANKED: Final = 2.0  # above all ranks
# Prompt-cache files hold this state under its names, which must not change.
LAG_SCORE: Final = "lag_score"  # state: the rank of a token in its block, a number from 0 to 1
LAG_END: Final = "lag_end"  # state: the end of the last whole block when the rank was computed (0: no rank yet)


@dataclass(frozen=True)
class LagKV(Policy, LayersAsRows):
    """Keeps the tokens whose keys and values spread most, measured by the ranges of the block that follows.

    The text after the sinks is cut into blocks of `lag` positions. Whenever a token follows a whole block, the tokens
    held up to the block's end are ranked in blocks of `lag`, counted back from there, and keep their ranks until the
    next block ends. So ranks do not depend on where chunks end. The last whole block and the tokens after it have no
    following block: they rank above all others, so give a budget well above `2 * lag`. Needs no attention weights.

    Source: LagKV, Liang et al. 2025 (arXiv:2504.04704).
    Differs: compares un-rotated keys. The paper thins each block once, by a fixed share, and keeps the rest for ever.
    Here the remaining tokens of the blocks are ranked again once every `lag` tokens. Of equal ranks in their blocks the
    token with the lower score goes first. The paper's blocks have 128 tokens.
    """

    lag: int = 32

    needs = Needs(state=(LAG_SCORE, LAG_END))

    def __post_init__(self) -> None:
        if self.lag < 2:
            raise PolicyError(f"LagKV: lag must be at least 2, got {self.lag}")

    def score(self, slots: Slots) -> Scores:
        score, known_end = slots.state[LAG_SCORE], slots.state[LAG_END]
        # Without the newest token: a chunk that ends with a block evicts by the same ranks as steps of one within it.
        read = slots.next_positions[:, None, None] - 1
        block_end = read - (read - slots.sinks).remainder(self.lag)
        order = kernels.argsort_positions(slots.positions)
        # Free slots have negative positions.
        sinks = ((slots.positions >= 0) & (slots.positions < slots.sinks)).sum(-1, keepdim=True)
        last = ((slots.positions >= 0) & (slots.positions < block_end)).sum(-1, keepdim=True)
        place = torch.arange(order.shape[-1], device=order.device)
        has_block_after = (place >= sinks) & (place < last - self.lag)
        is_new = torch.empty_like(has_block_after).scatter_(-1, order, has_block_after) & (known_end != block_end)
        # Mostly no block has ended.
        if not kernels.can_ask(is_new) or bool(is_new.any()):
            score.copy_(self._ranks(slots, order, sinks, last).where(is_new, score))
            known_end.copy_(block_end.where(is_new, known_end))
        return score.masked_fill(known_end == 0, UNRANKED)

    def _ranks(self, slots: Slots, order: SlotIndex, sinks: Tensor, last: Tensor) -> Scores:
        """The rank from 0 to 1 of each token in its block, where another one of the first `last` tokens follows."""
        blocks = max(2, -(-order.shape[-1] // self.lag))
        # Blocks are counted back from `block_end`: the first cells may have no token.
        padding = blocks * self.lag - last
        place = torch.arange(blocks * self.lag, device=order.device) - padding
        index = order.gather(-1, place.clamp(min=0))
        is_token = (place >= sinks).unflatten(-1, (blocks, self.lag))[:, :, :-1]
        shares = (self._shares(slots.keys(), index, is_token) + self._shares(slots.values(), index, is_token)) / 2
        empty = (~is_token).sum(-1, keepdim=True)
        ranks = shares.argsort(dim=-1, stable=True).argsort(dim=-1) - empty
        # A share is below 1, so it decides between equal ranks only.
        found = (ranks + 0.5) / (self.lag - empty).clamp(min=1) + shares / self.lag
        found = found.masked_fill(~is_token, UNRANKED).flatten(2)
        cell = torch.arange(order.shape[-1], device=order.device) + padding
        return scatter_sorted(found.gather(-1, cell.clamp(max=found.shape[-1] - 1)), order)

    def _shares(self, states: Tensor, index: Tensor, is_token: Tensor) -> Tensor:
        """Shares of each block but the last: (batch, kv_heads, blocks - 1, lag), with -1 in cells of no token."""
        x = gather_sorted(states, index).float().unflatten(2, (-1, self.lag))
        low, high = x[:, :, 1:].amin(3, keepdim=True), x[:, :, 1:].amax(3, keepdim=True)
        relative = (x[:, :, :-1] - low).div_((high - low).clamp(min=MIN_RANGE))
        # torch's own `std` takes longer than all the rest.
        relative -= relative.mean(-1, keepdim=True)
        deviations = vector_norm(relative, dim=-1) / (relative.shape[-1] - 1) ** 0.5
        shares: Tensor = deviations.masked_fill(~is_token, -torch.inf).softmax(-1)
        return shares.masked_fill(~is_token, -1.0)
