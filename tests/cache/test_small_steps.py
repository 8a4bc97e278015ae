"""Decode does not depend on how many tokens come in one pass, and every token can be rolled back by itself."""

from itertools import product

import pytest
import torch
from torch import Tensor

from tests.helpers.caches import MODES, POLICIES, assert_same
from tests.helpers.models import Models, Text, read
from windlass import KVCache, UsageError
from windlass.core.step import AttentionCall
from windlass.policies import H2O, KeyDiff, Policy, Random, Smoothed

DECODE = [policy for policy in POLICIES if not isinstance(policy, Random)] + [Random(keep_prompt=False)]
"""`Random` otherwise depends on the tokens that came in one step."""


def both_ways(model: object, ids: Tensor, sizes: list[int], **options: object) -> None:
    """Read 40 tokens, then the rest one by one, or in passes of `sizes`. Compare logits and caches."""
    caches = [KVCache(model, sinks=2, window=3, **options) for _ in range(2)]  # type: ignore[arg-type]
    for cache in caches:
        read(model, cache, ids[:, :40], 40)  # type: ignore[arg-type]
    one_by_one = read(model, caches[0], ids[:, 40:], 1)  # type: ignore[arg-type]
    pieces = ids[:, 40:].split(sizes, 1)
    in_passes = torch.cat([read(model, caches[1], piece, piece.shape[1]) for piece in pieces], 1)  # type: ignore[arg-type]
    torch.testing.assert_close(in_passes, one_by_one, atol=1e-5, rtol=0)
    assert_same(caches[1], caches[0])


@pytest.mark.parametrize("policy", [*DECODE, Smoothed(H2O())], ids=repr)
def test_passes_of_few_tokens_are_single_tokens(attached_model: Models, text: Text, policy: Policy) -> None:
    both_ways(attached_model("llama"), text(64), [5, 16, 1, 2], budget=14, policy=policy)


def outputs(cache: KVCache, states: tuple[Tensor, Tensor, Tensor], sizes: list[int]) -> Tensor:
    """Outputs of the first layer's queries where queries, keys and values come in steps of `sizes`."""
    outs, start = [], 0
    for size in sizes:
        span = slice(start, start + size)
        ids = torch.zeros(1, size, dtype=torch.long)
        cache.begin(1, size, None, None, ids)
        queries, keys, values = (x[:, :, span] for x in states)
        outs.append(cache.attend(0, queries, keys, values, AttentionCall(0.5)))
        cache.commit()
        start = span.stop
    return torch.cat(outs, 2)


@pytest.mark.parametrize(
    ("budget", "store", "merge"),
    [
        *product([13, None], ["plain", "int8", "int4", "int4(sinks=2, newest=5)"], [None]),
        *product([13], ["plain", "int8", "int4"], ["mean_count"]),
    ],
)
def test_stores_and_merges(attached_model: Models, budget: int | None, store: str, merge: str | None) -> None:
    """The same keys, so that codes are the same, too. Without a budget the newest are others for each query."""
    model = attached_model("llama")
    config, generator = model.config, torch.Generator().manual_seed(4)
    heads = config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads
    states = [torch.randn(1, n, 57, config.head_dim, generator=generator) for n in heads]
    options = {"budget": budget, "sinks": 2, "window": 3, "policy": KeyDiff(), "store": store, "merge": merge}
    caches = [KVCache(model, **options) for _ in range(2)]  # type: ignore[arg-type]
    one_by_one = outputs(caches[0], (states[0], states[1], states[2]), [40] + [1] * 17)
    in_passes = outputs(caches[1], (states[0], states[1], states[2]), [40, 3, 9, 5])
    torch.testing.assert_close(in_passes, one_by_one, atol=1e-5, rtol=0)
    found = [cache.layers[0].positions.clamp(min=-1).sort(-1, descending=True).values[..., :40] for cache in caches]
    assert found[0].equal(found[1])


@pytest.mark.parametrize("mode", MODES)
def test_position_modes(attached_model: Models, text: Text, mode: str) -> None:
    both_ways(attached_model("mistral"), text(55), [6, 9], budget=11, policy=H2O(), positions=mode)


def test_padded_rows(attached_model: Models, text: Text) -> None:
    """Rows of different lengths in one pass: padding on either side, and a row that idles."""
    model, ids = attached_model("llama"), text(60, rows=3)
    mask = torch.tensor([[1] * 7, [0] * 3 + [1] * 4, [0] * 7], dtype=torch.long)
    mask[1, 6] = 0
    cache = KVCache(model, budget=13, policy=H2O(), window=3, batch=3)
    read(model, cache, ids[:, :41], 41)
    with torch.no_grad():
        ours = model(ids[:, 41:48], attention_mask=mask, past_key_values=cache).logits
    for row, (start, stop) in enumerate(((0, 7), (3, 6), (0, 0))):
        alone = KVCache(model, budget=13, policy=H2O(), window=3)
        read(model, alone, ids[row : row + 1, :41], 41)
        if stop:
            expected = read(model, alone, ids[row : row + 1, 41 + start : 41 + stop], 1)
            torch.testing.assert_close(ours[row : row + 1, start:stop], expected, atol=1e-5, rtol=0)
        after = ids[row : row + 1, 50:51]
        twin = KVCache(model, budget=13, policy=H2O(), window=3)
        twin.splice(cache, row)
        for mine, theirs in zip(twin.layers, alone.layers, strict=True):
            held = [layer.positions.sort(-1, descending=True).values[..., :13] for layer in (mine, theirs)]
            assert held[0].equal(held[1])
        assert alone.next_positions == twin.next_positions, after


@pytest.mark.parametrize("policy", DECODE, ids=repr)
def test_rows_roll_back_by_different_numbers_of_single_tokens(
    attached_model: Models, text: Text, policy: Policy
) -> None:
    """Each row equals the row alone, though their tokens share steps."""
    model, ids = attached_model("llama"), text(60, rows=3)
    cache = KVCache(model, budget=14, policy=policy, window=2, batch=3)
    twin = KVCache(model, budget=14, policy=policy, window=2, batch=3)
    for each in (cache, twin):
        read(model, each, ids[:, :40], 20)
        read(model, each, ids[:, 40:43], 1)
    read(model, cache, ids[:, 43:48], 1)
    read(model, cache, ids[:, 48:54], 6)
    counts = [8, 1, 3]
    cache.rollback(counts)
    mask = torch.tensor([[n < 11 - count for n in range(11)] for count in counts]).long()
    with torch.no_grad():
        for column in range(11):
            if mask[:, column].any():
                one = slice(43 + column, 44 + column)
                model(ids[:, one], attention_mask=mask[:, column : column + 1], past_key_values=twin)
    assert cache.next_positions == twin.next_positions == [46, 53, 51]
    for mine, theirs in zip(cache.layers, twin.layers, strict=True):
        held = [layer.positions.clamp(min=-1).sort(-1, descending=True).values[..., :14] for layer in (mine, theirs)]
        assert held[0].equal(held[1])
        for name in mine.table.state:
            sums = [layer.table.state[name].where(layer.positions >= 0, 0.0).sum(-1) for layer in (mine, theirs)]
            torch.testing.assert_close(*sums, atol=1e-4, rtol=1e-4)


def test_rollback_reaches_a_verification_pass_and_no_further(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(60)
    cache = KVCache(model, budget=14, policy=H2O(), window=2, rollback=3)
    read(model, cache, ids[:, :40], 40)
    read(model, cache, ids[:, 40:44], 1)
    read(model, cache, ids[:, 44:49], 5)
    with pytest.raises(UsageError, match="rollback of 9 tokens is more than"):
        cache.rollback(9)
    twin = KVCache(model, budget=14, policy=H2O(), window=2, rollback=3)
    read(model, twin, ids[:, :40], 40)
    read(model, twin, ids[:, 40:41], 1)
    cache.rollback(8)
    assert_same(cache, twin)
