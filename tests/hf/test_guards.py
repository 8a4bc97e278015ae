"""A KVCache refuses unsupported arguments by name, before anything changes."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import windlass
from tests.helpers.models import Models, Text, read
from windlass import KVCache, UsageError
from windlass.policies import H2O, KeyDiff
from windlass.testing import tiny_model

GREEDY = {"do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize("policy", [None, H2O()], ids=str)
def test_a_backward_pass_through_a_cache_is_refused(
    policy: H2O | None, attached_model: Models, plain_model: Models, text: Text
) -> None:
    """The forward pass is right without `no_grad`, as most call it. A gradient would lack the cached tokens."""
    model, ids = attached_model("llama"), text(12)
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    cache = KVCache(model, policy=policy)
    out = model(inputs_embeds=embeds, past_key_values=cache).logits
    expected = plain_model("llama")(ids).logits
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    head = model.lm_head.weight  # after all attention: its gradient is whole
    assert torch.autograd.grad(out.sum(), head, retain_graph=True)[0].isfinite().all()
    with pytest.raises(UsageError, match=r"no gradient passes.*Leave past_key_values out"):
        out.sum().backward()
    twin = copy.deepcopy(cache)
    assert twin.next_positions == [12]
    later = model(ids[:, :3], past_key_values=cache).logits
    with pytest.raises(UsageError, match="no gradient passes"):
        torch.autograd.grad(later.sum(), list(model.parameters()), allow_unused=True)
    with torch.no_grad():
        assert model(ids[:, 3:4], past_key_values=cache).logits.grad_fn is None


def test_gradients_without_a_cache_stay(text: Text) -> None:
    model, plain = windlass.attach(tiny_model("llama")), tiny_model("llama")
    grads = []
    for one in (model, plain):
        embeds = one.get_input_embeddings()(text(9)).detach().requires_grad_()
        one(inputs_embeds=embeds).logits.sum().backward()
        grads.append(embeds.grad)
    assert grads[0] is not None
    assert torch.equal(*grads)


def test_generate_without_use_cache_is_refused_at_once(attached_model: Models, text: Text) -> None:
    model, cache = attached_model("llama"), KVCache(attached_model("llama"))
    with pytest.raises(UsageError, match="use_cache=False asks for a pass without a cache"):
        model.generate(text(5), past_key_values=cache, use_cache=False, max_new_tokens=4, **GREEDY)
    assert cache.tokens_seen == [0]
    ours = model.generate(text(5), past_key_values=cache, max_new_tokens=4, **GREEDY)
    assert ours.tolist() == model.generate(text(5), use_cache=False, max_new_tokens=4, **GREEDY).tolist()


def step(model: PreTrainedModel, cache: KVCache, ids: Tensor, mask: object) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(
            ids, past_key_values=cache, attention_mask=None if mask is None else torch.tensor(mask)
        ).logits
    return logits


WRONG_MASKS = [
    ([[1, 1, 1, 1, 1, 1], [0, 0, 1, 0, 1, 1]], r"attention_mask\[1, 3\] is 0, but this column was fed as a token"),
    ([[1, 0, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]], r"attention_mask\[0, 1\] is 0, but this column was fed as a token"),
    ([[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1]], r"attention_mask\[1, 1\] is 1, but this column was fed as padding"),
    # As many zeros as there were, in other columns.
    ([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 1, 1]], r"attention_mask\[1, 0\] is 1, but this column was fed as padding"),
]


@pytest.mark.parametrize(("mask", "message"), WRONG_MASKS)
def test_a_mask_that_contradicts_earlier_columns_is_refused(
    mask: list[list[int]], message: str, attached_model: Models, text: Text
) -> None:
    model, ids = attached_model("llama"), text(6, rows=2)
    cache, twin = KVCache(model, batch=2), KVCache(model, batch=2)
    right = [[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]]
    for one in (cache, twin):
        step(model, one, ids[:, :4], [row[:4] for row in right])
    with pytest.raises(UsageError, match=message):
        step(model, cache, ids[:, 4:], mask)
    assert cache.tokens_seen == [4, 2]
    assert step(model, cache, ids[:, 4:], right).equal(step(model, twin, ids[:, 4:], [[1, 1], [1, 1]]))


def hidden(cache: KVCache, model: PreTrainedModel, ids: Tensor, column: int) -> bool:
    """Return True if a mask that hides one earlier column of row 0 is refused."""
    mask = torch.ones(cache.batch_size, cache.columns_seen + 1, dtype=torch.long)
    mask[0, column] = 0
    try:
        step(model, copy.deepcopy(cache), ids, mask.tolist())
    except UsageError:
        return True
    return False


def test_what_was_fed_is_known_through_all_that_happens_to_rows(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(1, rows=2)
    cache = KVCache(model, batch=2)
    step(model, cache, text(5, rows=2), [[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]])
    step(model, cache, ids, [[0], [1]])  # one idles
    step(model, cache, ids, None)
    mask = [[0, 1, 1, 1, 1, 0, 1, 1], [1, 1, 1, 1, 0, 1, 1, 1]]
    step(model, copy.deepcopy(cache), ids, mask)
    assert cache.rows.rows[0].padding == ((0, 1), (5, 6))
    cache.select_rows(torch.tensor([1, 0]))
    step(model, copy.deepcopy(cache), ids, mask[::-1])
    with pytest.raises(UsageError, match=r"attention_mask\[0, 0\] is 0"):
        step(model, copy.deepcopy(cache), ids, mask)
    cache.rollback(1)
    step(model, copy.deepcopy(cache), ids, [row[:7] for row in mask[::-1]])
    cache.rollback([0, 1])  # past columns of padding: how a mask counts row 1 is no longer known
    assert [row.padding for row in cache.rows.rows] == [((4, 5),), None]


def test_an_edited_row_takes_any_mask(attached_model: Models, text: Text) -> None:
    """A dropped token may be hidden, or not: the columns of an edited text are the caller's."""
    model = attached_model("llama")
    cache = KVCache(model)
    read(model, cache, text(9), 9)
    assert hidden(cache, model, text(1), 2)
    cache.drop(1, 4)
    assert not hidden(cache, model, text(1), 2)


@pytest.mark.parametrize("dump", [pickle.dumps, lambda cache: torch.save(cache, io.BytesIO()), copy.copy])
def test_a_cache_is_not_pickled(dump: Callable[[Any], object], attached_model: Models, text: Text) -> None:
    model = attached_model("llama")
    cache = KVCache(model, budget=12, window=3, policy=KeyDiff())
    read(model, cache, text(20), 5)
    with pytest.raises(UsageError, match=r"can't be pickled.*cache\.save\(path\)"):
        dump(cache)
    assert read(model, copy.deepcopy(cache), text(4), 1).equal(read(model, cache, text(4), 1))


def test_positions_of_several_axes_are_taken_where_they_agree(attached_model: Models, text: Text) -> None:
    """As some models that read pictures hand them to their decoder, text and pictures alike."""
    model, ids = attached_model("llama"), text(11)
    decoder, twin, cache = model.get_decoder(), KVCache(model), KVCache(model)
    expected = decoder(ids, past_key_values=twin).last_hidden_state
    axes = torch.arange(11).expand(4, 1, 11)
    assert torch.equal(decoder(ids, position_ids=axes, past_key_values=cache).last_hidden_state, expected)
    picture = (axes + 11).clone()
    picture[2, 0, 5:8] += 3
    with pytest.raises(UsageError, match=r"differ between their axes.*Read text alone"):
        decoder(ids, position_ids=picture, past_key_values=cache)
    assert cache.next_positions == [11]
