"""The memory of a recurrent layer: a state of fixed size that every token changes."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
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
        self.drafts: dict[int, dict[str, Tensor]] = {}  # states within the last pass, by the columns behind them

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
        return [*self._copies.values(), *(state for each in self.drafts.values() for state in each.values())]

    def protect(self, step: Step) -> None:
        """Copy the state before `step` changes it. An earlier step can't be rolled back after it."""
        self.forget_steps()  # first, as an interrupt may leave half a copy
        states = self.tensors()
        if any(name not in self._copies or self._copies[name].shape != state.shape for name, state in states.items()):
            self._copies = {name: torch.empty_like(state) for name, state in states.items()}
        for name, state in states.items():
            self._copies[name].copy_(state)
        self.before = PriorState(step, {name: self._copies[name] for name in states})

    def note_draft(self, left: int) -> None:
        """Copy the state within a pass, of whose columns `left` are still to be read."""
        self.drafts[left] = {name: state.clone() for name, state in self.tensors().items()}

    def settle(self, step: Step) -> None:
        """Restore the state of rows that got no token in `step`, and detach the state from gradients."""
        for state in self.tensors().values():
            state.detach_()
        idle = [row for row, tokens in enumerate(step.lengths) if not tokens]
        if idle:
            self._put_back(idle)

    def commit(self) -> None:
        """Do nothing: `latest` needs the copies."""

    def take_back(self, step: Step) -> None:
        if self.before is not None and self.before.step is step:
            self._put_back(range(len(step.lengths)))
            self.forget_steps()

    def latest(self, row: int) -> dict[int, dict[str, Tensor]]:
        """The states of a row before and within the last pass, by the number of newest tokens that they lack."""
        if self.before is None:
            return {}
        step, found = self.before.step, dict[int, dict[str, Tensor]]()
        for left, states in self.drafts.items():
            found[int((step.positions[row, -left:] >= 0).sum())] = _of_row(states, row)
        return found | {step.lengths[row]: _of_row(self.before.states, row)}

    def restore(self, prior: Mapping[int, dict[str, Tensor]]) -> None:
        """Give some rows earlier states. Those of a row that had read nothing are empty."""
        states = self.tensors()
        for row, own in prior.items():
            for name, state in states.items():
                state[row] = own.get(name, 0)
        if all(row in prior and not prior[row] for row in range(max(map(len, states.values()), default=0))):
            self.load({})

    def forget_steps(self) -> None:
        """Make all earlier steps permanent."""
        self.before, self.drafts = None, {}

    def select_rows(self, rows: Tensor) -> None:
        self.forget_steps()
        self._copies = {}
        self.load({name: state.index_select(0, rows.to(state.device)) for name, state in self.tensors().items()})

    def copy_row(self, source: int, target: int) -> None:
        self.forget_steps()
        for state in self.tensors().values():
            state[target] = state[source]

    def _put_back(self, rows: Sequence[int]) -> None:
        """Restore the states of `rows` from before the last pass, or none where that was the first."""
        assert self.before is not None, "a state without a copy"
        self.restore({row: _of_row(self.before.states, row) for row in rows})


def _of_row(states: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
    return {name: state[row] for name, state in states.items()}


def states_of_row(layers: Sequence[RecurrentLayer], row: int) -> tuple[dict[str, Tensor], ...]:
    """Copies of a row's states, layer by layer."""
    return tuple({name: state.clone() for name, state in _of_row(each.tensors(), row).items()} for each in layers)


def prior_states(
    layers: Sequence[RecurrentLayer], rows: Sequence[RowState], counts: Sequence[int]
) -> list[dict[int, dict[str, Tensor]]]:
    """The states that each layer had before the newest `counts` tokens of each row, by the rows that lose any.

    Raises: UsageError where there are no copies of them, naming the numbers of tokens of which there are.
    """
    found: list[dict[int, dict[str, Tensor]]] = [{} for _ in layers]
    for at, (row, count) in enumerate(zip(rows, counts, strict=True)):
        left = row.tokens_seen - count
        for number, layer in enumerate(layers if count else ()):
            known: dict[int, dict[str, Tensor]] = {0: {}}
            known |= {each.tokens: each.states[number] for each in row.checkpoints}
            known |= {row.tokens_seen - fewer: states for fewer, states in layer.latest(at).items()}
            if left not in known:
                raise UsageError(
                    f"rollback of {count} tokens would leave {left} in row {at}, and {layer.label} has copies of its "
                    f"state at {', '.join(map(str, sorted(known)))} tokens only. Roll back to one of these, and read "
                    "the rest again. `checkpoint()` makes a copy"
                )
            found[number][at] = known[left]
    return found


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
            "moved. Use rollback to a checkpoint, and read the rest again"
        )
