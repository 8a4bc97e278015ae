"""`windlass bench`: what a benchmark shows while it runs, and where its rows go."""

import json
import time
from pathlib import Path

from windlass.cli.terminal import INTERRUPTED, note, progress, say
from windlass.core.errors import UsageError
from windlass.core.files import check_regular
from windlass.evals.speed.run import Benchmark, BenchRequest
from windlass.evals.speed.table import as_json, footnote, ratios, table
from windlass.evals.speed.timer import Clock


def bench(request: BenchRequest, output: Path | None, is_json: bool, clock: Clock = time.perf_counter) -> int:
    """Measure all rows in turn and show them; returns the exit code. Ctrl-C shows what was measured.

    `output` gets one JSON object per row after what is already there.

    Raises: WindlassError for what cannot be honoured, before anything is measured.
    """
    if output is not None:
        check_regular(output, "-o")
        _append(output, "")  # better refused now than after the run
    benchmark = Benchmark(request)
    code = 0
    try:
        # A thread that draws would take its time from what is measured.
        with progress("runs", has_thread=False) as bars:
            bar = bars.add_task("")

            def tell(what: str, done: int, total: int) -> None:
                bars.update(bar, description=what, completed=done, total=total, refresh=True)

            benchmark.run(tell, clock)
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        # Whatever ended it: what was measured took minutes.
        _show(benchmark, output, is_json)
    if code:
        timed = sum(len(row.samples_s) for row in benchmark.rows)
        note(f"interrupted; {timed} of {benchmark.runs} runs are done")
    return code


def _show(benchmark: Benchmark, output: Path | None, is_json: bool) -> None:
    """The table and the ratios, or JSON objects, on stdout; JSON objects in the file."""
    rows, conditions = [row for row in benchmark.rows if row.samples_s], benchmark.conditions
    if not rows:
        return
    lines = "".join(json.dumps(as_json(row, conditions), ensure_ascii=False) + "\n" for row in rows)
    if is_json:
        say(lines)
    else:
        tables = [table(rows, conditions), footnote(rows, conditions), *ratios(rows)]
        say("\n\n".join(tables) + "\n")
    if output is not None:
        _append(output, lines)


def _append(output: Path, lines: str) -> None:
    try:
        with output.open("a", encoding="utf-8") as file:
            file.write(lines)
    except OSError as error:
        raise UsageError(f"-o {output} cannot be written: {error.strerror}") from None
