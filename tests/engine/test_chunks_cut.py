"""Parts that were cut, caches with a budget, rows beside each other, text before and behind."""

import pytest
import torch

import windlass
from tests.helpers.joined import ORDER, SIZES, fresh, ids_of, joined, read_again, slots_in_order, texts
from tests.helpers.models import Models
from windlass import CacheOptions, KVCache, Shares, chunks
from windlass.policies import H2O, KeyDiff, Recent, SnapKV


def positions(cache: KVCache, layer: int, head: int = 0, row: int = 0) -> list[int]:
    held = cache.layers[layer].positions[row, head]
    return sorted(held[held >= 0].tolist())


def test_a_part_is_cut_once_all_of_it_was_read(attached_model: Models) -> None:
    model, (own,) = attached_model("llama"), texts(20, (37,))
    options = CacheOptions(budget=12, policy=KeyDiff(), sinks=2, window=3, chunk=5)
    part = chunks.encode(model, own, options)
    whole = KVCache.from_options(model, CacheOptions(policy=KeyDiff(), sinks=2, window=3))
    windlass.prefill(model, whole, [own])
    whole.compress(12)
    for layer in range(2):
        for head in range(3):
            kept = positions(part.cache, layer, head)
            assert kept == positions(whole, layer, head)
            assert len(kept) == 12
            assert {0, 1, 34, 35, 36} <= {*kept}
    assert part.bytes_held < chunks.encode(model, own, CacheOptions(policy=KeyDiff())).bytes_held / 2


@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
def test_only_what_is_left_is_read_again(attached_model: Models, family: str) -> None:
    """Tokens that a head has evicted stay evicted there, and the others are where they were."""
    model, own = attached_model(family), texts(21)
    options = CacheOptions(budget=14, policy=KeyDiff(), sinks=1, window=2)
    parts = [chunks.encode(model, own[at], options) for at in ORDER]
    target = CacheOptions(policy=KeyDiff())
    none, _ = joined(model, parts, "none", target)
    held = {at for layer in none.layers for at in layer.positions[layer.positions >= 0].tolist()}
    for mode in ("first(6)", "divergent(0.2)", "all"):
        cache, done = joined(model, parts, mode, target)
        assert done.recomputed
        assert {*done.recomputed} <= held - {*range(31)}
        for one, two in zip(none.layers, cache.layers, strict=True):
            for head in range(one.positions.shape[1]):
                at = one.index, head
                assert positions(none, *at) == positions(cache, *at)
            assert two.table.occupancy_bound == int((two.positions >= 0).sum(-1).max())
            is_new = torch.tensor([at in done.recomputed for at in positions(none, one.index)])
            before, after = (slots_in_order(each, one.index)["keys"][0, 0] for each in (none, cache))
            changed = (before != after).any(-1)
            assert not bool((changed & ~is_new).any()) or mode == "divergent(0.2)"
    assert done.recomputed == tuple(sorted(held - {*range(31)}))


def test_what_a_head_has_evicted_is_seen_by_itself_alone(attached_model: Models) -> None:
    """A token sees itself in a layer that does not hold it, and no other one of those."""
    model, (own, other) = attached_model("llama"), texts(22, (19, 23))
    parts = [chunks.encode(model, own), chunks.encode(model, other)]
    whole, _ = joined(model, parts, "none")
    lacking, _ = joined(model, parts, "none")
    whole.layers[1].edit(lambda at: at.masked_fill(at == 30, -1))
    lacking.layers[1].edit(lambda at: at.masked_fill(at == 25, -1))
    for cache in (whole, lacking):
        read_again(model, cache, {25: other[25 - 19]})
    ours = {name: each[:, :, :25] for name, each in slots_in_order(lacking, 1).items() if each.ndim == 4}
    truth = slots_in_order(whole, 1)
    assert all(each.equal(truth[name][:, :, :25]) for name, each in ours.items())
    assert 25 not in positions(lacking, 1)
    assert 25 in positions(whole, 1)


@pytest.mark.parametrize("policy", [KeyDiff(), SnapKV(observed_queries=3, pool=3), H2O(), Recent()], ids=str)
def test_a_budget_cuts_when_the_model_reads_on(attached_model: Models, policy: windlass.policies.Policy) -> None:
    """Until then the whole text is held, so tokens that are read again see all of it."""
    model, (*own, question) = attached_model("qwen3"), texts(23, (*SIZES, 6))
    options = CacheOptions(budget=40, policy=policy, sinks=2, window=4)
    parts = [chunks.encode(model, each, CacheOptions(policy=policy)) for each in own]
    cache, done = joined(model, parts, "all", options)
    assert done.tokens - len(done.recomputed) == 23
    assert positions(cache, 1) == [*range(80)]
    windlass.prefill(model, cache, [question])
    assert [len(positions(cache, layer)) for layer in range(2)] == [40, 40]
    assert {0, 1, 82, 83, 84, 85} <= {*positions(cache, 0)}
    if not isinstance(policy, Recent):  # whose layers see no further back than the budget
        again, _ = joined(model, parts, "all", options)
        truth = fresh(model, ids_of(parts), question[:1])
        torch.testing.assert_close(windlass.prefill(model, again, [question[:1]]), truth, atol=1e-5, rtol=0)


def test_a_row_beside_others(attached_model: Models) -> None:
    """Each row gets its own order of the parts. The tokens of other rows stay to the bit."""
    model, (*own, question) = attached_model("llama"), texts(24, (*SIZES, 5))
    parts = [chunks.encode(model, each) for each in own]
    cache = KVCache(model, batch=3)
    orders = [(3, 1), (2, 0, 3, 1), (0, 2)]
    for row, order in enumerate(orders):
        before = [slots_in_order(cache, layer, 0) for layer in range(2)] if row else []
        chunks.join(model, cache, [parts[at] for at in order], "all", row=row)
        for layer, held in enumerate(before):
            now = slots_in_order(cache, layer, 0)
            assert all(each.equal(now[name]) for name, each in held.items())
    answers = windlass.prefill(model, cache, [question] * 3)
    for row, order in enumerate(orders):
        truth = fresh(model, ids_of([parts[at] for at in order]), question)[0]
        torch.testing.assert_close(answers[row], truth, atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", ["none", "all"])
def test_text_before_and_behind(attached_model: Models, mode: str) -> None:
    """Parts go into the middle of a text. Later tokens keep their keys and values."""
    model, (start, own, other, end) = attached_model("llama"), texts(25, (11, 17, 6, 13))
    parts = [chunks.encode(model, own), chunks.encode(model, other)]
    cache = KVCache(model)
    windlass.prefill(model, cache, [start + end])
    behind = [slots_in_order(cache, layer) for layer in range(2)]
    done = chunks.join(model, cache, parts, mode, at=11)
    assert done.spans == ((11, 28), (28, 34))
    assert (cache.next_positions, cache.tokens) == ([47], [start + own + other + end])
    whole = KVCache(model)
    windlass.prefill(model, whole, [start + own + other + end])
    for layer in range(2):
        now, truth = slots_in_order(cache, layer), slots_in_order(whole, layer)
        assert now["positions"].tolist() == [[[*range(47)]]]
        assert all(now[name][:, :, 34:].equal(behind[layer][name][:, :, 11:]) for name in ("keys", "values"))
        if mode == "all":
            torch.testing.assert_close(now["values"][:, :, :34], truth["values"][:, :, :34], atol=2e-5, rtol=0)
    read_again(model, cache, dict(enumerate(end, 34)))  # and then all of it is a text read anew
    if mode == "all":
        for layer in range(2):
            now, truth = slots_in_order(cache, layer), slots_in_order(whole, layer)
            torch.testing.assert_close(now["values"], truth["values"], atol=2e-5, rtol=0)


def test_shares_of_heads_are_honoured(attached_model: Models) -> None:
    model, own = attached_model("llama"), texts(26, (21, 26))
    shares = Shares([[2.0, 0.5, 0.5], [1.0, 1.5, 0.5]])
    options = CacheOptions(budget=16, policy=KeyDiff(), sinks=1, window=2, shares=shares)
    parts = [chunks.encode(model, each, options) for each in own]
    cache, done = joined(model, parts, "all", options)
    assert done.recomputed
    assert [len(positions(cache, leaf)) for leaf in range(len(cache.layers))] == [
        sum(len(positions(part.cache, leaf)) for part in parts) for leaf in range(len(cache.layers))
    ]
    with pytest.raises(windlass.UsageError, match="shares"):
        joined(model, parts, "divergent(0.2)", options)
