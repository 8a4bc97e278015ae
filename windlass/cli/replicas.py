"""What `windlass serve --replicas` starts."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from windlass.cli.loading import loading
from windlass.cli.options import LoadOptions
from windlass.cli.ray_options import LOCAL
from windlass.cli.terminal import note
from windlass.core.errors import UsageError

if TYPE_CHECKING:
    from windlass.serve.run import ServeOptions


def serve_replicas(model: str, load: LoadOptions, options: "ServeOptions", count: int, address: str) -> int:
    """Serve through `count` replicas until a signal; returns the exit code. Raises: WindlassError as `serve` does."""
    is_local = address == LOCAL
    if not (is_local or options.keys):
        raise UsageError(
            f"replicas of the cluster at {address} can be reached from other machines, and there is no key; give "
            "--api-key KEY"
        )
    from windlass.ray.cluster import connected

    threads = load.threads or (max(1, (os.cpu_count() or 1) // count) if is_local else 1)
    with connected(address, count * threads if is_local else None):
        with loading():
            from windlass.ray.executor import Crew
            from windlass.ray.replica import ReplicaOptions
            from windlass.ray.serve import serve_replicas as run

        crew = Crew.of(count, threads, load.device, "--replicas")
        device = "cuda" if crew.gpus else load.device
        asked = ReplicaOptions(
            model, load.dtype, device, load.weights, crew.threads, options, str(Path.cwd()), is_local
        )
        return run(asked, count, crew.gpus, note, note)
