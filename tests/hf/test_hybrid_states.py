"""States of recurrent layers: passes that end early, the last step rolled back, rows, edits, files, bytes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import windlass
from tests.helpers.hybrid_caches import (
    LIMITS,
    OF_CHUNKS,
    assert_close,
    assert_same,
    begun,
    each_kind,
    each_pass,
    held,
    step,
)
from tests.helpers.hybrids import KINDS, bound, plain
from tests.helpers.interrupts import interrupted_at
from tests.helpers.models import Text, given_cache, read
from windlass import KVCache, UnsupportedModel, UsageError
from windlass.cache.describe import bytes_by_part
from windlass.engine.generate import prefill
from windlass.testing import tiny_hybrid


@each_kind
@each_pass
def test_an_interrupt_leaves_the_cache_as_it_was(family: str, tokens: int, text: Text) -> None:
    cache, work = begun(family, text), step(family, text(tokens, rows=2, seed=8))
    before, twin, line = held(cache), copy.deepcopy(cache), 1
    work(twin)
    while interrupted_at(line, lambda: work(cache)):
        assert not cache.is_in_step
        assert_same(held(cache), before, line)
        line += 5 if (family, tokens) == ("lfm2", 1) else 61
    assert line > 200
    for name, each in held(cache).items():
        torch.testing.assert_close(each, held(twin)[name], atol=1e-5, rtol=1e-5)


@each_kind
def test_an_interrupted_first_pass_leaves_nothing(family: str, text: Text) -> None:
    cache, line = KVCache(bound(family), **LIMITS), 1
    work = step(family, text(9))
    while interrupted_at(line, lambda: work(cache)):
        assert all(state.is_empty for state in cache.recurrent)
        assert cache.tokens_seen == [0]
        line += 173
    fresh = KVCache(bound(family), **LIMITS)
    assert_close(step(family, text(4, seed=1))(cache), [work(fresh), step(family, text(4, seed=1))(fresh)][1])


@each_kind
@each_pass
def test_the_last_step_is_rolled_back(family: str, tokens: int, text: Text) -> None:
    cache, more, other = begun(family, text), text(tokens, rows=2, seed=8), text(6, rows=2, seed=9)
    before, twin = held(cache), copy.deepcopy(cache)
    step(family, more)(cache)
    cache.rollback(tokens)
    assert_same(held(cache), before)
    assert_close(step(family, other)(cache), step(family, other)(twin))


@each_kind
def test_one_row_of_the_last_step_is_rolled_back(family: str, text: Text) -> None:
    cache = begun(family, text)
    twin = copy.deepcopy(cache)
    step(family, text(4, rows=2, seed=8))(cache)
    cache.rollback([0, 4])
    step(family, text(4, rows=2, seed=8), torch.tensor([[1] * 4, [0] * 4]))(twin)
    assert_close(step(family, text(3, rows=2, seed=9))(cache), step(family, text(3, rows=2, seed=9))(twin))


def test_what_lies_further_back_can_not_be_rolled_back(text: Text) -> None:
    cache = begun("qwen3_next", text)
    step("qwen3_next", text(4, rows=2, seed=8))(cache)
    before = held(cache)
    for tokens in (3, 5, [4, 2]):
        with pytest.raises(
            UsageError, match=r"layer 0 \(linear_attention\) has copies of its state at 0, 26 tokens only"
        ):
            cache.rollback(tokens)
    assert_same(held(cache), before)
    cache.rollback(4)
    with pytest.raises(UsageError, match="has copies of its state at 0 tokens only"):
        cache.rollback(1)
    cache.reset()
    assert all(state.is_empty for state in cache.recurrent)


def test_a_first_pass_is_rolled_back_to_nothing(text: Text) -> None:
    cache = KVCache(bound("lfm2"))
    read(bound("lfm2"), cache, text(8), 8)
    cache.rollback(8)
    assert_close(read(bound("lfm2"), cache, text(9), 3), read(bound("lfm2"), KVCache(bound("lfm2")), text(9), 3))


EDITS: dict[str, Callable[[KVCache], object]] = {
    "drop": lambda cache: cache.drop(1, 3),
    "keep": lambda cache: cache.keep(1, 3),
    "shift": lambda cache: cache.shift(0, 99, 2),
    "divide": lambda cache: cache.divide(0, 99, 2),
    "splice": lambda cache: cache.splice(cache),
    "to_rotated": lambda cache: cache.to_rotated(),
}


@pytest.mark.parametrize("edit", EDITS)
def test_edits_that_a_state_can_not_honour_are_refused(edit: str, text: Text) -> None:
    cache = begun("lfm2", text)
    before = held(cache)
    with pytest.raises(UsageError, match=rf"^{edit}.*: layer 0 \(conv\) keeps a state"):
        EDITS[edit](cache)
    assert_same(held(cache), before)


def test_a_cache_of_transformers_is_not_taken_over(text: Text) -> None:
    with torch.no_grad():
        theirs = plain("lfm2")(text(5), use_cache=True).past_key_values
    with pytest.raises(UsageError, match="layer 0 of the DynamicCache is a LinearAttentionLayer"):
        KVCache.from_rotated(bound("lfm2"), theirs)


def test_a_policy_that_reads_twice_is_refused() -> None:
    with pytest.raises(UsageError, match=r"KVzip.* reads a text twice, and layer 0 \(conv\)"):
        KVCache(bound("lfm2"), 20, windlass.policies.KVzip(8))


@each_kind
def test_idle_rows_keep_their_states(family: str, text: Text) -> None:
    """Prompts of three lengths, then turns in which some rows idle, each as if it were alone."""
    model = bound(family)
    turns = [[text(n, seed=n).tolist()[0] for n in lengths] for lengths in ((19, 11, 4), (3, 9, 1))]
    cache = KVCache(model, 60, chunk=8, batch=3)
    ours = [prefill(model, cache, prompts) for prompts in turns]
    ids, mask = text(1, rows=3, seed=5), torch.tensor([[1], [0], [1]])
    ours.append(step(family, ids, mask)(cache)[:, 0])
    ours.append(step(family, ids)(cache)[:, 0])
    for row in range(3):
        alone = KVCache(model, 60)
        theirs = [prefill(model, alone, [prompts[row]])[0] for prompts in turns]
        for at in range(2):
            assert_close(ours[at][row], theirs[at], OF_CHUNKS)
        if row != 1:
            assert_close(ours[2][row], step(family, ids[row : row + 1])(alone)[0, 0], OF_CHUNKS)
        assert_close(ours[3][row], step(family, ids[row : row + 1])(alone)[0, 0], OF_CHUNKS)


@each_kind
def test_texts_of_the_engine_equal_each_alone(family: str, text: Text) -> None:
    model = bound(family)
    prompts = [text(n, seed=n).tolist()[0] for n in (21, 13)]
    cache = KVCache(model, 60, batch=2, chunk=6)
    logits = prefill(model, cache, prompts)
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            assert_close(logits[row], plain(family)(torch.tensor([prompt])).logits[0, -1], OF_CHUNKS)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1, 1, 1, 1], [1, 1, 0, 0]], "row 1 has padding between its tokens or behind them"),
        ([[1, 0, 1, 1], [1, 1, 1, 1]], "row 0 has padding between its tokens or behind them"),
        ([[1, 1, 1, 1], [0, 0, 1, 1]], "row 1 has padding after its first token"),
    ],
)
def test_other_padding_is_refused(mask: list[list[int]], message: str, text: Text) -> None:
    cache = begun("qwen3_next", text)
    before = held(cache)
    with pytest.raises(UsageError, match=message + r".* layer 0 \(linear_attention\)"):
        step("qwen3_next", text(4, rows=2), torch.tensor(mask))(cache)
    assert_same(held(cache), before)


@each_kind
def test_rows_are_copied_and_selected(family: str, text: Text) -> None:
    cache, ids = begun(family, text), text(5, rows=2, seed=6)
    truth = step(family, ids[[1, 1]])(copy.deepcopy(cache))[1]
    twin = copy.deepcopy(cache)
    twin.copy(1, 0)
    both = step(family, ids[[1, 1]])(twin)
    assert_close(both[0], truth)
    cache.select_rows(torch.tensor([1, 0, 1]))
    three = step(family, ids[[1, 0, 1]])(cache)
    assert_close(three[0], truth)
    assert_close(three[2], truth)


def test_compress_leaves_states(text: Text) -> None:
    cache = begun("qwen3_next", text)
    before = {name: each for name, each in held(cache).items() if "linear" in name}
    cache.compress(8)
    after = held(cache)
    assert_same({name: after[name] for name in before}, before)
    with pytest.raises(UsageError, match="edited 0 tokens ago"):
        cache.rollback(1)


@pytest.mark.parametrize(
    "options", [{"store": "int8"}, {"merge": "mean_count"}, {"positions": "compact"}, {"policy": "h2o"}]
)
def test_options_of_the_cache_work_on_attention_layers(options: dict[str, Any], text: Text) -> None:
    for family in KINDS:
        cache = KVCache(bound(family), 20, **options)
        logits = read(bound(family), cache, text(60), 13)
        assert logits.isfinite().all()
        assert all(int((layer.positions >= 0).sum(-1).max()) <= 20 for layer in cache.layers)


@each_kind
def test_bytes_count_every_storage_once(family: str, text: Text) -> None:
    cache = begun(family, text)
    parts = bytes_by_part(cache)
    states = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for state in cache.recurrent
        for each in (*state.tensors().values(), *state.undo_tensors)
    }
    assert 2 * parts["recurrent states"] == sum(states.values())
    assert parts["rollback"] >= parts["recurrent states"]
    kind = cache.recurrent[0].kind
    assert f"  states   {kind} in {len(cache.recurrent)} layers" in cache.describe()
    assert "recurrent states" in cache.describe()


def test_a_layer_that_forgets_its_state_is_refused_at_attach() -> None:
    model = tiny_hybrid("lfm2")
    own = type(model.model.layers[0].conv).forward

    def forgetful(conv: Any, hidden_states: Tensor, **options: Any) -> Tensor:
        given_cache(options)
        return own(conv, hidden_states, None, **options)

    model.model.layers[0].conv.forward = forgetful.__get__(model.model.layers[0].conv)
    with pytest.raises(UnsupportedModel, match="gives other hidden states with a cache than without"):
        windlass.attach(model)
