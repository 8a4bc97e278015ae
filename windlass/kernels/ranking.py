"""From a policy's scores to an order in which tokens are evicted."""

import torch
from torch import Tensor

from windlass.core.shapes import RowCounts, Scores, SlotPositions


def total_order(
    score: Scores,
    positions: SlotPositions,
    next_positions: RowCounts,
    sinks: int,
    window: int,
    sliding_window: int | None,
) -> Tensor:
    """Scores as whole numbers without ties, so that no result depends on the order of slots.

    Free slots are lowest, then NaN and what no later token can see; sinks and the newest `window`
    tokens are highest; of equal scores the newer token wins.
    """
    least, most = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
    score = score.float().nan_to_num(nan=least, posinf=most, neginf=least)
    ends = next_positions[:, None, None]
    score = score.masked_fill((positions >= ends - window) | (positions < sinks), torch.inf)
    if sliding_window is not None:
        score = score.masked_fill(positions <= ends - sliding_window, least)
    score = score.masked_fill(positions < 0, -torch.inf) + 0.0  # there is no -0.0 then
    bits = score.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # compares as the float does
    return (ordered.long() << 32) + positions
