"""The state of a cache: its options, layers and rows. `windlass.cache.cache` has its operations."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from windlass.cache.fused import FusedDecode
from windlass.cache.head_groups import HeadGroups
from windlass.cache.layer import SlotLayer
from windlass.cache.merging import Merge
from windlass.cache.options import CacheOptions
from windlass.cache.recompute import Divergence, Fitting
from windlass.cache.recurrent import RecurrentLayer
from windlass.cache.rows import RowTable
from windlass.core.ranks import RankHeads
from windlass.core.step import READ, Limits, Pass, Step
from windlass.core.types import KeyMeans
from windlass.policies.base import Policy
from windlass.positions.modes import PositionMode, position_mode
from windlass.positions.rotary import Rotary
from windlass.stores.base import Store


@dataclass(frozen=True)
class Text:
    """Where the rows stand, and the pass that is running, if any. It is replaced as a whole: a pass is all or nothing.

    `latest` is the pass that completed last, unless there were edits after it.
    """

    rows: RowTable
    pending: Step | None = None
    latest: Step | None = None


class CacheState:
    """The layers and rows of a cache of un-rotated keys, and its options.

    `model_id` is an object of its one model. Caches that share it may exchange tokens. `rotaries` has the rotary
    embedding of each of the model's layers, or None for a layer that does not rotate.
    """

    is_rotated: ClassVar[bool] = False
    """Return True if keys are stored as the model's own rotary module rotated them."""

    expects_drafts: bool = False
    """True if the tokens whose logits a pass asks for, but for the first, may turn out wrong and be rolled back."""

    model_name: str = ""
    """What people call the model; empty where that is not known."""

    recurrent: list[RecurrentLayer]
    """One for each recurrent layer; where a layer of the model attends as well, both have its number."""

    shared: frozenset[int] = frozenset()
    """Which of `layers` are read by further layers of the model, too, that have no keys and values of their own."""

    key_means: list[KeyMeans | None] | None = None
    """Per layer the mean key, for a store that asks for it."""

    heads: RankHeads | None = None
    """Which heads this process has, where several hold the model together; None: all of them."""

    fitting: Fitting | None = None
    """Where a second reading of the text is for new values, what it finds; None: it is for the policy."""

    divergence: Divergence | None = None
    """What passes over tokens that are written over bring to one layer, where they are to end; None: they go on."""

    def __init__(
        self, model_id: object, options: CacheOptions, rotaries: list[Rotary | None], device: torch.device
    ) -> None:
        self.model_id, self.options, self.rotaries, self.device = model_id, options, rotaries, device
        self.text = Text(RowTable.at_start(options.batch))
        self._layers, self._by_layer = list[SlotLayer](), list[HeadGroups]()
        self._fused: FusedDecode | None = None  # decode steps of which the layers do not know yet
        self.next_pass = READ

    @property
    def layers(self) -> list[SlotLayer]:
        """The slot layers in the order of the model: one per attention layer, or with shares one per group of heads."""
        self._settle()
        return self._layers

    @layers.setter
    def layers(self, layers: list[SlotLayer]) -> None:
        self._layers, self._fused = layers, None

    @property
    def layers_to_read(self) -> list[SlotLayer]:
        """`layers` for a reader that changes nothing in them, so that decode stays as fast as before."""
        fused = self._fused
        self._settle()
        if fused is not None:
            fused.resume()
            self._fused = fused
        return self._layers

    @property
    def by_layer(self) -> list[HeadGroups]:
        """`layers`, grouped by attention layer of the model."""
        self._settle()
        return self._by_layer

    @by_layer.setter
    def by_layer(self, groups: list[HeadGroups]) -> None:
        self._by_layer = groups

    def _settle(self) -> None:
        """Bring the layers up to date with all decode steps."""
        fused = self._fused
        if fused is not None:
            fused.settle()
            self._fused = None

    def forget_steps(self) -> None:
        """Make all steps permanent, and free the memory for rolling them back."""
        if self._fused is not None:
            self._fused.forget()
        else:
            for layer in self._layers:
                layer.forget_steps(0)

    @property
    def rows(self) -> RowTable:
        """Where each row's text stands."""
        return self.text.rows

    @rows.setter
    def rows(self, rows: RowTable) -> None:
        self.text = Text(rows)

    @property
    def positions(self) -> PositionMode:
        """The mode that decides where kept tokens are read. It may change between steps: keys are stored un-rotated."""
        return self.options.positions

    @positions.setter
    def positions(self, mode: str | PositionMode) -> None:
        self.options = replace(self.options, positions=position_mode(mode))

    @property
    def trained_length(self) -> int | None:
        """Tokens of the longest text that the model was trained on. None: its config does not tell."""
        lengths = [
            each.trained_length for each in self.rotaries if each is not None and each.trained_length is not None
        ]
        return min(lengths, default=None)

    @property
    def limits(self) -> Limits:
        """The limits of every layer."""
        return self.options.limits

    @property
    def policy(self) -> Policy:
        """The policy that decides which tokens are kept."""
        return self.options.policy

    @property
    def store(self) -> Store:
        """The format of keys and values."""
        return self.options.store

    @property
    def merge(self) -> Merge | None:
        """The rule that merges evicted tokens into kept ones. None: they are dropped."""
        return self.options.merge

    @property
    def batch_size(self) -> int:
        """The number of rows."""
        return self.options.batch

    @property
    def next_positions(self) -> list[int]:
        """Per row, the position of the next token."""
        return self.rows.next_positions

    def schedule(self, how: Pass) -> None:
        """Set how the next forward pass is taken."""
        self.next_pass = how
