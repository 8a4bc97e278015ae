"""Contents of a cache, to the bit, and passes that are interrupted at every line."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.helpers.interrupts import interrupted_at
from windlass import KVCache, kernels
from windlass.cache.recall import RecallStore
from windlass.core.positions import RESERVED


def content(cache: KVCache) -> dict[str, Any]:
    """Places of the rows, and held tokens in the order of the text: positions, keys, values, state."""
    found: dict[str, Any] = {"rows": cache.rows, "is in a pass": cache.is_in_step}
    for layer in cache.layers:
        table = layer.table
        found |= _recallable(layer.index, table.recall)
        if table.is_empty or not bool((table.positions >= 0).any()):
            continue
        order = kernels.argsort_positions(table.positions)[..., : int((table.positions >= 0).sum(-1).max())]
        positions = table.positions.gather(-1, order).clamp(min=-1)
        index, is_held = order.expand(-1, table.store.layout[0], -1), positions >= 0
        keys, values = (
            kernels.read(each, index) * is_held[..., None] for each in (table.store.keys(), table.store.values())
        )
        state = {name: part.gather(-1, order) * is_held for name, part in table.state.items()}
        held = {"positions": positions, "keys": keys, "values": values, **state, **table.statistics}
        found |= {f"{name} of layer {layer.index}": part.clone() for name, part in held.items()}
        found[f"count of layer {layer.index}"] = table.occupancy_bound
    return found


def _recallable(layer: int, recall: RecallStore | None) -> dict[str, Any]:
    """Tokens that a layer may recall, of each row, or whether there is memory for it if nothing was written."""
    if recall is None or recall.is_empty:
        return {}
    parts = recall.memory.filled(max(recall.lengths))
    return {
        f"{name} to recall of row {row} in layer {layer}": part[row, ..., :length, :].clone()
        for row, length in enumerate(recall.lengths)
        if length
        for name, part in (parts | {"positions": recall.positions[..., None]}).items()
    }


def is_same(ours: dict[str, Any], truth: dict[str, Any]) -> bool:
    """Return True if both are equal to the bit."""
    return ours.keys() == truth.keys() and all(
        part.equal(truth[name]) if isinstance(part, Tensor) else part == truth[name] for name, part in ours.items()
    )


def assert_close(ours: dict[str, Any], truth: dict[str, Any]) -> None:
    """Equal but for rounding: tokens in other slots are added up in another order."""
    assert ours.keys() == truth.keys()
    for name, part in ours.items():
        if isinstance(part, Tensor):
            torch.testing.assert_close(part, truth[name], atol=1e-5, rtol=1e-5, msg=name)
        else:
            assert part == truth[name]


def assert_nothing_leaks(cache: KVCache) -> None:
    """A slot is reserved for a record, and for nothing else."""
    for layer in cache.layers:
        reserved = torch.zeros_like(layer.positions, dtype=torch.bool)
        for record in layer.history.records:
            if record.evicted is not None and record.evicted_positions is not None:
                own = torch.zeros_like(reserved).scatter(-1, record.evicted, record.evicted_positions >= 0)
                reserved |= own
        assert ((layer.positions == RESERVED) == reserved).all()


def check_every_line(
    model: PreTrainedModel,
    cache: KVCache,
    work: Callable[[KVCache], object],
    stride: int = 1,
    may_be_done: bool = False,
) -> int:
    """Interrupt `work`, a pass, before every `stride`-th line, and at last not at all. Returns the number of lines.

    `may_be_done`: the pass may also have finished, as the interrupt came after its end.
    """
    names = [config._attn_implementation for config in (model.config, model.model.config)]
    before, twin, lines = content(cache), copy.deepcopy(cache), 1
    work(twin)
    after = content(twin)
    while interrupted_at(lines, lambda: work(cache)):
        now = content(cache)
        assert is_same(now, before) or (may_be_done and is_same(now, after)), lines
        assert_nothing_leaks(cache)
        assert [config._attn_implementation for config in (model.config, model.model.config)] == names, lines
        lines += stride
    assert_close(content(cache), after)
    return lines
