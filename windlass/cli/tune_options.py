"""The options of `windlass tune`; those that other commands have, too, are in `options`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Option

from windlass.cli.eval_options import EvalMerges, EvalPolicies, EvalTasks
from windlass.cli.options import Samples, Seed, StoreSpecs

TuneText = Annotated[Path, Option("--file", "-f", metavar="FILE", help="A UTF-8 text like those that will be read.")]
TuneSize = Annotated[
    str,
    Option(
        "--bytes",
        metavar="SIZE",
        help="Most bytes that the cache holds once a text is read, as 64MiB; a chunk that is being read comes on top.",
    ),
]
Positions = Annotated[
    str | None,
    Option(
        "--positions",
        metavar="LIST",
        help="Where they are read, as in `generate`; by default as the trained length asks for.",
    ),
]
Length = Annotated[
    int | None,
    Option("--length", min=1, max=2**30, help="Tokens of a sample; by default 2048 or more, as far as the text goes."),
]
ResultsOut = Annotated[
    Path | None,
    Option(
        "--output",
        "-o",
        metavar="FILE",
        help="A line of JSON per answer, as `eval` writes it; by default tune-MODEL.jsonl.",
    ),
]


@dataclass(frozen=True)
class TuneArguments:
    """Lists of what may be combined into candidates: the more, the longer it takes."""

    tasks: EvalTasks = "passkey_novel,perplexity"
    policies: EvalPolicies = "recent,key_diff,snapkv"
    store: StoreSpecs = "plain,int8,int4"
    merge: EvalMerges = "none"
    positions: Positions = None
    samples: Samples = 10
    length: Length = None
    seed: Seed = 0
    output: ResultsOut = None

    @property
    def of_cache(self) -> dict[str, str]:
        """Lists of the cache's options that were asked for, by the names of their flags."""
        lists = {"policies": self.policies, "store": self.store, "merge": self.merge, "positions": self.positions}
        return {name: typed for name, typed in lists.items() if typed is not None}
