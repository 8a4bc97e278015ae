"""The options of `windlass calibrate`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

CalibrationText = Annotated[
    Path, Argument(metavar="TEXT", help="A UTF-8 text like those that will be read.", show_default=False)
]
CalibrationOut = Annotated[Path, Option("--output", "-o", metavar="FILE", help="The file to write.")]
IsOfShares = Annotated[
    bool,
    Option(
        "--shares",
        help="Measure how much of a budget each layer and each kv head gets, for `--shares FILE` of other commands.",
    ),
]
IsOfScorer = Annotated[
    bool,
    Option(
        "--scorer",
        help="Fit weights that say of each token, as it comes, how much it will be read, for "
        '`--policy "LinearScorer(FILE)"`; on texts like those to come.',
    ),
]
Tokens = Annotated[
    int | None,
    Option(
        "--tokens",
        min=1,
        max=1_000_000_000,
        help="Pairs: tokens of the text to measure, each with the next one; by default 20,000.",
    ),
]
Texts = Annotated[
    int | None,
    Option("--texts", min=1, max=100_000, help="Shares, scorer: how many texts to read; by default 50, and 100."),
]
Length = Annotated[
    int | None,
    Option(
        "--length",
        min=1,
        max=2**30,
        help="Shares, scorer: tokens of each text; by default 500. A stretch of TEXT is one.",
    ),
]
TextTasks = Annotated[
    str | None,
    Option(
        "--tasks",
        metavar="LIST",
        help="Shares, scorer: texts of these tasks, as in `eval`, made of TEXT, in place of stretches.",
    ),
]
AtBudget = Annotated[
    str | None,
    Option("--budget", metavar="BUDGET", help="Shares: 64, or a part of the text; by default 4x, a quarter."),
]
ByPolicy = Annotated[
    str | None, Option("--policy", metavar="NAME", help="Shares: whose scores decide; by default key_diff.")
]
Groups = Annotated[
    int | None,
    Option(
        "--groups",
        min=1,
        max=1024,
        help="Shares: most sizes that the heads of a layer have; by default 4. 1: only layers differ.",
    ),
]


@dataclass(frozen=True)
class TextsArguments:
    """On which texts shares are measured, or a scorer is fitted, and how shares are; None stands for the default."""

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
        """Those of them that only shares take."""
        return [name for name in self.given if name in ("--budget", "--policy", "--groups")]
