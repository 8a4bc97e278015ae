"""Where cases are run: in this process, or by the workers that `--ray` asks for."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from windlass.cli.ray_options import LOCAL, RayArguments
from windlass.evals.work import Executor

if TYPE_CHECKING:
    from windlass.ray.executor import Options


@contextmanager
def executor_of(options: "Options", asked: RayArguments, note: Callable[[str], None]) -> Iterator[Executor[Any] | None]:
    """The workers, until the end of the block; None where this process does the work.

    Nothing of what is printed to stdout in the block is shown while there are workers.

    Raises: WindlassError for what cannot be honoured.
    """
    if asked.ray is None:
        yield None
        return
    from windlass.ray.cluster import connected

    cpus = None if asked.workers is None or asked.ray != LOCAL else asked.workers * (options.threads or 1)
    with connected(asked.ray, cpus):
        from windlass.ray.executor import RayExecutor

        yield RayExecutor(options, asked.workers, note)
