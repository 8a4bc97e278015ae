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
    """The rows, and the running pass, if any. It is replaced as a whole: a pass is all or nothing.

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
    """True if keys are stored after the model's own rotary module rotated them."""

    expects_drafts: bool = False
    """True if a pass may read draft tokens: all but the first token with logits may be rolled back."""

    model_name: str = ""
    """The model's name (empty: unknown)."""

    recurrent: list[RecurrentLayer]
    """The recurrent layers. A layer of the model that also attends has the same number in `layers`."""

    shared: frozenset[int] = frozenset()
    """Indices of `layers` whose keys and values other layers of the model read as their own."""

    key_means: list[KeyMeans | None] | None = None
    """The mean key of each layer, for a store that needs it."""

    heads: RankHeads | None = None
    """The heads of this process under tensor parallelism (None: all heads)."""

    fitting: Fitting | None = None
    """Sums of a second pass that fits values (None: a second pass is observed by the policy)."""

    divergence: Divergence | None = None
    """Inputs of the layer at which a pass over rewritten tokens ends (None: passes run to the last layer)."""

    def __init__(
        self, model_id: object, options: CacheOptions, rotaries: list[Rotary | None], device: torch.device
    ) -> None:
        self.model_id, self.options, self.rotaries, self.device = model_id, options, rotaries, device
        self.text = Text(RowTable.at_start(options.batch))
        self._layers, self._by_layer = list[SlotLayer](), list[HeadGroups]()
        self._fused: FusedDecode | None = None  # decode steps that are not yet in the layers' histories
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
        """The state of each row's text."""
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
