"""Running means over the queries that a layer has seen, and these queries carried to positions ahead."""

import torch
from torch import Tensor

from windlass.core.shapes import SlotKeys
from windlass.policies.base import Observation, Slots
from windlass.positions.rotary import rotate


def counted(seen: Observation, start: int) -> Tensor:
    """Which of the observed queries stand at `start` or later: (batch, 1, tokens, 1)."""
    return (seen.positions >= start)[:, None, :, None]


def take_in(statistics: dict[str, Tensor], is_counted: Tensor, new: dict[str, Tensor]) -> None:
    """Carry the running means named in `new` on by these states (batch, heads, tokens, channels), and "count".

    A mean is (batch, heads, channels), and 0 before anything was counted.
    """
    added = is_counted.sum(2).float()
    before = statistics["count"] if statistics else torch.zeros_like(added)
    count = before + added
    for name, states in new.items():
        total = states.masked_fill(~is_counted, 0.0).sum(2)
        mean = statistics[name] if statistics else torch.zeros_like(total)
        new[name] = mean + (total - added * mean) / count.clamp(min=1)
    statistics.update(new, count=count)


def carried(slots: Slots, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """States (batch, heads, n, head_dim) turned to each row's newest position, and on from there by cos and sin.

    These need not be of one angle: a mean over several carries to the mean of as many positions.
    """
    newest = (slots.next_positions - 1).clamp(min=0)[:, None, None]
    return slots.rotated(rotate(states, cos, sin), newest)


def products(states: Tensor, keys: SlotKeys) -> Tensor:
    """Every head's state (batch, heads, 1, channels) times the keys of its kv head: (batch, kv_heads, group, slots).

    In one product for a kv head: one for each of its heads would copy the keys as often.
    """
    found: Tensor = states.squeeze(2).unflatten(1, (keys.shape[1], -1)) @ keys.mT
    return found
