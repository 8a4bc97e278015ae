"""Where the processes are: a Ray of our own on this machine, or a cluster that runs already.

Ray reads its environment when it is first imported, so it is imported here, once that is set, and nowhere before.
"""

import logging
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Final

from windlass.core.errors import UsageError

LOCAL: Final = "local"
# Ray's ports are open to all networks, whatever the address of its node, so our own asks for a token.
MODE, TOKEN, ASKS = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "token"
NICENESS: Final = "RAY_worker_niceness"  # 15 unless said: beside other programs such workers hardly run
STORE_BYTES: Final = 128 << 20  # what goes between processes are lines of results, and settings


@contextmanager
def connected(address: str, cpus: int | None = None) -> Iterator[None]:
    """Ray at `address` until the end of the block: `local` starts one for this process, with `cpus` of this machine.

    Other addresses are `auto` and `HOST:PORT`; this machine must be one of that cluster's. A local one asks for a
    token that nobody else knows, which stays in the environment, and ends with this process, however that ends.
    Nothing reaches stdout meanwhile, for Ray writes there what happens to processes.

    Raises: UsageError where there is no Ray, or it cannot be started.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address == LOCAL:
        os.environ.setdefault(NICENESS, "0")
        if "ray" in sys.modules and os.environ.get(MODE) != ASKS:
            raise UsageError(
                f"Ray was imported before a token was set, and would be open to the network; set {MODE}={ASKS} and "
                f"{TOKEN} before, or start a cluster of your own and give its address"
            )
        os.environ[MODE] = ASKS
        os.environ.setdefault(TOKEN, secrets.token_hex(32))
    import ray

    try:
        if address == LOCAL:
            ray.init(
                address=LOCAL, num_cpus=cpus, include_dashboard=False, object_store_memory=STORE_BYTES,
                log_to_driver=False, logging_level=logging.ERROR,
            )  # fmt: skip
        else:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        way = "look at its logs" if address == LOCAL else "start one with `ray start --head`, or leave the address out"
        raise UsageError(f"--ray {address}: there is no Ray ({reason}); {way}") from error
    try:
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
            yield
    finally:
        ray.shutdown()
