"""The memory of a recurrent layer: a state of fixed size that every token changes."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from windlass.cache.layer_config import Layer
from windlass.cache.rows import RowState
from windlass.core.errors import UsageError
from windlass.core.step import Step
from windlass.core.types import TokenMask


class PriorState(NamedTuple):
    """A state before `step`, by name. Without tensors, no token had been read."""

    step: Step
    states: dict[str, Tensor]


class RecurrentLayer(Layer):
    """A layer's state. `kind` is the model's name for such a layer. The code that runs the model writes the tensors."""

    kind: str

    def __init__(self, index: int) -> None:
        self.index = index
        self._copies: dict[str, Tensor] = {}  # reused in each pass, so that memory is allocated once
        self.before: PriorState | None = None

    @abstractmethod
    def load(self, states: dict[str, Tensor]) -> None:
        """Use these tensors as the state, with the names of `tensors`. An empty dict begins anew."""

    @property
    def is_empty(self) -> bool:
        return not self.tensors()

    @property
    def label(self) -> str:
        """The layer's name in errors."""
        return f"layer {self.index} ({self.kind})"

    @property
    def undo_tensors(self) -> list[Tensor]:
        """Tensors that are kept so that the last pass can be rolled back."""
        return list(self._copies.values())

    def protect(self, step: Step) -> None:
        """Copy the state before `step` changes it. An earlier step can't be rolled back after it."""
        self.before = None  # cleared first, as an interrupt may leave half a copy
        states = self.tensors()
        if any(name not in self._copies or self._copies[name].shape != state.shape for name, state in states.items()):
            self._copies = {name: torch.empty_like(state) for name, state in states.items()}
        for name, state in states.items():
            self._copies[name].copy_(state)
        self.before = PriorState(step, {name: self._copies[name] for name in states})

    def settle(self, step: Step) -> None:
        """Restore the state of rows that got no token in `step`, and detach the state from gradients."""
        for state in self.tensors().values():
            state.detach_()
        idle = [row for row, tokens in enumerate(step.lengths) if not tokens]
        if idle:
            self._put_back(idle)

    def commit(self) -> None:
        """Do nothing: `roll_back` needs the copy."""

    def take_back(self, step: Step) -> None:
        if self.before is not None and self.before.step is step:
            self._put_back(range(len(step.lengths)))
            self.before = None

    def can_roll_back(self, counts: Sequence[int]) -> bool:
        before = self.before
        return before is not None and all(n in (0, was) for n, was in zip(counts, before.step.lengths, strict=True))

    def roll_back(self, counts: Sequence[int], here: Step) -> None:  # only positions would need it
        self._put_back([row for row, tokens in enumerate(counts) if tokens])
        self.before = None

    def forget_steps(self) -> None:
        """Make all earlier steps permanent."""
        self.before = None

    def select_rows(self, rows: Tensor) -> None:
        self.before, self._copies = None, {}
        self.load({name: state.index_select(0, rows.to(state.device)) for name, state in self.tensors().items()})

    def copy_row(self, source: int, target: int) -> None:
        self.before = None
        for state in self.tensors().values():
            state[target] = state[source]

    def _put_back(self, rows: Sequence[int]) -> None:
        """Restore the states of `rows` from before the last pass, or zeros where that was the first."""
        assert self.before is not None, "a state without a copy"
        states = self.tensors()
        if len(rows) == len(self.before.step.lengths) and not self.before.states:
            self.load({})
            return
        for name, state in states.items():
            before = self.before.states.get(name)
            for row in rows:
                state[row] = 0 if before is None else before[row]


def check_columns(layers: Sequence[RecurrentLayer], rows: Sequence[RowState], mask: TokenMask | None) -> None:
    """Check that no row's state would read padding in a pass of (batch, columns) `mask`.

    A row may be padding as a whole, and then keeps its state. It may also begin with padding before its first token, as
    zeros leave an empty state unchanged.

    Raises: UsageError for other padding, naming row and layer.
    """
    if mask is None or bool(mask.all()):
        return
    for row, columns in enumerate(mask.tolist()):
        tokens = sum(columns)
        is_left = all(columns[len(columns) - tokens :])
        if not (tokens in (0, len(columns)) or (is_left and rows[row].tokens_seen == 0)):
            where = "after its first token" if is_left else "between its tokens or behind them"
            raise UsageError(
                f"row {row} has padding {where}, which {layers[0].label} would read into its state. Pad on the left "
                "of the first pass only, or let a row be padding in the whole pass, as windlass.generate does"
            )


def refuse_edit(layers: Sequence[RecurrentLayer], edit: str) -> None:
    """Raises: UsageError for an `edit` of a text that a recurrent layer has read."""
    if layers:
        raise UsageError(
            f"{edit}: {layers[0].label} keeps a state that every token has changed, out of which none can be taken or "
            "moved. Use rollback for the last step, or read the text again"
        )
