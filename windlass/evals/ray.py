"""Cases spread over workers, each a process of Ray's with a model of its own."""

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import RayActorError, RayTaskError

from windlass.core.errors import UsageError, WindlassError
from windlass.evals.grid import Cell
from windlass.evals.ray_cluster import Batch, BatchQueue
from windlass.evals.results import Case, Identity
from windlass.evals.run import EvalOptions, Executor, Measured, Plan, Runner, Started

# Keys are Ray's references. Values are the worker and its batch, or None while the worker loads.
Running = dict[Any, tuple[Any, Batch | None]]
PLUGINS: Final = "windlass_"  # prefix of modules made of users' files


class Worker:
    """A runner in a process of Ray's."""

    def __init__(self) -> None:
        self._runner: Runner | None = None
        self._cells: dict[Identity, Cell] = {}

    def load(self, options: EvalOptions, folder: str) -> int:
        """Load the model, once. Returns the process's id. Raises: WindlassError as the command itself would."""
        if not Path(folder).is_dir():
            raise UsageError(f"{folder} is not on {os.uname().nodename}. Run this where all machines have one folder")
        os.chdir(folder)
        self._runner = options.runner()
        return os.getpid()

    def plan(self) -> Plan:
        """The work, checked. Classes of users' files are sent along."""
        assert self._runner is not None
        plan = self._runner.plan
        for name, module in list(sys.modules.items()):
            if name.startswith(PLUGINS):
                ray.cloudpickle.register_pickle_by_value(module)
        return plan

    def measured(self, identities: Sequence[Identity], batch: int) -> list[Case]:
        """Run the cells that begin with these identities, up to `batch` texts side by side."""
        assert self._runner is not None
        if not self._cells:
            self._cells = {cell.identities[0]: cell for cell in self._runner.proposal.grid.cells}
        cells = [self._cells[each] for each in identities]
        return [case for _, cases in self._runner.measure(cells, batch, lambda _: None) for case in cases]


@dataclass(frozen=True)
class Crew:
    """The number of workers, and the share of its machine that each has."""

    workers: int
    threads: int
    gpus: int

    @classmethod
    def of(cls, asked: int | None, threads: int | None, device: str, flag: str = "--workers") -> "Crew":
        """A crew of `asked` workers. None: one per GPU, or else as many as the cluster's processors have room for.

        Raises: UsageError for more than there is room for, or a GPU by number.
        """
        if device.startswith("cuda:"):
            raise UsageError(f"--device {device}: Ray chooses the GPU of each worker. Write --device cuda")
        there = ray.cluster_resources()
        cpus, gpus = int(there.get("CPU", 0)), int(there.get("GPU", 0))
        each, has_gpu = threads or 1, device == "cuda" or (device == "auto" and gpus > 0)
        room = min(gpus, cpus // each) if has_gpu else cpus // each
        if not 0 < (asked or 1) <= room:
            what = f"{gpus} GPUs and {cpus} processors" if has_gpu else f"{cpus} processors"
            raise UsageError(
                f"{flag} {asked or 1} with --threads {each} do not fit: this Ray has {what}, room for {room}. Lower "
                "one of them"
            )
        return cls(asked or room, each, int(has_gpu))


class RayExecutor(Executor):
    """Runs cells on workers of a connected Ray. `note` is told of workers that die, and of cells that none survives."""

    def __init__(self, options: EvalOptions, asked: int | None, note: Callable[[str], None]) -> None:
        """Start the workers of `Crew.of`. Raises: WindlassError for options that cannot be honoured."""
        crew = Crew.of(asked, options.threads, options.device)
        device = "cuda" if crew.gpus else options.device
        self._options, self._note = replace(options, threads=crew.threads, device=device), note
        kind = ray.remote(num_cpus=crew.threads, num_gpus=crew.gpus, max_restarts=0, max_task_retries=0)
        self._kind: Any = kind(Worker)
        self._workers = {each: self._loading(each) for each in (self._kind.remote() for _ in range(crew.workers))}
        self._plan: Plan | None = None

    @property
    def plan(self) -> Plan:
        if self._plan is None:
            first = next(iter(self._workers))
            try:
                ray.get(self._workers[first])
                self._plan = ray.get(first.plan.remote())
            except RayTaskError as error:
                raise _told(error) from error
            except RayActorError as error:
                raise _lost_at_start() from error
        return self._plan

    def measure(self, cells: Sequence[Cell], batch: int, started: Started) -> Measured:
        queue = BatchQueue.of(cells, batch)
        running: Running = {loaded: (each, None) for each, loaded in self._workers.items()}
        while not queue.is_empty or any(sent for _, sent in running.values()):
            if not running:
                raise _lost_at_start()
            try:
                [ready], _ = ray.wait(list(running))
            except KeyboardInterrupt:
                yield from _finished(running)
                raise
            worker, sent = running.pop(ready)
            try:
                result = ray.get(ready)
            except RayTaskError as error:
                raise _told(error) from error
            except RayActorError:
                self._replace(worker, sent, queue, running)
            else:
                if sent is not None:
                    yield sent.cells, result
            for idle in [each for each in self._workers if all(each is not busy for busy, _ in running.values())]:
                following = queue.next_of(idle)
                if following is not None:
                    started(following.cells[0])
                    names = [cell.identities[0] for cell in following.cells]
                    running[idle.measured.remote(names, batch)] = idle, following

    def _replace(self, worker: Any, sent: Batch | None, queue: BatchQueue, running: Running) -> None:
        """Start another worker, unless this one died while it loaded the model, as the next one would."""
        del self._workers[worker]
        if sent is None:
            self._note("a worker died while it loaded the model. The others continue")
            return
        if queue.died(worker, sent):
            self._note(f"a worker died. Its cell goes to another: {sent.name}")
        else:
            self._note(f"windlass: error: {sent.deaths} workers died over this cell, which is left out: {sent.name}")
        new = self._kind.remote()
        self._workers[new] = self._loading(new)
        running[self._workers[new]] = new, None

    def _loading(self, worker: Any) -> Any:
        return worker.load.remote(self._options, str(Path.cwd()))


def _told(error: RayTaskError) -> BaseException:
    """The error of a worker, as if it had been raised here."""
    cause = error.cause
    return cause if isinstance(cause, WindlassError | MemoryError | RuntimeError) else error


def _finished(running: Running) -> Measured:
    """The results that are there at an interrupt."""
    ready, _ = ray.wait(list(running), num_returns=len(running), timeout=0)
    for each in ready:
        _, sent = running[each]
        if sent is not None:
            with suppress(RayTaskError, RayActorError):
                yield sent.cells, ray.get(each)


def _lost_at_start() -> UsageError:
    return UsageError("all workers died while they loaded the model. Is there memory for one in each? Lower --workers")
