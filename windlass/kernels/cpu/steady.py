"""Tables of which each row is the one before it, rotated by the same angles, as those of text are."""

from collections.abc import Callable
from typing import Final, final
from weakref import ReferenceType, ref

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from windlass.core.shapes import RotaryTable
from windlass.kernels.cpu.arguments import table_arguments

Look = Callable[[int, int, int, int], bool]  # the compiled module's `is_steady`


@final
class SteadyTables:
    """Which tables are steady, looked at once each; a table is never written to once it is built."""

    def __init__(self) -> None:
        self._known = WeakIdKeyDictionary()  # of cos: a reference to sin, and what was found

    def __call__(self, tables: tuple[RotaryTable, RotaryTable], look: Look) -> bool:
        """Whether a few keys at positions that follow each other may be rotated by the first rows of `tables`."""
        cos, sin = tables
        known: tuple[ReferenceType[Tensor], bool] | None = self._known.get(cos)
        if known is None or known[0]() is not sin:
            known = ref(sin), look(cos.data_ptr(), sin.data_ptr(), *cos.shape)
            self._known[cos] = known
        return known[1]


are_steady: Final = SteadyTables()


def steady_arguments(tables: tuple[RotaryTable, RotaryTable] | None, look: Look) -> tuple[int, int, int, bool]:
    """Those of `table_arguments`, and whether the tables are steady."""
    return *table_arguments(tables), tables is not None and are_steady(tables, look)
