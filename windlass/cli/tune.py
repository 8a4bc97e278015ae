"""`windlass tune`: what it shows while it measures, and the verdict at its end."""

from contextlib import ExitStack
from pathlib import Path

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from windlass.cli.loading import INTERRUPTED, loading
from windlass.cli.options import LoadOptions
from windlass.cli.ray_options import RayArguments
from windlass.cli.spread import executor_of
from windlass.cli.terminal import note, progress, say
from windlass.cli.tune_options import TuneArguments
from windlass.core.spec import parse_bytes
from windlass.core.units import in_units
from windlass.evals.report.summaries import wilson
from windlass.evals.tune.ranking import Ranked, command, sentence
from windlass.evals.tune.run import TuneOptions, Tuning

PIPE_WIDTH = 240
SPEED_S = 600.0  # of the newest cases, whose speed tells the time that is left


def options_of(model: str, text: Path, size: str, asked: TuneArguments, load: LoadOptions) -> TuneOptions:
    """What was typed, read. Raises: UsageError for a size that is no number of bytes."""
    return TuneOptions(
        model=model,
        text=text,
        size=parse_bytes("--bytes", size),
        tasks=asked.tasks,
        lists=asked.of_cache,
        samples=asked.samples,
        length=asked.length,
        seed=asked.seed,
        output=asked.output,
        dtype=load.dtype,
        threads=load.threads,
        device=load.device,
        weights=load.weights,
    )


def tune(options: TuneOptions, spread: RayArguments) -> int:
    """Measure the candidates, and show who did best and the line to paste; returns the exit code.

    Ctrl-C leaves whole lines, and the same command goes on from there.

    Raises: WindlassError for what cannot be honoured, before anything is run.
    """
    is_complete, notes = True, list[str]()
    with ExitStack() as stack:
        with loading():
            tuning = Tuning(options, notes.append, stack.enter_context(executor_of(options, spread, note)))
        for line in notes:
            note(line)
        if not tuning.is_whole:
            note(
                f"{len(tuning.settings)} candidates on texts of {tuning.length:,} tokens; results go to {tuning.output}"
            )
            with progress("cases", speed_s=SPEED_S) as bars:
                bar = bars.add_task("", visible=False)
                is_complete = tuning.run(
                    lambda done, total, what: bars.update(
                        bar, completed=done, total=total, description=what, visible=True
                    )
                )
    if tuning.is_whole:
        whole = min(tuning.settings, key=lambda each: each.options.store.name != "plain")
        say(
            f"{in_units(options.size)} hold all of a text of {tuning.length:,} tokens, in store "
            f"{whole.options.store.name}: nothing is evicted, and there is nothing to choose. For longer texts give "
            f"one, and --length.\n\n    {_command(options, Ranked(whole, {}, {}, None, 0))}\n"
        )
        return 0
    ranking, full = tuning.ranking, tuning.full
    if ranking:
        # A pipe gets whole lines, whatever the width of a terminal.
        Console(width=None if Console().is_terminal else PIPE_WIDTH).print(_table(ranking, full))
    if not is_complete:
        note("interrupted; the same command goes on from here")
        return INTERRUPTED
    say(f"{sentence(ranking, full, options.size)}\n\n    {_command(options, ranking[0])}\n")
    return 0


def _command(options: TuneOptions, best: Ranked) -> str:
    loading = [] if options.dtype == "auto" else ["--dtype", options.dtype]
    loading += [] if options.device == "cpu" else ["--device", options.device]
    loading += [] if options.weights == "auto" else ["--weights", options.weights]
    return command(options.model, str(options.text), best, loading)


def _table(ranking: list[Ranked], full: Ranked | None) -> Table:
    """One row per candidate, the best first; then the full cache."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for name in ("policy", "store", "positions"):
        table.add_column(name, overflow="fold")
    for name in ("budget", "bytes", "texts", "found", "95 %", "nll", "kl"):
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
            "-" if each.kl is None else f"{each.kl:.3f}",
        )
    return table
