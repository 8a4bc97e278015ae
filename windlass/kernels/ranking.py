"""From a policy's scores to an order in which tokens are evicted."""

import torch
from torch import Tensor

from windlass.core.attention import EvictionInput


def total_order(call: EvictionInput) -> Tensor:
    """A whole number per slot that orders slots as `call` asks, the first to evict lowest.

    Free slots are lowest, then those whose score is NaN and tokens that no later token can see; sinks and the
    newest `window` tokens are highest; of equal scores the newer token is higher. Tokens are equal only where they
    share a position. Does not use `call.count`.
    """
    least, most = torch.finfo(torch.float32).min, torch.finfo(torch.float32).max
    positions, ends = call.positions, call.next_positions[:, None, None]
    score = call.score.float().nan_to_num(nan=least, posinf=most, neginf=least)
    sinks = call.sinks if call.row_sinks is None else call.row_sinks[:, None, None]
    score = score.masked_fill((positions >= ends - call.window) | (positions < sinks), torch.inf)
    if call.sliding_window is not None:
        score = score.masked_fill(positions <= ends - call.sliding_window, least)
    if call.attention_chunk is not None:
        score = score.masked_fill(positions < ends - ends % call.attention_chunk, least)
    score = score.masked_fill(positions < 0, -torch.inf) + 0.0  # adding 0.0 turns -0.0 into 0.0
    bits = score.view(torch.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # compares as the float does
    return (ordered.long() << 32) + positions
