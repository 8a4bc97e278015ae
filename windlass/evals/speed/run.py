"""`windlass bench`: how fast a model reads and writes behind texts of some length, for many settings in one run.

Rows take turns, so that any two of them were measured under the same conditions. Tokens are random,
and there is neither a tokenizer nor a sampler in what is timed, as in llama-bench.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from windlass.core.errors import UsageError
from windlass.core.units import in_units
from windlass.engine.graph import graph_for
from windlass.evals.speed.depth import bytes_held
from windlass.evals.speed.rows import BenchRow, rows_of
from windlass.evals.speed.shapes import SHAPES, random_model, shape_of
from windlass.evals.speed.table import Conditions
from windlass.evals.speed.timer import Clock, Timer
from windlass.evals.speed.workloads import BenchLists, check_subject
from windlass.hf.attach import attach
from windlass.hf.layer_shapes import LayerShape, layer_shapes
from windlass.hf.load import check_place, device_of, dtype_of, load
from windlass.hf.model_name import shown_name
from windlass.hf.weights import labelled, parameter_count, quantize, stored_bytes

Progress = Callable[[str, int, int], None]  # what is run next, how many runs are done, and of how many


@dataclass(frozen=True)
class BenchRequest:
    """What the user asked for: a `model` by name, or a `shape` (of so many `layers`) with random weights."""

    model: str | None
    shape: str | None
    layers: int | None
    lists: BenchLists
    chunk: int
    repetitions: int
    dtype: str
    device: str = "cpu"
    weights: str = "auto"


class Benchmark:
    """The `rows` of a request, and what they have in common; `run` measures them.

    Raises: WindlassError for what cannot be honoured, before anything is measured.
    """

    def __init__(self, request: BenchRequest) -> None:
        check_subject(request.model, request.shape, request.layers, SHAPES)
        self.rows = rows_of(_with_graph(request), request.chunk)
        model, self.conditions, shapes = _opened(request, self.rows)
        self._timers = [Timer(model, shapes, row) for row in self.rows]
        self._repetitions = request.repetitions

    @property
    def runs(self) -> int:
        """How many runs count in all."""
        return len(self.rows) * self._repetitions

    def run(self, progress: Progress, clock: Clock = time.perf_counter) -> None:
        """Warm up every row once, then time every row once per round. What is timed is in the rows at once.

        `progress` is called between runs: nothing that it does is timed.
        """
        done, total = 0, len(self.rows) + self.runs
        for timer in self._timers:
            progress(f"warming up {timer.row.workload}", done, total)
            timer.warm_up(clock)
            done += 1
        for _ in range(self._repetitions):
            for timer in self._timers:
                progress(f"timing {timer.row.workload}", done, total)
                timer.row.samples_s.append(timer.run(clock))
                timer.take_back()
                done += 1


def check_memory(weights: int, caches: int, free: int | None) -> None:
    """Raises: UsageError when what is asked for exceeds the bytes that are `free` (None: not known)."""
    if free is not None and weights + caches > free:
        whole, of_weights, of_caches, rest = (in_units(size) for size in (weights + caches, weights, caches, free))
        raise UsageError(
            f"this needs about {whole} of memory (weights {of_weights}, the caches of all rows {of_caches}), but "
            f"{rest} are free; give a lower -d or --layers, or fewer values"
        )


def _with_graph(request: BenchRequest) -> BenchLists:
    """The lists, with a graph by default where there can be one. Raises: UsageError where one is asked for in vain."""
    device = device_of(request.device)
    has_graphs = graph_for(device) is not None
    asked = request.lists.graph
    if asked is None:
        return replace(request.lists, graph="on" if has_graphs else "off")
    if "on" in asked and not has_graphs:
        raise UsageError(f"--graph {asked}: on a {device.type} steps run as they come; use --device cuda, or off")
    return request.lists


def _opened(request: BenchRequest, rows: Sequence[BenchRow]) -> tuple[PreTrainedModel, Conditions, list[LayerShape]]:
    """The attached model, what to say of it, and what its layers hold."""
    asked = dtype_of(request.dtype)
    device = device_of(request.device)
    check_place(request.weights, device)
    if device.type != "cpu" and request.lists.threads is not None:
        raise UsageError(f"--threads are those of a CPU; leave it out, or use --device cpu instead of {device}")
    if request.shape is not None:
        shape, label = shape_of(request.shape, request.layers)
        dtype = asked if isinstance(asked, torch.dtype) else torch.bfloat16
        caches = cache_bytes(shape.cached_layers(dtype), rows)
        check_memory(shape.parameters * dtype.itemsize, caches, free_bytes(device))
        model = random_model(shape, dtype, device)
        quantize(model, request.weights)
        attach(model)
    else:
        model = load(str(request.model), request.dtype, request.device, request.weights)[0]
        label = shown_name(str(request.model))
    shapes = layer_shapes(model)
    if request.shape is None:
        check_memory(0, cache_bytes(shapes, rows), free_bytes(device))
    numbers = parameter_count(model)
    name = str(model.dtype).removeprefix("torch.")
    size = sum(map(stored_bytes, model.parameters()))
    conditions = Conditions(
        labelled(label, model), size, numbers, name, request.chunk, request.repetitions, gpu=gpu_name(device)
    )
    return model, conditions, shapes


def cache_bytes(shapes: Sequence[LayerShape], rows: Sequence[BenchRow]) -> int:
    """About what the caches of all rows take."""
    return sum(bytes_held(shape, row) for shape in shapes for row in rows)


def free_bytes(device: torch.device) -> int | None:
    """Memory that can be had there, without swapping; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), None)


def gpu_name(device: torch.device) -> str | None:
    """What the maker calls it; None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None
