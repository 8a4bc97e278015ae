"""Contexts beyond an indexer's picks: its keys are held beside each token's own, and a query reads the best."""

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import windlass
from tests.helpers.indexers import CLASSES, INDEX_WIDTH, bound_indexed, made, mistral_large, plain_indexed
from tests.helpers.models import Text, masked, read
from windlass import KVCache
from windlass.policies import NAMES, Recent
from windlass.policies.wrappers import scoring_chunk

PICKED, TOKENS = 13, 45
GREEDY = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}

each_class = pytest.mark.parametrize("name", CLASSES)
each_chunk = pytest.mark.parametrize("chunk", [1, 7, TOKENS])


def plain(name: str) -> PreTrainedModel:
    return plain_indexed(name, PICKED)


def bound(name: str) -> PreTrainedModel:
    return bound_indexed(name, PICKED)


@torch.no_grad()
def one_shot(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits


def assert_equal(ours: Tensor, theirs: Tensor) -> None:
    """To 1e-4 of a standard deviation."""
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() <= 1e-4 * theirs.std()


@each_class
@each_chunk
def test_all_held_equals_transformers(name: str, chunk: int, text: Text) -> None:
    ids = text(TOKENS)
    ours = read(bound(name), KVCache(bound(name)), ids, chunk)
    assert_equal(ours, one_shot(plain(name), ids))
    own = DynamicCache(config=plain(name).config)
    with torch.no_grad():
        pieces = [plain(name)(piece, past_key_values=own).logits for piece in ids.split(chunk, 1)]
    assert_equal(ours, torch.cat(pieces, 1))


@each_class
def test_what_is_picked_matters(name: str, text: Text) -> None:
    """Else none of this would show a fault."""
    sparse, whole = (one_shot(plain_indexed(name, picked), text(TOKENS)) for picked in (PICKED, TOKENS))
    assert (sparse - whole)[:, PICKED:].abs().max() > 0.5 * whole.std()


@each_chunk
def test_a_layer_that_does_not_rotate(chunk: int, text: Text) -> None:
    model, ids = mistral_large(PICKED), text(TOKENS)
    expected = one_shot(model, ids)
    windlass.attach(model)
    assert_equal(read(model, KVCache(model), ids, chunk), expected)


@each_class
@pytest.mark.parametrize("chunk", [1, 5, 9])
def test_a_budget_equals_an_explicit_mask(name: str, chunk: int, text: Text) -> None:
    """The model's own indexer scores under that mask: it picks among the visible tokens."""
    budget, sinks, ids = 26, 3, text(TOKENS)
    cache = KVCache(bound(name), budget, Recent(), sinks, positions="original")
    ours = read(bound(name), cache, ids, chunk)
    query, key = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)[None]
    seen = (key <= query) & ((key < sinks) | (key >= query - (budget - sinks)))
    if name == "dots3_note_text":  # masked by hand, its sliding layers would lose their windows
        pytest.skip("transformers takes one explicit mask for all layers")
    theirs = masked(plain(name), ids, seen)
    assert_equal(ours, theirs)
    assert (theirs - one_shot(plain(name), ids)).norm() > 0.05 * theirs.norm()


@each_class
@pytest.mark.parametrize("chunk", [1, 7, TOKENS])
@pytest.mark.parametrize("side", ["left", "right"])
def test_ragged_rows(name: str, chunk: int, side: str, text: Text) -> None:
    texts, short = [text(TOKENS, seed=1), text(31, seed=2)], TOKENS - 31
    filler = torch.full((1, short), 7)
    parts = (filler, texts[1]) if side == "left" else (texts[1], filler)
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, : short if side == "left" else TOKENS] = 0
    if side == "right":
        mask[1, :31], mask[1, 31:] = 1, 0
    ids, cache = torch.cat((texts[0], torch.cat(parts, 1))), KVCache(bound(name), batch=2)
    with torch.no_grad():
        ours = torch.cat(
            [
                bound(name)(ids[:, at : at + chunk], attention_mask=mask[:, : at + chunk], past_key_values=cache).logits
                for at in range(0, TOKENS, chunk)
            ],
            1,
        )
    for row, alone in enumerate(texts):
        assert_equal(ours[row][mask[row].bool()][None], one_shot(plain(name), alone))


@each_class
def test_generate_equals_transformers(name: str, text: Text) -> None:
    ids = text(26, seed=3)
    ours = bound(name).generate(ids, past_key_values=KVCache(bound(name)), **GREEDY)
    assert ours.tolist() == plain(name).generate(ids, **GREEDY).tolist()
    mask = torch.ones(2, 26, dtype=torch.long)
    mask[1, :9] = 0
    ids = torch.cat((ids, text(26, seed=4)))
    ours = bound(name).generate(ids, attention_mask=mask, past_key_values=KVCache(bound(name), batch=2), **GREEDY)
    assert ours.tolist() == plain(name).generate(ids, attention_mask=mask, **GREEDY).tolist()


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa"])
def test_assisted_decoding_takes_drafts_back(name: str, text: Text) -> None:
    ids, drafter = text(21, seed=6), made(name, PICKED, num_hidden_layers=2)
    for budget in (None, 24):
        caches = [KVCache(bound(name), budget, Recent()) for _ in range(2)]
        ours = bound(name).generate(ids, past_key_values=caches[0], assistant_model=drafter, **GREEDY)
        assert ours.tolist() == bound(name).generate(ids, past_key_values=caches[1], **GREEDY).tolist()


@pytest.mark.parametrize("policy", sorted(set(NAMES) - {"DMC"}))
def test_policies_rank_the_keys_that_attention_reads(policy: str, text: Text) -> None:
    """The first layer's input does not depend on the picks, so rules without attention keep the same tokens."""
    ids, budget = text(TOKENS)[0].tolist(), 24
    caches = []
    for picked in (PICKED, TOKENS):
        model = bound_indexed("deepseek_v32", picked)
        cache = KVCache(model, budget, policy, chunk=16)
        windlass.prefill(model, cache, [ids])
        assert read(model, cache, text(9, seed=5), 1).isfinite().all()
        caches.append(cache)
        assert all(int((layer.positions >= 0).sum(-1).max()) <= budget for layer in cache.layers)
    assert caches[0].layers[0].store.keys().shape[-1] == 24 + 8  # latent and shared channels
    is_by_keys = caches[0].policy.observed_queries == 0 and not caches[0].policy.needs.statistics
    if is_by_keys and not scoring_chunk(caches[0].policy):
        one, other = (each.layers[0].positions.sort().values[..., -budget:] for each in caches)
        assert one.equal(other)


@pytest.mark.parametrize(
    "store", ["plain", *(pytest.param(store, marks=pytest.mark.slow) for store in ("int8", "int4"))]
)
def test_bytes_are_those_that_are_allocated(store: str) -> None:
    from windlass.hf.forward import layer_shapes

    model = bound("dots3_note_text")  # half of its layers have no indexer
    cache = KVCache(model, 26, Recent(), sinks=3, store=store, chunk=9)
    read(model, cache, torch.arange(41)[None], 9)
    for number, (layer, shape) in enumerate(zip(cache.layers, layer_shapes(model), strict=True)):
        parts = [part for name, part in layer.store.tensors().items() if name not in layer.store.constant_names]
        assert sum(part.nbytes for part in parts) == shape.bytes_per_token(layer.store) * layer.table.slots
        assert shape.index == (INDEX_WIDTH if number % 2 == 0 else 0)
        latent = {"plain": 4 * 32, "int8": 32 + 2, "int4": 16 + 2 * 4}[store]
        if number % 2 == 0:
            assert shape.bytes_per_token(layer.store) == latent + 4 * INDEX_WIDTH
