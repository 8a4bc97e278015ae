"""Common parts of `python -m gpu`: sizes, time limits, timing and result lines."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from windlass.core.errors import UsageError
from windlass.engine.decode import wait_for
from windlass.evals.speed.measure import Clock

Line = dict[str, Any]
Work = Callable[[], object]
LEAST_ROUNDS, MOST_ROUNDS = 3, 9
LEAST_S = 0.01  # least time of one sample: a clock and a wait cost microseconds


@dataclass(frozen=True)
class Sizes:
    """The sizes that are measured."""

    shapes: tuple[str, ...] = ("1b", "8b")
    batches: tuple[int, ...] = (1, 16)
    slots: tuple[int, ...] = (1024, 4096, 16384, 65536)
    depths: tuple[int, ...] = (0, 4096, 16384, 65536)
    policy_depth: int = 16384
    peer_depths: tuple[int, ...] = (4096, 65536)
    recall_depth: int = 100_000
    budget: int = 4096
    chunk: int = 512
    tokens: int = 16  # written in a row, before the cache goes back
    prompt: int = 16384
    copied_bytes: int = 4 * 2**30
    layer_bytes: int = 2**29  # that several layers together hold at least, so that none stays in the GPU's own cache


TINY = Sizes(("tiny",), (1, 3), (64, 200), (0, 48, 200), 200, (48, 200), 2500, 40, 16, 3, 90, 2**22, 2**17)


class Timed(Protocol):
    """Work that is timed in turn and goes back after each run. `windlass.bench_timer.Timer` is one."""

    def warm_up(self, clock: Clock) -> None:
        """Get ready, with a run that does not count."""

    def run(self, clock: Clock) -> float:
        """Seconds of one run."""

    def take_back(self) -> None:
        """Be as before the run."""


class OutOfTime(Exception):
    """Raised when the rest would take longer than this part may."""


class Part:
    """One part of a run: appends its lines to a file as they come, and knows how long it may go on."""

    def __init__(self, name: str, device: torch.device, out: Path, seconds: float, is_tiny: bool) -> None:
        self.name, self.device, self.is_tiny = name, device, is_tiny
        self.sizes = TINY if is_tiny else Sizes()
        self._out, self._ends = out, time.monotonic() + seconds

    @property
    def is_gpu(self) -> bool:
        """Return True if this is the real thing."""
        return self.device.type == "cuda"

    @property
    def graphs(self) -> tuple[str, ...]:
        """The ways to run a step of ours, the best first."""
        return ("on", "off") if self.is_gpu else ("off",)

    @property
    def compiler(self) -> str:
        """The backend of `torch.compile` on a GPU, elsewhere a fast one."""
        return "inductor" if self.is_gpu else "eager"

    @property
    def left_s(self) -> float:
        """Seconds that this part still has."""
        return self._ends - time.monotonic()

    def write(self, kind: str, **line: object) -> None:
        """Append one line to the results."""
        append(self._out, {"part": self.name, "kind": kind, **line})

    def skip(self, what: str, why: str) -> None:
        """Tell, in the results and to whoever watches, what was not measured."""
        self.write("skipped", what=what, why=why)
        print(f"{self.name}: skipped {what}: {why}", flush=True)

    def attempt(self, what: str, measure: Work) -> None:
        """Measure, and skip work beyond the time, the memory or Windlass' limits."""
        if self.left_s <= 0:
            self.skip(what, "no time left for it")
            return
        try:
            measure()
        except OutOfTime:
            self.skip(what, "no time left to finish it")
        except UsageError as error:
            self.skip(what, str(error))
        except torch.OutOfMemoryError as error:
            self.skip(what, f"not enough memory: {str(error).splitlines()[0]}")
        if self.is_gpu:
            torch.cuda.empty_cache()

    def alternate(self, works: dict[str, Work], share: float = 1.0) -> dict[str, Line]:
        """Time all works in turn, round after round, in the `share` of the time that is left. See `summary`.

        Each runs twice before, and then so often in a row that a clock can tell.

        Raises: OutOfTime before so many rounds as a median needs.
        """
        ends = time.monotonic() + share * self.left_s
        repeats = {}
        for name, work in works.items():
            self.seconds(work)
            took = self.seconds(work)
            repeats[name] = 1 + int(LEAST_S / took) if self.is_gpu else 1
        samples: dict[str, list[float]] = {name: [] for name in works}
        while len(samples[next(iter(works))]) < MOST_ROUNDS:
            done = len(samples[next(iter(works))])
            if done >= LEAST_ROUNDS and time.monotonic() > ends:
                break
            if self.left_s <= 0:
                raise OutOfTime
            for name in list(works) if done % 2 else reversed(works):
                samples[name].append(self.seconds(works[name], repeats[name]) / repeats[name])
        return {name: summary(each) for name, each in samples.items()}

    def take_turns(self, timed: Sequence[Timed], share: float) -> tuple[list[list[float]], list[int | None]]:
        """Seconds of each round of things that go back after a run, in turn, and the most bytes that a run took.

        Those bytes come on top of what was allocated before the run (None on a CPU).

        Raises: OutOfTime, like `alternate`.
        """
        ends = time.monotonic() + share * self.left_s
        for each in timed:
            if self.left_s <= 0:
                raise OutOfTime
            each.warm_up(time.perf_counter)
        samples: list[list[float]] = [[] for _ in timed]
        most: list[int | None] = [0 if self.is_gpu else None for _ in timed]
        for turn in range(MOST_ROUNDS):
            if turn >= LEAST_ROUNDS and time.monotonic() > ends:
                break
            for index in range(len(timed)) if turn % 2 else reversed(range(len(timed))):
                if self.left_s <= 0:
                    raise OutOfTime
                before = most[index]
                if before is None:
                    samples[index].append(timed[index].run(time.perf_counter))
                else:
                    torch.cuda.reset_peak_memory_stats(self.device)
                    held = torch.cuda.memory_allocated(self.device)
                    samples[index].append(timed[index].run(time.perf_counter))
                    most[index] = max(before, torch.cuda.max_memory_allocated(self.device) - held)
                timed[index].take_back()
        return samples, most

    def seconds(self, work: Work, times: int = 1) -> float:
        """Seconds that the device takes for `work`, so many times."""
        wait_for(self.device)
        start = time.perf_counter()
        for _ in range(times):
            work()
        wait_for(self.device)
        return time.perf_counter() - start

    def recorded(self, work: Work) -> tuple[Work, str | None]:
        """`work` as a CUDA graph, so that the host's share is not timed, or `work` itself and the reason.

        Source: the steps to capture a graph, PyTorch's "CUDA semantics".
        """
        if not self.is_gpu:
            return work, "not a GPU"
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                work()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                work()
        except RuntimeError as error:
            torch.cuda.synchronize()
            return work, str(error).splitlines()[0]
        return graph.replay, None


def append(out: Path, line: Line) -> None:
    """Append one line. Earlier lines stay, even if a later one fails."""
    with out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line, ensure_ascii=False) + "\n")


def summary(samples_s: Sequence[float]) -> Line:
    """Median and quartiles of some timings."""
    low, median, high = statistics.quantiles(samples_s, n=4, method="inclusive")
    return {"median_s": median, "low_s": low, "high_s": high, "rounds": len(samples_s)}
