"""What `windlass calibrate` measures and shows: pairs, shares, scorers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.cache import shares_file
from windlass.cache.policy_spec import policy_of
from windlass.cache.shares import Shares
from windlass.cli.calibration_options import TextsArguments
from windlass.cli.loading import INTERRUPTED, loading
from windlass.cli.signals import as_interrupts
from windlass.cli.terminal import Bar, note, say
from windlass.cli.unfinished import unfinished
from windlass.core.files import check_writable, read_text
from windlass.evals import fit_scorer, measure_shares, pair_costs
from windlass.evals.budgets import budget_of
from windlass.evals.calibration_texts import calibration_texts
from windlass.hf.load import load
from windlass.policies import pair_table, scorer_file
from windlass.policies.pair_table import PairTable
from windlass.policies.scorer_file import Scorer

Measured = TypeVar("Measured")
SHARES_TEXTS: Final = 50
SCORER_TEXTS: Final = 100
LENGTH: Final = 500  # tokens of each text
GROUPS: Final = 4  # sizes of a layer's heads, of shares
SHOWN: Final = 5  # cheapest and dearest pairs in the summary of a calibration
SCORER_WARNING: Final = (
    "windlass: warning: it serves texts like those that it was fitted to; fitted to plain prose it keeps nothing of "
    'the facts that a text is asked for: check it with `windlass eval --policies "LinearScorer(FILE)"`'
)


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


def calibrate_pairs(options: CalibrationOptions) -> int:
    """Measure the pairs of a text and write their table; returns the exit code. After Ctrl-C it has fewer pairs.

    Raises: WindlassError for what cannot be honoured.
    """
    check_writable(options.output, "-o")
    text = read_text(options.text, f"text {options.text}")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with loading():
        model, tokenizer = load(options.model, options.dtype, options.device, options.weights)
    table, code, output = _measured(
        Bar("measuring", options.tokens),
        options.output,
        lambda bar: pair_costs.measured(model, tokenizer, text, options.tokens, options.seed, bar),
    )
    if table is None:
        return code
    pair_table.write(table, output)
    if table.tokens < options.tokens and not code:
        note(f"windlass: note: the text has room for {table.tokens:,} tokens only")
    say(_pairs(table, tokenizer, output))
    return code


def calibrate_shares(options: CalibrationOptions, asked: TextsArguments) -> int:
    """Measure shares on texts and write their file; returns the exit code. After Ctrl-C it is of fewer texts.

    Raises: WindlassError for what cannot be honoured.
    """
    policy, budget = policy_of(asked.policy or "key_diff"), budget_of("--budget", asked.budget or "4x")
    return _of_texts(
        options,
        asked,
        SHARES_TEXTS,
        lambda model, texts, bar: measure_shares.measured(model, texts, policy, budget, asked.groups or GROUPS, bar),
        shares_file.write,
        _shares_table,
    )


def calibrate_scorer(options: CalibrationOptions, asked: TextsArguments) -> int:
    """Fit a scorer to texts and write its file; returns the exit code. After Ctrl-C it is of fewer texts.

    Raises: WindlassError for what cannot be honoured.
    """
    source, tasks = options.text.name, asked.tasks or ""
    code = _of_texts(
        options,
        asked,
        SCORER_TEXTS,
        lambda model, texts, bar: fit_scorer.fitted(model, texts, bar, source, tasks),
        scorer_file.write,
        _scorer_table,
    )
    if code == 0:
        note(SCORER_WARNING)
    return code


def _of_texts(
    options: CalibrationOptions,
    asked: TextsArguments,
    usual: int,
    measure: Callable[[PreTrainedModel, Sequence[Sequence[int]], Bar], Measured],
    write: Callable[[Measured, Path], None],
    table: Callable[[Measured, Path], str],
) -> int:
    """Measure something on texts, as many as are asked for or the `usual` ones, write it, and show it."""
    check_writable(options.output, "-o")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with loading():
        model, tokenizer = load(options.model, options.dtype, options.device, options.weights)
    count, length = asked.texts or usual, asked.length or LENGTH
    texts = calibration_texts(tokenizer, options.text, asked.tasks, count, length, options.seed)
    found, code, output = _measured(
        Bar("measuring", len(texts), "texts"), options.output, lambda bar: measure(model, texts, bar)
    )
    if found is None:
        return code
    write(found, output)
    if len(texts) < count:
        note(f"windlass: note: the text has room for {len(texts):,} texts of {length:,} tokens only")
    say(table(found, output))
    return code


def _measured(bar: Bar, output: Path, measure: Callable[[Bar], Measured]) -> tuple[Measured | None, int, Path]:
    """What is measured, the exit code, and the file for it.

    Ctrl-C and SIGTERM end with what was measured until then, which replaces no older file; None where that is nothing.
    """
    with as_interrupts():
        try:
            with bar:
                found = measure(bar)
        except KeyboardInterrupt:
            note(f"interrupted; {bar.told}; {output} {'stays as it was' if output.exists() else 'was not written'}")
            return None, INTERRUPTED, output
    if bar.is_whole:
        return found, 0, output
    output = unfinished(output)
    note(f"interrupted; {bar.told} are measured and written to {output}; the same command measures all of them anew")
    return found, INTERRUPTED, output


def _shares_table(shares: Shares, path: Path) -> str:
    """Shares that were written to `path`, a line a layer."""
    lines = [
        f"  layer {layer:>3}  " + ("its own window" if own is None else "  ".join(f"{each:.2f}" for each in own)) + "\n"
        for layer, own in enumerate(shares.layers)
    ]
    return (
        f"{path}: of {shares.texts:,} texts, by {shares.policy} at {shares.budget}; what each kv head keeps beside "
        f"sinks and window, in multiples of the mean\n{''.join(lines)}"
    )


def _scorer_table(scorer: Scorer, path: Path) -> str:
    """A scorer that was written to `path`, a line a layer."""
    lines = [
        f"  layer {layer:>3}  {'  '.join(f'{each:.2f}' for each in own)}\n" for layer, own in scorer.explained.items()
    ]
    return (
        f"{path}: fitted to {scorer.texts:,} texts, {scorer.tokens:,} tokens; what part of the variance of the scores "
        f"it explains in each kv head\n{''.join(lines)}"
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
