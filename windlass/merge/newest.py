"""What the newest query gives to keys, for rules that ask."""

from dataclasses import dataclass

from torch import Tensor

from windlass.core.shapes import PerSlot, SlotKeys
from windlass.core.step import Record
from windlass.positions.rotary import Turns


@dataclass(frozen=True)
class Newest:
    """Of each row the newest query of a step, at its place in the text, times the model's scale.

    The query heads that share a kv head are one, their mean. 0 in a row without a query, which is what
    an edit leaves, or a row that had finished.
    """

    query: Tensor | None  # (batch, kv_heads, 1, head_dim); None: no row has one
    turns: Turns

    def logits(self, keys: SlotKeys, positions: Tensor) -> PerSlot:
        """Of un-rotated float32 keys that stand at `positions` (batch, kv_heads, slots)."""
        if self.query is None:
            return keys.new_zeros(keys.shape[:3])
        return (self.turns.turned(keys, positions.clamp(min=0)) * self.query).sum(-1)


def newest(record: Record, kv_heads: int, turns: Turns) -> Newest:
    """The newest queries of those of the step's tokens that still stand; none where the step kept no queries."""
    if record.queries is None:
        return Newest(None, turns)
    at, column = record.step.positions.max(-1)
    column = column[:, None, None, None].expand(-1, record.queries.shape[1], 1, record.queries.shape[3])
    query = turns.turned(record.queries.gather(2, column).float(), at.clamp(min=0)[:, None, None])
    query = query.unflatten(1, (kv_heads, -1)).mean(2) * record.scale
    return Newest(query * (at >= 0)[:, None, None, None], turns)
