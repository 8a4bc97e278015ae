"""What `windlass eval` shows."""

from contextlib import ExitStack

from rich.console import Console

from windlass.cli.loading import INTERRUPTED, loading
from windlass.cli.ray_options import RayArguments
from windlass.cli.spread import executor_of
from windlass.cli.terminal import note, progress, say
from windlass.evals.report.verdict import verdict
from windlass.evals.summary import summary
from windlass.evals.sweep import EvalOptions, Sweep

PIPE_WIDTH = 240
SPEED_S = 3600.0  # of the newest cases, whose speed tells the time that is left
TEXTS, LENGTH, GROUPS = 50, 500, 4  # of shares: texts, tokens of each, sizes of a layer's heads
SHOWN = 5  # cheapest and dearest pairs in the summary of a calibration


def evaluate(options: EvalOptions, spread: RayArguments) -> int:
    """Run every case that the output lacks and show the means of all; returns the exit code.

    Ctrl-C leaves whole lines; the same command goes on from there.

    Raises: WindlassError for what cannot be honoured, before anything is run.
    """
    notes: list[str] = []
    with ExitStack() as stack:
        with loading():
            executor = stack.enter_context(executor_of(options, spread, note))
            sweep = Sweep(options, notes.append, executor)
        for line in notes:
            note(line)
        with progress("cases", speed_s=SPEED_S) as bars:
            bar = bars.add_task("", visible=False)
            is_whole = sweep.run(
                lambda done, total, what: bars.update(bar, completed=done, total=total, description=what, visible=True)
            )
    if sweep.cases:
        # A pipe gets whole lines, whatever the width of a terminal.
        Console(width=None if Console().is_terminal else PIPE_WIDTH).print(summary(sweep.cases))
        told = verdict(sweep.cases)
        if told:
            say(f"{told}\n")
    done, total = sweep.counts
    if not is_whole:
        note(f"interrupted; {done} of {total} cases are done; the same command goes on from here")
        return INTERRUPTED
    if done < total:
        note(f"{done} of {total} cases are done; the same command tries the others again")
    return int(done < total)
