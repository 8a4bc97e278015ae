"""Works that take turns, so that what slows the machine slows all of them, and how they compare."""

import statistics
import time
from collections.abc import Callable, Mapping

Works = Mapping[str, Callable[[], object]]


def in_turn(works: Works, rounds: int, after: Works | None = None) -> dict[str, list[float]]:
    """Seconds of each work in each round, after one round that warms up; every other round in the opposite order.

    `after`: what follows a work of that name and is not timed.
    """
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name in list(works)[:: 1 if turn % 2 else -1]:
            start = time.perf_counter()
            works[name]()
            taken = time.perf_counter() - start
            if after is not None:
                after[name]()
            if turn:
                seconds[name].append(taken)
    return seconds


def medians(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Median seconds of each."""
    return {name: statistics.median(each) for name, each in seconds.items()}


def quartiles(over: list[float], under: list[float]) -> list[float]:
    """The quartiles of the ratios within a round; the second is the median."""
    return statistics.quantiles((a / b for a, b in zip(over, under, strict=True)), n=4, method="inclusive")
