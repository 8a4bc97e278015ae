"""Options and contents of caches, and comparisons of two of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from windlass import KVCache
from windlass.cache.layer import SlotLayer
from windlass.policies import NAMES
from windlass.stores.full_precision import KEYS, VALUES, WRITTEN
from windlass.stores.full_precision import NAMES as FULL_PRECISION

MODES = ("original", "compact", "self_extend(3, 5)", "clamp(9)")
POLICIES = [policy() for policy in NAMES.values()]


def bytes_of_slots(cache: KVCache) -> int:
    """Bytes of all slots of a cache, their state and the policy's statistics of a layer, without records of steps."""
    return sum(tensor.untyped_storage().nbytes() for layer in cache.layers for tensor in layer.tensors().values())


def held(cache: KVCache, layer: int = 0, row: int = 0) -> list[list[int]]:
    """Positions held by each head of a layer."""
    return [sorted(p for p in head if p >= 0) for head in cache.layers[layer].positions[row].tolist()]


def assert_same(ours: KVCache, truth: KVCache) -> None:
    """Same tokens held, with the same keys, values and policy state, wherever the slots are."""
    assert ours.next_positions == truth.next_positions
    assert ours.tokens == truth.tokens
    assert ours.columns_seen == truth.columns_seen
    for mine, theirs in zip(ours.layers, truth.layers, strict=True):
        orders = []
        for layer in (mine, theirs):
            positions = layer.positions.where(layer.positions >= 0, 2**30)
            orders.append(positions.argsort(dim=-1, stable=True)[..., : int((layer.positions >= 0).sum(-1).max())])
        places = [
            layer.positions.gather(-1, order).clamp(min=-1) for layer, order in zip((mine, theirs), orders, strict=True)
        ]
        assert places[0].equal(places[1])
        if mine.store.full_precision.tensors:
            assert_same_ring(mine, theirs, orders, places[0] >= 0)
        for name, tensor in mine.tensors().items():
            if name in FULL_PRECISION:
                continue
            if name.startswith("statistics.") or name in mine.store.constant_names:
                torch.testing.assert_close(tensor, theirs.tensors()[name], atol=1e-5, rtol=1e-5, msg=name)
                continue
            picked, is_free = [], places[0] < 0  # heads may hold different numbers of tokens
            for source, order in ((tensor, orders[0]), (theirs.tensors()[name], orders[1])):
                index = order.expand(-1, source.shape[1], -1)
                picked.append(
                    source.gather(2, index[..., None].expand(-1, -1, -1, source.shape[3])).masked_fill(
                        is_free[..., None], 0
                    )
                    if source.ndim == 4
                    else source.gather(2, index).masked_fill(is_free, 0)
                )
            torch.testing.assert_close(picked[0], picked[1], atol=1e-5, rtol=1e-5, msg=f"{name} of layer {mine.index}")


def assert_same_ring(mine: SlotLayer, theirs: SlotLayer, orders: Sequence[Tensor], is_held: Tensor) -> None:
    """Same tokens in full precision, of those at `orders` that are held, from the same entries."""
    rings = [layer.store.full_precision for layer in (mine, theirs)]
    found = []
    for layer, ring, order in zip((mine, theirs), rings, orders, strict=True):
        index = ring.ring_index(layer.table.slots)
        assert index is not None
        found.append(index.gather(2, order.expand(-1, index.shape[1], -1)).where(is_held, -1))
    assert found[0].equal(found[1])
    assert rings[0].tensors[WRITTEN].equal(rings[1].tensors[WRITTEN])
    for name in (KEYS, VALUES):  # the last entry takes what nobody reads
        assert rings[0].tensors[name][:, :, :-1].equal(rings[1].tensors[name][:, :, :-1])


def contents(cache: KVCache, row: int = 0) -> list[Tensor]:
    """Positions, keys and values of a row, layer by layer, in the order of its text."""
    found = []
    for layer in cache.layers:
        if not layer.is_empty:
            positions = layer.positions[row, 0]
            order = positions.where(positions >= 0, 2**30).argsort(stable=True)[: int((positions >= 0).sum())]
            found += [positions[order], layer.store.keys()[row][:, order], layer.store.values()[row][:, order]]
    return found


def assert_holds(cache: KVCache, truth: Sequence[Tensor], row: int = 0, tolerance: float = 0.0) -> None:
    ours = contents(cache, row)
    assert len(ours) == len(truth)
    for mine, theirs in zip(ours, truth, strict=True):
        torch.testing.assert_close(mine, theirs, atol=tolerance, rtol=0)
