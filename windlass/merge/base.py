"""The contract of a merge rule: what it is given, and what it gives back."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar

from torch import Tensor

from windlass.core.check import real_number
from windlass.core.errors import UsageError
from windlass.merge.groups import TokenGroups
from windlass.merge.state import MERGED
from windlass.merge.targets import TARGETS


@dataclass(frozen=True)
class TokenStates:
    """What some slots hold; floats are float32.

    `states` are keys and values side by side. `weights` say how many tokens a slot stands for, or give the policy's
    weight where the rule has `weighs_by`; they are 0 for a token that is dropped.
    """

    states: Tensor  # (batch, kv_heads, n, head_dim + value_dim)
    weights: Tensor  # (batch, kv_heads, n, 1)
    positions: Tensor  # (batch, kv_heads, n)


@dataclass(frozen=True)
class MergeBatch:
    """The evicted tokens of one layer and step, and what their target slots hold: entry i of both is for token i."""

    targets: TokenStates
    tokens: TokenStates
    groups: TokenGroups

    def mean(self) -> Tensor:
        """For each token, the weighted mean over its target and all tokens of its group."""
        targets, tokens = self.targets, self.tokens
        total = self.groups.add(targets.states * targets.weights, tokens.states * tokens.weights)
        return total.div_(self.groups.add(targets.weights, tokens.weights))


@dataclass(frozen=True)
class Merge(ABC):
    """How a kept slot takes evicted tokens in; `windlass.merge` tells what the two settings mean.

    Raises: UsageError for an unknown target, or a threshold that is no cosine.
    """

    target: str = "nearest"
    threshold: float = -1.0

    name: ClassVar[str]
    """What a user calls it."""

    is_counted: ClassVar[bool] = False
    """Whether the logarithm of a slot's count is added to its logits."""

    is_mean: ClassVar[bool] = True
    """Whether a slot's keys and values are weighted means over its tokens, so that tokens may join as they come."""

    weighs_by: ClassVar[str | None] = None
    """Name of the policy's state that gives the weights; None weighs by counts."""

    def __post_init__(self) -> None:
        if self.target not in TARGETS:
            raise UsageError(f"target of a merge must be one of: {', '.join(TARGETS)}; got {self.target!r}")
        if not -1 <= real_number("threshold of a merge", self.threshold) <= 1:
            raise UsageError(f"threshold of a merge must be a cosine from -1 to 1, got {self.threshold}")

    @abstractmethod
    def combine(self, batch: MergeBatch) -> Tensor:
        """For each token, the keys and values of its target slot once the whole group is merged into it.

        The result is float32 (batch, kv_heads, evicted, head_dim + value_dim), the same for all tokens of a group.
        Where a token is dropped it may be anything finite.
        """

    @property
    def state(self) -> tuple[str, ...]:
        """Names of what merging keeps per slot."""
        return (MERGED,)

    def __str__(self) -> str:
        """The shortest text that `merge_of` reads as this rule."""
        default = {each.name: each.default for each in fields(self)}
        words = [] if self.target == default["target"] else [self.target]
        if self.threshold != default["threshold"]:
            words.append(f"threshold={repr(self.threshold).removesuffix('.0')}")
        return self.name + (f"({', '.join(words)})" if words else "")
