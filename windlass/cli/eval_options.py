"""The options of `windlass eval`; those that other commands have, too, are in `options`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from windlass.cli.options import PositionModes, StoreSpecs

EvalTasks = Annotated[
    str,
    Option(
        "--tasks",
        metavar="LIST",
        help="What is asked: passkey, niah_single, vt, multiturn, perplexity(text.txt), ..., or file.py:Class.",
    ),
]
EvalPolicies = Annotated[str, Option("--policies", metavar="LIST", help="Which tokens to keep, as in `generate`.")]
EvalBudgets = Annotated[
    str, Option("--budgets", metavar="LIST", help="Most tokens that a layer keeps: 64, all, or 4x: a quarter of them.")
]
EvalLengths = Annotated[
    str, Option("--lengths", metavar="LIST", help="Tokens of a text with its question and the room for an answer.")
]
EvalMerges = Annotated[
    str, Option("--merge", metavar="LIST", help="What happens to evicted tokens, as in `generate`; none drops them.")
]
EvalShares = Annotated[
    str,
    Option("--shares", metavar="LIST", help="How much each layer and head gets, as in `generate`; none: as much."),
]
EvalRecall = Annotated[
    str, Option("--recall", metavar="LIST", help="Evicted tokens that each step reads again, as in `generate`.")
]
EvalRecallStores = Annotated[
    str, Option("--recall-store", metavar="LIST", help="How evicted tokens are held for --recall: plain, int8, int4.")
]
EvalDepths = Annotated[
    str | None,
    Option(
        "--depth",
        metavar="LIST",
        help="Where in the text the answer stands, from 0 to 1; by default anywhere. Only tasks with one place for it.",
        show_default=False,
    ),
]
EvalBatch = Annotated[
    int,
    Option(
        "--batch",
        min=1,
        max=65_536,
        help="Most texts that are read side by side, which is faster; the answers are the same. Texts that share no "
        "budget, or ask nothing, are read alone.",
    ),
]
IsAware = Annotated[
    bool,
    Option(
        "--aware/--blind",
        help="Whether the question is read with the text, or comes when the text has been read and compressed.",
    ),
]
ResultsOut = Annotated[
    Path,
    Option("--output", "-o", metavar="FILE", help="A line of JSON per answer; what is there already is not run again."),
]


@dataclass(frozen=True)
class EvalLists:
    """Lists of everything that an evaluation combines."""

    tasks: EvalTasks = "passkey"
    policies: EvalPolicies = "recent,key_diff"
    budgets: EvalBudgets = "all,4x"
    lengths: EvalLengths = "500"
    depth: EvalDepths = None
    merge: EvalMerges = "none"
    positions: PositionModes = "original"
    store: StoreSpecs = "plain"
    shares: EvalShares = "none"
    recall: EvalRecall = "0"
    recall_store: EvalRecallStores = "int4"

    @property
    def of_cache(self) -> dict[str, str]:
        """Those of the cache's options, by the names of their flags."""
        return {name: typed for name, typed in vars(self).items() if name not in ("tasks", "lengths", "depth")}
