"""What slots hold in the order of the text, and back."""

import torch
from torch import Tensor

from windlass.shapes import Scores, SlotIndex


def along_text(states: Tensor, order: SlotIndex) -> Tensor:
    """`states` (batch, kv_heads, slots, channels) in the order of the text, which `kernels.text_order` gives."""
    return states.gather(2, order[..., None].expand(-1, -1, -1, states.shape[-1]))


def to_slots(scores: Scores, order: SlotIndex) -> Scores:
    """Scores that stand in the order of the text, put where the slots are."""
    return torch.empty_like(scores).scatter_(-1, order, scores)
