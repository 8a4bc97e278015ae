"""Tokens that share a position after `divide`."""

import copy

import pytest
import torch

from tests.helpers.caches import assert_holds, contents, held
from tests.helpers.models import Models, Text, read
from tests.helpers.policies import ALL_POLICIES
from windlass import KVCache
from windlass.policies import H2O, KeyDiff, Policy, SnapKV


def permuted(cache: KVCache, seed: int) -> KVCache:
    """A twin whose tokens lie in other slots, each row and head in an order of its own, free slots between them."""
    twin = copy.deepcopy(cache)
    draw = torch.Generator().manual_seed(seed)
    for layer in twin.layers:
        layer.forget_steps(0)
        table = layer.table
        order = torch.rand(table.positions.shape, generator=draw).argsort(-1)
        table.store.rearrange(order, table.slots)
        table.positions = table.positions.gather(-1, order)
        table.state = {name: tensor.gather(-1, order) for name, tensor in table.state.items()}
    return twin


MERGES = [(KeyDiff(), "mean_count", "compact"), (H2O(), "mean_count(next)", "compact")]


@pytest.mark.parametrize(
    ("policy", "merge", "positions"),
    [*((policy, None, "compact") for policy in ALL_POLICIES), *MERGES, (SnapKV(), None, "original")],
    ids=str,
)
def test_tokens_that_share_a_position_keep_their_order_whatever_their_slots(
    attached_model: Models, text: Text, policy: Policy, merge: str | None, positions: str
) -> None:
    """Two caches that differ in slots alone are divided, and read on over budget, packed and divided again."""
    model, ids = attached_model("llama"), text(60, rows=2)
    cache = KVCache(
        model, 20, policy, sinks=2, window=3, positions=positions, batch=2, rollback=0, store="int8", merge=merge
    )
    read(model, cache, ids[:, :25], 25)
    read(model, cache, ids[:, 25:40], 1)
    twin = permuted(cache, 3)
    start = 40
    for stop, by in ((45, 30), (57, 7)):
        for each in (cache, twin):
            each.divide(0, 1000, by)
        assert_holds(twin, contents(cache))
        assert read(model, twin, ids[:, start:stop], 1).equal(read(model, cache, ids[:, start:stop], 1))
        assert read(model, twin, ids[:, stop : stop + 2], 2).equal(read(model, cache, ids[:, stop : stop + 2], 2))
        start = stop + 2


def test_a_divided_text_is_read_in_its_order(attached_model: Models, text: Text) -> None:
    """Under "compact" dividing changes no rank, so nothing that is read, though all tokens share a few positions."""
    model, ids = attached_model("llama"), text(115)
    cache = KVCache(model, budget=12, sinks=2, window=3, policy=KeyDiff(), positions="compact", rollback=0)
    read(model, cache, ids[:, :20], 20)
    read(model, cache, ids[:, 20:110], 1)
    twin = copy.deepcopy(cache)
    twin.divide(0, 1000, 40)
    assert {p for head in held(twin) for p in head} <= {0, 1, 2}
    ours, truth = read(model, twin, ids[:, 110:111], 1), read(model, cache, ids[:, 110:111], 1)
    torch.testing.assert_close(ours, truth, atol=1e-5, rtol=0)
