"""The state of a cache: its options, layers and rows. Its operations are in `cache`."""

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
    """Where the rows stand, and the pass that is running, if any. Replaced as a whole: a pass is all or nothing.

    `latest` is the pass that completed last, unless there were edits after it.
    """

    rows: RowTable
    pending: Step | None = None
    latest: Step | None = None


class CacheState:
    """The layers and rows of a cache of un-rotated keys, and its options.

    `model_id` is an object of its one model: caches that share it may exchange tokens. `rotaries` say how each of
    the model's layers rotates, None where it does not.
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
        """One for each attention layer, in the order of the model; with shares, one for each group of its heads."""
        self._settle()
        return self._layers

    @layers.setter
    def layers(self, layers: list[SlotLayer]) -> None:
        self._layers, self._fused = layers, None

    @property
    def layers_to_read(self) -> list[SlotLayer]:
        """The same for a reader that changes nothing in them: decode goes on as fast as before."""
        fused = self._fused
        self._settle()
        if fused is not None:
            fused.resume()
            self._fused = fused
        return self._layers

    @property
    def by_layer(self) -> list[HeadGroups]:
        """The same, gathered: slots of each attention layer."""
        self._settle()
        return self._by_layer

    @by_layer.setter
    def by_layer(self, groups: list[HeadGroups]) -> None:
        self._by_layer = groups

    def _settle(self) -> None:
        """Let the layers know of all steps."""
        fused = self._fused
        if fused is not None:
            fused.settle()
            self._fused = None

    def forget_steps(self) -> None:
        """Let no step be rolled back any more, which takes memory."""
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
        """Where kept tokens are read. Nothing is stored with it, so it may change between steps."""
        return self.options.positions

    @positions.setter
    def positions(self, mode: str | PositionMode) -> None:
        self.options = replace(self.options, positions=position_mode(mode))

    @property
    def trained_length(self) -> int | None:
        """Tokens of the longest text that the model was trained on; None where its config does not tell."""
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
        """Which tokens are kept."""
        return self.options.policy

    @property
    def store(self) -> Store:
        """How keys and values are held."""
        return self.options.store

    @property
    def merge(self) -> Merge | None:
        """Where evicted tokens go; None drops them."""
        return self.options.merge

    @property
    def batch_size(self) -> int:
        """Rows."""
        return self.options.batch

    @property
    def next_positions(self) -> list[int]:
        """Per row, the position of the next token."""
        return self.rows.next_positions

    def schedule(self, how: Pass) -> None:
        """Say how the next forward pass is taken."""
        self.next_pass = how
