"""`windlass bench`: tokens per second behind texts of some lengths."""

import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from windlass.cache.history import History
from windlass.cache.layer import SlotLayer, append
from windlass.cache.rows import RowTable
from windlass.cache.state import CacheState
from windlass.core.errors import UsageError
from windlass.core.parse import in_units
from windlass.core.positions import EMPTY
from windlass.core.types import TokenIds, TokenMask
from windlass.engine.decode import Decoder, Sampler, graph_for, wait_for
from windlass.engine.generate import prefill
from windlass.engine.sampling import Sampling
from windlass.evals.speed.rows import SHAPES, BenchRow, random_model, rows_of, shape_of
from windlass.evals.speed.table import Conditions
from windlass.evals.speed.workloads import BenchLists, check_subject
from windlass.hf.attach import attach
from windlass.hf.forward import LayerShape, layer_shapes, vocabulary_of
from windlass.hf.kv_cache import KVCache
from windlass.hf.load import check_place, device_of, dtype_of, load
from windlass.hf.model_facts import shown_name
from windlass.hf.weights import labelled, parameter_count, quantize, stored_bytes, weight_bytes
from windlass.positions.modes import Auto, Original, PositionMode, position_mode

GROWTH = 1.5  # of a cache without budget, see `SlotLayer`
BLOCK = 1024  # random tokens, repeated in longer texts


def bytes_held(shape: LayerShape, row: BenchRow) -> int:
    """An estimate of the bytes that the cache of `row` takes in a layer of this shape."""
    work, budget = row.workload, row.setup.options.budget
    slots = GROWTH * (work.depth + work.tokens)
    if shape.most_visible is not None:
        budget = min(shape.most_visible, budget or shape.most_visible)
    if budget is not None:
        slots = budget + row.setup.options.chunk
    return int(work.batch * slots * shape.kv_heads * shape.bytes_per_token(row.setup.options.store))


def fill(cache: KVCache, shapes: list[LayerShape], depth: int) -> None:
    """Let each row of a cache stand behind a text of `depth` tokens, whatever it held. Memory stays allocated.

    Speed does not depend on the contents, so keys and values are random, the same in every row and on every device,
    and the text is not read.
    Over budget, the sinks and the newest tokens are held, as after eviction under `Recent`, and all of the text can be
    recalled. A policy's state is 0.
    """
    for layer, shape in zip(cache.layers, shapes, strict=True):
        if layer.table.recall is not None:
            layer.table.recall.clear()
        layer.edit(lambda positions: torch.full_like(positions, EMPTY))
        layer.history = History()
        if depth:
            _fill_layer(layer, shape, depth, cache)
    batch = cache.batch_size
    cache.rows = RowTable.after_prompt(batch, depth) if depth else RowTable.at_start(batch)


def _fill_layer(layer: SlotLayer, shape: LayerShape, depth: int, cache: KVCache) -> None:
    layer.use_sliding_window(shape.sliding_window, shape.attention_chunk)
    sinks, device = cache.limits.sinks, cache.device
    positions = torch.arange(depth, device=device)
    size = depth
    if layer.budget is not None:
        if depth > layer.budget:
            sinks = 0 if layer.rules.is_whole_window else sinks
            positions = torch.cat((positions[:sinks], positions[depth - layer.budget + sinks :]))
            layer.history = History(has_evicted=True)
            _remember(layer, shape, torch.arange(sinks, int(positions[sinks]), device=device), cache.batch_size)
        size = cache.chunk  # as a prompt comes, so that the slots are as many as after one
    draw = torch.Generator().manual_seed(layer.index)
    widest = max(shape.head_dim, shape.value_dim)
    block = torch.randn(2, 1, shape.kv_heads, BLOCK, widest, generator=draw).to(device, shape.dtype)
    keys, values = block.repeat(1, 1, 1, -(-len(positions) // BLOCK), 1).expand(-1, cache.batch_size, -1, -1, -1)
    for start in range(0, len(positions), size):
        here = slice(start, min(start + size, len(positions)))
        new_keys, new_values = keys[:, :, here, : shape.head_dim], values[:, :, here, : shape.value_dim]
        if shape.latent:
            new_values = new_keys[..., -shape.latent :]
        at = positions[here].expand(cache.batch_size, 1, -1)
        append(layer, new_keys, new_values, at)


def _remember(layer: SlotLayer, shape: LayerShape, positions: Tensor, batch: int) -> None:
    """Put tokens that no slot holds into the recall store, if there is one."""
    draw = torch.Generator().manual_seed(layer.index)
    for here in positions.split(BLOCK):
        keys, values = (
            torch.randn(1, shape.kv_heads, len(here), width, generator=draw)
            .to(positions.device, shape.dtype)
            .expand(batch, -1, -1, -1)
            for width in (shape.head_dim, shape.value_dim)
        )
        layer.table.remember(keys, values, here.expand(batch, -1), (len(here),) * batch)


HINT = "Use a KVCache, which stores keys un-rotated"


class RotatedStorage(KVCache):
    """A `KVCache` in all but one thing: the model's own rotary module rotates a key before it is stored.

    The same kernels read it and rotate nothing. So a run beside a `KVCache` shows the cost of rotating
    keys at every read. A stored key can be read at its own position only. Any call that would move
    it is refused, and so is padding. Policies that look at keys are given rotated ones.

    "auto" is "original" here, however long the text.

    Raises: UsageError for other positions, for a policy that keeps statistics of queries, which it would be shown
    rotated, for a model that rotates neighbouring channels, whose keys transformers lays out differently, and for a
    model with weights of norms after RoPE.
    """

    is_rotated = True

    def reset(self) -> None:
        self.positions = self.options.positions
        policy = self.options.policy
        if policy.needs.statistics:
            raise UsageError(
                f"policy {policy!r} keeps statistics of un-rotated queries, and with rotated storage queries come "
                f"rotated. {HINT}"
            )
        if any(rotary is not None and rotary.layout.is_interleaved for rotary in self.rotaries):
            raise UsageError(f"rotated storage is for models whose channel pairs are halves. {HINT}")
        if any(rotary is not None and rotary.norm_weights is not None for rotary in self.rotaries):
            raise UsageError(f"rotated storage is not for models with weights of norms after RoPE. {HINT}")
        super().reset()
        for layer in self.layers:
            layer.rotary = None

    @property
    def positions(self) -> PositionMode:
        """Always "original"."""
        return self.options.positions

    @positions.setter
    def positions(self, mode: str | PositionMode) -> None:
        self.options = replace(self.options, positions=_check_mode(position_mode(mode)))

    def begin(
        self,
        batch: int,
        tokens: int,
        mask: TokenMask | None,
        positions: Tensor | None,
        ids: TokenIds | None,
        axes: Tensor | None = None,
    ) -> None:
        """See `KVCache.begin`. The model counts columns, so these must be the positions.

        Raises: UsageError where they are not: padding, or rows rolled back to different lengths.
        """
        step = self.next_pass.step
        if (mask is not None and not bool(mask.all())) or (step is not None and not all(step.lengths)):
            raise UsageError(f"rotated storage takes no padding. {HINT}")
        if any(at != self.columns_seen for at in self.next_positions):
            raise UsageError(f"with rotated storage all rows must continue at {self.columns_seen}. {HINT}")
        super().begin(batch, tokens, mask, positions, ids, axes)

    def drop(self, start: int, end: int, row: int | None = None) -> None:
        if any(start < at <= end for at in self.next_positions):
            raise _moved("drop of the newest tokens")
        super().drop(start, end, row)

    def keep(self, start: int, end: int, row: int | None = None) -> None:
        if any(end < at for at in self.next_positions):
            raise _moved("keep without the newest tokens")
        super().keep(start, end, row)

    def shift(self, start: int, end: int, by: int, row: int | None = None) -> None:
        raise _moved("shift")

    def divide(self, start: int, end: int, by: int, row: int | None = None) -> None:
        raise _moved("divide")

    def splice(self, other: CacheState, source: int = 0, row: int = 0, at: int | None = None) -> None:
        raise _moved("splice")


def _check_mode(mode: PositionMode) -> PositionMode:
    if isinstance(mode, Auto):
        return Original()
    if not isinstance(mode, Original):
        raise UsageError(f'rotated storage reads at positions="original" only, got "{mode}". {HINT}')
    return mode


def _moved(edit: str) -> UsageError:
    return UsageError(f"{edit} would move positions, and rotated keys stay where they were stored. {HINT}")


Clock = Callable[[], float]

RECORDED: Final = 3  # steps before the timed ones: one in eager mode, one recorded, one replayed


class Timer:
    """Runs one row, on a cache of its own that goes back to the row's depth after each run."""

    def __init__(self, model: PreTrainedModel, shapes: list[LayerShape], row: BenchRow) -> None:
        self.row = row
        self._model, self._shapes = model, shapes
        kind = RotatedStorage if row.setup.storage == "rotated" else KVCache
        self.cache = kind.from_options(model, replace(row.setup.options, batch=row.workload.batch))
        draw = torch.Generator().manual_seed(0)
        size = row.workload.batch, row.workload.tokens
        self._ids: list[list[int]] = torch.randint(vocabulary_of(model), size, generator=draw).tolist()
        self._graph = None
        if row.setup.graph == "on" and not row.workload.is_prompt:
            self._graph = graph_for(self.cache.device)
            self._logits = torch.randn(row.workload.batch, vocabulary_of(model), generator=draw).to(self.cache.device)

    def warm_up(self, clock: Clock) -> None:
        """Fill the cache, then one run that does not count."""
        self._refill()
        self.run(clock)
        self.take_back()
        if not self.row.workload.is_prompt:
            self.row.bytes_per_token = (weight_bytes(self._model) + self._bytes_read()) / self.row.workload.batch

    def run(self, clock: Clock) -> float:
        """Seconds that the row's workload takes, until the device has done all of it."""
        torch.set_num_threads(self.row.setup.threads)
        work = self._begun()
        wait_for(self.cache.device)
        started = clock()
        work()
        wait_for(self.cache.device)
        return clock() - started

    def _begun(self) -> Callable[[], None]:
        """The function to time. Raises: UsageError for a step that cannot be recorded, though a graph is asked for."""
        if self.row.workload.is_prompt:
            return self._read
        if self._graph is None:
            return self._decode
        sampler = Sampler(Sampling(), self._ids, self.cache.device)
        decoding = Decoder(self._model, self.cache, sampler, self._logits, self._graph)

        def write(tokens: int) -> None:
            for _ in range(tokens):
                decoding.next_tokens()
                decoding.advance([True] * self.row.workload.batch, is_last=False)

        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            try:
                write(RECORDED)
            except UserWarning as error:
                raise UsageError(f"--graph on: {error}. Leave it out, or use off") from error
        return partial(write, self.row.workload.tokens)

    def _read(self) -> None:
        prefill(self._model, self.cache, self._ids)

    def _decode(self) -> None:
        for column in range(self.row.workload.tokens):
            prefill(self._model, self.cache, [ids[column : column + 1] for ids in self._ids])

    def take_back(self) -> None:
        """Let the cache be as before the run, or fill it anew where that cannot be taken back."""
        try:
            self.cache.rollback(self.row.workload.tokens + (0 if self._graph is None else RECORDED))
        except UsageError:
            self._refill()

    def _refill(self) -> None:
        torch.set_num_threads(self.row.setup.threads)
        fill(self.cache, self._shapes, self.row.workload.depth)
        if not self.row.workload.is_prompt:
            # The first token after a prompt packs the slots, so no run counts it.
            prefill(self._model, self.cache, [ids[:1] for ids in self._ids])
            self.cache.rollback(1)

    def _bytes_read(self) -> float:
        """Keys, values and scales of all texts that a step of decode reads, as the mean over a run.

        Of a token that is held in full precision, too, that copy is read, and its codes are not.
        """
        total = 0.0
        for layer in self.cache.layers:
            most = layer.table.occupancy_bound + self.row.workload.tokens if layer.budget is None else layer.budget
            held = [min(layer.table.occupancy_bound + done, most) + 1 for done in range(self.row.workload.tokens)]
            tokens = sum(held) / len(held)
            ring = layer.store.full_precision
            full_precision = min(tokens, ring.sinks + ring.newest)
            keys, values = layer.store.packed()
            for part in (keys, values) if values.last is None else (keys,):
                coded = part.data.nbytes + (0 if part.scales is None else part.scales.nbytes)
                copied = part.full_precision
                copies = 0.0 if copied is None else full_precision * copied.nbytes / copied.shape[2]
                total += copies + (tokens - (full_precision if copies else 0)) * coded / layer.store.slots
        return total


Progress = Callable[[str, int, int], None]  # the name of the next run, the number of runs done, and their total


@dataclass(frozen=True)
class BenchRequest:
    """A benchmark that a user asked for: a `model` by name, or a `shape` (of so many `layers`) with random weights."""

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
    """The `rows` of a request, and the conditions they share. `run` measures them.

    Raises: WindlassError for a request that cannot be honoured, before anything is measured.
    """

    def __init__(self, request: BenchRequest) -> None:
        check_subject(request.model, request.shape, request.layers, SHAPES)
        self.rows = rows_of(_with_graph(request), request.chunk)
        model, self.conditions, shapes = _opened(request, self.rows)
        self._timers = [Timer(model, shapes, row) for row in self.rows]
        self._repetitions = request.repetitions

    @property
    def runs(self) -> int:
        """The number of timed runs in all."""
        return len(self.rows) * self._repetitions

    def run(self, progress: Progress, clock: Clock = time.perf_counter) -> None:
        """Warm up every row once, then time every row once per round. Each sample is in its row at once.

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
    """Raises: UsageError when `weights` and `caches` exceed the bytes that are `free` (None: not known)."""
    if free is not None and weights + caches > free:
        whole, of_weights, of_caches, rest = (in_units(size) for size in (weights + caches, weights, caches, free))
        raise UsageError(
            f"this needs about {whole} of memory (weights {of_weights}, the caches of all rows {of_caches}), but "
            f"{rest} are free. Give a lower -d or --layers, or fewer values"
        )


def _with_graph(request: BenchRequest) -> BenchLists:
    """The lists, with a graph by default where there can be one. Raises: UsageError where one is asked for in vain."""
    device = device_of(request.device)
    has_graphs = graph_for(device) is not None
    asked = request.lists.graph
    if asked is None:
        return replace(request.lists, graph="on" if has_graphs else "off")
    if "on" in asked and not has_graphs:
        raise UsageError(f"--graph {asked}: on a {device.type} steps run eagerly. Use --device cuda, or off")
    return request.lists


def _opened(request: BenchRequest, rows: Sequence[BenchRow]) -> tuple[PreTrainedModel, Conditions, list[LayerShape]]:
    """The attached model, the conditions to report, and the shapes of its layers."""
    asked = dtype_of(request.dtype)
    device = device_of(request.device)
    check_place(request.weights, device)
    if device.type != "cpu" and request.lists.threads is not None:
        raise UsageError(f"--threads is for a CPU. Leave it out, or use --device cpu instead of {device}")
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
    """An estimate of the bytes that the caches of all rows take."""
    return sum(bytes_held(shape, row) for shape in shapes for row in rows)


def free_bytes(device: torch.device) -> int | None:
    """Bytes of memory free on a device, without swapping. None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable")), None)


def gpu_name(device: torch.device) -> str | None:
    """The GPU's name. None for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None
