"""The options of a cache on the command line, each declared once; they are named as in the library."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from typer import BadParameter, Option

from windlass.cli import complete
from windlass.core.limits import SYSTEM

Budget = Annotated[
    int | None,
    Option(
        "--budget", "--max-kv-size", envvar="WINDLASS_BUDGET", help="Most tokens that a layer keeps; by default all."
    ),
]


def sinks_of(typed: str) -> int | str:
    """A number of sinks, or `system`. Raises: BadParameter."""
    try:
        return typed if typed == SYSTEM else int(typed)
    except ValueError:
        raise BadParameter(f"{typed!r} is neither a whole number nor {SYSTEM!r}") from None


Sinks = Annotated[
    Any,  # a parser's own type: a number, or `system`
    Option(
        "--sinks",
        metavar="INTEGER",
        parser=sinks_of,
        help="First tokens, never evicted; system: those of the system text. By default 4, in `serve` system.",
    ),
]
Window = Annotated[
    int | None, Option("--window", help="Newest tokens, never evicted; by default a quarter of the budget, at most 64.")
]
PolicySpec = Annotated[
    str | None,
    Option(
        "--policy",
        metavar="NAME",
        envvar="WINDLASS_POLICY",
        autocompletion=complete.policies,
        help="Which tokens to keep: a name, SnapKV(pool=7), or file.py:Class; by default auto, which is key_diff.",
    ),
]
Positions = Annotated[
    str | None,
    Option(
        "--positions",
        metavar="MODE",
        envvar="WINDLASS_POSITIONS",
        autocompletion=complete.names_of(complete.MODES),
        help="Where kept tokens are read: auto, original, compact, self_extend(group, window) or clamp(limit); "
        "by default auto: as the model does, and so that a longer text stays within its trained length.",
    ),
]
StoreSpec = Annotated[
    str | None,
    Option(
        "--store",
        metavar="NAME",
        envvar="WINDLASS_STORE",
        autocompletion=complete.names_of(complete.STORES),
        help="How the cache is held: plain, int8, int4, or int4(sinks=4, newest=32), whose first and newest tokens "
        "are held in full precision; by default plain.",
    ),
]
MergeSpec = Annotated[
    str | None,
    Option(
        "--merge",
        metavar="RULE",
        envvar="WINDLASS_MERGE",
        autocompletion=complete.names_of(complete.MERGES),
        help="How evicted tokens are merged into kept ones: mean_count, mean, sum, pick or weighted, also as "
        "mean_count(next, threshold=0.5); by default they are dropped.",
    ),
]
SharesFile = Annotated[
    Path | None,
    Option(
        "--shares",
        metavar="FILE",
        envvar="WINDLASS_SHARES",
        help="How much of the budget each layer and each kv head gets, as `windlass calibrate --shares` measured it; "
        "by default all get as much.",
    ),
]
Recall = Annotated[
    int | None,
    Option(
        "--recall",
        envvar="WINDLASS_RECALL",
        help="Evicted tokens that each step reads again, those that matter most to it; all of them stay in the host's "
        "memory. A multiple of 8; by default 0.",
    ),
]
RecallStore = Annotated[
    str | None,
    Option(
        "--recall-store",
        metavar="NAME",
        envvar="WINDLASS_RECALL_STORE",
        autocompletion=complete.names_of(complete.STORES),
        help="How evicted tokens are held for --recall: plain, int8 or int4; by default int4.",
    ),
]
RecallFolder = Annotated[
    str | None,
    Option(
        "--recall-folder",
        metavar="FOLDER",
        envvar="WINDLASS_RECALL_FOLDER",
        help="Hold them in an unnamed file of this folder, for texts beyond the host's memory.",
    ),
]
Chunk = Annotated[
    int | None,
    Option("--chunk", envvar="WINDLASS_CHUNK", help="Most tokens taken in one step of the prompt; by default 512."),
]


@dataclass(frozen=True)
class CacheArguments:
    """What was asked of the cache; None where nothing was, so that the defaults or a prompt cache decide."""

    budget: Budget = None
    sinks: Sinks = None
    window: Window = None
    policy: PolicySpec = None
    positions: Positions = None
    chunk: Chunk = None
    store: StoreSpec = None
    merge: MergeSpec = None
    recall: Recall = None
    recall_store: RecallStore = None
    recall_folder: RecallFolder = None
    shares: SharesFile = None

    def given(self) -> dict[str, Any]:
        """What was asked, by the names of `CacheOptions`."""
        return {name: value for name, value in vars(self).items() if value is not None}
