"""Requirements of transformers' own `generate`: turns, padding, drafts, beams."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

import windlass
from tests.helpers.caches import POLICIES
from tests.helpers.models import Models, Text
from windlass import KVCache
from windlass.policies import H2O, TOVA, KeyDiff, Policy, Recent, SnapKV
from windlass.testing import SLIDING_WINDOW, tiny_model

TOLERANCE = 1e-5
GREEDY = {"do_sample": False, "pad_token_id": 0}


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: Tensor, cache: object = None, **options: object) -> Tensor:
    return model(ids, past_key_values=cache, **options).logits


def test_sampling_equals_transformers(plain_model: Models, attached_model: Models, text: Text) -> None:
    options = {"do_sample": True, "temperature": 1.3, "top_k": 20, "max_new_tokens": 20, "pad_token_id": 0}
    tokens = []
    for model, cache in (
        (plain_model("mistral"), None),
        (attached_model("mistral"), KVCache(attached_model("mistral"))),
    ):
        torch.manual_seed(5)
        tokens.append(model.generate(text(14), past_key_values=cache, **options).tolist())
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_second_turn_equals_a_fresh_run(family: str, attached_model: Models, text: Text) -> None:
    model = attached_model(family)
    cache = KVCache(model, budget=80, policy=Recent())
    first = model.generate(text(17), past_key_values=cache, max_new_tokens=9, **GREEDY)
    ids = torch.cat((first, text(8, seed=1)), 1)
    second = model.generate(ids, past_key_values=cache, max_new_tokens=9, **GREEDY)
    assert second.tolist() == model.generate(ids, max_new_tokens=9, **GREEDY).tolist()
    # The last token is chosen but not fed.
    assert cache.tokens == [second[0, :-1].tolist()]


def test_a_ragged_second_turn_on_sliding_windows(plain_model: Models, attached_model: Models, text: Text) -> None:
    """Padding in the middle of a row: transformers' own mask counts it into the window, ours does not."""
    turns = [[text(16, seed=1), text(9, seed=2)], [text(6, seed=3), text(13, seed=4)]]
    columns, masks = [], []
    for texts in turns:
        width = max(piece.shape[1] for piece in texts)
        gaps = [width - piece.shape[1] for piece in texts]
        columns.append(torch.cat([torch.cat((torch.full((1, n), 7), p), 1) for n, p in zip(gaps, texts, strict=True)]))
        masks.append(torch.tensor([[0] * n + [1] * (width - n) for n in gaps]))
    mask = torch.cat(masks, 1)
    ids = torch.cat(columns, 1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    model, plain = attached_model("mistral"), plain_model("mistral")
    cut = columns[0].shape[1]
    errors = []
    for one, cache in ((model, KVCache(model, batch=2)), (plain, DynamicCache(config=plain.config))):
        options = {"cache": cache, "attention_mask": mask[:, :cut], "position_ids": positions[:, :cut]}
        parts = [logits_of(one, ids[:, :cut], **options)]
        options |= {"attention_mask": mask, "position_ids": positions[:, cut:]}
        parts.append(logits_of(one, ids[:, cut:], **options))
        together = torch.cat(parts, 1)
        rows = [torch.cat([texts[row] for texts in turns], 1) for row in range(2)]
        assert all(row.shape[1] > SLIDING_WINDOW for row in rows)
        errors.append(
            max(
                float((together[r][mask[r].bool()] - logits_of(plain, row)[0]).abs().max())
                for r, row in enumerate(rows)
            )
        )
    assert errors[0] <= TOLERANCE
    assert errors[1] > 0.01

    ours = model.generate(ids, attention_mask=mask, past_key_values=KVCache(model, batch=2), max_new_tokens=7, **GREEDY)
    for row, alone in enumerate(rows):
        expected = plain.generate(alone, max_new_tokens=7, **GREEDY)
        assert ours[row, -7:].tolist() == expected[0, -7:].tolist()


@pytest.mark.parametrize("prefill_chunk_size", [None, 4])
def test_columns_that_are_padding_in_every_row(
    prefill_chunk_size: int | None, attached_model: Models, text: Text
) -> None:
    """As a tokenizer's `pad_to_multiple_of` makes them, also with whole chunks of padding."""
    model, texts = attached_model("mistral"), [text(19, seed=1), text(14, seed=2)]
    ids = torch.cat([torch.cat((torch.full((1, 28 - piece.shape[1]), 7), piece), 1) for piece in texts])
    mask = torch.tensor([[0] * (28 - piece.shape[1]) + [1] * piece.shape[1] for piece in texts])
    options = {"max_new_tokens": 6, **GREEDY}
    cache = KVCache(model, budget=40, batch=2, policy=Recent())
    ours = model.generate(
        ids, attention_mask=mask, past_key_values=cache, prefill_chunk_size=prefill_chunk_size, **options
    )
    for row, alone in enumerate(texts):
        assert ours[row, 28:].tolist() == model.generate(alone, **options)[0, alone.shape[1] :].tolist()
    # A second turn slices the columns that were seen off, and must find the same number.
    ids, mask = torch.cat((ours, text(5, rows=2, seed=3)), 1), torch.cat((mask, torch.ones(2, 11, dtype=torch.long)), 1)
    again = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    fresh = model.generate(ids, attention_mask=mask, past_key_values=KVCache(model, batch=2), **options)
    assert again.tolist() == fresh.tolist()


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt_oss", "gemma3n", "gemma4_e"])
def test_assisted_decoding_equals_greedy(family: str, attached_model: Models, text: Text) -> None:
    model, ids = attached_model(family), text(15)
    for assistant in (tiny_model(family), tiny_model("qwen3")):
        cache = KVCache(model)
        assisted = model.generate(ids, past_key_values=cache, assistant_model=assistant, max_new_tokens=25, **GREEDY)
        assert assisted.tolist() == model.generate(ids, max_new_tokens=25, **GREEDY).tolist()
        assert cache.tokens is not None
        assert cache.tokens[0] == assisted[0, : cache.tokens_seen[0]].tolist()


def assert_drafts_change_nothing(model: PreTrainedModel, ids: Tensor, tokens: int, **options: Any) -> None:
    """Assisted decoding and prompt lookup write the text of greedy decoding, through as large a cache."""
    run: dict[str, Any] = {"max_new_tokens": tokens, **GREEDY}
    greedy = model.generate(ids, past_key_values=KVCache(model, **options), **run)
    # Drafts that are all right, and longer ones that are mostly wrong.
    for drafts in ({"assistant_model": model}, {"prompt_lookup_num_tokens": 21}):
        cache = KVCache(model, **options)
        assert model.generate(ids, past_key_values=cache, **drafts, **run).tolist() == greedy.tolist(), drafts.keys()
        assert cache.tokens is not None
        assert cache.tokens[0] == greedy[0, : cache.tokens_seen[0]].tolist()


@pytest.mark.parametrize(
    ("family", "policy"),
    [
        *(("llama", policy) for policy in POLICIES),
        ("mistral", KeyDiff()),
        ("gemma3", H2O()),
        ("gemma3n", KeyDiff()),
        ("gemma4_e", H2O()),
    ],
    ids=repr,
)
def test_drafts_change_nothing_for_any_policy(family: str, policy: Policy, attached_model: Models, text: Text) -> None:
    assert_drafts_change_nothing(attached_model(family), text(30), 17, budget=16, window=6, policy=policy)


@pytest.mark.parametrize(
    ("store", "merge"),
    [
        *product(["plain", "int8"], [None, "mean_count", "sum", "mean", "pick"]),
        ("int4(sinks=4, newest=8)", None),
    ],
)
def test_drafts_change_nothing_for_stores_and_merges(
    store: str, merge: str | None, attached_model: Models, text: Text
) -> None:
    options = {"budget": 18, "window": 5, "policy": KeyDiff(), "store": store, "merge": merge, "positions": "compact"}
    assert_drafts_change_nothing(attached_model("llama"), text(27), 17, **options)


def test_the_engine_reads_and_writes_as_ever_after_assisted_decoding(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(30)
    caches = [KVCache(model, budget=16, window=6, policy=SnapKV(observed_queries=4)) for _ in range(2)]
    for cache in caches:
        logits_of(model, ids, cache)
    caches[0].activate_past_recording()
    logits = [windlass.prefill(model, cache, text(7, seed=3).tolist()) for cache in caches]
    assert logits[0].equal(logits[1])
    logits = [windlass.prefill(model, cache, text(1, seed=4).tolist()) for cache in caches]
    assert logits[0].equal(logits[1])


@pytest.mark.parametrize(
    "policy", [H2O(), TOVA(), SnapKV(observed_queries=4), KeyDiff()], ids=lambda p: type(p).__name__
)
def test_a_rejected_draft_leaves_no_trace(policy: Policy, attached_model: Models, text: Text) -> None:
    """A step of which `crop` takes a part back equals the shorter step, evictions and scores included."""
    model, ids, draft = attached_model("llama"), text(30), text(4, seed=9)
    caches = [KVCache(model, budget=16, policy=policy, window=4) for _ in range(2)]
    for cache in caches:
        logits_of(model, ids, cache)
    logits_of(model, torch.cat((draft, text(4, seed=8)), 1), caches[0])
    caches[0].crop(-4)
    logits_of(model, draft, caches[1])
    assert caches[0].tokens_seen == caches[1].tokens_seen == [34]
    after = [torch.cat([logits_of(model, text(3, seed=s), cache) for s in (5, 6)], 1) for cache in caches]
    assert torch.allclose(*after, rtol=0, atol=TOLERANCE)  # type: ignore[misc, arg-type]


def test_roomy_scored_assisted_decoding(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(20)
    cache = KVCache(model, budget=80, policy=H2O())
    assisted = model.generate(
        ids, past_key_values=cache, assistant_model=tiny_model("qwen3"), max_new_tokens=25, **GREEDY
    )
    assert assisted.tolist() == model.generate(ids, max_new_tokens=25, **GREEDY).tolist()


def test_crop(attached_model: Models, text: Text) -> None:
    model, ids = attached_model("llama"), text(24)
    cache = KVCache(model)
    expected = logits_of(model, ids, KVCache(model))[:, 18:]
    logits_of(model, ids, cache)
    for crop in (-6, 18):
        cache.crop(crop)
        assert cache.get_seq_length() == 18
        assert cache.tokens == [ids[0, :18].tolist()]
        assert torch.allclose(logits_of(model, ids[:, 18:], cache), expected, rtol=0, atol=TOLERANCE)
    cache.crop(0)
    cache.crop(100)
    assert cache.tokens_seen == [24]


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss", "gemma3n"])
@pytest.mark.parametrize("policy", [None, H2O()])
def test_beam_search_equals_transformers(
    family: str, policy: Policy | None, attached_model: Models, text: Text
) -> None:
    model, ids = attached_model(family), text(13, rows=2)
    options = {"num_beams": 3, "max_new_tokens": 12, **GREEDY}
    cache = KVCache(model, 60, policy, batch=6)
    ours = model.generate(ids, past_key_values=cache, **options)
    assert ours.tolist() == model.generate(ids, **options).tolist()
