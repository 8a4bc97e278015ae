"""What a benchmark measures: its rows, out of the lists that a user typed."""

import itertools
import statistics
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from windlass.cache.options import CacheOptions
from windlass.core.errors import UsageError
from windlass.evals.budgets import ALL, Budget
from windlass.evals.grid import axes_of
from windlass.evals.speed.workloads import BenchLists, Workload, setups_of, workloads_of
from windlass.policies import Recent
from windlass.positions.modes import Original

USUAL: Final[dict[str, Any]] = {"policy": Recent(), "positions": Original()}  # named in rows, so never "auto"
AXES: Final = ("budget", "policy", "positions", "store", "storage", "threads", "graph")


@dataclass(frozen=True)
class BenchSetup:
    """With what a row is run; `options` are those of its cache, but for the batch."""

    options: CacheOptions = field(default_factory=lambda: CacheOptions(**USUAL))
    storage: str = "unrotated"
    threads: int = 1
    graph: str = "off"

    def labels(self) -> dict[str, int | str | None]:
        """All of it as a row of results has it."""
        return self.options.labels() | {"storage": self.storage, "threads": self.threads, "graph": self.graph}

    @property
    def texts(self) -> dict[str, str]:
        """What a list may vary, as a table has it: by `AXES`."""
        labels = self.labels()
        return {axis: ALL if labels[axis] is None else str(labels[axis]).removesuffix("()") for axis in AXES}


@dataclass
class BenchRow:
    """One row and what was measured of it.

    `places` tells which workload it has (`task`), and which value of each list it has. `bytes_per_token` are read
    from memory in decode: its held keys, values and scales, and its share of the weights, which are
    read once for a batch; None for prompts, whose tokens share a reading.
    """

    workload: Workload
    setup: BenchSetup
    places: dict[str, int]
    samples_s: list[float] = field(default_factory=list)
    bytes_per_token: float | None = None

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each run, those of all texts."""
        return [self.workload.batch * self.workload.tokens / seconds for seconds in self.samples_s]

    @property
    def tokens_per_s(self) -> float:
        """The median."""
        return statistics.median(self.speeds)

    @property
    def half_range(self) -> float:
        """Half the interquartile range of tokens per second; 0 for one run."""
        if len(self.samples_s) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.speeds, n=4, method="inclusive")
        return (high - low) / 2

    @property
    def gb_per_s(self) -> float | None:
        """10^9 bytes read per second, at the median."""
        return None if self.bytes_per_token is None else self.bytes_per_token * self.tokens_per_s / 1e9


def rows_of(lists: BenchLists, chunk: int) -> list[BenchRow]:
    """The product of all lists; rows that differ only in their setup are neighbours.

    Raises: WindlassError for what cannot be honoured.
    """
    cache_axes = axes_of(lists.options)
    setup_axes: dict[str, list[Any]] = {"threads": [torch.get_num_threads()]} | setups_of(lists)
    axes = {axis: values for axis in AXES if (values := (cache_axes | setup_axes).get(axis))}
    setups = []
    for places in itertools.product(*(range(len(values)) for values in axes.values())):
        chosen = {axis: axes[axis][place] for axis, place in zip(axes, places, strict=True)}
        rest = {axis: chosen.pop(axis) for axis in setup_axes}
        if "budget" in chosen:
            chosen["budget"] = _slots(chosen["budget"])
        setup = BenchSetup(CacheOptions(chunk=chunk, **USUAL | chosen), **rest)
        _check(setup)
        setups.append((setup, dict(zip(axes, places, strict=True))))
    return [
        BenchRow(workload, setup, {"task": index, **dict.fromkeys(AXES, 0), **places})
        for index, workload in enumerate(workloads_of(lists))
        for setup, places in setups
    ]


def _check(setup: BenchSetup) -> None:
    if setup.storage == "rotated" and not isinstance(setup.options.positions, Original):
        raise UsageError(
            f"--storage rotated and --positions {setup.options.positions} exclude each other: a key that is stored "
            "rotated is read where it was; measure them in two runs"
        )


def _slots(budget: Budget) -> int | None:
    if budget.divisor is not None:
        raise UsageError(f"--budget {budget.asked!r} is a part of a text; a benchmark takes a number of tokens, or all")
    return budget.slots
