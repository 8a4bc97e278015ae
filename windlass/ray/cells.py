"""Which worker runs which cases next: those of a text together, since a worker keeps the texts that it made last."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

from windlass.evals.planned import PlannedCase
from windlass.evals.runner import POOL

ATTEMPTS: Final = 2  # workers that may die over a cell


@dataclass(eq=False)
class Cell:
    """What a worker is sent at once: a case, or those of one setting among the texts of a batch."""

    cases: list[PlannedCase]
    deaths: int = 0

    @property
    def name(self) -> str:
        """As an error calls it: `"passkey, length 200, text 3, policy=Recent(), asked_budget=64"`."""
        case = self.cases[0]
        numbers = " to ".join(dict.fromkeys(str(each.spec.number) for each in (case, self.cases[-1])))
        labels = (f"{name}={label}" for name, label in case.settings.labels.items() if label not in ("none", "plain"))
        return f"{case.spec.label}, length {case.spec.length}, text {numbers}, {', '.join(labels)}"


@dataclass(eq=False)
class Cells:
    """What is left to be sent, text by text; `again` holds cells whose worker died."""

    texts: deque[deque[Cell]]
    again: deque[Cell] = field(default_factory=deque)
    _taken: dict[object, deque[Cell]] = field(default_factory=dict)

    @classmethod
    def of(cls, cases: Sequence[PlannedCase], batch: int) -> "Cells":
        """All of them, in the order of `cases`; `batch` is the most texts that are read side by side."""
        pool = 1 if batch == 1 else batch * POOL
        texts: deque[deque[Cell]] = deque()
        for _, group in groupby(cases, lambda case: (case.spec.number // pool, case.spec.label, case.spec.length)):
            settings: dict[tuple[str, ...], Cell] = {}
            for case in group:
                settings.setdefault(tuple(case.settings.labels.values()), Cell([])).cases.append(case)
            texts.append(deque(settings.values()))
        return cls(texts)

    @property
    def is_empty(self) -> bool:
        """Whether all has been sent."""
        return not (self.texts or self.again or any(self._taken.values()))

    def next_of(self, worker: object) -> Cell | None:
        """What `worker` runs next: what another died over, then more of its text, a new text, or of another's."""
        if self.again:
            return self.again.popleft()
        own = self._taken.get(worker)
        if not own:
            own = self.texts.popleft() if self.texts else max(self._taken.values(), key=len, default=None)
            if not own:
                return None
            self._taken[worker] = own
        return own.popleft()

    def died(self, worker: object, cell: Cell) -> bool:
        """Give back what `worker` left; whether `cell`, which it died over, is to be tried once more."""
        left = self._taken.pop(worker, None)
        if left and all(left is not each for each in self._taken.values()):
            self.texts.appendleft(left)
        cell.deaths += 1
        if cell.deaths < ATTEMPTS:
            self.again.append(cell)
        return cell.deaths < ATTEMPTS
