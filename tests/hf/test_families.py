"""Every family: a cache that has room for the whole text gives the results of transformers."""

from collections.abc import Collection

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import windlass
from tests.helpers.models import Models
from windlass import KVCache
from windlass.hf.attach import attached
from windlass.policies import H2O, Recent
from windlass.testing import FAMILIES, TRAINED_LENGTH, tiny_model

TOKENS, SHORTER = 45, 29  # both longer than the sliding windows, within every trained length
ROOMY = 60
CHUNKS = (1, 7, 40, None)
TOLERANCE = 1e-5

# Their rotary table changes once a text outgrows the trained length.
LENGTH_DEPENDENT = ("llama_dynamic", "phi3")

# Their layers are memories of another kind, or are masked in another way, on which options of a cache depend.
OWN_LAYERS = {"gemma3n", "gemma4_e", "gemma4_wrapped", "deepseek_v3", "minicpm3", "llama4", "gpt_oss", "qwen2"}
SETTINGS = {"absent": (None, Recent()), "recent": (ROOMY, Recent()), "h2o": (ROOMY, H2O())}
SIDES = ("left", "right")

each_family = pytest.mark.parametrize("family", FAMILIES)


def cases(last: Collection[str]) -> list[tuple[str, int | None, str]]:
    """Each family with each chunk, and with each of `last`.

    Token by token, which takes four fifths of the time, a family is read under one of them, in turn: the code of a
    family is in `windlass.hf`, which asks nothing of a cache's options. Those of `OWN_LAYERS` have all.
    """
    return [
        (family, chunk, each)
        for turn, family in enumerate(FAMILIES)
        for chunk in CHUNKS
        for number, each in enumerate(last)
        if chunk != 1 or family in OWN_LAYERS or number == turn % len(last)
    ]


@torch.no_grad()
def fed(model: PreTrainedModel, cache: KVCache, ids: Tensor, chunk: int | None, mask: Tensor | None = None) -> Tensor:
    """Logits of all columns, fed `chunk` at a time."""
    logits = []
    for start in range(0, ids.shape[1], chunk or ids.shape[1]):
        end = start + (chunk or ids.shape[1])
        seen = None if mask is None else mask[:, :end]
        logits.append(model(ids[:, start:end], attention_mask=seen, past_key_values=cache).logits)
    return torch.cat(logits, 1)


@torch.no_grad()
def one_shot(model: PreTrainedModel, ids: Tensor) -> Tensor:
    return model(ids, use_cache=False).logits


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert (ours - theirs).norm() <= TOLERANCE * theirs.norm()


def padded(texts: list[Tensor], side: str) -> tuple[Tensor, Tensor]:
    """Ids and mask of one batch. The padding is a real token's id, so that reading it would show."""
    width = max(text.shape[1] for text in texts)
    pairs = []
    for text in texts:
        padding = torch.full((1, width - text.shape[1]), 7)
        parts = (padding, text) if side == "left" else (text, padding)
        ones = [torch.full_like(part, part is text) for part in parts]
        pairs.append((torch.cat(parts, 1), torch.cat(ones, 1)))
    return torch.cat([ids for ids, _ in pairs]), torch.cat([mask for _, mask in pairs])


@pytest.mark.parametrize(("family", "chunk", "setting"), cases(SETTINGS))
def test_room_for_all_equals_transformers(
    family: str, chunk: int | None, setting: str, plain_model, attached_model, text
) -> None:
    ids, (budget, policy) = text(TOKENS), SETTINGS[setting]
    model = attached_model(family)
    cache = KVCache(model, budget, policy)
    assert_close(fed(model, cache, ids, chunk), one_shot(plain_model(family), ids))


@pytest.mark.parametrize(("family", "chunk", "side"), cases(SIDES))
def test_row_of_ragged_batch_equals_row_alone(
    family: str, chunk: int | None, side: str, plain_model, attached_model, text
) -> None:
    texts = [text(TOKENS, seed=1), text(SHORTER, seed=2)]
    ids, mask = padded(texts, side)
    model = attached_model(family)
    # One text without and one with a budget: a scored policy has slots per head.
    budget, policy = (None, Recent()) if side == "left" else (ROOMY, H2O())
    cache = KVCache(model, budget, policy, batch=2)
    logits = fed(model, cache, ids, chunk, mask)
    for row, alone in enumerate(texts):
        assert_close(logits[row][mask[row].bool()][None], one_shot(plain_model(family), alone))


@each_family
@pytest.mark.parametrize("prefill_chunk_size", [None, 7])
def test_generate_equals_transformers(
    family: str, prefill_chunk_size: int | None, plain_model, attached_model, text
) -> None:
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "prefill_chunk_size": prefill_chunk_size}
    model = attached_model(family)
    ids = text(26, seed=3)
    ours = model.generate(ids, past_key_values=KVCache(model), **options)
    assert ours.tolist() == plain_model(family).generate(ids, **options).tolist()

    ids, mask = padded([text(26, seed=3), text(15, seed=4)], "left")
    cache = KVCache(model, ROOMY, batch=2, policy=Recent())
    ours = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    assert ours.tolist() == plain_model(family).generate(ids, attention_mask=mask, **options).tolist()


@pytest.mark.parametrize("family", LENGTH_DEPENDENT)
def test_beyond_the_trained_length(family: str, plain_model, attached_model, text) -> None:
    # Only one-shot is compared: transformers' own cache holds keys that were turned by the table of
    # the moment at which they came, so its cached passes agree neither with one-shot nor with us.
    ids = text(TRAINED_LENGTH + 26)
    model, plain = attached_model(family), plain_model(family)
    assert_close(fed(model, KVCache(model), ids, None), one_shot(plain, ids))
    within = ids[:, : TRAINED_LENGTH - 1]  # at the length itself transformers keeps the table of a longer text
    assert_close(fed(model, KVCache(model), within, None), one_shot(plain, within))


@pytest.mark.parametrize("family", LENGTH_DEPENDENT)
def test_table_does_not_remember_longer_texts(family: str, attached_model, text) -> None:
    ids = text(TRAINED_LENGTH + 26)
    model = attached_model(family)
    fresh, back = KVCache(model), KVCache(model)
    expected = fed(model, fresh, ids[:, : TRAINED_LENGTH + 5], TRAINED_LENGTH)[:, TRAINED_LENGTH:]
    fed(model, back, ids, TRAINED_LENGTH)
    back.rollback(26)
    assert torch.equal(fed(model, back, ids[:, TRAINED_LENGTH : TRAINED_LENGTH + 5], None), expected)


@each_family
def test_layouts_are_found_in_low_precision_too(family: str, attached_model: Models) -> None:
    found = []
    for model in (attached_model(family), windlass.attach(tiny_model(family).bfloat16())):
        rotaries = attached(model).rotaries
        found.append([rotary and (rotary.layout, rotary.rotary_pairs, rotary.layer_type) for rotary in rotaries])
    assert found[0] == found[1]
