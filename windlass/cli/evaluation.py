"""What `windlass eval` and `windlass calibrate` show, and the text and the table of a calibration."""

from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from windlass.cache import shares_file
from windlass.cache.policy_spec import policy_of
from windlass.cache.shares import Shares
from windlass.cli.calibration_options import SharesArguments
from windlass.cli.loading import INTERRUPTED, loading
from windlass.cli.terminal import Bar, note, progress, say
from windlass.core.files import check_writable, read_text
from windlass.evals import measure_shares, pair_costs
from windlass.evals.budgets import budget_of
from windlass.evals.calibration_texts import calibration_texts
from windlass.evals.report.verdict import verdict
from windlass.evals.summary import summary
from windlass.evals.sweep import EvalOptions, Sweep
from windlass.hf.load import load
from windlass.policies import pair_table
from windlass.policies.pair_table import PairTable

PIPE_WIDTH = 240
SPEED_S = 3600.0  # of the newest cases, whose speed tells the time that is left
TEXTS, LENGTH, GROUPS = 50, 500, 4  # of shares: texts, tokens of each, sizes of a layer's heads
SHOWN = 5  # cheapest and dearest pairs in the summary of a calibration


def evaluate(options: EvalOptions) -> int:
    """Run every case that the output lacks and show the means of all; returns the exit code.

    Ctrl-C leaves whole lines; the same command goes on from there.

    Raises: WindlassError for what cannot be honoured, before anything is run.
    """
    notes: list[str] = []
    with loading():
        sweep = Sweep(options, notes.append)
    for line in notes:
        note(line)
    with progress("cases", speed_s=SPEED_S) as bars:
        bar = bars.add_task("", total=None)
        is_complete = sweep.run(
            lambda done, total, what: bars.update(bar, completed=done, total=total, description=what)
        )
    if sweep.cases:
        # A pipe gets whole lines, whatever the width of a terminal.
        Console(width=None if Console().is_terminal else PIPE_WIDTH).print(summary(sweep.cases))
        told = verdict(sweep.cases)
        if told:
            say(f"{told}\n")
    if not is_complete:
        done, total = sweep.counts
        note(f"interrupted; {done} of {total} cases are done; the same command goes on from here")
    return 0 if is_complete else INTERRUPTED


@dataclass(frozen=True)
class CalibrationOptions:
    """What the user asked for; `tokens` are of pairs."""

    model: str
    text: Path
    output: Path
    tokens: int
    seed: int
    dtype: str
    threads: int | None
    device: str = "cpu"
    weights: str = "auto"


def calibrate(options: CalibrationOptions) -> int:
    """Measure the pairs of a text and write their table; returns the exit code. After Ctrl-C nothing is written.

    Raises: WindlassError for what cannot be honoured.
    """
    check_writable(options.output, "-o")
    text = read_text(options.text, f"text {options.text}")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with loading():
        model, tokenizer = load(options.model, options.dtype, options.device, options.weights)
    with Bar("measuring") as bar:
        try:
            table = pair_costs.measured(model, tokenizer, text, options.tokens, options.seed, bar)
        except KeyboardInterrupt:
            note(f"interrupted; {bar.done:,} of {options.tokens:,} tokens; {options.output} was not written")
            return INTERRUPTED
    pair_table.write(table, options.output)
    if table.tokens < options.tokens:
        note(f"windlass: note: the text has room for {table.tokens:,} tokens only")
    say(_pairs(table, tokenizer, options.output))
    return 0


def calibrate_shares(options: CalibrationOptions, asked: SharesArguments) -> int:
    """Measure shares on texts and write their file; returns the exit code. After Ctrl-C nothing is written.

    Raises: WindlassError for what cannot be honoured.
    """
    check_writable(options.output, "-o")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    policy, budget = policy_of(asked.policy or "key_diff"), budget_of("--budget", asked.budget or "4x")
    with loading():
        model, tokenizer = load(options.model, options.dtype, options.device, options.weights)
    count, length = asked.texts or TEXTS, asked.length or LENGTH
    texts = calibration_texts(tokenizer, options.text, asked.tasks, count, length, options.seed)
    with Bar("measuring") as bar:
        try:
            shares = measure_shares.measured(model, texts, policy, budget, asked.groups or GROUPS, bar)
        except KeyboardInterrupt:
            note(f"interrupted; {bar.done:,} of {len(texts):,} texts; {options.output} was not written")
            return INTERRUPTED
    shares_file.write(shares, options.output)
    if len(texts) < count:
        note(f"windlass: note: the text has room for {len(texts):,} texts of {length:,} tokens only")
    say(_table(shares, options.output))
    return 0


def _table(shares: Shares, path: Path) -> str:
    """Shares that were written to `path`, a line a layer."""
    lines = [
        f"  layer {layer:>3}  " + ("its own window" if own is None else "  ".join(f"{each:.2f}" for each in own)) + "\n"
        for layer, own in enumerate(shares.layers)
    ]
    return (
        f"{path}: of {shares.texts:,} texts, by {shares.policy} at {shares.budget}; what each kv head keeps beside "
        f"sinks and window, in multiples of the mean\n{''.join(lines)}"
    )


def _pairs(table: PairTable, tokenizer: PreTrainedTokenizerBase, path: Path) -> str:
    """The cheapest and the dearest pairs of a table that was written to `path`."""

    def shown(pair: tuple[int, int, int, float]) -> str:
        return f"  {pair[3]:.5f} nats  {pair[2]:>5,} times  {tokenizer.decode(list(pair[:2]))!r}\n"

    often = [pair for pair in table.pairs if pair[2] > 1] or table.pairs
    return (
        f"{path}: {len(table.pairs):,} pairs of {table.tokens:,} tokens; of those met more than once the cheapest\n"
        + "".join(map(shown, often[:SHOWN]))
        + "and the dearest\n"
        + "".join(map(shown, often[-SHOWN:]))
    )
