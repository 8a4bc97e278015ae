"""`windlass bench`: how fast a model reads and writes behind texts of some length, for many settings in one run.

Rows take turns, so that any two of them were measured under the same conditions. Tokens are random,
and there is neither a tokenizer nor a sampler in what is timed, as in llama-bench.
"""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel

from windlass.cache.describe import in_units
from windlass.cli.terminal import INTERRUPTED, note, progress, say
from windlass.core.errors import UsageError
from windlass.engine.graph import graph_for
from windlass.evals.speed.depth import LayerShape, layer_shapes
from windlass.evals.speed.grid import Lists, Row, rows_of
from windlass.evals.speed.shapes import random_model, shape_of
from windlass.evals.speed.table import Conditions, as_json, footnote, ratios, table
from windlass.evals.speed.timer import Clock, Timer
from windlass.hf.attach import attach
from windlass.hf.load import DTYPES, device_of, open_model


@dataclass(frozen=True)
class Options:
    """What the user asked for: a `model` by name, or a `shape` (of so many `layers`) with random weights."""

    model: str | None
    shape: str | None
    layers: int | None
    lists: Lists
    chunk: int
    repetitions: int
    dtype: str
    output: Path | None
    device: str = "cpu"


def bench(options: Options, is_json: bool, clock: Clock = time.perf_counter) -> int:
    """Measure all rows in turn and show them; returns the exit code. Ctrl-C shows what was measured.

    `output` gets one JSON object per row after what is already there.

    Raises: WindlassError for what cannot be honoured, before anything is measured.
    """
    if (options.model is None) == (options.shape is None):
        raise UsageError("give either a model or --shape with one of its names")
    rows = rows_of(_with_graph(options), options.chunk)
    _check_output(options.output)
    model, conditions, shapes = _opened(options, rows)
    timers = [Timer(model, shapes, row, options.chunk) for row in rows]
    code = 0
    try:
        with Turns(timers, options.repetitions) as turns:
            turns.measure(clock)
    except KeyboardInterrupt:
        code = INTERRUPTED
    finally:
        # Whatever ended it: what was measured took minutes.
        _show([row for row in rows if row.samples_s], conditions, options.output, is_json)
    if code:
        timed = sum(len(row.samples_s) for row in rows)
        note(f"interrupted; {timed} of {len(rows) * options.repetitions} runs are done")
    return code


class Turns:
    """The rows of a run in turn, and a bar of it on stderr that is drawn between runs only."""

    def __init__(self, timers: Sequence[Timer], repetitions: int) -> None:
        self._timers, self._repetitions = timers, repetitions
        # A thread that draws would take its time from what is measured.
        self._progress = progress("runs", has_thread=False)
        self._task = self._progress.add_task("", total=len(timers) * (repetitions + 1))

    def __enter__(self) -> "Turns":
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def measure(self, clock: Clock) -> None:
        """Warm up every row once, then time every row once per round."""
        for timer in self._timers:
            self._tell("warming up", timer)
            timer.warm_up(clock)
            self._progress.advance(self._task)
        for _ in range(self._repetitions):
            for timer in self._timers:
                self._tell("timing", timer)
                timer.row.samples_s.append(timer.run(clock))
                timer.take_back()
                self._progress.advance(self._task)

    def _tell(self, what: str, timer: Timer) -> None:
        self._progress.update(self._task, description=f"{what} {timer.row.task}", refresh=True)


def check_memory(weights: int, caches: int, free: int | None) -> None:
    """Raises: UsageError when what is asked for exceeds the bytes that are `free` (None: not known)."""
    if free is not None and weights + caches > free:
        whole, of_weights, of_caches, rest = (in_units(size) for size in (weights + caches, weights, caches, free))
        raise UsageError(
            f"this needs about {whole} of memory (weights {of_weights}, the caches of all rows {of_caches}), but "
            f"{rest} are free; give a lower -d or --layers, or fewer values"
        )


def _with_graph(options: Options) -> Lists:
    """The lists, with a graph by default where there can be one. Raises: UsageError where one is asked for in vain."""
    has_graphs = graph_for(device_of(options.device)) is not None
    asked = options.lists.graph
    if asked is None:
        return replace(options.lists, graph="on" if has_graphs else "off")
    if "on" in asked and not has_graphs:
        raise UsageError(f"--graph {asked}: on a {options.device} steps run as they come; use --device cuda, or off")
    return options.lists


def _opened(options: Options, rows: Sequence[Row]) -> tuple[PreTrainedModel, Conditions, list[LayerShape]]:
    """The attached model, what to say of it, and what its layers hold."""
    if options.dtype not in DTYPES:
        raise UsageError(f"dtype {options.dtype!r} is unknown; use one of: {', '.join(DTYPES)}")
    device = device_of(options.device)
    if device.type != "cpu" and options.lists.threads is not None:
        raise UsageError(f"--threads are those of a CPU; leave it out, or use --device cpu instead of {options.device}")
    if options.shape is not None:
        shape, label = shape_of(options.shape, options.layers)
        asked = DTYPES[options.dtype]
        dtype = asked if isinstance(asked, torch.dtype) else torch.bfloat16
        layers = [LayerShape(shape.kv_heads, shape.head_dim, shape.head_dim, dtype)] * shape.layers
        check_memory(shape.parameters * dtype.itemsize, cache_bytes(layers, rows, options.chunk), free_bytes(device))
        model = attach(random_model(shape, dtype, device))
    else:
        if options.layers is not None:
            raise UsageError("--layers goes with --shape; a model has the layers that it has")
        label = str(options.model)
        model = open_model(label, options.dtype, options.device)[0]
    shapes = layer_shapes(model)
    if options.shape is None:
        check_memory(0, cache_bytes(shapes, rows, options.chunk), free_bytes(device))
    parameters = list(model.parameters())
    numbers = sum(each.numel() for each in parameters)
    name = str(model.dtype).removeprefix("torch.")
    size = sum(each.nbytes for each in parameters)
    conditions = Conditions(label, size, numbers, name, options.chunk, options.repetitions, gpu=gpu_name(device))
    return model, conditions, shapes


def cache_bytes(shapes: Sequence[LayerShape], rows: Sequence[Row], chunk: int) -> int:
    """About what the caches of all rows take."""
    return sum(shape.bytes_held(row, chunk) for shape in shapes for row in rows)


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


def _check_output(output: Path | None) -> None:
    """Raises: UsageError when nothing can be written there: better now than after the run."""
    if output is not None:
        _append(output, "")


def _append(output: Path, lines: str) -> None:
    try:
        with output.open("a", encoding="utf-8") as file:
            file.write(lines)
    except OSError as error:
        raise UsageError(f"-o {output} cannot be written: {error.strerror}") from None


def _show(rows: Sequence[Row], conditions: Conditions, output: Path | None, is_json: bool) -> None:
    """The table and the ratios, or JSON objects, on stdout; JSON objects in the file."""
    if not rows:
        return
    lines = "".join(json.dumps(as_json(row, conditions), ensure_ascii=False) + "\n" for row in rows)
    if is_json:
        say(lines)
    else:
        tables = [table(rows, conditions), footnote(rows, conditions), *ratios(rows)]
        say("\n\n".join(tables) + "\n")
    if output is not None:
        _append(output, lines)
