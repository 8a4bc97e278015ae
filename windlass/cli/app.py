"""The command line: what each command takes. What it does is in the module that it calls.

Those modules are imported when a command runs, because torch and transformers take seconds.
"""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from windlass.cli import options as take
from windlass.cli.options import expanded
from windlass.core.errors import WindlassError

INTERRUPTED = 130  # the exit code that shells give to Ctrl-C
app = typer.Typer(
    help="Reads and writes texts far longer than a model's memory, in a cache of fixed size.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (by default that of the process); returns the exit code.

    What a user can mend is one line on stderr and exit code 2, without a traceback.
    """
    if sys.stderr is None:  # closed by the caller: what would have been said is lost, and no file takes its place
        sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115  # until the process ends
    if sys.stdout is None:
        return _failed("the output is closed; send it somewhere, to /dev/null if it is not wanted")
    # On a busy machine, threads that spin while they wait make every token wait for them.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        code = app(args=None if arguments is None else list(arguments), prog_name="windlass", standalone_mode=False)
        sys.stdout.flush()
    except (WindlassError, typer.TyperException) as error:
        return _failed(str(error) if isinstance(error, WindlassError) else error.format_message())
    except (KeyboardInterrupt, typer.Abort):
        print("windlass: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; without this, Python complains once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _failed(f"{error.filename or 'the output'}: {error.strerror}")
    except (MemoryError, RuntimeError) as error:
        # torch tells that memory is out in a message only.
        if isinstance(error, RuntimeError) and "memory" not in str(error):
            raise
        return _failed("there is not enough memory for this; lower --budget or --chunk, or use a smaller model")
    return int(code or 0)


def _failed(message: str) -> int:
    line = re.sub(r"\s*\n\s*", " ", message.strip())
    if line:
        print(f"windlass: error: {line}", file=sys.stderr)
    return 2


@app.command()
def demo(
    depth: Annotated[
        float | None, Option("--depth", min=0.0, max=1.0, help="Where the pass key is hidden; by default anywhere.")
    ] = None,
    budget: Annotated[int, Option("--budget", "--max-kv-size", help="Slots of the first two rows.")] = 256,
    policy: Annotated[str, Option("--policy", metavar="NAME", help="The policy of the first row.")] = "key_diff",
    text: Annotated[
        Path | None, Option("--text", metavar="FILE", help="Another text; by default Three Men in a Boat.")
    ] = None,
    seed: take.Seed = 0,
    has_numerals: Annotated[
        bool, Option("--numerals", help="Leave the text's own numerals in, which this model takes for pass keys.")
    ] = False,
    threads: take.Threads = None,
    is_json: take.Json = False,
) -> int:
    """Hide a pass key in a novel, read all of it in 256 slots, and ask. No download."""
    from windlass.cli import demo as run

    return run.demo(run.Options(depth, budget, policy, text, seed, threads, has_numerals), is_json)


@app.command()
@expanded
def generate(
    model: take.ModelName,
    prompt: take.PromptArguments,
    cache: take.CacheArguments,
    *,
    prompt_cache: take.PromptCache = None,
    max_tokens: take.MaxTokens = 256,
    sampling: take.SamplingArguments,
    load: take.LoadOptions,
    is_json: take.Json = False,
) -> int:
    """Write the text that follows a prompt."""
    from windlass.cli import session, terminal
    from windlass.engine.sampling import Sampling

    how = Sampling(**vars(sampling))
    given = terminal.read_prompt(prompt.prompt, prompt.file)
    return session.generate(session.open_session(model, cache, load, prompt_cache), given, max_tokens, how, is_json)


@app.command()
@expanded
def chat(
    model: take.ModelName,
    cache: take.CacheArguments,
    *,
    prompt_cache: take.PromptCache = None,
    max_tokens: take.MaxTokens = 256,
    sampling: take.SamplingArguments,
    load: take.LoadOptions,
) -> int:
    """Talk to a model, many turns on one cache; /reset, /describe, /quit."""
    from windlass.cli import chat as run
    from windlass.cli import session
    from windlass.engine.sampling import Sampling

    how = Sampling(**vars(sampling))
    return run.chat(session.open_session(model, cache, load, prompt_cache), max_tokens, how)


@app.command("cache")
@expanded
def save_cache(
    model: take.ModelName,
    prompt_cache: take.PromptCacheOut,
    prompt: take.PromptArguments,
    cache: take.CacheArguments,
    load: take.LoadOptions,
    is_json: take.Json = False,
) -> int:
    """Read a prompt once, into a file that `generate` and `chat` go on from."""
    from windlass.cli import session, terminal
    from windlass.core.files import check_writable

    check_writable(prompt_cache, "prompt cache")
    given = terminal.read_prompt(prompt.prompt, prompt.file)
    return session.save_cache(session.open_session(model, cache, load), given, prompt_cache, is_json)


@app.command()
@expanded
def bench(
    model: take.BenchModel = None,
    shape: take.Shape = None,
    layers: take.Layers = None,
    prompt_tokens: take.PromptTokens = "512",
    decode_tokens: take.DecodeTokens = "128",
    depth: take.Depths = "0",
    *,
    cache: take.BenchCacheLists,
    storage: take.Storages = "unrotated",
    threads: take.ThreadCounts = None,
    batch: take.Batches = "1",
    graph: take.Graphs = None,
    chunk: take.Chunk = None,
    repetitions: take.Repetitions = 5,
    dtype: take.Dtype = "auto",
    device: take.Device = "cpu",
    output: take.Output = None,
    is_json: take.JsonLines = False,
) -> int:
    """Measure tokens per second, as llama-bench does; lists (a,b) make every combination, in turn in one run.

    Tokens, keys and values are random, for speed does not depend on them; there is no sampler.
    """
    from windlass.cli import bench as show
    from windlass.evals.speed.rows import BenchLists
    from windlass.evals.speed.run import BenchRequest

    lists = BenchLists(prompt_tokens, decode_tokens, depth, vars(cache), storage, threads, batch, graph)
    tokens = 512 if chunk is None else chunk
    request = BenchRequest(model, shape, layers, lists, tokens, repetitions, dtype, device)
    return show.bench(request, output, is_json)


@app.command("eval")
@expanded
def evaluate(
    model: take.ModelName,
    output: take.ResultsOut,
    lists: take.EvalLists,
    *,
    samples: take.Samples = 20,
    is_aware: take.IsAware = False,
    batch: take.EvalBatch = 1,
    seed: take.Seed = 0,
    load: take.LoadOptions,
) -> int:
    """Measure what a model still finds in texts that its cache has compressed; lists (a,b) make every combination.

    A run that was stopped goes on where it was when the command is given again.
    """
    from windlass.cli import evaluation
    from windlass.evals.grid import Lists
    from windlass.evals.sweep import EvalOptions

    typed = Lists(lists.tasks, lists.lengths, lists.of_cache)
    return evaluation.evaluate(
        EvalOptions(model, typed, samples, seed, is_aware, output, load.dtype, load.threads, load.device, batch)
    )


@app.command()
def report(results: take.Results, output: take.Page = Path("report.html")) -> int:
    """Make one HTML page, and figures as PNG, of results that `windlass eval` wrote."""
    from windlass.cli import terminal
    from windlass.evals.report.make import write_report

    written = write_report(results, output)
    for line in written.notes:
        terminal.note(f"windlass: note: {line}")
    counted = f"{written.cases:,} case{'' if written.cases == 1 else 's'}"
    if written.figures:
        counted += f", {written.figures} figure{'' if written.figures == 1 else 's'}, also in {written.folder}"
    terminal.say(f"{written.page}: {counted}\n")
    return 0


@app.command()
@expanded
def calibrate(
    model: take.ModelName,
    text: take.CalibrationText,
    output: take.PairsOut,
    *,
    tokens: take.CalibrationTokens = 20_000,
    seed: take.Seed = 0,
    load: take.LoadOptions,
) -> int:
    """Measure which neighbouring tokens can be merged at what cost, for `--policy "Pairs(FILE)"`."""
    from windlass.cli import evaluation

    return evaluation.calibrate(
        evaluation.CalibrationOptions(model, text, output, tokens, seed, load.dtype, load.threads, load.device)
    )


@app.command()
def policies(is_json: take.Json = False) -> int:
    """List the policies: name, defaults, what is kept, and where it comes from."""
    from windlass.cli import catalogue

    return catalogue.show(is_json)
