"""What a cache holds for one layer of the model, of whatever kind."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from windlass.core.step import Step


class Layer(ABC):
    """The memory of one layer. A step changes it for good only when it is committed."""

    index: int

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether nothing was ever written."""

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """Everything allocated, by name."""

    @abstractmethod
    def commit(self) -> None:
        """The pass has completed: what it takes to undo an interrupted step is no longer needed."""

    @abstractmethod
    def take_back(self, step: Step) -> None:
        """Be as before `step`, however far it came. Nothing happens where it never began, or others came after it."""

    @abstractmethod
    def can_roll_back(self, counts: Sequence[int]) -> bool:
        """Whether the newest `counts` tokens of each row can be rolled back, with all that they changed."""

    @abstractmethod
    def roll_back(self, counts: Sequence[int], here: Step) -> None:
        """Roll the newest `counts` tokens of each row back; `here` tells where the rows then stand.

        Evictions that these tokens caused are undone, those of the tokens before them are not.
        """

    @abstractmethod
    def select_rows(self, rows: Tensor) -> None:
        """Keep the batch rows at `rows`, which may repeat; earlier steps can't be rolled back after it."""

    @abstractmethod
    def copy_row(self, source: int, target: int) -> None:
        """Overwrite row `target` with row `source`; earlier steps can't be rolled back after it."""
