"""What happens when a step fails: who is told, and when the engine gives up."""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from windlass.core.errors import WindlassError
from windlass.engine.lane import Lane
from windlass.engine.task import Task
from windlass.engine.totals import Totals

LOG: Final = logging.getLogger("windlass.engine")
ERRORS: Final = 3  # in a row, after which the engine is dead
ALL: Final = "all"  # that is done; beside it, the steps of each lane are counted apart
ALONE: Final = "alone"  # lanes of one request, all together


class Guard:
    """Does work, and counts errors in a row: of all work, and of the steps of each lane. So prompts that are read well
    do not hide a lane whose steps fail. `is_fatal`: the first error of ours is raised, for other ranks may stand
    elsewhere then."""

    def __init__(self, totals: Totals, is_fatal: bool) -> None:
        self._totals, self._is_fatal = totals, is_fatal
        self._in_a_row = Counter[str | int]()

    @property
    def is_over(self) -> bool:
        """Whether there were too many errors."""
        return any(count >= ERRORS for count in self._in_a_row.values())

    def do(self, tasks: Sequence[Task], work: Callable[[], None], lane: Lane | None = None) -> bool:
        """Let an error of `work` be one of the `tasks`, and of no other; `lane`: what it is a step of.

        False where it was an error of ours.
        """
        counts = [ALL] if lane is None else [ALL, ALONE if lane.is_alone else id(lane)]
        errors = self._totals.errors
        try:
            work()
            if self._totals.errors == errors:  # those of a single request of the step count, too
                for name in counts:
                    self._in_a_row.pop(name, None)
        except WindlassError as error:
            for task in tasks:
                task.fail(str(error), is_ours=False)
        except Exception as error:
            if self._is_fatal:
                raise
            LOG.exception("a step failed")
            self._totals.errors += 1
            self._in_a_row.update(counts)
            for task in tasks:
                task.fail(f"the engine failed: {type(error).__name__}", is_ours=True)
            return False
        return True
