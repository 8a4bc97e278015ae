"""Running means of the queries that a layer has observed, and how they read keys from positions ahead."""

from typing import Final

import torch
from torch import Tensor

from windlass.core.rotate import rotate
from windlass.core.shapes import SlotKeys
from windlass.policies.base import Observation, Slots

COUNT: Final = "count"  # statistics: how many queries of each row the means are of


def is_from(observation: Observation, start: int) -> Tensor:
    """Which of the observed queries have position `start` or a later one: (batch, 1, tokens, 1)."""
    return (observation.positions >= start)[:, None, :, None]


def update_means(statistics: dict[str, Tensor], is_counted: Tensor, new: dict[str, Tensor]) -> None:
    """Update the running means named in `new` by these states (batch, heads, tokens, channels), and `COUNT`.

    A mean is (batch, heads, channels), and 0 before anything was counted.
    """
    added = is_counted.sum(2).float()
    before = statistics[COUNT] if statistics else torch.zeros_like(added)
    count = before + added
    for name, states in new.items():
        total = states.masked_fill(~is_counted, 0.0).sum(2)
        mean = statistics[name] if statistics else torch.zeros_like(total)
        new[name] = mean + (total - added * mean) / count.clamp(min=1)
    statistics.update({**new, COUNT: count})


def rotate_ahead(slots: Slots, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """States (batch, heads, n, head_dim) rotated to each row's newest position, and from there by cos and sin.

    With means of several cosines and sines, the mean of the states rotated by as many angles.
    """
    newest = (slots.next_positions - 1).clamp(min=0)[:, None, None]
    return slots.rotate(rotate(states, cos, sin), newest)


def head_products(states: Tensor, keys: SlotKeys) -> Tensor:
    """Every head's state (batch, heads, 1, channels) times the keys of its kv head: (batch, kv_heads, group, slots).

    In one product for a kv head: one for each of its heads would copy the keys as often.
    """
    found: Tensor = states.squeeze(2).unflatten(1, (keys.shape[1], -1)) @ keys.mT
    return found
