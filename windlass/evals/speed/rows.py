"""What a benchmark measures: its rows, out of the lists that a user typed."""

import itertools
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from windlass.cache.options import CacheOptions
from windlass.core.errors import UsageError
from windlass.core.spec import int_parser, parse_list
from windlass.core.step import MAX_NUMBER
from windlass.evals.grid import ALL, Budget, axes_of
from windlass.positions.modes import Original

STORAGES: Final = ("unrotated", "rotated")
GRAPHS: Final = ("off", "on")
AXES: Final = ("budget", "policy", "positions", "store", "storage", "threads", "graph")
MOST_THREADS: Final = 1024
MOST_ROWS: Final = 65536


@dataclass(frozen=True)
class BenchLists:
    """What was typed; values are separated by commas. `threads` None: as torch has it; `graph` None: off.

    `options` holds lists of values of the cache's options by their name; one without a list is the default.
    """

    prompt_tokens: str = "512"
    decode_tokens: str = "128"
    depth: str = "0"
    options: Mapping[str, str] = field(default_factory=dict)
    storage: str = "unrotated"
    threads: str | None = None
    batch: str = "1"
    graph: str | None = None


@dataclass(frozen=True)
class Workload:
    """A prompt of `tokens` read, or `tokens` written one by one, where a text of `depth` tokens came before.

    `batch` such texts at once.
    """

    is_prompt: bool
    tokens: int
    depth: int
    batch: int = 1

    def __str__(self) -> str:
        rows = f" b{self.batch}" if self.batch > 1 else ""
        at = f" @ d{self.depth}" if self.depth else ""
        return f"{'pp' if self.is_prompt else 'tg'}{self.tokens}{rows}{at}"


@dataclass(frozen=True)
class BenchSetup:
    """With what a row is run; `options` are those of its cache, but for the batch."""

    options: CacheOptions = field(default_factory=CacheOptions)
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
    setup_axes: dict[str, list[Any]] = {
        "storage": parse_list("--storage", lists.storage, _storage),
        "threads": [torch.get_num_threads()],
        "graph": parse_list("--graph", lists.graph or "off", _graph),
    }
    if lists.threads is not None:
        setup_axes["threads"] = parse_list("--threads", lists.threads, int_parser("--threads", 1, MOST_THREADS))
    axes = {axis: values for axis in AXES if (values := (cache_axes | setup_axes).get(axis))}
    setups = []
    for places in itertools.product(*(range(len(values)) for values in axes.values())):
        chosen = {axis: axes[axis][place] for axis, place in zip(axes, places, strict=True)}
        rest = {axis: chosen.pop(axis) for axis in setup_axes}
        if "budget" in chosen:
            chosen["budget"] = _slots(chosen["budget"])
        setup = BenchSetup(CacheOptions(chunk=chunk, **chosen), **rest)
        _check(setup)
        setups.append((setup, dict(zip(axes, places, strict=True))))
    return [
        BenchRow(workload, setup, {"task": index, **dict.fromkeys(AXES, 0), **places})
        for index, workload in enumerate(_workloads(lists))
        for setup, places in setups
    ]


def _workloads(lists: BenchLists) -> list[Workload]:
    kinds = ((True, "-p", lists.prompt_tokens), (False, "-n", lists.decode_tokens))
    counts = [(kind, parse_list(option, typed, int_parser(option, 0, MAX_NUMBER))) for kind, option, typed in kinds]
    depths = parse_list("-d", lists.depth, int_parser("-d", 0, MAX_NUMBER))
    batches = parse_list("--batch", lists.batch, int_parser("--batch", 1, MOST_ROWS))
    workloads = [
        Workload(kind, tokens, depth, batch)
        for depth in depths
        for batch in batches
        for kind, each in counts
        for tokens in each
        if tokens
    ]
    if not workloads:
        raise UsageError("-p 0 and -n 0 leave nothing to measure; give one of them a number of tokens")
    return workloads


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


def _storage(part: str) -> str:
    if part not in STORAGES:
        raise UsageError(f"--storage {part!r} is not one of: {', '.join(STORAGES)}")
    return part


def _graph(part: str) -> str:
    if part not in GRAPHS:
        raise UsageError(f"--graph {part!r} is not one of: {', '.join(GRAPHS)}")
    return part
