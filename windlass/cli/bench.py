"""`windlass bench`: what a benchmark shows while it runs, and where its rows go."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from windlass.cli.loading import INTERRUPTED, loading
from windlass.cli.signals import as_interrupts
from windlass.cli.terminal import note, progress, say
from windlass.core.close_names import use_one_of
from windlass.core.errors import UsageError
from windlass.core.files import check_regular
from windlass.evals.speed.rows import BenchRow
from windlass.evals.speed.run import Benchmark, BenchRequest
from windlass.evals.speed.table import NUMBERS, Conditions, as_json, footnote, in_common, ratios, table, varied
from windlass.evals.speed.timer import Clock

FORMATS: Final = ("table", "md", "json")
PIPE_WIDTH: Final = 240


@dataclass(frozen=True)
class Form:
    """How rows are printed: one of `FORMATS`, and whether ratios follow them.

    Raises: UsageError for another format, and for ratios with JSON.
    """

    format: str = "table"
    has_ratios: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise UsageError(f"--format {self.format!r} is unknown; {use_one_of(self.format, FORMATS)}")
        if self.format == "json" and self.has_ratios:
            raise UsageError("--ratios go with --format table or md; JSON has the samples of which they are made")


def bench(request: BenchRequest, output: Path | None, form: Form, clock: Clock = time.perf_counter) -> int:
    """Measure all rows in turn and show them; returns the exit code. Ctrl-C shows what was measured.

    `output` gets one JSON object per row after what is already there.

    Raises: WindlassError for what cannot be honoured, before anything is measured.
    """
    if output is not None:
        check_regular(output, "-o")
        _append(output, "")  # better refused now than after the run
    with loading():
        benchmark = Benchmark(request)
    code = 0
    try:
        # A thread that draws would take its time from what is measured.
        with progress("runs", has_thread=False) as bars:
            bar = bars.add_task("", visible=False)

            def tell(what: str, done: int, total: int) -> None:
                bars.update(bar, description=what, completed=done, total=total, visible=True, refresh=True)

            with as_interrupts():
                benchmark.run(tell, clock)
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        # Whatever ended it: what was measured took minutes.
        _show(benchmark, output, form)
    if code:
        timed = sum(len(row.samples_s) for row in benchmark.rows)
        note(f"interrupted; {timed} of {benchmark.runs} runs are done")
    return code


def _show(benchmark: Benchmark, output: Path | None, form: Form) -> None:
    """The table and, where they are wanted, the ratios, or JSON objects, on stdout; JSON objects in the file."""
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
    """What all rows have in common, and a table of the rest that is no wider than the terminal."""
    # A pipe gets whole lines, whatever the width of a terminal.
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
