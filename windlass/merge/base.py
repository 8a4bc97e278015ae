"""The contract of a merge rule: what it is given, and what it gives back."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import ClassVar, Final

import torch
from torch import Tensor

from windlass.core.errors import UsageError
from windlass.merge.readout import MERGED, READS, STATES
from windlass.merge.targets import TARGETS

FRAMES: Final = ("unrotated", "rotated")
MOST_RARE: Final = 0.5
LIKENESS: Final = "merged_likeness"  # statistics, (batch, ranked): the running mean of cosines


@dataclass(frozen=True)
class Groups:
    """Which tokens join the same cell: `cells` (batch, heads, evicted) names the slot that each goes to.

    Where `is_joined` is not so, a token joins nothing and its cell is its own slot. `leaders` names, for each
    token, one of those that join its cell, the same for all of them.
    """

    cells: Tensor
    is_joined: Tensor
    leaders: Tensor

    def expand(self, heads: int) -> "Groups":
        """The same in all heads, where one row of heads stands for them."""
        return Groups(*(each.expand(-1, heads, -1) for each in (self.cells, self.is_joined, self.leaders)))

    def added(self, own: Tensor, states: Tensor) -> Tensor:
        """For each token, its cell's `own` and the sum of `states` over all that join it, of channels (..., c).

        Changes `own`, both are (batch, heads, evicted, c) and 0 in `states` where a token joins nothing.
        """
        batch, heads, tokens, channels = own.shape
        starts = torch.arange(0, batch * heads * tokens, tokens, device=own.device).view(batch, heads, 1)
        at = (self.leaders + starts).flatten()
        whole = own.reshape(-1, channels).index_add_(0, at, states.reshape(-1, channels))
        return whole.index_select(0, at).view(own.shape)

    def summed(self, numbers: Tensor) -> Tensor:
        """For each token, the sum of `numbers` (batch, heads, evicted) over all that join its cell."""
        numbers = numbers * self.is_joined
        return self.added(torch.zeros_like(numbers)[..., None], numbers[..., None])[..., 0]

    def largest(self, numbers: Tensor) -> Tensor:
        """For each token, the largest of `numbers` (batch, heads, evicted) over all that join its cell, or -inf."""
        whole = torch.full_like(numbers, -torch.inf)
        whole.scatter_reduce_(2, self.leaders, numbers.masked_fill(~self.is_joined, -torch.inf), "amax")
        return whole.gather(2, self.leaders)


def groups_of(cells: Tensor, is_joined: Tensor, slots: int) -> Groups:
    """The groups of tokens that go to `cells` (batch, heads, evicted), of `slots`."""
    tokens = torch.arange(cells.shape[-1], device=cells.device).expand_as(cells)
    leaders = torch.zeros(*cells.shape[:2], slots, dtype=tokens.dtype, device=cells.device).scatter_(2, cells, tokens)
    return Groups(cells, is_joined, leaders.gather(2, cells))


@dataclass(frozen=True)
class Members:
    """What some slots hold, keys and values side by side; floats are float32.

    `counts` says how many tokens each stands for, or what these weigh together where a rule `weighs_by` that: 0
    for one that joins nothing.
    """

    states: Tensor  # (batch, kv_heads, n, head_dim + value_dim)
    counts: Tensor  # (batch, kv_heads, n, 1)
    positions: Tensor  # (batch, kv_heads, n)


@dataclass(frozen=True)
class Joined:
    """Tokens on their way into cells: everything is given once per token, in order.

    `cells` is what the cell of each holds, `tokens` the tokens themselves; in the rotated frame their keys
    are turned, so that they are to be read at the positions of their cells. `likeness` is the cosine of a
    token's key with its cell's, where the rule has a threshold. `logits` gives, for keys (batch, kv_heads, n,
    head_dim) at `positions` (batch, kv_heads, n), the logit of the newest query: the mean over the query
    heads that share a kv head, and 0 in a row without one.
    """

    cells: Members
    tokens: Members
    groups: Groups
    head_dim: int
    likeness: Tensor | None  # (batch, kv_heads, n)
    logits: Callable[[Tensor, Tensor], Tensor]

    def mean(self, cells: Tensor, tokens: Tensor) -> Tensor:
        """For each token, the mean of its cell's state and of all that join it, weighted by (..., 1) weights."""
        whole = self.groups.added(self.cells.states * cells, self.tokens.states * tokens)
        return whole.div_(self.groups.added(cells.clone(), tokens))


@dataclass(frozen=True)
class Merge(ABC):
    """How evicted tokens join cells; the settings are told in `windlass.merge`.

    Raises: UsageError for settings that are unknown or do not go together.
    """

    target: str = "nearest"
    frame: str = "unrotated"
    read: str = "plain"
    rare: float = 0.0
    threshold: float = -1.0

    name: ClassVar[str]
    """What a user calls it."""

    is_counted: ClassVar[bool] = False
    """Whether the logarithm of a cell's count is added to its logits."""

    has_mean_keys: ClassVar[bool] = False
    """Whether a cell's key is the mean of its tokens' keys, which alone may be damped or read at anchors."""

    keeps_keys: ClassVar[bool] = False
    """Whether cells keep their keys as they are, so that no frame matters."""

    asks_query: ClassVar[bool] = False
    """Whether `join` looks at the logits of the newest query."""

    weighs_by: ClassVar[str | None] = None
    """Name of the policy's state that counts in place of how many tokens a slot stands for."""

    is_relative: ClassVar[bool] = False
    """Whether tokens less like their cell than those before them, on the whole, are let go."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("target", self.target, tuple(TARGETS)),
            ("frame", self.frame, FRAMES),
            ("read", self.read, READS),
        ):
            if value not in known:
                raise UsageError(f"{name} of a merge must be one of: {', '.join(known)}; got {value!r}")
        if not 0 <= self.rare <= MOST_RARE:
            raise UsageError(f"rare of a merge must be a share from 0 to {MOST_RARE}, got {self.rare}")
        if not -1 <= self.threshold <= 1:
            raise UsageError(f"threshold of a merge must be a cosine from -1 to 1, got {self.threshold}")
        if self.keeps_keys and self.frame != FRAMES[0]:
            raise UsageError(f"merge={self}: this rule leaves keys as they are, so it has no frame; leave it out")
        if self.read != READS[0] and not self.has_mean_keys:
            raise UsageError(f"merge={self}: only cells of mean keys may be read {self.read}; use mean_count or mean")
        if self.read != READS[0] and self.frame != FRAMES[0]:
            raise UsageError(
                f"merge={self}: rotated keys hold their distances already; leave out {self.frame} or {self.read}"
            )

    @abstractmethod
    def join(self, joined: Joined) -> Tensor:
        """For each token, what its cell holds with all tokens taken in: keys and values side by side.

        Where a token joins nothing, anything finite.
        """

    @property
    def state(self) -> tuple[str, ...]:
        """Names of what is kept per slot."""
        return (MERGED, *STATES[self.read])

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of what is kept per layer."""
        return (LIKENESS,) if self.is_relative else ()

    def __str__(self) -> str:
        changed = (
            getattr(self, each.name) if each.default != getattr(self, each.name) else None for each in fields(self)
        )
        words = [
            value if isinstance(value, str) else f"{each.name}={repr(value).removesuffix('.0')}"
            for each, value in zip(fields(self), changed, strict=True)
            if value is not None
        ]
        return self.name + (f"({', '.join(words)})" if words else "")
