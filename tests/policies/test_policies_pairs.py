"""Pairs from a table: the order of joining against a greedy loop, and the cells of a cache."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers.models import Models, Text, read
from tests.helpers.pair_tables import table_of
from windlass import KVCache, PolicyError, UsageError
from windlass.cache.options import CacheOptions, policy_of
from windlass.core.types import Scores
from windlass.policies import InGroups, Needs, Pairs, Policy, Recent, Slots, Smoothed, pairs
from windlass.testing import SLIDING_WINDOW, check_policy


@pytest.mark.parametrize("seed", range(6))
def test_turns_are_those_of_joining_the_cheapest_of_the_smallest(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pairs, "ROUNDS", 40)  # as many as rising costs need
    draw = torch.Generator().manual_seed(seed)
    positions = torch.randperm(60, generator=draw)[:31].sort().values[None, None]
    place = torch.randint(0, 12, (1, 1, 31), generator=draw)
    place[..., -1] = 0  # the last has none to join
    turn = pairs.merge_order(positions, place)[0, 0].tolist()
    at, costs = positions[0, 0].tolist(), place[0, 0].tolist()
    cells, greedy = list(range(31)), []
    while True:
        keys = []
        for before, cell, after in zip([None, *cells], cells, cells[1:], strict=False):
            size = at[after] - (-1 if before is None else at[before])
            if costs[cell]:
                keys.append((next(power for power in itertools.count() if 2**power >= size), costs[cell], cell))
        if not keys:
            break
        greedy.append(min(keys)[2])
        cells.remove(greedy[-1])
    assert [i for i, when in enumerate(turn) if when == pairs.UNMERGED] == [
        i for i, cost in enumerate(costs) if not cost
    ]
    joined = sorted((i for i in range(31) if costs[i]), key=lambda i: (turn[i], i))
    assert joined == greedy


def test_pairs_then_fours_and_what_is_in_no_pair_stays(attached_model: Models, tmp_path: Path) -> None:
    """By hand. 1 to 9 may be merged with their next tokens, the cheaper the smaller. 50 and above may not."""
    model = attached_model("llama")
    costs = {(a, b): a + b / 10 for a in range(1, 10) for b in range(1, 10)}
    policy = Pairs(table_of(tmp_path / "pairs.json", model, costs))
    #        0   1  2  3  4  5  6   7   8  9  10 11 12  13
    text = [60, 70, 5, 1, 3, 4, 50, 51, 2, 6, 9, 7, 80, 81]
    cells = {}
    for budget in range(13, 6, -1):
        cache = KVCache(model, budget, policy, sinks=1, window=1, merge="mean_count(next)")
        read(model, cache, torch.tensor([text]), 14)
        for layer in cache.layers:
            held = dict(zip(layer.positions[0, 0].tolist(), layer.table.state["merged"][0, 0].tolist(), strict=True))
        cells[budget] = {at: int(held[at]) + 1 for at in sorted(held) if at >= 0}
    assert {at for at, count in cells[13].items() if count == 2} == {4}  # 1 3
    assert {at for at, count in cells[12].items() if count == 2} == {4, 9}  # 2 6
    assert {at for at, count in cells[11].items() if count == 2} == {4, 9, 11}  # 9 7, the dearest, but not 3 4
    # Of the threes and fours 3 4 is cheapest, then 5 1: each lets a neighbour join the cell.
    assert {at: count for at, count in cells[10].items() if count > 1} == {5: 3, 9: 2, 11: 2}
    assert {at: count for at, count in cells[9].items() if count > 1} == {5: 4, 9: 2, 11: 2}
    assert {at: count for at, count in cells[8].items() if count > 1} == {5: 4, 11: 4}
    # Nothing is left to join: the oldest that is no sink goes.
    assert cells[7] == {0: 1, 5: 5, 6: 1, 7: 1, 11: 4, 12: 1, 13: 1}


def test_a_token_at_the_window_waits(attached_model: Models, tmp_path: Path) -> None:
    model = attached_model("llama")
    policy = Pairs(table_of(tmp_path / "pairs.json", model, {(3, 4): 0.1, (1, 2): 0.2}))
    cache = KVCache(model, 6, policy, sinks=0, window=2, merge="mean_count(next)")
    read(model, cache, torch.tensor([[9, 1, 2, 9, 3, 4, 8]]), 7)  # 4 is in the window
    layer = cache.layers[0]
    assert sorted(at for at in layer.positions[0, 0].tolist() if at >= 0) == [0, 2, 3, 4, 5, 6]
    read(model, cache, torch.tensor([[8]]), 1)
    assert sorted(at for at in layer.positions[0, 0].tolist() if at >= 0) == [0, 2, 3, 5, 6, 7]


def test_tokens_of_a_sliding_window_are_in_no_pair(attached_model: Models, tmp_path: Path) -> None:
    """A layer that held just its window kept no ids. Those of tokens that come after `compress` are known."""
    model = attached_model("mistral")
    table = table_of(tmp_path / "pairs.json", model, {(0, 0): 0.1, (3, 0): 0.2, (0, 3): 0.3, (3, 4): 0.4})
    cache = KVCache(model, SLIDING_WINDOW, Pairs(table), sinks=0, window=2, merge="mean_count(next)")
    read(model, cache, torch.tensor([[0, 5, 0, 0, 6, 0, 0, 0, 7, 0, 0, 0]]), 12)
    cache.compress(8)
    read(model, cache, torch.tensor([[3, 4, 8]]), 3)
    read(model, cache, torch.tensor([[9]]), 1)
    for layer in cache.layers:
        held = {at: slot for slot, at in enumerate(layer.positions[0, 0].tolist()) if at >= 0}
        ids = [int(layer.table.state["token"][0, 0, held[at]]) for at in sorted(held)]
        assert (sorted(held), ids) == ([7, 8, 9, 10, 11, 13, 14, 15], [-1] * 5 + [4, 8, 9])


def test_token_by_token_is_as_at_once(attached_model: Models, text: Text, tmp_path: Path) -> None:
    """A token's worth does not depend on the time when its neighbour became visible."""
    model, ids = attached_model("llama"), text(60)
    costs = {(a, b): (a * 31 + b * 17) % 101 / 50 for a, b in itertools.pairwise(ids[0].tolist())}
    policy = Pairs(table_of(tmp_path / "pairs.json", model, costs))
    for chunk in (1, 7):
        cache = KVCache(model, 40, policy, sinks=2, window=3, merge="mean_count(next)")
        read(model, cache, ids, chunk)
        for layer in cache.layers:
            held = layer.positions[0, 0] >= 0
            order = layer.positions[0, 0][held].argsort()
            place, merged = (layer.table.state[name][0, 0][held][order] for name in ("place", "merged"))
            ranking = sorted(costs.values())
            for at, found in zip(layer.positions[0, 0][held][order].tolist()[:-1], place.tolist(), strict=False):
                cost = costs[ids[0, at].item(), ids[0, at + 1].item()]
                assert abs(ranking.index(cost) + 1 - found) <= ranking.count(cost) - 1
            assert merged.sum() == 20
            assert merged.max() <= 1, "three in a cell while there are pairs"


@dataclass(frozen=True)
class Known(Policy):
    """Keeps tokens with large ids. Source: none. Differs: none."""

    needs = Needs(state=("token", "other"))

    def score(self, slots: Slots) -> Scores:
        return slots.state["token"] % 53


def assert_known(cache: KVCache, ids: Tensor) -> None:
    """Every slot has the id of its position."""
    for layer in cache.layers:
        held = layer.positions >= 0
        truth = ids[:, None].expand(-1, held.shape[1], -1).gather(-1, layer.positions.clamp(min=0).long())
        assert layer.table.state["token"][held].equal(truth[held].float())
        assert held.any()


def test_slots_know_their_tokens_whatever_happens_to_them(attached_model: Models, text: Text, tmp_path: Path) -> None:
    model, ids = attached_model("llama"), text(70, rows=2)
    cache = KVCache(model, 24, Known(), window=3, batch=2)
    read(model, cache, ids[:, :30], 10)
    assert_known(cache, ids)
    read(model, cache, text(8, rows=2, seed=1), 8)
    cache.rollback(8)
    assert_known(cache, ids)
    other = text(8, rows=2, seed=2)
    other[:, :3] = ids[:, 30:33]
    read(model, cache, other, 8)
    cache.rollback(5)  # a part of the step, which is taken again
    assert_known(cache, ids)  # before the policy evicts tokens with wrong state
    read(model, cache, ids[:, 33:50], 1)
    assert_known(cache, ids)
    cache.save(tmp_path / "cache")
    cache = KVCache.load(tmp_path / "cache", model, policy=Known())
    cache.select_rows(torch.tensor([1, 0]))
    assert_known(cache, ids.flip(0))
    cache.drop(40, 50)
    read(model, cache, ids.flip(0)[:, 40:], 4)
    assert_known(cache, ids.flip(0))


def test_padding_moves_no_id(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(20, rows=2)
    cache = KVCache(model, 14, Known(), window=3, batch=2)
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :6] = 0
    model(ids, attention_mask=mask, past_key_values=cache)
    assert_known(cache, torch.stack([ids[0], torch.cat((ids[1, 6:], ids[1, :6]))]))


def test_ids_travel_with_a_splice(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(30)
    caches = [KVCache(model, 30, Known()) for _ in range(2)]
    read(model, caches[0], ids[:, :12], 12)
    read(model, caches[1], ids[:, 12:], 18)
    caches[0].splice(caches[1])
    assert_known(caches[0], ids)
    without = KVCache(model, 30, policy=Recent())
    read(model, without, ids, 30)
    with pytest.raises(UsageError, match=r"splice: Known\(\) ranks by token ids, which the other cache's policy"):
        caches[0].splice(without)


def test_a_text_without_ids_is_refused(attached_model: Models, plain_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(9)
    cache = KVCache(model, 24, Known())
    with pytest.raises(UsageError, match=r"Known\(\) ranks by token ids. Call the model with input_ids, not inputs_em"):
        model(inputs_embeds=model.get_input_embeddings()(ids), past_key_values=cache)
    assert cache.tokens_seen == [0]
    read(model, cache, ids, 9)
    theirs = plain_model("llama")(ids, use_cache=True).past_key_values
    with pytest.raises(UsageError, match=r"from_rotated: Known\(\) ranks by token ids, which a DynamicCache does not"):
        KVCache.from_rotated(model, theirs, CacheOptions(24, Known()))


def test_it_is_made_from_a_file_and_prints_so(attached_model: Models, tmp_path: Path) -> None:
    path = table_of(tmp_path / "a (table), of 'mine'.json", attached_model("llama"), {(1, 2): 0.1})
    policy = Pairs(path)
    assert policy_of(f"pairs({path})") == policy == policy_of(f"Pairs( table={path!r} )")
    assert repr(policy) == f"Pairs(table={path!r})"
    assert policy_of(repr(policy)) == policy
    assert hash(policy) == hash(Pairs(path))
    for each in (policy, Smoothed(policy), InGroups(policy)):
        check_policy(each)
    with pytest.raises(PolicyError, match=r"policy 'pairs' needs a table: Pairs\(FILE\), with a file of `windlass cal"):
        policy_of("pairs")
    with pytest.raises(PolicyError, match=r"pair table nowhere.json cannot be read: No such file"):
        policy_of("Pairs(nowhere.json)")


def test_a_table_serves_the_model_that_it_was_measured_on(attached_model: Models, tmp_path: Path) -> None:
    policy = Pairs(table_of(tmp_path / "pairs.json", attached_model("llama"), {(1, 2): 0.1}))
    KVCache(attached_model("llama"), 20, Smoothed(policy))
    with pytest.raises(PolicyError, match=r"was measured on a LlamaForCausalLM, this is a Qwen3ForCausalLM\. Make one"):
        KVCache(attached_model("qwen3"), 20, policy)
    with pytest.raises(PolicyError, match=r"was measured on another LlamaForCausalLM\. Make one for this model"):
        KVCache(attached_model("llama_linear"), 20, InGroups(policy))
