"""The options of the commands that measure."""

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, ClassVar, Final

from typer import Argument, Option

from windlass.cli.options import CACHE, BareOptionCommand, PositionModes, Seed, StoreSpecs, list_option
from windlass.core.errors import UsageError

EvalTasks = Annotated[
    str,
    Option(
        "--tasks",
        metavar="LIST",
        help="Tasks: passkey, niah_single, vt, multiturn, perplexity(text.txt), ..., or file.py:Class.",
    ),
]
EvalPolicies = Annotated[str, list_option(CACHE["policy"], "--policies")]
EvalMerges = Annotated[str, list_option(CACHE["merge"], note=", or none to drop them")]
EvalLengths = Annotated[
    str, Option("--lengths", metavar="LIST", help="Tokens of a text, including its question and the answer.")
]
EvalDepths = Annotated[
    str | None,
    Option(
        "--depth",
        metavar="LIST",
        help="Place of the answer in the text, from 0 to 1 (default: random). Only for tasks with one such place.",
        show_default=False,
    ),
]
EvalBatch = Annotated[
    int,
    Option(
        "--batch",
        min=1,
        max=65_536,
        help="Maximum number of texts in a batch. Batches are faster, with the same answers. Texts without a common "
        "budget or without a question are read alone.",
    ),
]
IsAware = Annotated[
    bool,
    Option(
        "--aware/--blind",
        help="Read the question with the text, or after the text was read and compressed.",
    ),
]
ResultsOut = Annotated[
    Path,
    Option(
        "--output",
        "-o",
        metavar="FILE",
        help="JSON Lines file, one line per answer. Answers that it already has are not run again.",
    ),
]


@dataclass(frozen=True)
class EvalLists:
    """Lists of everything that an evaluation combines."""

    tasks: EvalTasks = "passkey"
    policies: EvalPolicies = "recent,key_diff"
    budgets: Annotated[str, list_option(CACHE["budget"], "--budgets", ": 64, all, or 4x, a quarter of the text")] = (
        "all,4x"
    )
    lengths: EvalLengths = "500"
    depth: EvalDepths = None
    merge: EvalMerges = "none"
    positions: PositionModes = "original"
    store: StoreSpecs = "plain"
    shares: Annotated[str, list_option(CACHE["shares"], note=", or none for equal shares")] = "none"
    recall: Annotated[str, list_option(CACHE["recall"])] = "0"
    recall_store: Annotated[str, list_option(CACHE["recall_store"])] = "int4"

    @property
    def of_cache(self) -> dict[str, str]:
        """Options of the cache, by the names of their flags."""
        return {name: typed for name, typed in vars(self).items() if name not in ("tasks", "lengths", "depth")}


TuneText = Annotated[Path, Option("--file", "-f", metavar="FILE", help="A UTF-8 text, similar to your own texts.")]
TuneSize = Annotated[
    str,
    Option(
        "--bytes",
        metavar="SIZE",
        help="Maximum size of the cache after reading a text, as 64MiB. The chunk being read comes on top.",
    ),
]
SampleLength = Annotated[
    int | None,
    Option("--length", min=1, max=2**30, help="Tokens of a sample (default: 2048 or more, as the text allows)."),
]
Minutes = Annotated[
    float,
    Option("--minutes", min=0.1, max=1e6, help="Time to measure. Fewer texts are read where all would take longer."),
]
TuneOut = Annotated[
    Path | None,
    Option(
        "--output",
        "-o",
        metavar="FILE",
        help="JSON Lines file as `eval` writes it (default: tune-MODEL.jsonl).",
    ),
]


@dataclass(frozen=True)
class TuneArguments:
    """Lists of values to combine into candidates. More values take longer."""

    tasks: EvalTasks = "passkey_novel,perplexity"
    policies: EvalPolicies = "recent,key_diff,snapkv"
    store: StoreSpecs = "plain,int8,int4"
    merge: EvalMerges = "none"
    positions: Annotated[
        str | None, list_option(CACHE["positions"], note=" (default: chosen by the trained length)")
    ] = None
    samples: Annotated[int, Option("--samples", min=1, max=1_000_000, help="Texts for each candidate, at most.")] = 10
    minutes: Minutes = 10.0
    length: SampleLength = None
    seed: Seed = 0
    output: TuneOut = None

    @property
    def of_cache(self) -> dict[str, str]:
        """Lists of the cache's options that were asked for, by the names of their flags."""
        lists = {"policies": self.policies, "store": self.store, "merge": self.merge, "positions": self.positions}
        return {name: typed for name, typed in lists.items() if typed is not None}


CalibrationText = Annotated[
    Path, Argument(metavar="TEXT", help="A UTF-8 text, similar to your own texts.", show_default=False)
]
CalibrationOut = Annotated[Path, Option("--output", "-o", metavar="FILE", help="The file to write.")]
IsOfShares = Annotated[
    bool,
    Option(
        "--shares",
        help="Measure each layer's and each kv head's share of a budget, for `--shares FILE` of other commands.",
    ),
]
IsOfScorer = Annotated[
    bool,
    Option(
        "--scorer",
        help="Fit weights that predict the attention to each token as it is read, for "
        '`--policy "LinearScorer(FILE)"`. Use texts similar to your own.',
    ),
]
Tokens = Annotated[
    int | None,
    Option(
        "--tokens",
        min=1,
        max=1_000_000_000,
        help="Pairs: number of tokens to measure, each with the next token (default: 20,000).",
    ),
]
Texts = Annotated[
    int | None,
    Option(
        "--texts",
        min=1,
        max=100_000,
        help="Shares, scorer: number of texts to read (default: 16 for shares, 100 for a scorer).",
    ),
]
Length = Annotated[
    int | None,
    Option(
        "--length",
        min=1,
        max=2**30,
        help="Shares, scorer: tokens of each text, a stretch of TEXT (default: 1,000 for shares, 500 for a scorer).",
    ),
]
TextTasks = Annotated[
    str | None,
    Option(
        "--tasks",
        metavar="LIST",
        help="Shares, scorer: texts of these tasks of `eval`, made of TEXT, instead of stretches.",
    ),
]
AtBudget = Annotated[
    str | None,
    Option(
        "--budget",
        metavar="BUDGET",
        help="Shares: a budget such as 64, or a part of the text (default: 4x, a quarter).",
    ),
]
ByPolicy = Annotated[
    str | None, Option("--policy", metavar="NAME", help="Shares: the policy that scores tokens (default: kvzip).")
]
Groups = Annotated[
    int | None,
    Option(
        "--groups",
        min=1,
        max=1024,
        help="Shares: maximum number of different sizes among a layer's heads (default: 4). 1: only layers differ.",
    ),
]


@dataclass(frozen=True)
class TextsArguments:
    """Texts for measuring shares or fitting a scorer, and options of shares. None stands for the default."""

    texts: Texts = None
    length: Length = None
    tasks: TextTasks = None
    budget: AtBudget = None
    policy: ByPolicy = None
    groups: Groups = None

    @property
    def given(self) -> list[str]:
        """The options that were typed."""
        return [f"--{name}" for name, value in vars(self).items() if value is not None]

    @property
    def of_shares(self) -> list[str]:
        """Options that only shares take."""
        return [name for name in self.given if name in ("--budget", "--policy", "--groups")]

    def check(self, is_of_shares: bool, is_of_scorer: bool, tokens: int | None) -> None:
        """Raises: UsageError for options of another kind of calibration."""
        if is_of_shares and is_of_scorer:
            raise UsageError("both --shares and --scorer were given. A file holds one of them: run the command twice")
        if not (is_of_shares or is_of_scorer):
            if self.given:
                which = "--shares" if self.given[0] in self.of_shares else "--shares or --scorer"
                raise UsageError(f"{self.given[0]} goes with {which}. Leave it out, or measure shares")
            return
        if is_of_scorer and self.of_shares:
            raise UsageError(f"{self.of_shares[0]} goes with --shares, and --scorer was given. Leave it out")
        if tokens is not None:
            given = "--shares" if is_of_shares else "--scorer"
            raise UsageError(f"--tokens is for pairs, and {given} was given. Use --texts and --length")


LOCAL: Final = "local"
RAY: Final = "--ray"

RayAddress = Annotated[
    str | None,
    Option(
        RAY,
        metavar="[ADDRESS]",
        help="Run on workers with a model each, in the Ray cluster at HOST:PORT, in a cluster running here "
        "(auto), or without an address on this machine alone. Requires windlass\\[ray].",
    ),
]
Workers = Annotated[
    int | None,
    Option(
        "--workers",
        min=1,
        max=65_536,
        help="Number of workers with --ray (default: one per GPU, or as many as have --threads processors each).",
    ),
]


@dataclass(frozen=True)
class RayArguments:
    """Place and number of workers."""

    ray: RayAddress = None
    workers: Workers = None


class RayOptionCommand(BareOptionCommand):
    """A command whose `--ray` may stand without an address."""

    alone: ClassVar = {RAY: LOCAL}

    def is_value(self, flag: str, following: str) -> bool:
        return bool(following) and not following.startswith("-") if flag == RAY else super().is_value(flag, following)


class ServeCommand(RayOptionCommand):
    """A command whose `--ray` and options of the cache may stand without a value."""

    alone: ClassVar = {**BareOptionCommand.alone, RAY: LOCAL}


def check_ray(asked: RayArguments) -> None:
    """Check options of Ray. Raises: UsageError for a wrong address, workers without --ray, or a missing package."""
    if asked.ray is None:
        if asked.workers is not None:
            raise UsageError(f"--workers {asked.workers} goes with --ray. Give that, too, or leave it out")
        return
    if asked.ray not in (LOCAL, "auto") and not re.fullmatch(r"[^\s/]+:[0-9]{1,5}", asked.ray):
        raise UsageError(
            f"--ray {asked.ray} is no address. Write HOST:PORT, or auto, or put --ray last, and without one, for "
            "processes of this machine"
        )
    if find_spec("ray") is None:
        raise UsageError("--ray needs Ray. Run: pip install 'windlass[ray]'")
