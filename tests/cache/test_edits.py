"""Sequence edits: integers change, bytes do not, and later reads are exact."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.helpers import models
from tests.helpers.caches import assert_same, held
from tests.helpers.models import Models, Text, logits_at, read
from windlass import KVCache, UsageError
from windlass.policies import H2O, KeyDiff, Policy, Recent, SnapKV

one_layer = models.one_layer  # fixture


@pytest.mark.slow
@pytest.mark.parametrize("policy", [Recent(), KeyDiff()], ids=repr)
def test_ten_thousand_shifts_leave_every_byte(attached_model: Models, text: Text, policy: Policy) -> None:
    model, ids = attached_model("llama"), text(50)
    cache, twin = (KVCache(model, budget=20, policy=policy) for _ in range(2))
    for one in (cache, twin):
        read(model, one, ids[:, :40], 40)
    before = [{name: tensor.clone() for name, tensor in layer.tensors().items()} for layer in cache.layers]
    generator = torch.Generator().manual_seed(3)
    for by in torch.randint(1, 1000, (5000,), generator=generator).tolist():
        cache.shift(0, 2000, by)
        cache.shift(by, 2000, -by)
    for layer, tensors in zip(cache.layers, before, strict=True):
        for name in ("keys", "values"):
            assert layer.tensors()[name].equal(tensors[name])
    torch.testing.assert_close(read(model, cache, ids[:, 40:], 10), read(model, twin, ids[:, 40:], 10), atol=0, rtol=0)


def test_a_shifted_text_reads_as_if_it_had_been_written_there(
    plain_model: Models, attached_model: Models, text: Text
) -> None:
    model, ids = attached_model("llama"), text(33)
    cache = KVCache(model)
    read(model, cache, ids[:, :25], 7)
    cache.shift(0, 25, 130)
    assert cache.next_positions == [155]
    with torch.no_grad():
        truth = plain_model("llama")(ids, position_ids=torch.arange(130, 163)[None]).logits[:, 25:]
    torch.testing.assert_close(read(model, cache, ids[:, 25:], 8), truth, atol=1e-5, rtol=0)


def test_drop_and_shift_make_the_text_that_is_left(
    one_layer: tuple[PreTrainedModel, PreTrainedModel], text: Text
) -> None:
    plain, attached = one_layer
    ids = text(31)[0].tolist()
    cache = KVCache(attached)
    read(attached, cache, torch.tensor([ids[:30]]), 30)
    cache.drop(8, 19)
    hole = read(attached, cache, torch.tensor([ids[30:]]), 1)[0, 0]
    torch.testing.assert_close(
        hole, logits_at(plain, ids[:8] + ids[19:], [*range(8), *range(19, 31)]), atol=1e-5, rtol=0
    )
    cache.rollback(1)
    cache.shift(19, 30, -11)
    closed = read(attached, cache, torch.tensor([ids[30:]]), 1)[0, 0]
    torch.testing.assert_close(closed, logits_at(plain, ids[:8] + ids[19:], [*range(20)]), atol=1e-5, rtol=0)
    assert held(cache) == [list(range(20))]


def test_divide_and_keep(one_layer: tuple[PreTrainedModel, PreTrainedModel], text: Text) -> None:
    plain, attached = one_layer
    ids = text(25)[0].tolist()
    cache = KVCache(attached)
    read(attached, cache, torch.tensor([ids[:24]]), 24)
    cache.divide(0, 24, 3)
    assert cache.next_positions == [8]
    mean = read(attached, cache, torch.tensor([ids[24:]]), 1)[0, 0]
    torch.testing.assert_close(mean, logits_at(plain, ids, [i // 3 for i in range(24)] + [8]), atol=1e-5, rtol=0)
    cache.keep(2, 5)
    assert held(cache) == [[2, 2, 2, 3, 3, 3, 4, 4, 4]]
    assert cache.next_positions == [5]


def test_copy_makes_a_row_a_twin_that_then_goes_its_own_way(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(40, rows=2)
    cache = KVCache(model, budget=12, policy=SnapKV(observed_queries=3), window=2, batch=2)
    read(model, cache, ids[:, :30], 30)
    cache.copy(0, 1)
    alone = KVCache(model, budget=12, policy=SnapKV(observed_queries=3), window=2)
    read(model, alone, ids[:1, :30], 30)
    for row in range(2):
        assert held(cache, row=row) == held(alone)
    ours = read(model, cache, torch.cat((ids[:1, 30:], ids[1:, 30:])), 1)
    torch.testing.assert_close(ours[:1], read(model, alone, ids[:1, 30:], 1), atol=1e-5, rtol=0)
    assert cache.tokens is not None
    assert cache.tokens[1] == ids[0, :30].tolist() + ids[1, 30:].tolist()


def test_splice_joins_two_texts_at_new_positions(
    one_layer: tuple[PreTrainedModel, PreTrainedModel], text: Text
) -> None:
    """Three chunks read apart, joined in another order, read as one text."""
    plain, attached = one_layer
    a, b, c, last = text(9)[0].tolist(), text(14, seed=1)[0].tolist(), text(5, seed=2)[0].tolist(), [7]
    parts = []
    for ids in (a, b, c):
        part = KVCache(attached)
        read(attached, part, torch.tensor([ids]), 4)
        parts.append(part)
    whole = parts[2]
    whole.splice(parts[0])
    whole.splice(parts[1])
    assert whole.next_positions == [28]
    assert held(whole) == [list(range(28))]
    ours = read(attached, whole, torch.tensor([last]), 1)[0, 0]
    torch.testing.assert_close(ours, logits_at(plain, c + a + b + last, [*range(29)]), atol=1e-5, rtol=0)
    assert whole.tokens == [c + a + b + last]


def test_a_splice_beyond_the_budget_is_evicted_at_the_next_step(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    cache, other = KVCache(model, budget=20, policy=KeyDiff(), batch=2), KVCache(model, budget=24, policy=KeyDiff())
    read(model, cache, text(40, rows=2), 40)
    read(model, other, text(60, seed=4), 60)
    cache.splice(other, row=1)
    assert cache.next_positions == [40, 100]
    assert [len(head) for head in held(cache, row=1)] == [44] * 3
    assert [len(head) for head in held(cache, row=0)] == [20] * 3
    read(model, cache, text(1, rows=2), 1)
    assert [len(head) for head in held(cache, row=1)] == [20] * 3


@pytest.mark.parametrize("edit", [lambda c: c.copy(0, 1), lambda c: c.select_rows(torch.tensor([0, 0]))])
def test_where_the_longest_row_is_replaced_later_steps_can_be_rolled_back(
    attached_model: Models, text: Text, edit: Callable[[KVCache], None]
) -> None:
    """Were the old length still counted, the next step would seem to evict more than the records hold."""
    model = attached_model("llama")
    cache, other = (KVCache(model, 20, KeyDiff(), window=5, batch=rows, rollback=3) for rows in (2, 1))
    read(model, cache, text(33, rows=2), 33)
    read(model, other, text(31, seed=4), 31)
    cache.splice(other, row=1)
    edit(cache)
    before = held(cache)
    read(model, cache, text(3, rows=2), 1)
    assert held(cache) != before
    cache.rollback(3)
    assert held(cache) == before


def test_rows_can_be_selected_and_repeated(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(30, rows=3)
    cache = KVCache(model, budget=12, policy=H2O(), window=2, batch=3)
    read(model, cache, ids[:, :25], 25)
    cache.select_rows(torch.tensor([2, 0, 2]))
    rows = [KVCache(model, budget=12, policy=H2O(), window=2) for _ in range(2)]
    for one, row in zip(rows, (2, 0), strict=True):
        read(model, one, ids[row : row + 1, :25], 25)
    ours = read(model, cache, ids[[2, 0, 2], 25:], 1)
    for row, one in ((0, rows[0]), (1, rows[1])):
        torch.testing.assert_close(
            ours[row : row + 1], read(model, one, ids[[2, 0]][row : row + 1, 25:], 1), atol=1e-5, rtol=0
        )
    torch.testing.assert_close(ours[0], ours[2], atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda c: c.shift(0, 10, -1), "would move position 0 before 0"),
        (lambda c: c.shift(5, 10, 3), "onto positions 8 to 12, which other tokens hold"),
        (lambda c: c.shift(5, 10, 30), "to 39, past the text's end at 20"),
        (lambda c: c.drop(5, 3), r"range \[5, 3\) ends before it starts"),
        (lambda c: c.divide(0, 5, 0), "by must be from 1 to 1073741824, got 0"),
        (lambda c: c.drop(0, 3, row=1), "row 1 is not one of the cache's 1 rows"),
        (lambda c: c.copy(0, 4), "target 4 is not one of"),
    ],
)
def test_edits_that_make_no_text_are_refused(
    attached_model: Models, text: Text, edit: Callable[[KVCache], None], words: str
) -> None:
    model = attached_model("llama")
    cache = KVCache(model)
    read(model, cache, text(20), 20)
    with pytest.raises(UsageError, match=words):
        edit(cache)
    assert held(cache) == [list(range(20))]


def test_a_row_of_the_cache_itself_can_be_spliced_where_tokens_are_merged(attached_model: Models, text: Text) -> None:
    """The slots are packed meanwhile, and counts follow their tokens."""
    model, ids = attached_model("llama"), text(30, rows=2)
    options: dict[str, Any] = {"budget": 9, "sinks": 0, "window": 1, "merge": "mean_count", "policy": KeyDiff()}
    cache, other = (KVCache(model, batch=2, chunk=20, **options) for _ in range(2))
    for each in (cache, other):
        read(model, each, ids, 30)
    cache.splice(cache, 0, 1)
    other.splice(copy.deepcopy(other), 0, 1)
    assert_same(cache, other)


def test_a_step_without_tokens_is_forgotten_like_any_other(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    cache = KVCache(model, budget=12, policy=H2O(), batch=3)
    read(model, cache, text(5, rows=3), 5)
    model(text(1, rows=3), attention_mask=torch.zeros(3, 1, dtype=torch.long), past_key_values=cache)
    cache.select_rows(torch.tensor([0, 1]))
    read(model, cache, text(2, rows=2), 2)
    with pytest.raises(UsageError, match="rollback of 3 tokens is more than"):
        cache.rollback(3)


def test_a_deep_copy_is_a_cache_of_its_own(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(50)
    cache = KVCache(model, budget=14, policy=H2O(), window=2)
    read(model, cache, ids[:, :40], 20)
    twin = copy.deepcopy(cache)
    ours = read(model, twin, ids[:, 40:], 1)
    assert cache.next_positions == [40]
    assert cache.tokens == ids[:, :40].tolist()
    other = copy.deepcopy(cache)
    read(model, other, ids[:, :7], 1)
    assert ours.equal(read(model, cache, ids[:, 40:], 1))
    assert twin.tokens == cache.tokens == ids.tolist()
    assert other.tokens == [[*ids[0, :40].tolist(), *ids[0, :7].tolist()]]


def test_a_second_thread_is_refused_while_a_pass_runs(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(8)
    inner, outer = KVCache(model), KVCache(model)
    handle = model.model.layers[0].register_forward_pre_hook(lambda *_: read(model, inner, ids, 8))
    try:
        with pytest.raises(UsageError, match="a pass with a KVCache runs in this model"):
            read(model, outer, ids, 8)
    finally:
        handle.remove()
    assert (inner.next_positions, outer.next_positions) == ([0], [0])
    assert read(model, outer, ids, 8).isfinite().all()


def test_a_shift_of_one_row_asks_nothing_of_the_others(attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    cache = KVCache(model, batch=2)
    with torch.no_grad():
        mask = torch.tensor([[1] * 10, [1] * 3 + [0] * 7])
        model(text(10, rows=2), attention_mask=mask, past_key_values=cache)
    cache.drop(0, 4, row=0)
    cache.shift(0, 10, -4, row=0)
    assert (held(cache), held(cache, row=1)) == ([list(range(6))], [[0, 1, 2]])
    assert cache.next_positions == [6, 3]
    with pytest.raises(UsageError, match="move the end of the text to -1, before 0"):
        cache.shift(0, 10, -4, row=1)


def test_the_end_of_a_text_stays_behind_its_tokens(attached_model: Models, text: Text) -> None:
    """Positions that would put the next token on an old one, or before it, are refused."""
    model = attached_model("llama")
    cache = KVCache(model)
    read(model, cache, text(20), 20)
    with pytest.raises(UsageError, match="divide by 4 would move the end of the text to 5, but a token stays at 11"):
        cache.divide(12, 20, 4)
    cache.drop(6, 8)
    with pytest.raises(UsageError, match="shift by -12 would move the end of the text to 8, but a token stays at 17"):
        cache.shift(18, 20, -12)
    cache.drop(5, 12)
    cache.divide(12, 20, 4)
    assert (held(cache), cache.next_positions) == ([[0, 1, 2, 3, 3, 3, 3, 3, 4, 4, 4, 4, 4]], [5])


@pytest.mark.parametrize("edit", ["drop", "keep"])
def test_the_end_goes_back_only_over_what_windows_hold(attached_model: Models, text: Text, edit: str) -> None:
    """Tokens that a sliding window would see again are evicted. Without evictions, an edit is a rollback."""
    model, ids = attached_model("qwen2"), text(70)
    long, short, twin = (KVCache(model) for _ in range(3))
    read(model, long, ids[:, :60], 20)
    with pytest.raises(UsageError, match=f"{edit} moves the end of the text back to 48, and layer .* has evicted"):
        long.drop(48, 60) if edit == "drop" else long.keep(0, 48)
    assert long.next_positions == [60]
    for cache in (short, twin):
        read(model, cache, ids[:, :6], 6)
    short.drop(4, 6) if edit == "drop" else short.keep(0, 4)
    twin.rollback(2)
    torch.testing.assert_close(read(model, short, ids[:, 6:9], 3), read(model, twin, ids[:, 6:9], 3))
    long.drop(10, 20)  # elsewhere nothing goes back
    assert long.next_positions == [60]


def test_no_shift_of_a_range_without_tokens_moves_the_end_before_a_token(attached_model: Models, text: Text) -> None:
    cache = KVCache(attached_model("llama"))
    read(attached_model("llama"), cache, text(20), 20)
    cache.drop(10, 19)
    cache.drop(19, 20)
    with pytest.raises(UsageError, match="would move the end of the text to 7, but a token stays at 9"):
        cache.shift(18, 19, -12)
    assert held(cache) == [[*range(10)]]
    assert cache.next_positions == [19]


@pytest.mark.parametrize(
    "edit", [lambda cache: cache.shift(10, 14, 20), lambda cache: cache.drop(9, 13)], ids=["shift", "drop"]
)
@pytest.mark.parametrize("tokens", [1, 3, 21])
def test_recent_reads_all_that_it_holds_across_a_gap(
    attached_model: Models, text: Text, edit: Callable[[KVCache], None], tokens: int
) -> None:
    """Tokens are newer than others by their number, whatever their positions, in one pass or one by one."""
    model, ids = attached_model("llama"), text(14 + tokens)
    whole, held = KVCache(model), KVCache(model, 15, "recent", sinks=4, window=4, positions="original")
    for cache in (whole, held):
        read(model, cache, ids[:, :14], 14)
        edit(cache)
    single = copy.deepcopy(held)
    expected = read(model, whole, ids[:, 14:15], 1)
    torch.testing.assert_close(read(model, copy.deepcopy(held), ids[:, 14:15], 1), expected, atol=1e-5, rtol=0)
    one_by_one, at_once = read(model, single, ids[:, 14:], 1), read(model, held, ids[:, 14:], tokens)
    torch.testing.assert_close(at_once, one_by_one, atol=1e-5, rtol=0)
