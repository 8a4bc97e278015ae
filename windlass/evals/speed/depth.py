"""A cache as a long text would have left it, filled with random keys and values instead of read."""

import torch
from torch import Tensor

from windlass.cache.append import append
from windlass.cache.history import History
from windlass.cache.rows import RowTable
from windlass.cache.slot_layer import SlotLayer
from windlass.core.rotary_index import EMPTY
from windlass.evals.speed.rows import BenchRow
from windlass.hf.kv_cache import KVCache
from windlass.hf.layer_shapes import LayerShape

GROWTH = 1.5  # of a cache without budget, see `SlotLayer`
BLOCK = 1024  # random tokens that are drawn; longer texts repeat them


def bytes_held(shape: LayerShape, row: BenchRow) -> int:
    """About what the cache of `row` takes in a layer of this shape."""
    work, budget = row.workload, row.setup.options.budget
    slots = GROWTH * (work.depth + work.tokens)
    if shape.most_visible is not None:
        budget = min(shape.most_visible, budget or shape.most_visible)
    if budget is not None:
        slots = budget + row.setup.options.chunk
    return int(work.batch * slots * shape.kv_heads * shape.bytes_per_token(row.setup.options.store))


def fill(cache: KVCache, shapes: list[LayerShape], depth: int) -> None:
    """Let each row of a cache stand behind a text of `depth` tokens, whatever it held; memory stays allocated.

    Speed does not depend on what is held, so keys and values are random, the same in every row and on every
    device, and the text is not read.
    Over budget, the sinks and the newest tokens are held, as after eviction under `Recent`, and what can be recalled is
    all of the text; state that a policy keeps is 0.
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
    """Let tokens that no slot holds be recalled, where that is asked for."""
    draw = torch.Generator().manual_seed(layer.index)
    for here in positions.split(BLOCK):
        keys, values = (
            torch.randn(1, shape.kv_heads, len(here), width, generator=draw)
            .to(positions.device, shape.dtype)
            .expand(batch, -1, -1, -1)
            for width in (shape.head_dim, shape.value_dim)
        )
        layer.table.remember(keys, values, here.expand(batch, -1), (len(here),) * batch)
