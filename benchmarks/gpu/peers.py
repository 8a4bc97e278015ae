"""Parts of `python -m gpu`: Windlass beside transformers' caches, on the same weights in one process and in turn.

transformers runs a `StaticCache` through `torch.compile(mode="reduce-overhead")`, which is what its `generate`
does, and a `DynamicCache` as it is. Each writes the same tokens behind a text of random keys and values.
"""

import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, StaticCache

import windlass
from gpu.decode import pair
from gpu.part import Part, Timed, summary
from windlass.core.errors import UsageError
from windlass.engine.decode import wait_for
from windlass.evals.speed.measure import Clock, Timer, check_memory, free_bytes
from windlass.evals.speed.rows import rows_of
from windlass.evals.speed.workloads import BenchLists
from windlass.hf.forward import LayerShape, layer_shapes

COMPILED_STEPS = 4  # until a step is compiled, recorded and replayed
CACHES = 8  # at most so many of the full text exist at once: four, and growing ones with their copies


def measure(part: Part, shape: str) -> None:
    """Every batch and depth."""
    plain, ours = pair(shape, part.device)
    windlass.attach(ours)
    mode = "reduce-overhead" if part.is_gpu else None
    step = torch.compile(plain.forward, backend=part.compiler, mode=mode, dynamic=False)
    models = Models(plain, ours, step, layer_shapes(ours))
    places = [(batch, depth) for batch in part.sizes.batches for depth in part.sizes.peer_depths]
    longest = 0.0
    for index, (batch, depth) in enumerate(places):
        what, started = f"peers of {shape}, batch {batch}, depth {depth}", part.left_s
        if started < longest:
            part.skip(what, f"{started:.0f} s are left, and compiling for one before took {longest:.0f} s")
            continue
        share = 1 / (len(places) - index)
        part.attempt(what, functools.partial(_measure, part, what, shape, models, batch, depth, share))
        longest = max(longest, started - part.left_s)
        torch.compiler.reset()


@dataclass(frozen=True)
class Models:
    """The same weights twice: as transformers has them, and attached."""

    plain: PreTrainedModel
    ours: PreTrainedModel
    compiled: Callable[..., object]
    shapes: list[LayerShape]


def _measure(part: Part, what: str, shape: str, models: Models, batch: int, depth: int, share: float) -> None:
    sizes = part.sizes
    text = sum(each.kv_heads * each.channels * each.dtype.itemsize for each in models.shapes)
    check_memory(0, CACHES * batch * depth * text, free_bytes(part.device))
    timed: dict[str, Timed] = {}
    budgets = ["all", str(sizes.budget)] if depth > sizes.budget else ["all"]
    for budget, graph in itertools.product(budgets, part.graphs):
        lists = BenchLists("0", str(sizes.tokens), str(depth), {"budget": budget}, batch=str(batch), graph=graph)
        [row] = rows_of(lists, sizes.chunk)
        timer, name = Timer(models.ours, models.shapes, row), f"windlass, budget {budget}, graph {graph}"
        try:
            timer.warm_up(time.perf_counter)
        except UsageError as error:
            part.skip(f"{what}, {name}", str(error))
        else:
            timed[name] = timer
    timed["transformers static, compiled"] = Static(models, part, batch, depth)
    timed["transformers dynamic"] = Dynamic(models, part, batch, depth)
    samples, step_bytes = part.take_turns(list(timed.values()), share)
    about = {"shape": shape, "batch": batch, "depth": depth, "tokens": sizes.tokens}
    for name, samples_s, most in zip(timed, samples, step_bytes, strict=True):
        rate = batch * sizes.tokens / summary(samples_s)["median_s"]
        part.write("peers", **about, peer=name, tokens_per_s=rate, step_bytes=most, **summary(samples_s))


class Transformers:
    """The common part of the two caches of transformers: a token per row, written again and again."""

    def __init__(self, models: Models, part: Part, batch: int, depth: int) -> None:
        self._models, self._depth, self._tokens = models, depth, part.sizes.tokens
        self._ids = torch.randint(models.plain.config.vocab_size, (batch, 1), device=part.device)

    def random_layer(self) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer for the whole text."""
        shape, batch = self._models.shapes[0], len(self._ids)
        size = batch, shape.kv_heads, self._depth, shape.head_dim
        keys, values = (torch.randn(size, device=self._ids.device, dtype=shape.dtype) for _ in range(2))
        return keys, values


class Static(Transformers):
    """Keys and values in tensors that are just long enough, and a compiled step."""

    def __init__(self, models: Models, part: Part, batch: int, depth: int) -> None:
        super().__init__(models, part, batch, depth)
        config = models.plain.config
        self._cache = StaticCache(config=config, max_cache_len=depth + max(self._tokens, COMPILED_STEPS))
        shape = models.shapes[0]
        self._cache.early_initialization(batch, shape.kv_heads, shape.head_dim, shape.dtype, part.device)
        layer: Any  # of StaticCache, which is typed as a list of any cache's layers
        for layer in self._cache.layers:
            layer.keys[:, :, :depth], layer.values[:, :, :depth] = self.random_layer()

    def warm_up(self, clock: Clock) -> None:
        self.take_back()
        self._write(COMPILED_STEPS)
        self.take_back()
        self.run(clock)
        self.take_back()

    def run(self, clock: Clock) -> float:
        wait_for(self._ids.device)
        started = clock()
        self._write(self._tokens)
        wait_for(self._ids.device)
        return clock() - started

    def take_back(self) -> None:
        """Go back to the end of the text. Written tokens stay in memory, unseen."""
        layer: Any
        for layer in self._cache.layers:
            layer.cumulative_length.fill_(self._depth)

    def _write(self, tokens: int) -> None:
        for _ in range(tokens):
            torch.compiler.cudagraph_mark_step_begin()
            self._models.compiled(input_ids=self._ids, past_key_values=self._cache, logits_to_keep=1)


class Dynamic(Transformers):
    """Keys and values that are concatenated at every step."""

    def __init__(self, models: Models, part: Part, batch: int, depth: int) -> None:
        super().__init__(models, part, batch, depth)
        self._cache = DynamicCache(config=models.plain.config)
        for layer in range(len(models.shapes)):
            self._cache.update(*self.random_layer(), layer)

    def warm_up(self, clock: Clock) -> None:
        self.run(clock)
        self.take_back()

    def run(self, clock: Clock) -> float:
        wait_for(self._ids.device)
        started = clock()
        for _ in range(self._tokens):
            self._models.plain(input_ids=self._ids, past_key_values=self._cache, logits_to_keep=1)
        wait_for(self._ids.device)
        return clock() - started

    def take_back(self) -> None:
        self._cache.crop(-self._tokens)
