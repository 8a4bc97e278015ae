"""The options of commands that may run in many processes, through Ray, which is imported when they do."""

import re
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated, Any, Final

from typer import Option
from typer.core import TyperCommand

from windlass.core.errors import UsageError

LOCAL: Final = "local"
RAY: Final = "--ray"

RayAddress = Annotated[
    str | None,
    Option(
        RAY,
        metavar="[ADDRESS]",
        help="Spread it over workers, each with a model of its own: those of the Ray cluster at HOST:PORT, of the one "
        "that runs here (auto), or without an address processes of this machine. Needs windlass[ray].",
    ),
]
Workers = Annotated[
    int | None,
    Option(
        "--workers",
        min=1,
        max=65_536,
        help="How many, with --ray; by default one per GPU, or as many as there are processors for --threads each.",
    ),
]


@dataclass(frozen=True)
class RayArguments:
    """Where workers run, and how many."""

    ray: RayAddress = None
    workers: Workers = None


class WithRay(TyperCommand):
    """A command whose `--ray` may stand without an address, which Typer has no word for."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        at = args.index(RAY) + 1 if RAY in args else None
        if at is not None and (at == len(args) or args[at].startswith("-")):
            args = [*args[:at], LOCAL, *args[at:]]
        return super().parse_args(ctx, args)


def check_ray(asked: RayArguments) -> None:
    """Raises: UsageError for what is no address, workers of nothing, or where Ray is not installed."""
    if asked.ray is None:
        if asked.workers is not None:
            raise UsageError(f"--workers {asked.workers} goes with --ray; give that, too, or leave it out")
        return
    if asked.ray not in (LOCAL, "auto") and not re.fullmatch(r"[^\s/]+:[0-9]{1,5}", asked.ray):
        raise UsageError(
            f"--ray {asked.ray} is no address; write HOST:PORT, or auto, or put --ray last, and without one, for "
            "processes of this machine"
        )
    if find_spec("ray") is None:
        raise UsageError("--ray needs Ray; pip install 'windlass[ray]'")
