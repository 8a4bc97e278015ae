"""Evaluation: tasks, sweeps over cache settings, a file of results, reports, and benchmarks of speed."""

from windlass.evals.task import Question, Sample, Task

__all__ = ["Sample", "Task", "Question"]
