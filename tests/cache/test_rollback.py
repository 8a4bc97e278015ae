"""Rollback: as if the tokens had never been written, evictions and policy state included."""

import pytest
import torch

from tests.helpers.caches import POLICIES, assert_same, held
from tests.helpers.models import Models, Text, read
from windlass import KVCache, UsageError
from windlass.policies import H2O, Policy, Recent


@pytest.mark.parametrize("taken", [1, 4, 7])
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_rollback_after_eviction_equals_never_having_written(
    attached_model: Models, text: Text, policy: Policy, taken: int
) -> None:
    """Draft tokens in one step, of which the last `taken` are refused."""
    model, ids = attached_model("llama"), text(70, rows=2)
    caches = [KVCache(model, budget=16, policy=policy, window=3, batch=2) for _ in range(2)]
    for cache in caches:
        for piece in ids[:, :50].split([30, 1, 1, 18], 1):
            read(model, cache, piece, piece.shape[1])
    read(model, caches[0], ids[:, 50:57], 7)
    caches[0].rollback(taken)
    if taken < 7:
        read(model, caches[1], ids[:, 50 : 57 - taken], 7)
    assert_same(*caches)
    after = ids[:, 57 - taken :]
    torch.testing.assert_close(read(model, caches[0], after, 1), read(model, caches[1], after, 1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_part_of_a_long_step_can_be_taken_back(attached_model: Models, text: Text, policy: Policy) -> None:
    """As assisted decoding does, whose first step is the whole prompt and the first draft."""
    model, ids = attached_model("llama"), text(60)
    caches = [KVCache(model, budget=14, policy=policy, window=2) for _ in range(2)]
    read(model, caches[0], ids[:, :48], 48)
    caches[0].rollback(2)
    caches[0].rollback(5)
    read(model, caches[1], ids[:, :41], 41)
    assert_same(*caches)


@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_single_token_steps_can_be_taken_back(attached_model: Models, text: Text, policy: Policy) -> None:
    model, ids = attached_model("llama"), text(60)
    caches = [KVCache(model, budget=14, policy=policy, window=2) for _ in range(2)]
    for cache in caches:
        read(model, cache, ids[:, :40], 20)
        read(model, cache, ids[:, 40:43], 1)
    read(model, caches[0], ids[:, 43:56], 1)
    caches[0].rollback(13)
    assert_same(*caches)


def test_rollback_of_a_sliding_window_model(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("qwen2"), text(60)
    caches = [KVCache(model) for _ in range(2)]
    for cache in caches:
        read(model, cache, ids[:, :40], 40)
        read(model, cache, ids[:, 40:42], 1)
    read(model, caches[0], ids[:, 42:50], 1)
    caches[0].rollback(8)
    assert_same(*caches)


def test_rows_take_back_what_each_must(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(45, rows=2)
    cache = KVCache(model, budget=14, policy=H2O(), window=2, batch=2)
    read(model, cache, ids[:, :38], 38)
    read(model, cache, ids[:, 38:], 7)
    cache.rollback([6, 2])
    for row, kept in enumerate((1, 5)):
        alone = KVCache(model, budget=14, policy=H2O(), window=2)
        read(model, alone, ids[row : row + 1, :38], 38)
        read(model, alone, ids[row : row + 1, 38 : 38 + kept], 7)
        assert held(cache, row=row) == held(alone)
        assert cache.next_positions[row] == 38 + kept


def test_a_rollback_before_anything_is_evicted_leaves_earlier_steps_their_records(
    attached_model: Models, text: Text
) -> None:
    """Two tokens go while there is room. Later ones push tokens out, and all of them can still be rolled back."""
    model, ids = attached_model("llama"), text(29)
    caches = [KVCache(model, budget=12, policy=Recent(), window=2) for _ in range(2)]
    for cache in caches:
        read(model, cache, ids[:, :4], 4)
    read(model, caches[0], ids[:, 4:11], 1)
    caches[0].rollback(2)
    read(model, caches[0], ids[:, 9:18], 1)
    caches[0].rollback(14)
    assert_same(*caches)
    after = ids[:, 4:]
    torch.testing.assert_close(read(model, caches[0], after, 1), read(model, caches[1], after, 1), atol=1e-5, rtol=0)


def test_rollback_too_far_is_refused_and_changes_nothing(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(45)
    for policy, allowed in ((H2O(), 17), (Recent(), 17)):
        cache = KVCache(model, budget=14, policy=policy, window=2)
        read(model, cache, ids[:, :20], 20)
        read(model, cache, ids[:, 20:], 1)
        before = held(cache)
        with pytest.raises(UsageError, match=f"rollback of {allowed + 1} tokens is more than layer 0"):
            cache.rollback(allowed + 1)
        assert held(cache) == before
        assert cache.next_positions == [45]
        cache.rollback(allowed)
        assert cache.next_positions == [45 - allowed]
    with pytest.raises(UsageError, match="rollback of 99 tokens, but row 0 is at position"):
        cache.rollback(99)
    with pytest.raises(UsageError, match="tokens must be from 0 to 1073741824, got -1"):
        cache.rollback(-1)
