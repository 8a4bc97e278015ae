"""One layer that is written step by step, without a model."""

import torch
from torch import Tensor

from windlass.cache.decode import LayerCall
from windlass.cache.layer import SlotLayer
from windlass.core.step import AttentionCall, Limits, Step
from windlass.positions.modes import Original

BATCH, KV_HEADS, GROUP, HEAD_DIM = 2, 3, 2, 4
BUDGET, SINKS, WINDOW = 9, 2, 3
LIMITS = Limits(BUDGET, SINKS, WINDOW, 8, 16)


def layer_step(layer: SlotLayer, q: Tensor, k: Tensor, v: Tensor, at: int, prompt_end: int) -> None:
    tokens, end = k.shape[2], at + k.shape[2]
    positions = torch.arange(at, end).expand(BATCH, -1)
    ends = torch.full((BATCH,), end)
    step = Step(positions, (tokens,) * BATCH, ends, torch.full((BATCH,), prompt_end), end)
    try:
        layer.step(LayerCall(q, k, v, step, Original(), AttentionCall(0.5)))
    except BaseException:  # as a cache does
        layer.take_back(step)
        raise
    layer.commit()
