"""Cases spread over workers, each a process of Ray's with a model of its own."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Generic

import ray
from ray.exceptions import RayActorError, RayTaskError

from windlass.core.errors import UsageError, WindlassError
from windlass.evals.grid import CasePlan
from windlass.evals.ray_cluster import Cell, Cells
from windlass.evals.results import Case, Identity
from windlass.evals.run import EvalOptions, EvalSession, EvalWork, Executor, Facts, Started
from windlass.evals.tune import TuneOptions, TuneWork

Options = EvalOptions | TuneOptions
Running = dict[Any, tuple[Any, Cell | None]]  # by what Ray promises: the worker, and its cell, or None while it loads
PLUGINS: Final = "windlass_"  # begins the names of modules that are files of users


class Worker:
    """What runs in a process of Ray's."""

    def __init__(self) -> None:
        self._work: EvalSession[Any] | None = None

    def load(self, options: Options, folder: str) -> int:
        """Load the model, once; returns the process's id. Raises: WindlassError as the command itself would."""
        if not Path(folder).is_dir():
            raise UsageError(f"{folder} is not on {os.uname().nodename}; run this where all machines have one folder")
        os.chdir(folder)
        self._work = EvalWork(options) if isinstance(options, EvalOptions) else TuneWork(options)
        return os.getpid()

    def facts(self) -> Any:
        """What the driver needs to know of the model. Classes of users' files are sent along."""
        assert self._work is not None
        facts = self._work.facts()
        for name, module in list(sys.modules.items()):
            if name.startswith(PLUGINS):
                ray.cloudpickle.register_pickle_by_value(module)
        return facts

    def measured(self, identities: Sequence[Identity], batch: int) -> list[Case]:
        """Run these cases, up to `batch` texts side by side."""
        assert self._work is not None
        return self._work.measured(identities, batch)


@dataclass(frozen=True)
class Crew:
    """How many workers, and what each has of its machine."""

    workers: int
    threads: int
    gpus: int

    @classmethod
    def of(cls, asked: int | None, threads: int | None, device: str, flag: str = "--workers") -> "Crew":
        """As many as there are GPUs, or else as fit on the processors of the cluster, unless so many were asked for.

        Raises: UsageError for more than there is room for, or a GPU by number.
        """
        if device.startswith("cuda:"):
            raise UsageError(f"--device {device}: Ray chooses the GPU of each worker; write --device cuda")
        there = ray.cluster_resources()
        cpus, gpus = int(there.get("CPU", 0)), int(there.get("GPU", 0))
        each, has_gpu = threads or 1, device == "cuda" or (device == "auto" and gpus > 0)
        room = min(gpus, cpus // each) if has_gpu else cpus // each
        if not 0 < (asked or 1) <= room:
            what = f"{gpus} GPUs and {cpus} processors" if has_gpu else f"{cpus} processors"
            raise UsageError(
                f"{flag} {asked or 1} with --threads {each} do not fit: this Ray has {what}, room for {room}; lower "
                "one of them"
            )
        return cls(asked or room, each, int(has_gpu))


class RayExecutor(Executor[Facts], Generic[Facts]):
    """Workers of a Ray that is connected to. `note` is told of those that die, and of cells that none lives through."""

    def __init__(self, options: Options, asked: int | None, note: Callable[[str], None]) -> None:
        """Start the workers; `asked` is how many. Raises: WindlassError for what cannot be honoured."""
        crew = Crew.of(asked, options.threads, options.device)
        device = "cuda" if crew.gpus else options.device
        self._options, self._note = replace(options, threads=crew.threads, device=device), note
        kind = ray.remote(num_cpus=crew.threads, num_gpus=crew.gpus, max_restarts=0, max_task_retries=0)
        self._kind: Any = kind(Worker)
        self._workers = {each: self._loading(each) for each in (self._kind.remote() for _ in range(crew.workers))}
        self._facts: Facts | None = None

    @property
    def facts(self) -> Facts:
        if self._facts is None:
            first = next(iter(self._workers))
            try:
                ray.get(self._workers[first])
                self._facts = ray.get(first.facts.remote())
            except RayTaskError as error:
                raise _told(error) from error
            except RayActorError as error:
                raise _lost_at_start() from error
        return self._facts

    def measure(
        self, cases: Sequence[CasePlan], batch: int, started: Started
    ) -> Iterator[tuple[Sequence[CasePlan], list[Case]]]:
        cells = Cells.of(cases, batch)
        running: Running = {loaded: (each, None) for each, loaded in self._workers.items()}
        while not cells.is_empty or any(cell for _, cell in running.values()):
            if not running:
                raise _lost_at_start()
            try:
                [ready], _ = ray.wait(list(running))
            except KeyboardInterrupt:
                yield from _finished(running)
                raise
            worker, cell = running.pop(ready)
            try:
                result = ray.get(ready)
            except RayTaskError as error:
                raise _told(error) from error
            except RayActorError:
                self._replace(worker, cell, cells, running)
            else:
                if cell is not None:
                    yield cell.cases, result
            for idle in [each for each in self._workers if all(each is not busy for busy, _ in running.values())]:
                following = cells.next_of(idle)
                if following is not None:
                    started(following.cases[0])
                    names = [case.identities[0] for case in following.cases]
                    running[idle.measured.remote(names, batch)] = idle, following

    def _replace(self, worker: Any, cell: Cell | None, cells: Cells, running: Running) -> None:
        """Start another worker, unless this one died while it loaded the model: so would the next."""
        del self._workers[worker]
        if cell is None:
            self._note("a worker died while it loaded the model; the others go on")
            return
        if cells.died(worker, cell):
            self._note(f"a worker died; its cell goes to another: {cell.name}")
        else:
            self._note(f"windlass: error: {cell.deaths} workers died over this cell, which is left out: {cell.name}")
        new = self._kind.remote()
        self._workers[new] = self._loading(new)
        running[self._workers[new]] = new, None

    def _loading(self, worker: Any) -> Any:
        return worker.load.remote(self._options, str(Path.cwd()))


def _told(error: RayTaskError) -> BaseException:
    """What a worker raised, as if it had been raised here."""
    cause = error.cause
    return cause if isinstance(cause, WindlassError | MemoryError | RuntimeError) else error


def _finished(running: Running) -> Iterator[tuple[Sequence[CasePlan], list[Case]]]:
    """What is there at an interrupt."""
    ready, _ = ray.wait(list(running), num_returns=len(running), timeout=0)
    for each in ready:
        _, cell = running[each]
        if cell is not None:
            try:
                result = ray.get(each)
            except (RayTaskError, RayActorError):
                continue
            yield cell.cases, result


def _lost_at_start() -> UsageError:
    return UsageError("all workers died while they loaded the model; is there memory for one in each? lower --workers")
