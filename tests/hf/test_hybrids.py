"""Models with recurrent layers: attention is bounded as ever, and states are transformers' own."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import windlass
from tests.helpers.hybrids import KINDS, bound, plain
from tests.helpers.models import Text, masked, read
from windlass import KVCache
from windlass.engine.generate import prefill
from windlass.hf import model_facts
from windlass.policies import Recent
from windlass.testing import HYBRIDS, tiny_hybrid

TOKENS, ROOMY = 45, 60
TOLERANCE = 1e-5
OF_CHUNKS = 1e-4  # transformers' own, of states that are added up in one pass or in many
FORGETFUL = "jamba"  # with transformers' cache a pass of several tokens begins anew
GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}

each_family = pytest.mark.parametrize("family", HYBRIDS)
each_kind = pytest.mark.parametrize("family", KINDS)


@torch.no_grad()
def one_shot(family: str, ids: Tensor) -> Tensor:
    return plain(family)(ids, use_cache=False).logits


@torch.no_grad()
def own_chunks(family: str, ids: Tensor, chunk: int) -> Tensor:
    """Logits with transformers' own cache, told the positions, which Bamba counts anew in each pass."""
    model = plain(family)
    cache, logits = DynamicCache(config=model.config), []
    for start in range(0, ids.shape[1], chunk):
        piece = ids[:, start : start + chunk]
        positions = torch.arange(start, start + piece.shape[1])[None]
        logits.append(model(piece, past_key_values=cache, position_ids=positions).logits)
    return torch.cat(logits, 1)


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = TOLERANCE) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).norm() <= tolerance * theirs.norm()


@each_family
@pytest.mark.parametrize("budget", [None, ROOMY])
@pytest.mark.parametrize("chunk", [1, 7, TOKENS])
def test_room_for_all_equals_transformers(family: str, chunk: int, budget: int | None, text: Text) -> None:
    """States add up how linear layers round, so these are PyTorch's here."""
    ids, model = text(TOKENS), windlass.attach(tiny_hybrid(family), own_linear=False)
    ours = read(model, KVCache(model, budget), ids, chunk)
    if family != FORGETFUL:
        assert_close(ours, own_chunks(family, ids, chunk))
    assert_close(ours, one_shot(family, ids), OF_CHUNKS)


@each_family
@pytest.mark.parametrize("chunk", [1, 7])
def test_our_linear_layers_are_as_near_to_float64_as_those_of_pytorch(family: str, chunk: int, text: Text) -> None:
    ids = text(TOKENS)
    truth = tiny_hybrid(family).double()(ids, use_cache=False).logits.detach()
    ours = read(bound(family), KVCache(bound(family)), ids, chunk)
    assert (ours - truth).norm() <= 3 * (one_shot(family, ids) - truth).norm()


@each_family
@pytest.mark.parametrize("chunk", [1, 7, 18])
def test_a_budget_equals_an_explicit_mask(family: str, chunk: int, text: Text) -> None:
    budget, sinks, ids = 20, 3, text(TOKENS)
    cache = KVCache(bound(family), budget, Recent(), sinks, positions="original")
    ours = read(bound(family), cache, ids, chunk)
    query, key = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)[None]
    seen = (key <= query) & ((key < sinks) | (key >= query - (budget - sinks)))
    # transformers gives a mask of four dimensions to attention alone: states read every token.
    theirs = masked(plain(family), ids, seen)
    assert_close(ours, theirs, OF_CHUNKS)
    assert (theirs - one_shot(family, ids)).norm() > 0.05 * theirs.norm()


@each_family
@pytest.mark.parametrize("prefill_chunk_size", [None, 7])
def test_generate_equals_transformers(family: str, prefill_chunk_size: int | None, text: Text) -> None:
    model, ids, options = bound(family), text(26, seed=3), {**GREEDY, "prefill_chunk_size": prefill_chunk_size}
    ours = model.generate(ids, past_key_values=KVCache(model), **options)
    assert ours.tolist() == plain(family).generate(ids, **GREEDY).tolist()


@each_family
def test_generate_of_left_padded_rows_equals_each_row_alone(family: str, text: Text) -> None:
    texts = [text(26, seed=3), text(15, seed=4)]
    ids = torch.cat([texts[0], torch.cat((torch.full((1, 11), 7), texts[1]), 1)])
    mask = torch.tensor([[1] * 26, [0] * 11 + [1] * 15])
    model = bound(family)
    for size in (None, 7):  # in the second, a row begins two passes later than the other
        cache = KVCache(model, ROOMY, batch=2)
        ours = model.generate(ids, attention_mask=mask, past_key_values=cache, **GREEDY, prefill_chunk_size=size)
        for row, alone in enumerate(texts):
            assert ours[row, -12:].tolist() == plain(family).generate(alone, **GREEDY)[0, -12:].tolist()


@each_kind
def test_beams_equal_transformers(family: str, text: Text) -> None:
    options = {**GREEDY, "num_beams": 3}
    ours = bound(family).generate(text(17), past_key_values=KVCache(bound(family), batch=3), **options)
    assert ours.tolist() == plain(family).generate(text(17), **options).tolist()


@each_kind
def test_a_second_turn_of_generate_equals_a_fresh_run(family: str, text: Text) -> None:
    model = bound(family)
    cache = KVCache(model)
    first = model.generate(text(17), past_key_values=cache, **GREEDY)
    ids = torch.cat((first, text(8, seed=1)), 1)
    second = model.generate(ids, past_key_values=cache, **GREEDY)
    assert second.tolist() == plain(family).generate(ids, **GREEDY).tolist()


def test_transformers_is_told_which_layers_only_keep_a_state() -> None:
    assert KVCache(bound("lfm2")).is_linear == [True, False, True, True, False]
    assert not any(KVCache(bound("falcon_h1")).is_linear)
    assert not KVCache(bound("lfm2")).is_croppable


@each_kind
def test_without_our_cache_the_model_is_its_own(family: str, text: Text) -> None:
    model, ids = bound(family), text(TOKENS)
    read(model, KVCache(model, 20), ids, 7)
    own = DynamicCache(config=model.config)
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, one_shot(family, ids))
        theirs = torch.cat([model(piece, past_key_values=own).logits for piece in ids.split(7, 1)], 1)
    assert_close(theirs, one_shot(family, ids), OF_CHUNKS)


@each_kind
def test_bfloat16_is_no_worse_than_its_own_error(family: str, text: Text) -> None:
    ids, truth, low = text(TOKENS), one_shot(family, text(TOKENS)), tiny_hybrid(family).bfloat16()
    errors = []
    for chunk in (1, 7, TOKENS):
        own = DynamicCache(config=low.config)
        with torch.no_grad():
            theirs = torch.cat([low(piece, past_key_values=own).logits for piece in ids.split(chunk, 1)], 1)
        errors.append(float((theirs.float() - truth).norm() / truth.norm()))
    low = windlass.attach(low)
    for chunk in (1, 7, TOKENS):
        ours = read(low, KVCache(low), ids, chunk)
        assert float((ours.float() - truth).norm() / truth.norm()) <= 1.25 * max(errors)


@pytest.mark.parametrize("family", ["qwen3_next", "lfm2", "falcon_h1"])
def test_bytes_do_not_grow_with_the_text(family: str, text: Text) -> None:
    model = bound(family)
    cache = KVCache(model, 64, chunk=500)
    held = []
    for tokens in (3000, 3500):  # both beyond the trained length, where records of steps are of one kind
        prefill(model, cache, text(tokens).tolist())
        read(model, cache, text(3, seed=1), 1)
        held.append(cache.bytes_held)
    assert cache.tokens_seen == [6506]
    assert held[0] == held[1]


def test_an_older_transformers_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_facts, "__version__", "5.21.1")
    with pytest.raises(windlass.UnsupportedModel, match=r"transformers 5\.22 or newer. This is 5\.21\.1"):
        windlass.attach(tiny_hybrid("lfm2"))


def test_a_module_that_two_layers_call_is_refused() -> None:
    """Layers of Zamba2 share weights, and are told in each pass which layer they are. Each is of one layer."""
    model = windlass.attach(tiny_hybrid("zamba2"))
    layers = [model.model.layers[number].shared_transformer for number in (1, 3, 4)]
    assert [block.self_attn.layer_idx for block in layers] == [-1, -1, -1]
    layers[2].self_attn = layers[0].self_attn
    windlass.detach(model)
    with pytest.raises(windlass.UnsupportedModel, match="calls attention more than once in layer 1"):
        windlass.attach(model)


def test_layers_that_forget_are_read_token_by_token_while_attached(text: Text) -> None:
    ids, model = text(TOKENS), windlass.attach(tiny_hybrid(FORGETFUL))
    one = (own_chunks(FORGETFUL, ids, 7) - one_shot(FORGETFUL, ids)).norm()
    assert one > 0.05 * one_shot(FORGETFUL, ids).norm(), "transformers has mended it"
    windlass.detach(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_padding_leaves_their_states(text: Text) -> None:
    """A row that begins within the second pass, whose states another row has."""
    model, texts = bound(FORGETFUL), [text(26, seed=3), text(15, seed=4)]
    ids = torch.cat([texts[0], torch.cat((torch.full((1, 11), 7), texts[1]), 1)])
    mask = torch.tensor([[1] * 26, [0] * 11 + [1] * 15])
    cache = KVCache(model, batch=2)
    with torch.no_grad():
        pieces = range(0, 26, 7)
        logits = [
            model(ids[:, at : at + 7], attention_mask=mask[:, : at + 7], past_key_values=cache).logits for at in pieces
        ]
    for row, alone in enumerate(texts):
        ours = torch.cat(logits, 1)[row, -alone.shape[1] :][None]
        assert_close(ours, one_shot(FORGETFUL, alone), OF_CHUNKS)


@pytest.mark.parametrize("beside", [23, 31])
@pytest.mark.parametrize("options", [{}, {"policy": Recent(), "positions": "compact"}], ids=str)
@each_kind
def test_a_row_that_evicts_is_the_same_beside_a_shorter_one(
    family: str, options: dict[str, Any], beside: int, text: Text
) -> None:
    """A pass ends where a row ends, as states read no padding. Other rows do not evict there."""
    model, prompts = bound(family), [text(40)[0].tolist(), text(beside, seed=1)[0].tolist()]
    both = prefill(model, KVCache(model, budget=16, batch=2, **options), prompts)
    for row, prompt in enumerate(prompts):
        alone = prefill(model, KVCache(model, budget=16, **options), [prompt])[0]
        assert_close(both[row], alone, OF_CHUNKS)
