"""The commands that measure: what they take. What they do is imported when they run, because it needs torch."""

from pathlib import Path

from windlass.cli import eval_options as evals
from windlass.cli import options as take
from windlass.cli import text_options as text
from windlass.cli.expand import Unset, expanded
from windlass.cli.given import the_model
from windlass.cli.loading import loading
from windlass.cli.ray_options import RayArguments, check_ray
from windlass.cli.tune_options import TuneArguments, TuneSize, TuneText


@expanded
def evaluate(
    unset: Unset,
    named: text.ModelArguments,
    output: evals.ResultsOut,
    lists: evals.EvalLists,
    *,
    samples: take.Samples = 20,
    is_aware: evals.IsAware = False,
    batch: evals.EvalBatch = 1,
    seed: take.Seed = 0,
    load: take.LoadOptions,
    spread: RayArguments,
    is_quiet: text.IsQuiet = False,
) -> int:
    """Measure what a model still finds in texts that its cache has compressed; lists (a,b) make every combination.

    A run that was stopped goes on where it was when the command is given again.
    """
    model = the_model(named.name, named.model, "model" in unset)
    from windlass.cli import checks, terminal

    checks.check_eval(lists, output)
    checks.check_model(model, load)
    check_ray(spread)
    with loading():
        from windlass.cli import evaluation
        from windlass.evals.grid import Lists
        from windlass.evals.sweep import EvalOptions

    typed = Lists(lists.tasks, lists.lengths, lists.of_cache, lists.depth)
    with terminal.quiet(is_quiet):
        loaded = load.dtype, load.threads, load.device, batch, load.weights
        options = EvalOptions(model, typed, samples, seed, is_aware, output, *loaded)
        return evaluation.evaluate(options, spread)


@expanded
def tune(
    unset: Unset,
    named: text.ModelArguments,
    tuned_text: TuneText,
    size: TuneSize,
    asked: TuneArguments,
    load: take.LoadOptions,
    spread: RayArguments,
) -> int:
    """Find the policy, store and positions that serve a model and your texts best in so many bytes.

    A run that was stopped goes on where it was when the command is given again.
    """
    model = the_model(named.name, named.model, "model" in unset)
    from windlass.cli import checks
    from windlass.core.spec import parse_bytes

    parse_bytes("--bytes", size)
    checks.check_text(tuned_text, f"text {tuned_text}")
    checks.check_model(model, load)
    check_ray(spread)
    with loading():
        from windlass.cli import tune as run

    return run.tune(run.options_of(model, tuned_text, size, asked, load), spread)


def report(results: take.Results, output: take.Page = Path("report.html")) -> int:
    """Make one HTML page, and figures as PNG, of results that `windlass eval` wrote."""
    from windlass.cli import terminal

    with loading():
        from windlass.evals.report.make import write_report

    written = write_report(results, output)
    for line in written.notes:
        terminal.note(f"windlass: note: {line}")
    counted = f"{written.cases:,} case{'' if written.cases == 1 else 's'}"
    if written.figures:
        counted += f", {written.figures} figure{'' if written.figures == 1 else 's'}, also in {written.folder}"
    terminal.say(f"{written.page}: {counted}\n")
    return 0
