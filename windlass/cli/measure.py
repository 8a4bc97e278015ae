"""Output of `windlass bench`, `calibrate`, `eval` and `tune` while they measure."""

import json
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import torch
from rich.box import SIMPLE, SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.cache import shares as shares_file
from windlass.cache.options import policy_of
from windlass.cache.shares import Shares
from windlass.cli.measure_options import LOCAL, RayArguments, TextsArguments, TuneArguments
from windlass.cli.options import LoadOptions
from windlass.cli.terminal import INTERRUPTED, Bar, as_interrupts, loading, note, progress, say, unfinished
from windlass.core.errors import UsageError
from windlass.core.files import check_regular, check_writable, read_text
from windlass.core.parse import in_units, parse_bytes, use_one_of
from windlass.evals import calibrate
from windlass.evals.calibrate import calibration_texts
from windlass.evals.grid import ListOptions
from windlass.evals.report.summaries import verdict, wilson
from windlass.evals.run import EvalOptions, Executor, Sweep, summary
from windlass.evals.speed.measure import Benchmark, BenchRequest, Clock
from windlass.evals.speed.rows import BenchRow
from windlass.evals.speed.table import NUMBERS, Conditions, as_json, footnote, in_common, ratios, table, varied
from windlass.evals.task import budget_of
from windlass.evals.tune import (
    CandidateResult,
    TuneOptions,
    Tuning,
    candidates_of,
    command,
    duration,
    is_whole,
    sentence,
)
from windlass.hf.load import load
from windlass.hf.model_facts import shown_name
from windlass.policies import linear_scorer, pairs
from windlass.policies.linear_scorer import Scorer
from windlass.policies.pairs import PairTable

FORMATS: Final = ("table", "md", "json")
PIPE_WIDTH: Final = 240


@dataclass(frozen=True)
class OutputFormat:
    """Format of printed rows: one of `FORMATS`, and whether ratios follow them.

    Raises: UsageError for another format, and for ratios with JSON.
    """

    format: str = "table"
    has_ratios: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UsageError(f"--format {self.format!r} is unknown. {use_one_of(self.format, FORMATS)}")
        if self.format == "json" and self.has_ratios:
            raise UsageError("--ratios goes with --format table or md. JSON has the samples instead")


def bench(request: BenchRequest, output: Path | None, form: OutputFormat, clock: Clock = time.perf_counter) -> int:
    """Measure all rows in turn and show them. Returns the exit code. Ctrl-C shows the rows measured so far.

    `output` gets one JSON object per row, appended.

    Raises: WindlassError for invalid options, before anything is measured.
    """
    if output is not None:
        check_regular(output, "-o")
        _append(output, "")  # checked now rather than after the run
    with loading():
        benchmark = Benchmark(request)
    code = 0
    try:
        # A thread that draws would slow down the measured runs.
        with progress("runs", has_thread=False) as bars:
            bar = bars.add_task("", visible=False)

            def tell(what: str, done: int, total: int) -> None:
                bars.update(bar, description=what, completed=done, total=total, visible=True, refresh=True)

            with as_interrupts():
                benchmark.run(tell, clock)
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        # Measured rows took minutes, so they are shown after any error.
        _show(benchmark, output, form)
    if code:
        timed = sum(len(row.samples_s) for row in benchmark.rows)
        note(f"interrupted, {timed} of {benchmark.runs} runs are done")
    return code


def _show(benchmark: Benchmark, output: Path | None, form: OutputFormat) -> None:
    """Show the table, ratios if wanted, or JSON objects on stdout, and append JSON objects to the file."""
    rows, conditions = [row for row in benchmark.rows if row.samples_s], benchmark.conditions
    if not rows:
        return
    lines = "".join(json.dumps(as_json(row, conditions), ensure_ascii=False) + "\n" for row in rows)
    if form.format == "json":
        say(lines)
    elif form.format == "md":
        tables = [table(rows, conditions), footnote(rows, conditions)]
        say("\n\n".join(tables + (ratios(rows) if form.has_ratios else [])) + "\n")
    else:
        _print(rows, conditions, form.has_ratios)
    if output is not None:
        _append(output, lines)


def _print(rows: Sequence[BenchRow], conditions: Conditions, has_ratios: bool) -> None:
    """Print the values that all rows share, and a table of the rest no wider than the terminal."""
    # A pipe gets whole lines at any terminal width.
    console = Console(width=None if Console().is_terminal else PIPE_WIDTH, highlight=False)
    console.print(Text(in_common(rows, conditions)))
    shown = Table(box=SIMPLE_HEAD, pad_edge=False)
    lines = varied(rows)
    for head in lines[0]:
        is_number = head in NUMBERS
        shown.add_column(head, justify="right" if is_number else "left", no_wrap=is_number, overflow="fold")
    for line in lines:
        shown.add_row(*map(Text, line.values()))
    console.print(shown)
    console.print(Text(footnote(rows, conditions)))
    for each in ratios(rows) if has_ratios else []:
        say(f"\n{each}\n")


def _append(output: Path, lines: str) -> None:
    try:
        with output.open("a", encoding="utf-8") as file:
            file.write(lines)
    except OSError as error:
        raise UsageError(f"-o {output} cannot be written: {error.strerror}") from None


Measured = TypeVar("Measured")
SHARES_TEXTS: Final = 16
SHARES_LENGTH: Final = 1_000  # tokens of each text
SCORER_TEXTS: Final = 100
SCORER_LENGTH: Final = 500
GROUPS: Final = 4  # sizes of a layer's heads, of shares
SHOWN: Final = 5  # cheapest and dearest pairs in the summary of a calibration
SCORER_WARNING: Final = (
    "windlass: warning: a scorer works on texts similar to its own. Fitted to plain prose, it keeps no facts for "
    'questions. Check it with `windlass eval --policies "LinearScorer(FILE)"`'
)


@dataclass(frozen=True)
class CalibrationOptions:
    """Options of `windlass calibrate`. `tokens` is the number of pairs."""

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
    """Measure the pairs of a text and write their table. Returns the exit code. After Ctrl-C it has fewer pairs.

    Raises: WindlassError for invalid options.
    """
    check_writable(options.output, "-o", (options.text,))
    text = read_text(options.text, f"text {options.text}")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with loading():
        model, tokenizer = load(options.model, options.dtype, options.device, options.weights)
    table, code, output = _measured(
        Bar("measuring", options.tokens),
        options.output,
        lambda bar: calibrate.measure_pair_costs(model, tokenizer, text, options.tokens, options.seed, bar),
    )
    if table is None:
        return code
    pairs.write(table, output)
    if table.tokens < options.tokens and not code:
        note(f"windlass: note: the text has room for {table.tokens:,} tokens only")
    say(_pairs(table, tokenizer, output))
    return code


def calibrate_shares(options: CalibrationOptions, asked: TextsArguments) -> int:
    """Measure shares on texts and write their file. Returns the exit code. After Ctrl-C it is of fewer texts.

    Raises: WindlassError for invalid options.
    """
    policy, budget = policy_of(asked.policy or "kvzip"), budget_of("--budget", asked.budget or "4x")
    return _calibrate_from_texts(
        options,
        asked,
        usual=SHARES_TEXTS,
        usual_length=SHARES_LENGTH,
        measure=lambda model, texts, bar: calibrate.measure_shares(
            model, texts, policy, budget, asked.groups or GROUPS, bar
        ),
        write=shares_file.write,
        table=_shares_table,
    )


def calibrate_scorer(options: CalibrationOptions, asked: TextsArguments) -> int:
    """Fit a scorer to texts and write its file. Returns the exit code. After Ctrl-C it is of fewer texts.

    Raises: WindlassError for invalid options.
    """
    source, tasks = options.text.name, asked.tasks or ""
    code = _calibrate_from_texts(
        options,
        asked,
        usual=SCORER_TEXTS,
        usual_length=SCORER_LENGTH,
        measure=lambda model, texts, bar: calibrate.fitted(model, texts, bar, source, tasks),
        write=linear_scorer.write,
        table=_scorer_table,
    )
    if code == 0:
        note(SCORER_WARNING)
    return code


def _calibrate_from_texts(
    options: CalibrationOptions,
    asked: TextsArguments,
    usual: int,
    usual_length: int,
    measure: Callable[[PreTrainedModel, Sequence[Sequence[int]], Bar], Measured],
    write: Callable[[Measured, Path], None],
    table: Callable[[Measured, Path], str],
) -> int:
    """Measure something on texts, write it, and show it. `usual` is their number, where no other is asked for."""
    check_writable(options.output, "-o", (options.text,))
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    with loading():
        model, tokenizer = load(options.model, options.dtype, options.device, options.weights)
    count, length = asked.texts or usual, asked.length or usual_length
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
    """Measurements, the exit code, and the file for them.

    Ctrl-C and SIGTERM end with the measurements so far, which replace no older file. None where there are none.
    """
    with as_interrupts():
        try:
            with bar:
                found = measure(bar)
        except KeyboardInterrupt:
            note(f"interrupted, {bar.told}. {output} {'stays as it was' if output.exists() else 'was not written'}")
            return None, INTERRUPTED, output
    if bar.is_whole:
        return found, 0, output
    output = unfinished(output)
    note(f"interrupted, {bar.told} are measured and written to {output}. The same command measures all of them again")
    return found, INTERRUPTED, output


def _shares_table(shares: Shares, path: Path) -> str:
    """Shares that were written to `path`, a line a layer."""
    lines = [
        f"  layer {layer:>3}  " + ("its own window" if own is None else "  ".join(f"{each:.2f}" for each in own)) + "\n"
        for layer, own in enumerate(shares.layers)
    ]
    return (
        f"{path}: of {shares.texts:,} texts, by {shares.policy} at {shares.budget}. Each kv head's "
        f"tokens beside sinks and window, in multiples of the mean\n{''.join(lines)}"
    )


def _scorer_table(scorer: Scorer, path: Path) -> str:
    """A scorer that was written to `path`, a line a layer."""
    lines = [
        f"  layer {layer:>3}  {'  '.join(f'{each:.2f}' for each in own)}\n" for layer, own in scorer.explained.items()
    ]
    return (
        f"{path}: fitted to {scorer.texts:,} texts, {scorer.tokens:,} tokens. Explained share of the variance "
        f"of the scores in each kv head\n{''.join(lines)}"
    )


def _pairs(table: PairTable, tokenizer: PreTrainedTokenizerBase, path: Path) -> str:
    """The cheapest and the dearest pairs of a table that was written to `path`."""

    def shown(pair: tuple[int, int, int, float]) -> str:
        return f"  {pair[3]:.5f} nats  {pair[2]:>5,} times  {tokenizer.decode(list(pair[:2]))!r}\n"

    often = [pair for pair in table.pairs if pair[2] > 1] or table.pairs
    return (
        f"{path}: {len(table.pairs):,} pairs of {table.tokens:,} tokens. Of those met more than once the cheapest\n"
        + "".join(map(shown, often[:SHOWN]))
        + "and the dearest\n"
        + "".join(map(shown, often[-SHOWN:]))
    )


@contextmanager
def executor_of(options: EvalOptions, asked: RayArguments, note: Callable[[str], None]) -> Iterator[Executor]:
    """The workers, until the end of the block. Without --ray, this process with the model loaded.

    With workers, output to stdout within the block is hidden.

    Raises: WindlassError for invalid options.
    """
    if asked.ray is None:
        yield options.runner()
        return
    from windlass.evals.ray_cluster import connected

    cpus = None if asked.workers is None or asked.ray != LOCAL else asked.workers * (options.threads or 1)
    with connected(asked.ray, cpus):
        from windlass.evals.ray import RayExecutor

        yield RayExecutor(options, asked.workers, note)


EVAL_SPEED_S: Final = 3600.0  # window of cases whose speed gives the remaining time
TUNE_SPEED_S: Final = 600.0


def evaluate(options: EvalOptions, spread: RayArguments) -> int:
    """Run every case that the output lacks and show the means of all. Returns the exit code.

    Ctrl-C leaves whole lines, and the same command continues from there.

    Raises: WindlassError for invalid options, before anything is run.
    """
    notes: list[str] = []
    with ExitStack() as stack:
        with loading():
            sweep = Sweep(options, notes.append, stack.enter_context(executor_of(options, spread, note)))
        for line in notes:
            note(line)
        is_whole = _run(sweep, EVAL_SPEED_S)
    if sweep.cases:
        _print_table(summary(sweep.cases))
        told = verdict(sweep.cases)
        if told:
            say(f"{told}\n")
    done, total = sweep.counts
    if not is_whole:
        note(f"interrupted, {done} of {total} cases are done. The same command continues from here")
        return INTERRUPTED
    if done < total:
        note(f"{done} of {total} cases are done. The same command tries the others again")
    return int(done < total)


def _run(sweep: Sweep, speed_s: float) -> bool:
    """Run a sweep with a bar. Returns True unless it was interrupted."""
    with progress("cases", speed_s=speed_s) as bars:
        bar = bars.add_task("", visible=False)
        return sweep.run(
            lambda done, total, what: bars.update(bar, completed=done, total=total, description=what, visible=True)
        )


def _print_table(table: Table) -> None:
    # A pipe gets whole lines at any terminal width.
    Console(width=None if Console().is_terminal else PIPE_WIDTH).print(table)


def options_of(model: str, text: Path, size: str, asked: TuneArguments, load: LoadOptions) -> TuneOptions:
    """The options of a tuning, read. Raises: UsageError for a size that is no number of bytes."""
    return TuneOptions(
        model=model,
        text=text,
        size=parse_bytes("--bytes", size),
        lists=ListOptions(asked.tasks, "", asked.of_cache),
        samples=asked.samples,
        minutes=asked.minutes,
        length=asked.length,
        seed=asked.seed,
        is_aware=False,
        output=asked.output or Path(f"tune-{re.sub('[/:]', '-', shown_name(model))}.jsonl"),
        dtype=load.dtype,
        threads=load.threads,
        device=load.device,
        weights=load.weights,
    )


def tune(options: TuneOptions, spread: RayArguments) -> int:
    """Measure the candidates, and show the best and the command to paste. Returns the exit code.

    Ctrl-C leaves whole lines, and the same command continues from there.

    Raises: WindlassError for invalid options, before anything is run.
    """
    with ExitStack() as stack:
        with loading():
            executor = stack.enter_context(executor_of(options, spread, note))
            plan, notes = executor.plan, [*executor.plan.notes]
            candidates, length = candidates_of(plan.grid), plan.grid.lengths[0]
            tuning = None if is_whole(plan.grid) else Tuning(options, notes.append, executor)
        for line in notes:
            note(line)
        if tuning is not None:
            texts = tuning.grid.samples
            told = f"{len(candidates)} candidates on texts of {length:,} tokens, at most {texts} for each"
            told += "" if texts == options.samples else f" in --minutes {options.minutes:g}"
            note(f"{told}: {duration(tuning.seconds_left)}. Results go to {options.output}")
            is_complete = _run(tuning, TUNE_SPEED_S)
    if tuning is None:
        whole = min(candidates, key=lambda each: each.options.store.name != "plain")
        say(
            f"{in_units(options.size)} hold all of a text of {length:,} tokens, in store "
            f"{whole.options.store.name}: nothing is evicted, and there is nothing to choose. For longer texts give "
            f"one, and --length.\n\n    {_command(options, CandidateResult(whole, {}, {}, 0))}\n"
        )
        return 0
    ranking, full = tuning.ranking, tuning.full
    if ranking:
        _print_table(_table(ranking, full))
    if not is_complete:
        note("interrupted. The same command continues from here")
        return INTERRUPTED
    say(f"{sentence(ranking, full, options.size)}\n\n    {_command(options, ranking[0])}\n")
    return 0


def _command(options: TuneOptions, best: CandidateResult) -> str:
    loading = [] if options.dtype == "auto" else ["--dtype", options.dtype]
    loading += [] if options.device == "cpu" else ["--device", options.device]
    loading += [] if options.weights == "auto" else ["--weights", options.weights]
    return command(options.model, str(options.text), best, loading)


def _table(ranking: list[CandidateResult], full: CandidateResult | None) -> Table:
    """One row per candidate, the best first and the full cache last."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for name in ("policy", "store", "positions"):
        table.add_column(name, overflow="fold")
    for name in ("budget", "bytes", "texts", "found", "95 %", "nll"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in [*ranking, *([full] if full is not None else [])]:
        labels, share = each.settings.labels, each.share_found
        low, high = (0.0, 0.0) if share is None else wilson(share, len(each.found))
        table.add_row(
            Text("full cache" if each is full else each.policy),
            Text(labels["store"]),
            Text(", ".join([labels["positions"], *([labels["merge"]] if labels["merge"] != "none" else [])])),
            labels["asked_budget"],
            in_units(each.bytes_held),
            str(each.samples),
            "-" if share is None else f"{100 * share:.0f} %",
            "-" if share is None else f"{100 * low:.0f} to {100 * high:.0f}",
            "-" if each.nll is None else f"{each.nll:.3f}",
        )
    return table
