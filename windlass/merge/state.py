"""What merging keeps per slot."""

from typing import Final

from torch import Tensor

from windlass.core.shapes import SlotPositions

MERGED: Final = "merged"  # how many evicted tokens a slot stands for beside its own


def holds_merged_tokens(positions: SlotPositions, state: dict[str, Tensor]) -> bool:
    """Whether any held slot of a layer stands for several tokens. Waits for the device."""
    return MERGED in state and bool(((state[MERGED] > 0) & (positions >= 0)).any())
