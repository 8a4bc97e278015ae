"""What a benchmark measures: its rows, out of the lists that a user typed."""

import itertools
import statistics
from dataclasses import dataclass, field
from typing import Final

import torch

from windlass.core.errors import UsageError
from windlass.core.spec import list_of, whole_number
from windlass.core.step import MOST, checked_limits
from windlass.policies import Policy
from windlass.policies.load import load_policy
from windlass.positions.modes import Original, PositionMode, position_mode
from windlass.stores.base import Store
from windlass.stores.low_bit import store_of

STORAGES: Final = ("unrotated", "rotated")
GRAPHS: Final = ("off", "on")
AXES: Final = ("budget", "policy", "positions", "store", "storage", "threads", "graph")
MOST_THREADS: Final = 1024
MOST_ROWS: Final = 65536


@dataclass(frozen=True)
class Lists:
    """What was typed; values are separated by commas. `threads` None: as torch has it; `graph` None: off."""

    prompt_tokens: str = "512"
    decode_tokens: str = "128"
    depth: str = "0"
    budget: str = "all"
    policy: str = "recent"
    positions: str = "original"
    store: str = "plain"
    storage: str = "unrotated"
    threads: str | None = None
    batch: str = "1"
    graph: str | None = None


@dataclass(frozen=True)
class Task:
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
class Settings:
    """With what a row is run, in the order of `AXES`."""

    budget: int | None
    policy: Policy
    positions: PositionMode
    store: Store
    storage: str
    threads: int
    graph: str

    @property
    def labels(self) -> dict[str, str]:
        """Each setting as text, by the name of its list."""
        budget = "all" if self.budget is None else str(self.budget)
        policy = repr(self.policy).removesuffix("()")
        texts = (budget, policy, str(self.positions), self.store.name, self.storage, str(self.threads), self.graph)
        return dict(zip(AXES, texts, strict=True))


@dataclass
class Row:
    """One row and what was measured of it.

    `places` tells the task's place, and which value of each list it has. `bytes_per_token` are read
    from memory in decode: its held keys, values and scales, and its share of the weights, which are
    read once for a batch; None for prompts, whose tokens share a reading.
    """

    task: Task
    settings: Settings
    places: dict[str, int]
    samples_s: list[float] = field(default_factory=list)
    bytes_per_token: float | None = None

    @property
    def speeds(self) -> list[float]:
        """Tokens per second of each run, those of all texts."""
        return [self.task.batch * self.task.tokens / seconds for seconds in self.samples_s]

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


def rows_of(lists: Lists, chunk: int) -> list[Row]:
    """The product of all lists; rows that differ only in settings are neighbours.

    Raises: WindlassError for what cannot be honoured.
    """
    budgets = list_of("--budget", lists.budget, _budget)
    policies = list_of("--policy", lists.policy, load_policy)
    modes = list_of("--positions", lists.positions, position_mode)
    stores = list_of("--store", lists.store, store_of)
    storages = list_of("--storage", lists.storage, _storage)
    threads = [torch.get_num_threads()]
    if lists.threads is not None:
        threads = list_of("--threads", lists.threads, whole_number("--threads", 1, MOST_THREADS))
    graphs = list_of("--graph", lists.graph or "off", _graph)
    axes = (budgets, policies, modes, stores, storages, threads, graphs)
    places = list(itertools.product(*(range(len(axis)) for axis in axes)))
    settings = [
        Settings(*values) for values in itertools.product(budgets, policies, modes, stores, storages, threads, graphs)
    ]
    tasks = _tasks(lists)
    for each in settings:
        checked_limits(each.budget, sinks=4, window=None, chunk=chunk, batch=1, rollback=16)
        if each.storage == "rotated" and not isinstance(each.positions, Original):
            raise UsageError(
                f"--storage rotated and --positions {each.positions} exclude each other: a key that is stored rotated "
                "is read where it was; measure them in two runs"
            )
    return [
        Row(task, each, {"task": index, **dict(zip(AXES, place, strict=True))})
        for index, task in enumerate(tasks)
        for each, place in zip(settings, places, strict=True)
    ]


def _tasks(lists: Lists) -> list[Task]:
    kinds = ((True, "-p", lists.prompt_tokens), (False, "-n", lists.decode_tokens))
    counts = [(kind, list_of(option, typed, whole_number(option, 0, MOST))) for kind, option, typed in kinds]
    depths = list_of("-d", lists.depth, whole_number("-d", 0, MOST))
    batches = list_of("--batch", lists.batch, whole_number("--batch", 1, MOST_ROWS))
    tasks = [
        Task(kind, tokens, depth, batch)
        for depth in depths
        for batch in batches
        for kind, each in counts
        for tokens in each
        if tokens
    ]
    if not tasks:
        raise UsageError("-p 0 and -n 0 leave nothing to measure; give one of them a number of tokens")
    return tasks


def _budget(part: str) -> int | None:
    return None if part == "all" else whole_number("--budget", 1, MOST)(part)


def _storage(part: str) -> str:
    if part not in STORAGES:
        raise UsageError(f"--storage {part!r} is not one of: {', '.join(STORAGES)}")
    return part


def _graph(part: str) -> str:
    if part not in GRAPHS:
        raise UsageError(f"--graph {part!r} is not one of: {', '.join(GRAPHS)}")
    return part
