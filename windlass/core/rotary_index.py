"""At which rotary positions a step's keys and queries are read: position modes compute it, kernels apply it."""

from dataclasses import dataclass

from windlass.core.shapes import RotaryKeys, RotaryQueries

EMPTY = -1  # position of a slot that holds no token, and of a padding token
RESERVED = -2  # position of a slot whose token was evicted but can still be rolled back


@dataclass(frozen=True)
class RotaryBranch:
    """Rotary positions of one set of logits; all are at least 0 and below `PositionMode.bound`."""

    queries: RotaryQueries
    keys: RotaryKeys


@dataclass(frozen=True)
class RotaryIndex:
    """The rotary position of each query and of each slot's key.

    Keys at distance `near_window` and beyond take their logit from `far`; `far` is None when one
    branch serves every distance.
    """

    near: RotaryBranch
    far: RotaryBranch | None = None
    near_window: int = 0
