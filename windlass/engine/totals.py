"""What the scheduler has done since it started."""

from dataclasses import dataclass

from windlass.engine.task import Task


@dataclass
class Totals:
    """Counts that only grow."""

    prompt: int = 0
    written: int = 0
    cached: int = 0
    errors: int = 0
    cancelled: int = 0
    steps: int = 0
    evicted: int = 0

    def count(self, task: Task) -> None:
        """Add a request that is over."""
        self.prompt += min(task.seen, len(task.ticket.request.prompt))
        self.cached += task.cached
        self.written += task.writer.written
        self.evicted += task.seen - task.kept

    @property
    def all(self) -> tuple[int, int, int, int, int, int, int]:
        """In the order of `EngineStatus`."""
        return self.prompt, self.written, self.cached, self.errors, self.cancelled, self.steps, self.evicted
