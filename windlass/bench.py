"""`windlass bench`: how fast a model reads and writes behind texts of some length, for many settings in one run.

Rows take turns, so that any two of them were measured under the same conditions. Tokens are random,
and there is neither a tokenizer nor a sampler in what is timed, as in llama-bench.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

from windlass.bench_depth import LayerShape, fill, layer_shapes
from windlass.bench_grid import Lists, Row, rows_of
from windlass.bench_shapes import random_model, shape_of
from windlass.bench_table import Conditions, as_json, footnote, ratios, table
from windlass.cache import KVCache
from windlass.describe import in_units
from windlass.engine import prefill
from windlass.errors import UsageError
from windlass.hf import attach, vocabulary_of
from windlass.open_model import DTYPES, open_model
from windlass.rotated import RotatedStorage
from windlass.terminal import INTERRUPTED, note, progress, say

Clock = Callable[[], float]


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


def bench(options: Options, is_json: bool, clock: Clock = time.perf_counter) -> int:
    """Measure all rows in turn and show them; returns the exit code. Ctrl-C shows what was measured.

    `output` gets one JSON object per row after what is already there.

    Raises: WindlassError for what cannot be honoured, before anything is measured.
    """
    if (options.model is None) == (options.shape is None):
        raise UsageError("give either a model or --shape with one of its names")
    rows = rows_of(options.lists, options.chunk)
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


class Timer:
    """Runs one row, on a cache of its own that goes back to the row's depth after each run."""

    def __init__(self, model: PreTrainedModel, shapes: list[LayerShape], row: Row, chunk: int) -> None:
        self.row = row
        self._model, self._shapes = model, shapes
        settings = row.settings
        kind = RotatedStorage if settings.storage == "rotated" else KVCache
        self.cache = kind(
            model,
            budget=settings.budget,
            policy=settings.policy,
            chunk=chunk,
            positions=settings.positions,
            store=settings.store,
        )
        draw = torch.Generator().manual_seed(0)
        self._ids: list[int] = torch.randint(vocabulary_of(model), (row.task.tokens,), generator=draw).tolist()

    def warm_up(self, clock: Clock) -> None:
        """Fill the cache, then one run that does not count."""
        self._refill()
        self.run(clock)
        self.take_back()
        if not self.row.task.is_prompt:
            self.row.bytes_per_token = weight_bytes(self._model) + self._bytes_read()

    def run(self, clock: Clock) -> float:
        """Seconds that the row's task takes."""
        torch.set_num_threads(self.row.settings.threads)
        pieces = [self._ids] if self.row.task.is_prompt else [[token] for token in self._ids]
        started = clock()
        for piece in pieces:
            prefill(self._model, self.cache, [piece])
        return clock() - started

    def take_back(self) -> None:
        """Let the cache be as before the run, or fill it anew where that cannot be taken back."""
        try:
            self.cache.rollback(self.row.task.tokens)
        except UsageError:
            self._refill()

    def _refill(self) -> None:
        torch.set_num_threads(self.row.settings.threads)
        fill(self.cache, self._shapes, self.row.task.depth)
        if not self.row.task.is_prompt:
            # The first token after a prompt packs the slots; it belongs to none of the runs.
            prefill(self._model, self.cache, [self._ids[:1]])
            self.cache.rollback(1)

    def _bytes_read(self) -> float:
        """Keys, values and scales that a token of decode reads, as the mean over a run.

        Of a token that is held exactly, too, the exact copy is read, and its codes are not.
        """
        total = 0.0
        for layer in self.cache.layers:
            most = layer.most_held + self.row.task.tokens if layer.budget is None else layer.budget
            held = [min(layer.most_held + done, most) + 1 for done in range(self.row.task.tokens)]
            tokens = sum(held) / len(held)
            exact = min(tokens, layer.store.exact.sinks + layer.store.exact.newest)
            for part in (layer.store.held_keys(), layer.store.held_values()):
                coded = part.codes.nbytes + (0 if part.scales is None else part.scales.nbytes)
                copies = 0.0 if part.exact is None else exact * part.exact.nbytes / part.exact.shape[2]
                total += copies + (tokens - (exact if copies else 0)) * coded / layer.store.slots
        return total


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


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of weights that a token of decode reads: all but the input embedding, of which it reads one row.

    An embedding that is also the head counts, and so does every expert of a mixture.
    """
    total = sum(parameter.nbytes for parameter in model.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    if head is not None and head.weight is embedding:
        return total
    assert isinstance(embedding, torch.Tensor)
    return total - embedding.nbytes


def check_memory(weights: int, caches: int, free: int | None) -> None:
    """Raises: UsageError when what is asked for exceeds the bytes that are `free` (None: not known)."""
    if free is not None and weights + caches > free:
        whole, of_weights, of_caches, rest = (in_units(size) for size in (weights + caches, weights, caches, free))
        raise UsageError(
            f"this needs about {whole} of memory (weights {of_weights}, the caches of all rows {of_caches}), but "
            f"{rest} are free; give a lower -d or --layers, or fewer values"
        )


def _opened(options: Options, rows: Sequence[Row]) -> tuple[PreTrainedModel, Conditions, list[LayerShape]]:
    """The attached model, what to say of it, and what its layers hold."""
    if options.dtype not in DTYPES:
        raise UsageError(f"dtype {options.dtype!r} is unknown; use one of: {', '.join(DTYPES)}")
    if options.shape is not None:
        shape, label = shape_of(options.shape, options.layers)
        asked = DTYPES[options.dtype]
        dtype = asked if isinstance(asked, torch.dtype) else torch.bfloat16
        layers = [LayerShape(shape.kv_heads, shape.head_dim, shape.head_dim, dtype)] * shape.layers
        check_memory(shape.parameters * dtype.itemsize, _cache_bytes(layers, rows, options.chunk), _free_bytes())
        model = attach(random_model(shape, dtype))
    else:
        if options.layers is not None:
            raise UsageError("--layers goes with --shape; a model has the layers that it has")
        label = str(options.model)
        model = open_model(label, options.dtype)[0]
    shapes = layer_shapes(model)
    if options.shape is None:
        check_memory(0, _cache_bytes(shapes, rows, options.chunk), _free_bytes())
    parameters = list(model.parameters())
    numbers = sum(each.numel() for each in parameters)
    name = str(model.dtype).removeprefix("torch.")
    size = sum(each.nbytes for each in parameters)
    return model, Conditions(label, size, numbers, name, options.chunk, options.repetitions), shapes


def _cache_bytes(shapes: Sequence[LayerShape], rows: Sequence[Row], chunk: int) -> int:
    return sum(shape.bytes_held(row, chunk) for shape in shapes for row in rows)


def _free_bytes() -> int | None:
    """Memory that can be had without swapping; None where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), None)


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
