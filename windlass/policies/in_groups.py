"""Groups of neighbours, each shrunk to its newest token."""

from dataclasses import dataclass

import torch

from windlass import kernels
from windlass.core.errors import PolicyError
from windlass.core.types import Scores
from windlass.policies.base import Slots, lexsort_ranks, scatter_sorted
from windlass.policies.wrapper import Wrapper

MAX_GROUP = 2**16


@dataclass(frozen=True)
class InGroups(Wrapper):
    """Shrinks groups of `group` neighbours to their newest token. The group with the lowest best score comes first.

    A group is the positions that `self_extend(group, window)` reads at one position. With
    `merge="mean_count(next)"` it becomes one merged token: every second token is merged into the next one, then
    every second pair, and so on; only then the next group begins. So at most one group is partly merged, and no
    token is dropped. A group that reaches into the window waits. Once every group is one token, these are merged
    into the next one, the lowest score first.

    Source: after llama.cpp PR 5719, which merges the tokens that self-extend reads at one position.
    Differs: a policy chooses which groups, and keeps the others whole; there, all of them are merged.
    """

    group: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 2 <= self.group <= MAX_GROUP:
            raise PolicyError(f"InGroups: group must be from 2 to {MAX_GROUP}, got {self.group}")

    def score(self, slots: Slots) -> Scores:
        order = kernels.argsort_positions(slots.positions)
        positions = slots.positions.gather(-1, order)
        score = self.policy.score(slots).float().nan_to_num(nan=-torch.inf).gather(-1, order)
        groups = positions.div(self.group, rounding_mode="floor")
        index = ((groups != groups.roll(1, -1)).cumsum(-1) - 1).clamp(min=0)
        best = torch.full_like(score, -torch.inf).scatter_reduce_(-1, index, score, "amax").gather(-1, index)
        newest = torch.full_like(positions, -1).scatter_reduce_(-1, index, positions, "amax").gather(-1, index)
        age = newest - positions
        waits = newest >= slots.next_positions[:, None, None] - slots.window
        tier = (age == 0).int().where(~waits, 2)
        return scatter_sorted(lexsort_ranks(tier, best, age & -age), order)
