"""The command `serve`: what it takes. Torch, and what listens, are imported when it runs."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from typer import Option

from windlass.cli import options as take
from windlass.cli import text_options as text
from windlass.cli.cache_options import CacheArguments
from windlass.cli.expand import Unset, expanded
from windlass.cli.given import the_model
from windlass.cli.loading import loading
from windlass.cli.ray_options import LOCAL, RayAddress, RayArguments, check_ray
from windlass.core.errors import UsageError
from windlass.core.spec import parse_bytes

if TYPE_CHECKING:
    from windlass.serve.run import ServeOptions

NEEDED: Final = ("starlette", "uvicorn", "llguidance", "prometheus_client")
BUDGET: Final = 1024

Rows = Annotated[int, Option("--rows", min=1, max=1024, envvar="WINDLASS_ROWS", help="Texts that are served at once.")]
Host = Annotated[str, Option("--host", help="The address to listen on; others than this machine's need a key.")]
Port = Annotated[int, Option("--port", min=0, max=65535, help="The port to listen on; 0: any that is free.")]
Keys = Annotated[
    list[str] | None,
    Option(
        "--api-key",
        metavar="KEY",
        envvar="WINDLASS_API_KEY",
        help="Ask for this key with each request; repeatable. Better in the environment, where others do not see it.",
    ),
]
Name = Annotated[str | None, Option("--name", help="The model's name for clients; by default that of its folder.")]
Queue = Annotated[int, Option("--queue", min=0, max=100_000, help="Requests that may wait for a row.")]
MostTokens = Annotated[int, Option("--max-tokens", "-n", min=1, help="Most tokens that a request may write.")]
MostPrompt = Annotated[int, Option("--max-prompt", min=1, help="Most tokens that a prompt may have.")]
Reuse = Annotated[
    str | None,
    Option("--reuse", metavar="SIZE", help="Memory for the beginnings of prompts, as 64MiB: each is then read once."),
]
IsShown = Annotated[
    bool, Option("--view", help="Show on the page at / what each text's cache holds, to all who may send requests.")
]
Replicas = Annotated[
    int | None,
    Option(
        "--replicas",
        min=1,
        max=4096,
        help="As many processes, each with a model of its own, behind one address; through Ray, see --ray.",
    ),
]
StopSeconds = Annotated[
    float, Option("--stop-seconds", min=0, max=3600, help="Time for requests under way, once the server is to end.")
]


@dataclass(frozen=True)
class ServeArguments:
    """Where is listened, and how much is taken."""

    rows: Rows = 4
    host: Host = "127.0.0.1"
    port: Port = 8000
    keys: Keys = None
    called: Name = None
    queue: Queue = 64
    max_tokens: MostTokens = 4096
    max_prompt: MostPrompt = 1_000_000
    reuse: Reuse = None
    stop_seconds: StopSeconds = 10.0
    is_shown: IsShown = False
    replicas: Replicas = None
    ray: RayAddress = None


@expanded
def serve(
    unset: Unset,
    named: text.ModelArguments,
    limits: CacheArguments,
    *,
    asked: ServeArguments,
    load: take.LoadOptions,
    is_quiet: text.IsQuiet = False,
) -> int:
    """Answer many clients at once, over HTTP as OpenAI's API has it, in memory that is known beforehand.

    Each of --rows texts has a cache of --budget tokens, by default 1024. Needs the packages of the
    extra `serve`.
    """
    model = the_model(named.name, named.model, "model" in unset)
    check_extra()
    check_replicas(asked)
    from windlass.cli import checks, terminal

    checks.check_session(model, load, limits)
    with loading(is_quiet):
        from windlass.hf.load import load as load_model
        from windlass.serve import run

    options = options_of(model, limits, asked)
    if asked.replicas is not None:
        from windlass.cli.replicas import serve_replicas

        with terminal.quiet(is_quiet):
            return serve_replicas(model, load, options, asked.replicas, asked.ray or LOCAL)
    with loading(is_quiet):
        loaded = load_model(model, load.dtype, load.device, load.weights)
    if load.threads is not None:
        import torch

        torch.set_num_threads(load.threads)
    say: Callable[[str], None] = terminal.note
    with terminal.quiet(is_quiet):
        return run.serve(*loaded, options, say=say)


def check_extra() -> None:
    """Raises: UsageError where the packages that serve are not installed."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        raise UsageError(f"`windlass serve` needs {', '.join(missing)}; pip install 'windlass[serve]'")


def check_replicas(asked: ServeArguments) -> None:
    """Raises: UsageError for options of replicas that do not go together."""
    if asked.replicas is None:
        if asked.ray is not None:
            raise UsageError("--ray goes with --replicas; say how many")
        return
    check_ray(RayArguments(asked.ray or LOCAL))
    if asked.is_shown:
        raise UsageError("--view shows one server, and --replicas makes several; leave one of them out")


def options_of(model: str, limits: CacheArguments, asked: ServeArguments) -> "ServeOptions":
    """What was typed, as the server takes it. Raises: UsageError for what cannot be honoured."""
    from windlass.cache.options import CacheOptions
    from windlass.engine.status import EngineLimits
    from windlass.serve.run import ServeOptions

    options = CacheOptions(**({"budget": BUDGET} | limits.given()))
    engine = EngineLimits(queue=asked.queue, max_tokens=asked.max_tokens, prompt_tokens=asked.max_prompt)
    name = asked.called or (Path(model).expanduser().resolve().name if Path(model).expanduser().exists() else model)
    keys = tuple(asked.keys or ())
    reuse_bytes = 0 if asked.reuse is None else parse_bytes("--reuse", asked.reuse)
    return ServeOptions(
        name, asked.rows, options, engine, asked.host, asked.port, keys, asked.stop_seconds, reuse_bytes, asked.is_shown
    )
