"""Groups of neighbours that become one cell."""

from dataclasses import dataclass

import torch

from windlass import kernels
from windlass.core.errors import PolicyError
from windlass.core.shapes import Scores
from windlass.policies.along_text import ranks, to_slots
from windlass.policies.base import Slots
from windlass.policies.wrappers import Wrapper

MOST_GROUP = 2**16


@dataclass(frozen=True)
class InGroups(Wrapper):
    """Shrinks groups of `group` neighbours to their newest token, those first whose best score is lowest.

    The groups are those that `self_extend(group, window)` reads at one position each. With
    `merge="mean_count(next)"` a group becomes one cell: first every second token joins the one after it, so
    that pairs are left, then pairs become fours, and so on; then the next group begins. All other groups are
    whole, and nothing is dropped. A group that reaches into the window waits. Once every group has shrunk,
    groups go by their scores, and a cell joins the next one.

    Source: after llama.cpp PR 5719, which merges the cells that self-extend reads at one position.
    Differs: a policy chooses which groups, and keeps the others whole; there, all of them are merged.
    """

    group: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.group <= MOST_GROUP:
            raise PolicyError(f"InGroups: group must be from 2 to {MOST_GROUP}, got {self.group}")

    def score(self, slots: Slots) -> Scores:
        order = kernels.text_order(slots.positions)
        positions = slots.positions.gather(-1, order)
        score = self.policy.score(slots).float().nan_to_num(nan=-torch.inf).gather(-1, order)
        groups = positions.div(self.group, rounding_mode="floor")
        index = ((groups != groups.roll(1, -1)).cumsum(-1) - 1).clamp(min=0)
        best = torch.full_like(score, -torch.inf).scatter_reduce_(-1, index, score, "amax").gather(-1, index)
        newest = torch.full_like(positions, -1).scatter_reduce_(-1, index, positions, "amax").gather(-1, index)
        age = newest - positions
        waits = newest >= slots.next_positions[:, None, None] - slots.window
        tier = (age == 0).int().where(~waits, 2)
        return to_slots(ranks(tier, best, age & -age), order)
