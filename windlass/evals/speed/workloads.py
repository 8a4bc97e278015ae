"""Workloads of a benchmark, as a user types them. Nothing here needs torch."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from windlass.core.errors import UsageError
from windlass.core.parse import MAX_NUMBER, int_parser, parse_list, use_one_of

STORAGES: Final = ("unrotated", "rotated")
GRAPHS: Final = ("off", "on")
MOST_THREADS: Final = 1024
MOST_ROWS: Final = 65536


@dataclass(frozen=True)
class BenchLists:
    """Lists as they were typed, separated by commas. `threads` None: torch's number. `graph` None: off.

    `options` holds lists of values of the cache's options by their name. An option without a list has its default.
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


def check_subject(model: str | None, shape: str | None, layers: int | None, shapes: Collection[str]) -> None:
    """Check the subject of a measurement: a model, or one of `shapes`.

    Raises: UsageError for both or neither, a shape that is unknown, and layers of a model.
    """
    if (model is None) == (shape is None):
        raise UsageError("give either a model or --shape with one of its names")
    if shape is not None and shape not in shapes:
        raise UsageError(f"--shape {shape!r} is unknown. {use_one_of(shape, shapes)}")
    if shape is None and layers is not None:
        raise UsageError("--layers goes with --shape. A model has the layers that it has")


def workloads_of(lists: BenchLists) -> list[Workload]:
    """Every combination of tokens, depth and batch. Raises: UsageError for lists that cannot be honoured."""
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
        raise UsageError("-p 0 and -n 0 leave nothing to measure. Give one of them a number of tokens")
    return workloads


def setups_of(lists: BenchLists) -> dict[str, list[Any]]:
    """The values of `storage`, `graph` and, where they are given, `threads`.

    Raises: UsageError for lists that cannot be honoured.
    """
    axes: dict[str, list[Any]] = {
        "storage": parse_list("--storage", lists.storage, partial(_choice, "--storage", STORAGES)),
        "graph": parse_list("--graph", lists.graph or "off", partial(_choice, "--graph", GRAPHS)),
    }
    if lists.threads is not None:
        axes["threads"] = parse_list("--threads", lists.threads, int_parser("--threads", 1, MOST_THREADS))
    return axes


def _choice(option: str, names: Collection[str], part: str) -> str:
    if part not in names:
        raise UsageError(f"{option} {part!r} is unknown. {use_one_of(part, names)}")
    return part
