"""Regressions: one small case for each past or possible error."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from tests.helpers.caches import bytes_of_slots, held
from tests.helpers.layers import BATCH, BUDGET, HEAD_DIM, KV_HEADS, LIMITS, SINKS, WINDOW, layer_step
from tests.helpers.models import Models, Text, masked, read
from windlass import KVCache, Sampling, UsageError
from windlass.cache.layer import SlotLayer
from windlass.cache.options import CacheOptions
from windlass.engine.decode import Sampler
from windlass.policies import H2O, KeyDiff, Policy, Random, Recent, Slots
from windlass.stores.formats import Plain


def test_slots_reserved_for_a_forgotten_step_stay_free(attached_model: Models, text: Text) -> None:
    """Steps of 16 and of 1, taken back now and then: reserved slots come free again, none is written twice."""
    model, ids = attached_model("llama"), text(200)[0].tolist()
    cache, at = KVCache(model, budget=20, policy=Recent()), 40
    read(model, cache, torch.tensor([ids[:40]]), 40)
    for _ in range(4):
        for tokens in (16, 1, 1):
            read(model, cache, torch.tensor([ids[at : at + tokens]]), tokens)
            at += tokens
        cache.rollback(2)
        at -= 2
        assert held(cache) == [[0, 1, 2, 3, *range(at - 16, at)]]


@pytest.mark.parametrize("policy", [Recent(), KeyDiff()], ids=repr)
@pytest.mark.parametrize("excess", [5, 24, 31])
def test_what_exceeds_the_budget_is_not_held_back_for_rollback(
    plain_model: Models, attached_model: Models, text: Text, policy: Policy, excess: int
) -> None:
    source, ids = DynamicCache(), text(20 + excess)
    with torch.no_grad():
        plain_model("llama")(ids, past_key_values=source)
    model = attached_model("llama")
    cache = KVCache.from_rotated(model, source, CacheOptions(budget=20, policy=policy))
    for token in text(20, seed=1).split(1, 1):
        read(model, cache, token, 1)
        assert all(len(head) == 20 for head in held(cache))


def test_a_plain_dynamic_cache_of_a_sliding_model_keeps_to_the_window(
    plain_model: Models, attached_model: Models, text: Text
) -> None:
    """`DynamicCache()` without a config does not know the window, but the model does."""
    source, ids = DynamicCache(), text(45)
    with torch.no_grad():
        plain_model("mistral")(ids[:, :39], past_key_values=source)
        truth = plain_model("mistral")(ids).logits[:, 39:]
    for policy in (Recent(), H2O()):
        cache = KVCache.from_rotated(attached_model("mistral"), source, CacheOptions(budget=20, policy=policy))
        ours = read(attached_model("mistral"), cache, ids[:, 39:], 2)
        torch.testing.assert_close(ours, truth, atol=1e-5, rtol=0)


def test_a_splice_takes_no_free_slots_along(attached_model: Models, text: Text) -> None:
    """After a drop the heads of a row hold different numbers of tokens."""
    model = attached_model("llama")
    cache, other = (KVCache(model, budget=24, policy=KeyDiff()) for _ in range(2))
    read(model, cache, text(15), 15)
    read(model, other, text(60, seed=4), 60)
    other.drop(10, 40)
    assert len({len(head) for head in held(other)}) > 1
    cache.splice(other)
    assert held(cache) == [[*range(15), *(15 + p for p in head)] for head in held(other)]


def test_a_splice_into_an_empty_cache_that_cannot_hold_it_is_refused(attached_model: Models, text: Text) -> None:
    other = KVCache(attached_model("llama"), budget=24, policy=KeyDiff())
    read(attached_model("llama"), other, text(60), 60)
    cache = KVCache(attached_model("llama"), budget=24, policy=Recent())
    with pytest.raises(UsageError, match="Make this cache with a policy that ranks per head"):
        cache.splice(other)
    assert cache.bytes_held == 0
    with pytest.raises(UsageError, match="made for another model"):
        KVCache(attached_model("qwen3")).splice(other)


def test_export_counts_what_each_row_holds(attached_model: Models, text: Text) -> None:
    """Rows filled one after the other can be exported, and rows of different lengths can't, in any mode."""
    model, ids = attached_model("llama"), text(5, rows=2)
    cache, ragged = KVCache(model, batch=2), KVCache(model, batch=2, positions="compact")
    with torch.no_grad():
        for mask in ([[1] * 5, [0] * 5], [[0] * 5, [1] * 5]):
            model(ids, attention_mask=torch.tensor(mask), past_key_values=cache)
        model(ids, attention_mask=torch.tensor([[1] * 5, [1, 1, 0, 0, 0]]), past_key_values=ragged)
    assert cache.to_rotated().get_seq_length() == 5
    with pytest.raises(UsageError, match="in every row and head"):
        ragged.to_rotated()


def test_compact_export_of_a_model_with_window_layers(plain_model: Models, attached_model: Models, text: Text) -> None:
    """All layers end at one position, whatever each of them holds."""
    model, ids = attached_model("qwen2"), text(61)
    cache = KVCache(model, budget=20, positions="compact", policy=Recent())
    read(model, cache, ids[:, :60], 20)
    with torch.no_grad():
        theirs = plain_model("qwen2")(ids[:, 60:], past_key_values=cache.to_rotated()).logits
    torch.testing.assert_close(read(model, cache, ids[:, 60:], 1), theirs, atol=1e-5, rtol=0)


def test_compact_asks_for_no_longer_table_than_what_is_held(
    plain_model: Models, attached_model: Models, text: Text
) -> None:
    """Free slots must not stretch a rotation that depends on the length."""
    ids = text(50)
    cache = KVCache(attached_model("llama_dynamic"), budget=60, positions="compact", policy=Recent())
    with torch.no_grad():
        truth = plain_model("llama_dynamic")(ids).logits
    torch.testing.assert_close(read(attached_model("llama_dynamic"), cache, ids, 50), truth, atol=1e-5, rtol=0)


def test_rollback_stops_at_an_edit(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    cache, other = KVCache(model), KVCache(model)
    read(model, other, text(14), 14)
    read(model, cache, text(24), 24)
    for edit in (
        lambda: cache.shift(0, 24, 100),
        lambda: cache.divide(0, 124, 3),
        lambda: cache.splice(other),
        lambda: cache.drop(2, 5),
        lambda: cache.keep(0, 50),
    ):
        edit()
        with pytest.raises(UsageError, match="was edited 0 tokens ago"):
            cache.rollback(1)
        end = cache.next_positions
        read(model, cache, text(20), 20)
        cache.rollback(20)
        assert cache.next_positions == end


def test_rollback_does_not_make_a_prompt_of_generated_tokens(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    caches = [KVCache(model, budget=14, policy=Random(), window=2) for _ in range(2)]
    for cache in caches:
        read(model, cache, text(8), 8)
        read(model, cache, text(5, seed=1), 1)
    read(model, caches[0], text(3, seed=2), 3)
    caches[0].rollback(3)
    for cache in caches:
        read(model, cache, text(30, seed=3), 1)
        assert cache.rows.prompt_ends == [8]
    assert held(caches[0]) == held(caches[1])


def test_a_row_that_idles_gets_no_longer_prompt(attached_model: Models, text: Text) -> None:
    model, cache = attached_model("llama"), KVCache(attached_model("llama"), batch=2)
    read(model, cache, text(6, rows=2), 6)
    read(model, cache, text(3, rows=2), 1)
    with torch.no_grad():
        model(text(4, rows=2), attention_mask=torch.tensor([[1] * 4, [0] * 4]), past_key_values=cache)
    assert cache.rows.prompt_ends == [13, 6]


def test_a_divided_text_goes_on_after_its_last_token(attached_model: Models, text: Text) -> None:
    cache = KVCache(attached_model("llama"))
    read(attached_model("llama"), cache, text(25), 25)
    cache.divide(0, 25, 3)
    assert held(cache)[0][-1] == 8
    assert cache.next_positions == [9]


def test_a_splice_counts_its_tokens(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    cache, other = KVCache(model), KVCache(model, budget=12, policy=Recent())
    read(model, cache, text(9), 9)
    read(model, other, text(30), 30)
    cache.splice(other)
    assert cache.tokens_seen == [39]


def test_a_layer_that_is_full_grows_without_loss(attached_model: Models, text: Text) -> None:
    cache = KVCache(attached_model("llama"))
    read(attached_model("llama"), cache, text(64), 64)
    assert cache.layers[0].store.slots == 64
    read(attached_model("llama"), cache, text(1), 1)
    assert held(cache) == [list(range(65))]


def test_taking_steps_back_costs_no_slots(attached_model: Models, text: Text) -> None:
    model, cache = attached_model("llama"), KVCache(attached_model("llama"))
    read(model, cache, text(30), 30)
    size = bytes_of_slots(cache)
    limited = SlotLayer(0, LIMITS, Broken(), None, Plain())
    states = torch.randn(BATCH, KV_HEADS, 8, HEAD_DIM)
    layer_step(limited, states.repeat_interleave(2, 1), states, states, 0, 8)
    for _ in range(10):
        read(model, cache, text(30), 30)
        cache.rollback(30)
        with pytest.raises(Exception, match="broken"):
            layer_step(limited, states.repeat_interleave(2, 1), states, states, 8, 16)
    assert bytes_of_slots(cache) == size
    assert limited.table.occupancy_bound == 8


class Broken(Policy):
    """Raises when asked. Source: none. Differs: all."""

    def score(self, slots: Slots) -> Tensor:
        raise ValueError("broken")


class Half(Policy):
    """NaN for even positions. Source: none. Differs: all."""

    def score(self, slots: Slots) -> Tensor:
        return slots.positions.float().masked_fill(slots.positions % 2 == 0, torch.nan)


def test_nan_ranks_lowest() -> None:
    layer = SlotLayer(0, LIMITS, Half(), None, Plain())
    states = torch.randn(BATCH, KV_HEADS, 30, HEAD_DIM)
    layer_step(layer, states.repeat_interleave(2, 1), states, states, 0, 30)
    odd = [p for p in range(SINKS, 30 - WINDOW) if p % 2][-(BUDGET - SINKS - WINDOW) :]
    for head in layer.positions.flatten(0, 1).tolist():
        assert sorted(p for p in head if p >= 0) == [*range(SINKS), *odd, *range(30 - WINDOW, 30)]


def test_sinks_that_the_window_has_left_behind_give_up_their_slots(
    plain_model: Models, attached_model: Models, text: Text
) -> None:
    """Budget 8 below a window of 11: once the sinks can't be seen, newer tokens take their place."""
    ids, model = text(40), attached_model("mistral")
    cache = KVCache(model, budget=8, policy=H2O(), sinks=3, window=2)
    read(model, cache, ids, 5)
    # Tokens that no later token can see go first, at the very step that hides it: 29 = 40 - 11.
    assert all(min(head) > 29 for head in held(cache))
    distance = torch.arange(11)[:, None] - torch.arange(11)[None]
    truth = masked(plain_model("mistral"), ids[:, :11], distance >= 0)
    fresh = KVCache(model, budget=8, policy=H2O(), sinks=3, window=2)
    torch.testing.assert_close(read(model, fresh, ids[:, :11], 11), truth, atol=1e-5, rtol=0)


def test_a_window_as_long_as_the_budget_is_held_whole(plain_model: Models, attached_model: Models, text: Text) -> None:
    ids = text(50)
    cache = KVCache(attached_model("mistral"), budget=11, policy=H2O(), sinks=3, window=2)
    with torch.no_grad():
        truth = plain_model("mistral")(ids).logits
    torch.testing.assert_close(read(attached_model("mistral"), cache, ids, 7), truth, atol=1e-5, rtol=0)


def test_a_copied_row_stands_where_its_source_does(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    cache = KVCache(model, budget=12, policy=H2O(), window=2, batch=2)
    with torch.no_grad():
        model(text(20, rows=2), attention_mask=torch.tensor([[1] * 20, [1] * 5 + [0] * 15]), past_key_values=cache)
    cache.copy(0, 1)
    assert cache.next_positions == [20, 20]
    for layer in cache.layers:
        assert layer.table.state["mass"][0].equal(layer.table.state["mass"][1])


def test_a_repetition_penalty_remembers_all_of_a_row() -> None:
    sampler = Sampler(Sampling(repetition_penalty=2.0), [[0, 1]], torch.device("cpu"))
    assert sampler.choose(torch.tensor([[3.0, 2.9, 2.0]])).tolist() == [[2]]


@dataclass(frozen=True)
class RotatedNorms(Policy):
    """Ranks by one channel of the rotated keys. Source: none. Differs: all."""

    def score(self, slots: Slots) -> torch.Tensor:
        return slots.rotated_keys()[..., 0]


def test_a_policy_that_asks_gets_the_keys_as_transformers_rotates_them(
    plain_model: Models, attached_model: Models, text: Text
) -> None:
    ids = text(40)
    with torch.no_grad():
        keys = plain_model("llama")(ids).past_key_values.layers[0].keys[0, :, :, 0]
    cache = KVCache(attached_model("llama"), budget=12, policy=RotatedNorms(), sinks=2, window=3)
    read(attached_model("llama"), cache, ids, 40)
    for head, channel in zip(held(cache), keys, strict=True):
        free = sorted(range(2, 37), key=lambda p: float(channel[p]), reverse=True)
        assert head == sorted([0, 1, 37, 38, 39, *free[:7]])


def test_a_short_pass_recalls_for_each_token_after_a_drop(attached_model: Models, text: Text) -> None:
    """Without evictions the pass was read in one piece, and all tokens read the choice of the newest ones."""
    model, ids = attached_model("llama"), text(54)
    outs = []
    for chunk in (4, 1):
        cache = KVCache(model, budget=14, policy=Recent(), sinks=2, window=3, recall=8, recall_store="plain")
        read(model, cache, ids[:, :50], 25)
        cache.drop(41, 49)
        outs.append(read(model, cache, ids[:, 50:], chunk))
    torch.testing.assert_close(*outs, atol=2e-5, rtol=0)
