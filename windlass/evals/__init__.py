"""What a cache of some size is worth to a model: tasks, the grid of settings, and a file of results."""

from windlass.evals.task import Sample, Task, Turn

__all__ = ["Sample", "Task", "Turn"]
