"""The interface of a layer's memory, and the rules by which a layer keeps tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from torch import Tensor

from windlass.cache.merging import Merge
from windlass.cache.recall import TOKEN_INDEX
from windlass.core.inputs import Visibility, most_visible
from windlass.core.positions import PLACES
from windlass.core.step import HEADROOM, AttentionCall, Limits, RowSinks, Step
from windlass.policies.base import ACCUMULATES, Policy
from windlass.policies.recent import Recent
from windlass.policies.wrappers import keeps_newest


class Layer(ABC):
    """The memory of one layer. A step is final only once it is committed."""

    index: int

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Return True if nothing was ever written."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """All allocated tensors, by name."""

    @abstractmethod
    def commit(self) -> None:
        """Make the completed pass final, and free the memory that could undo an interrupted step."""

    @abstractmethod
    def take_back(self, step: Step) -> None:
        """Undo `step`, however far it came. It does nothing if the step never began, or other steps came after it."""

    @abstractmethod
    def select_rows(self, rows: Tensor) -> None:
        """Keep the batch rows at `rows`, which may repeat. Earlier steps can't be rolled back after it."""

    @abstractmethod
    def copy_row(self, source: int, target: int) -> None:
        """Overwrite row `target` with row `source`. Earlier steps can't be rolled back after it."""


GROWTH: Final = 64  # slots of an unbounded layer grow by half, up to a multiple of this


@dataclass(frozen=True)
class LayerConfig:
    """The rules by which a layer keeps tokens at this moment.

    A layer whose sliding window, or chunk of attention, fits in the budget holds only that many tokens, as the next
    token sees no others. Its policy is then `Recent`, without a merge rule.
    """

    policy: Policy
    merge: Merge | None
    limits: Limits
    budget: int | None
    """Maximum number of tokens between steps: the budget of the limits, or the sliding window if that fits in it."""
    sliding_window: int | None = None
    """Length of the model's sliding window in this layer (None: no window)."""
    attention_chunk: int | None = None
    """Length of the model's attention chunks in this layer (None: no chunks). See `Visibility`."""
    has_places: bool = False
    """True if the text has pictures. The layer then stores the place at which each token is read."""

    def with_sliding_window(self, sliding_window: int | None, attention_chunk: int | None = None) -> LayerConfig:
        """Rules for a layer that attends to its newest `sliding_window` tokens, or within an `attention_chunk`."""
        rules = replace(self, sliding_window=sliding_window, attention_chunk=attention_chunk)
        most = rules.most_visible
        if most is None or (self.budget is not None and most > self.budget):
            return rules
        return replace(rules, policy=Recent(), merge=None, budget=most)

    def knows(self, call: AttentionCall) -> bool:
        """Return True if the model's own limits are those of `call`."""
        return (self.sliding_window, self.attention_chunk) == (call.sliding_window, call.attention_chunk)

    def with_budget(self, budget: int | None) -> LayerConfig:
        """The rules with another budget."""
        return replace(self, limits=replace(self.limits, budget=budget), budget=budget)

    @cached_property
    def most_visible(self) -> int | None:
        """The most tokens that a query sees, its own among them. None: no limit."""
        return most_visible(self.sliding_window, self.attention_chunk)

    @cached_property
    def recalls(self) -> bool:
        """Return True if evicted tokens may be recalled: not where a sliding window or chunk hides them anyway."""
        return self.limits.recall > 0 and self.most_visible is None

    @cached_property
    def recall_room(self) -> int:
        """Slots that stay free for the tokens that a step recalls."""
        return self.limits.recall if self.recalls else 0

    @cached_property
    def is_whole_window(self) -> bool:
        """Return True if the budget is the sliding window, or the chunk of attention."""
        return self.most_visible is not None and self.budget == self.most_visible

    @cached_property
    def state(self) -> tuple[str, ...]:
        """Names of the state per slot: the policy's, the merge's, and the positions at which tokens are read."""
        own = self.policy.needs.state if self.merge is None else (*self.policy.needs.state, *self.merge.state)
        own = (*own, TOKEN_INDEX) if self.recalls else own
        return (*own, *PLACES) if self.has_places else own

    @cached_property
    def joins(self) -> bool:
        """Return True if the policy decides that some tokens join the one before them as they are written."""
        return self.merge is not None and ACCUMULATES in self.policy.needs.state

    @cached_property
    def is_lossless(self) -> bool:
        """Return True if a token that is not evicted changes nothing but its own slot."""
        return not (self.policy.needs.state or self.policy.needs.statistics)

    @cached_property
    def headroom(self) -> int:
        """Slots beyond the budget at rest: for the next tokens, and for tokens that may be rolled back."""
        return HEADROOM + self.limits.rollback

    def slots_for(
        self, tokens: int, slots: int, held: int, reserve_hint: int, longest_decode: int, defer_eviction: bool
    ) -> int:
        """Slots that a layer with `slots` of them, `held` in use, should have before `tokens` more are written.

        In decode no pass is longer than `longest_decode` tokens. 0 means that the tokens are a chunk of a prompt.
        """
        needed, own = held + tokens, slots - self.recall_room
        if self.budget is not None and not defer_eviction:
            # A step of a prompt leaves room for the next step. Decode gives that room back.
            room = max(tokens, self.limits.chunk, own - self.budget)
            if longest_decode:
                room = longest_decode + self.limits.rollback
            return max(self.budget + room, needed) + self.recall_room
        if needed <= own:
            return slots
        grown = reserve_hint if reserve_hint >= needed else max(needed, own * 3 // 2)
        return -(-grown // GROWTH) * GROWTH + self.recall_room

    @cached_property
    def protected(self) -> tuple[int, int]:
        """Numbers of sinks and newest tokens that are never evicted: (0, 0) if the budget is the sliding window."""
        return (0, 0) if self.is_whole_window else (self.limits.sinks, self.limits.window)

    def row_sinks(self, step: Step) -> RowSinks | None:
        """Sinks of each row. None: all rows have those of `protected`."""
        return None if self.is_whole_window else step.sinks

    def reads_all(self, step: Step) -> bool:
        """Return True for a step of one token, which reads all that is held: tokens beyond the reach have been evicted.

        In a sliding window sinks are evicted once no token sees them, and newer tokens than within reach are held.
        """
        return step.is_decode_token and self.most_visible is None

    def visible_in(self, step: Step) -> Visibility:
        """`visibility` with the sinks of a step's rows. Where they differ or have pins, `seen_until` is the reach.

        So it is in rows with gaps, where tokens are newer than others by less than the difference of their positions.
        """
        visible, sinks = self.visibility, step.sinks
        if visible.reach is None or self.budget is None:
            return visible
        if self.reads_all(step) or self.reach_differs(step):
            return replace(visible, reach=None, sinks=0)
        count = self.limits.sinks if sinks is None else sinks.counts[0]
        return replace(visible, reach=self.budget - count + 1, sinks=count)

    def reach_differs(self, step: Step) -> bool:
        """Return True if the reach of queries is not one number of positions for all rows of a step."""
        if self.visibility.reach is None:
            return False
        sinks = step.sinks
        return step.may_have_gaps or (sinks is not None and (len({*sinks.counts}) > 1 or sinks.pins is not None))

    @cached_property
    def visibility(self) -> Visibility:
        """Which of the held tokens a query may see, beyond causality."""
        if self.recalls:  # recalled tokens are read at any distance
            return Visibility()
        if keeps_newest(self.policy) and self.budget is not None and self.merge is None and not self.is_whole_window:
            reach = self.budget - self.limits.sinks + 1
            return Visibility(self.sliding_window, reach, self.limits.sinks, self.attention_chunk)
        return Visibility(self.sliding_window, attention_chunk=self.attention_chunk)
