"""A command that runs in several processes: the first one speaks, and none of them reads a pipe that all share."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path

import typer

from windlass.core.errors import UsageError, WindlassError
from windlass.parallel.launch import Launch
from windlass.parallel.starter import end_with_starter


def launch_of(
    is_parallel: bool, prompt: str | None = None, file: Path | None = None, record: Path | None = None
) -> Launch | None:
    """This process among the others; None where there are none.

    Raises: UsageError where `torchrun` did not start it, for a prompt that would come through a pipe, and a recording.
    """
    if not is_parallel:
        return None
    launch = Launch.of(os.environ)
    if (prompt is None and file is None) or prompt == "-" or str(file) == "-":
        raise UsageError("--tensor-parallel: processes share one stdin; give the prompt as an argument, or with --file")
    if record is not None:
        raise UsageError("--record: each of the processes of --tensor-parallel has some heads only; leave it out")
    return launch


@contextmanager
def first_speaks(launch: Launch | None) -> Iterator[None]:
    """Let what other processes than the first print to stdout vanish, and what they find wrong with an option.

    The first one finds the same, and says so. All of them end when `torchrun` has ended.
    """
    if launch is None:
        yield
        return
    end_with_starter(os.environ)
    with ExitStack() as stack:
        if not launch.is_first:
            stack.enter_context(redirect_stdout(stack.enter_context(Path(os.devnull).open("w"))))
        try:
            yield
        except UsageError:
            if launch.is_first:
                raise
            raise typer.Exit(2) from None
        except RuntimeError as error:
            from windlass.parallel.ranks import is_lost

            if not is_lost(error):
                raise
            raise WindlassError(
                f"rank {launch.number} of {launch.size} has lost another one, which has ended or does not answer: what "
                "was written is all there is; start all of them again"
            ) from error


def parted(launch: Launch | None, code: int) -> int:
    """`code`, once all processes are done; one that was interrupted waits for nobody."""
    if launch is not None and code == 0:
        from windlass.parallel.meeting import leave

        leave()
    return code


def is_quiet(launch: Launch | None, is_asked: bool) -> bool:
    """Whether a command says nothing beside its text: it was asked to, or another process says it."""
    return is_asked or (launch is not None and not launch.is_first)
