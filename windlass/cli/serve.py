"""The commands `serve` and `view`."""

import gc
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from typer import Argument, Option

from windlass.cli import options, terminal
from windlass.cli.measure_options import LOCAL, RayAddress, RayArguments, check_ray
from windlass.cli.options import CacheValues, LoadOptions, Unset, expanded, resolve_model
from windlass.cli.terminal import loading, note
from windlass.core.errors import UsageError
from windlass.core.parse import SYSTEM, folder_of, parse_bytes

if TYPE_CHECKING:
    from windlass.serve.run import ServeOptions

NEEDED: Final = ("fastapi", "uvicorn", "llguidance", "prometheus_client")
BUDGET: Final = 1024

Rows = Annotated[
    int, Option("--rows", min=1, max=1024, envvar="WINDLASS_ROWS", help="Number of requests that are served at once.")
]
Kinds = Annotated[
    list[str] | None,
    Option(
        "--kind",
        metavar="ROWS",
        help="Add rows with different options, as rows=2,budget=4096,policy=snapkv. The rest is inherited. Repeatable.",
    ),
]
Host = Annotated[str, Option("--host", help="The address to listen on. Addresses beyond this machine require a key.")]
Port = Annotated[int, Option("--port", min=0, max=65535, help="The port to listen on (0: any free port).")]
Keys = Annotated[
    list[str] | None,
    Option(
        "--api-key",
        metavar="KEY",
        envvar="WINDLASS_API_KEY",
        help="Require this key in each request. Repeatable. In the environment, other users cannot see it.",
    ),
]
Origins = Annotated[
    list[str] | None,
    Option(
        "--allow-origin",
        metavar="ORIGIN",
        help="Let pages of this origin, as https://app.example, read answers in a browser (*: all pages). Repeatable.",
    ),
]
Name = Annotated[
    str | None, Option("--name", help="The model's name for clients (default: the name of its folder or GGUF file).")
]
Queue = Annotated[int, Option("--queue", min=0, max=100_000, help="Requests that may wait for a row.")]
MostTokens = Annotated[
    int, Option("--max-tokens", "-n", min=1, help="Maximum number of tokens that a request may write.")
]
MostSeconds = Annotated[
    float | None,
    Option("--max-seconds", min=0.001, max=1e6, help="Request timeout, including time in the queue (default: none)."),
]
MostPrompt = Annotated[int, Option("--max-prompt", min=1, help="Maximum number of tokens in a prompt.")]
Reuse = Annotated[
    str | None,
    Option(
        "--reuse",
        metavar="SIZE",
        help="Memory for texts that have been read, so that the next turn reads its new tokens alone. 0 for none. "
        "(default: 1GiB, none with --tensor-parallel)",
    ),
]
ReuseModeText = Annotated[
    str,
    Option(
        "--reuse-mode",
        metavar="MODE",
        help="Cached tokens that requests use: exact (same bits), prefix (also answers), edited (also tokens behind an "
        "edit, moved, but for 64 that are read again). edited(16) reads 16 again.",
    ),
]
ReuseFolder = Annotated[
    Path | None,
    Option(
        "--reuse-folder", metavar="DIR", help="Also save cached rows and sessions in this folder, for the next server."
    ),
]
RecallBytes = Annotated[
    str,
    Option(
        "--recall-bytes",
        metavar="SIZE",
        help="Memory, or files in --recall-folder, for evicted tokens that all rows together can recall.",
    ),
]
Disk = Annotated[
    str | None, Option("--disk", metavar="SIZE", help="Maximum size of all files in --reuse-folder (default: 1GiB).")
]
IsShown = Annotated[
    bool,
    Option("--view", help="Show the cached tokens of each text on the page at /, to everybody who may send requests."),
]
Replicas = Annotated[
    int | None,
    Option(
        "--replicas",
        min=1,
        max=4096,
        help="Number of processes with a model each, behind one address. Uses Ray, see --ray.",
    ),
]
StopSeconds = Annotated[
    float, Option("--stop-seconds", min=0, max=3600, help="Time for running requests to finish when the server stops.")
]


@dataclass(frozen=True)
class ServeArguments:
    """The address of a server, and its limits."""

    rows: Rows = 4
    kinds: Kinds = None
    host: Host = "127.0.0.1"
    port: Port = 8000
    keys: Keys = None
    called: Name = None
    queue: Queue = 64
    max_tokens: MostTokens = 32_768
    max_prompt: MostPrompt = 1_000_000
    max_seconds: MostSeconds = None
    reuse: Reuse = None
    reuse_mode: ReuseModeText = "prefix"
    stop_seconds: StopSeconds = 10.0
    is_shown: IsShown = False
    reuse_folder: ReuseFolder = None
    disk: Disk = None
    recall_bytes: RecallBytes = "1GiB"
    replicas: Replicas = None
    ray: RayAddress = None
    origins: Origins = None
    speculate: options.Speculate = None


@expanded
def serve(
    unset: Unset,
    named: options.ModelArguments,
    limits: CacheValues,
    *,
    asked: ServeArguments,
    load: options.LoadOptions,
    is_quiet: options.IsQuiet = False,
    is_parallel: options.TensorParallel = False,
) -> int:
    """Answer many clients at once, over HTTP with OpenAI's API, in memory of known size.

    Each of --rows texts has a cache of --budget tokens, by default 1024. Use --kind to add rows with other options.
    Needs the packages of the extra `serve`.
    """
    model = resolve_model(named.name, named.model, "model" in unset)
    check_extra()
    launch = terminal.launch_of(is_parallel, prompt="")
    is_quiet = terminal.is_quiet(launch, is_quiet)
    check_replicas(asked, is_parallel)
    folder_of(model)
    with loading(is_quiet):
        from windlass.hf.load import load as load_model
        from windlass.serve import run

    serving = options_of(model, limits, asked, is_parallel)
    if asked.replicas is not None:
        with terminal.quiet(is_quiet):
            return serve_replicas(model, load, serving, asked.replicas, asked.ray or LOCAL)
    if launch is None or launch.is_first:  # an address that cannot be had is told before weights are loaded
        run.bind(serving.host, serving.port).close()
    with loading(is_quiet):
        loaded = load_model(model, load.dtype, load.device, load.weights, is_parallel)
    if load.threads is not None:
        import torch

        torch.set_num_threads(load.threads)
    gc.collect()
    gc.freeze()  # else a collection goes through all that was loaded, while every client waits
    say: Callable[[str], None] = terminal.note
    with terminal.quiet(is_quiet), terminal.first_speaks(launch):
        if launch is None:
            return run.serve(*loaded, serving, say=say)
        return terminal.leave_ranks(launch, run.serve_together(*loaded, serving, say))


def check_extra() -> None:
    """Raises: UsageError where the packages that serve are not installed."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UsageError(f"`windlass serve` needs {', '.join(missing)}. Run: pip install 'windlass[serve]'")


def check_replicas(asked: ServeArguments, is_parallel: bool) -> None:
    """Raises: UsageError for options of replicas that do not go together."""
    if asked.replicas is None:
        if asked.ray is not None:
            raise UsageError("--ray goes with --replicas. Say how many")
        return
    check_ray(RayArguments(asked.ray or LOCAL))
    if asked.is_shown:
        raise UsageError("--view shows one server, and --replicas makes several. Leave one of them out")
    if asked.reuse_folder is not None:
        raise UsageError("--reuse-folder is of one server, and --replicas makes several. Leave one of them out")
    if is_parallel:
        raise UsageError("--tensor-parallel and --replicas can't be combined. Leave one of them out")


def options_of(model: str, limits: CacheValues, asked: ServeArguments, is_parallel: bool = False) -> "ServeOptions":
    """Return the options of the server. Raises: UsageError for an option that cannot be honoured."""
    from windlass.cli.session import cache_options, kinds_of
    from windlass.engine.request import EngineLimits, ReuseMode
    from windlass.hf.model_facts import shown_name
    from windlass.serve.run import ServeOptions

    first: dict[str, Any] = {"budget": BUDGET, "sinks": SYSTEM} | limits
    row, kinds = cache_options(first), kinds_of(asked.kinds or (), first)
    reuse = ("0" if is_parallel else "1GiB") if asked.reuse is None else asked.reuse
    if asked.disk is not None and asked.reuse_folder is None:
        raise UsageError(f"--disk {asked.disk} is of files in --reuse-folder. Name a folder, or leave it out")
    return ServeOptions(
        name=asked.called or shown_name(model),
        rows=asked.rows,
        options=row,
        limits=EngineLimits(
            queue=asked.queue,
            max_tokens=asked.max_tokens,
            prompt_tokens=asked.max_prompt,
            seconds=asked.max_seconds,
            recall_bytes=parse_bytes("--recall-bytes", asked.recall_bytes),
        ),
        host=asked.host,
        port=asked.port,
        keys=tuple(asked.keys or ()),
        stop_seconds=asked.stop_seconds,
        reuse_bytes=0 if reuse == "0" else parse_bytes("--reuse", reuse),
        reuse=ReuseMode.of(asked.reuse_mode),
        is_shown=asked.is_shown,
        kinds=kinds,
        reuse_folder=asked.reuse_folder,
        disk_bytes=parse_bytes("--disk", asked.disk or "1GiB"),
        origins=tuple(asked.origins or ()),
        speculate=asked.speculate,
    )


def serve_replicas(model: str, load: LoadOptions, serving: "ServeOptions", count: int, address: str) -> int:
    """Serve through `count` replicas until a signal. Returns the exit code. Raises: WindlassError as `serve` does."""
    is_local = address == LOCAL
    from windlass.evals.ray_cluster import connected

    threads = load.threads or (max(1, (os.cpu_count() or 1) // count) if is_local else 1)
    with connected(address, count * threads if is_local else None):
        with loading():
            from windlass.evals.ray import Crew
            from windlass.serve.replicas import ReplicaOptions
            from windlass.serve.replicas import serve_replicas as run

        crew = Crew.of(count, threads, load.device, "--replicas")
        device = "cuda" if crew.gpus else load.device
        asked = ReplicaOptions(
            model=model,
            dtype=load.dtype,
            device=device,
            weights=load.weights,
            threads=crew.threads,
            serve=serving,
            folder=str(Path.cwd()),
        )
        return run(asked, count, crew.gpus, note, note)


RecordingFile = Annotated[
    Path, Argument(metavar="FILE", help="A recording, of `windlass generate --record`.", show_default=False)
]
PagePort = Annotated[int, Option("--port", min=0, max=65535, help="The port on 127.0.0.1 (0: any free port).")]
Record = Annotated[
    Path | None,
    Option("--record", metavar="FILE", help="Record the cached tokens after each step, for `windlass view`."),
]


def view(file: RecordingFile, port: PagePort = 0) -> int:
    """Show a recording of a cache in the browser, without its model, until Ctrl-C.

    The page is served on this machine alone.
    """
    with loading():
        from windlass.view.server import RecordingServer

    with RecordingServer(file, port) as server:
        terminal.say(f"{server.address}\n")
        note("Ctrl-C ends it")
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            note("")
    return 0
