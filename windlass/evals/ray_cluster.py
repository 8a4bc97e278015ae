"""A Ray of our own on this machine, or a cluster that runs already.

Ray reads its environment when it is first imported, so it is imported here, once that is set, and nowhere before.
"""

import logging
import os
import secrets
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Final

from windlass.core.errors import UsageError
from windlass.evals.grid import Cell
from windlass.evals.report.summaries import grouped
from windlass.evals.run import POOL

LOCAL: Final = "local"
# Ray opens its ports to all networks, at any address of its node, so our cluster asks for a token.
MODE, TOKEN, ASKS = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "token"
NICENESS: Final = "RAY_worker_niceness"  # 15 unless said: beside other programs such workers hardly run
STORE_BYTES: Final = 128 << 20  # processes exchange settings and lines of results


@contextmanager
def connected(address: str, cpus: int | None = None) -> Iterator[None]:
    """Ray at `address` until the end of the block: `local` starts one for this process, with `cpus` of this machine.

    Other addresses are `auto` and `HOST:PORT`. This machine must belong to that cluster. A local Ray asks for a
    token that nobody else knows, which stays in the environment, and ends with this process, however that ends.
    Nothing reaches stdout meanwhile, for Ray writes news of processes there.

    Raises: UsageError where there is no Ray, or it cannot be started.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if address == LOCAL:
        os.environ.setdefault(NICENESS, "0")
        if "ray" in sys.modules and os.environ.get(MODE) != ASKS:
            raise UsageError(
                f"Ray was imported before a token was set, and would be open to the network. Set {MODE}={ASKS} and "
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
        way = "Look at its logs" if address == LOCAL else "Start one with `ray start --head`, or leave the address out"
        raise UsageError(f"--ray {address}: there is no Ray ({reason}). {way}") from error
    try:
        with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
            yield
    finally:
        ray.shutdown()


ATTEMPTS: Final = 2  # workers that may die over a batch


@dataclass(eq=False)
class Batch:
    """The cells that a worker is sent at once: one, or those of one setting among several texts."""

    cells: list[Cell]
    deaths: int = 0

    @property
    def name(self) -> str:
        """The name in an error: `"passkey, length 200, text 3, policy=Recent(), asked_budget=64"`."""
        first = self.cells[0]
        numbers = " to ".join(dict.fromkeys(str(each.spec.number) for each in (first, self.cells[-1])))
        labels = (f"{name}={label}" for name, label in first.settings.labels.items() if label not in ("none", "plain"))
        return f"{first.spec.label}, length {first.spec.length}, text {numbers}, {', '.join(labels)}"


@dataclass(eq=False)
class BatchQueue:
    """The batches that are left to be sent, text by text. `again` holds those whose worker died."""

    texts: deque[deque[Batch]]
    again: deque[Batch] = field(default_factory=deque)
    _taken: dict[object, deque[Batch]] = field(default_factory=dict)

    @classmethod
    def of(cls, cells: Sequence[Cell], batch: int) -> "BatchQueue":
        """The batches of all `cells`, in their order. `batch` is the most texts that are read side by side."""
        pool = 1 if batch == 1 else batch * POOL
        texts: deque[deque[Batch]] = deque()
        for _, group in groupby(cells, lambda cell: (cell.spec.number // pool, cell.spec.label, cell.spec.length)):
            of_setting = grouped(group, lambda cell: tuple(cell.settings.labels.values()))
            texts.append(deque(map(Batch, of_setting.values())))
        return cls(texts)

    @property
    def is_empty(self) -> bool:
        """Return True once all batches are sent."""
        return not (self.texts or self.again or any(self._taken.values()))

    def next_of(self, worker: object) -> Batch | None:
        """The next batch of `worker`: one that another died over, then of its text, of a new text, or of another's."""
        if self.again:
            return self.again.popleft()
        own = self._taken.get(worker)
        if not own:
            own = self.texts.popleft() if self.texts else max(self._taken.values(), key=len, default=None)
            if not own:
                return None
            self._taken[worker] = own
        return own.popleft()

    def died(self, worker: object, batch: Batch) -> bool:
        """Give back the batches that `worker` left. Returns True if `batch`, its last, is to be tried once more."""
        left = self._taken.pop(worker, None)
        if left and all(left is not each for each in self._taken.values()):
            self.texts.appendleft(left)
        batch.deaths += 1
        if batch.deaths < ATTEMPTS:
            self.again.append(batch)
        return batch.deaths < ATTEMPTS
