"""Models whose masks are made around the decoder, with pictures: their tokens see each other in both directions.

Texts alone are in `test_families.py`.
"""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedModel

import windlass
from tests.helpers.models import TEXT_CONFIG, Text
from windlass import KVCache, UsageError
from windlass.hf.attach import attached
from windlass.policies import H2O, Recent
from windlass.testing import SLIDING_WINDOW, VOCABULARY, tiny_model

TOLERANCE = 1e-5
TOKENS, PICTURE = 37, 9
STARTS = (5, 20)  # of the pictures
BETWEEN = (17, 3, 17)  # tokens of passes that cut no picture
BUDGET, SINKS = 20, 3
# Which layers see the whole of a picture, by family, and the argument that tells where it is.
KINDS = {"gemma3_wrapped": "token_type_ids", "gemma4_wrapped": "mm_token_type_ids"}
GREEDY: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0}

TEXT: dict[str, Any] = {**TEXT_CONFIG, "initializer_range": 0.2}
KINDS_OF_LAYERS = {
    "global_head_dim": 12,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": SLIDING_WINDOW,
    "num_kv_shared_layers": 0,
    "use_bidirectional_attention": "vision",
}
VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}

each_family = pytest.mark.parametrize("family", list(KINDS))


def types_at(starts: Sequence[int], tokens: int = TOKENS) -> Tensor:
    types = torch.zeros(1, tokens, dtype=torch.long)
    for start in starts:
        types[:, start : start + PICTURE] = 1
    return types


def explicit(family: str, reach: int | None = None) -> dict[str, Tensor]:
    """The masks as matrices. `reach` is that of a budget of the newest tokens, and the sinks."""
    at, block = torch.arange(TOKENS), torch.full((TOKENS,), -1)
    for number, start in enumerate(STARTS):
        block[start : start + PICTURE] = number
    distance = at[:, None] - at
    is_kept = torch.ones_like(distance, dtype=torch.bool) if reach is None else (at < SINKS) | (distance <= reach)
    both_ways = (distance >= 0) | ((block[:, None] == block) & (block >= 0))
    in_full = both_ways if family == "gemma3_wrapped" else distance >= 0
    seen = {"full_attention": in_full, "sliding_attention": both_ways & (distance < SLIDING_WINDOW)}
    lowest = torch.finfo(torch.float32).min
    return {
        kind: torch.zeros(1, 1, TOKENS, TOKENS).masked_fill(~(each & is_kept), lowest) for kind, each in seen.items()
    }


@torch.no_grad()
def under(model: PreTrainedModel, ids: Tensor, masks: dict[str, Tensor]) -> Tensor:
    return model(ids, attention_mask=masks, use_cache=False).logits


@torch.no_grad()
def read(model: PreTrainedModel, cache: KVCache, family: str, ids: Tensor, passes: Sequence[int]) -> Tensor:
    """Logits of all columns, fed in these passes, with the types of the whole text up to each."""
    pieces, start = [], 0
    for tokens in passes:
        stop = start + tokens
        types = {KINDS[family]: types_at(STARTS)[:, :stop].expand(len(ids), -1)}
        pieces.append(model(ids[:, start:stop], past_key_values=cache, **types).logits)
        start = stop
    return torch.cat(pieces, 1)


def error(ours: Tensor, theirs: Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


@each_family
@pytest.mark.parametrize("passes", [(TOKENS,), BETWEEN, (5, 9, 6, 9, 8)], ids=["whole", "between", "apart"])
@pytest.mark.parametrize("policy", [Recent(), H2O()], ids=["recent", "h2o"])
@torch.no_grad()
def test_a_picture_sees_itself(
    family: str, passes: Sequence[int], policy: windlass.policies.Policy, plain_model, attached_model, text: Text
) -> None:
    ids = text(TOKENS) % (VOCABULARY - 1)  # no token of a picture: its place is told by types
    theirs = under(plain_model(family), ids, explicit(family))
    causal = plain_model(family)(ids, use_cache=False).logits
    assert error(causal, theirs) > 0.01
    for budget in (None, 60):
        cache = KVCache(attached_model(family), budget, policy)
        assert error(read(attached_model(family), cache, family, ids, passes), theirs) <= TOLERANCE


@each_family
@pytest.mark.parametrize("passes", [(TOKENS,), BETWEEN, (5, 9, 6, 9, *[1] * 8)], ids=["whole", "between", "apart"])
def test_a_picture_within_a_budget(family: str, passes: Sequence[int], plain_model, attached_model, text: Text) -> None:
    ids = text(TOKENS, seed=1) % (VOCABULARY - 1)
    theirs = under(plain_model(family), ids, explicit(family, BUDGET - SINKS))
    cache = KVCache(attached_model(family), BUDGET, Recent(), sinks=SINKS)
    assert error(read(attached_model(family), cache, family, ids, passes), theirs) <= TOLERANCE
    assert all(int((layer.positions >= 0).sum(-1).max()) <= BUDGET for layer in cache.layers)


def shown(starts: Sequence[int], text: Text, seed: int, tokens: int = TOKENS) -> dict[str, Any]:
    """Arguments of a Gemma 3 that reads pictures."""
    ids = text(tokens, seed=seed) % (VOCABULARY - 1)
    types = types_at(starts, tokens)
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(len(starts), 3, 24, 24, generator=generator)
    return {"input_ids": ids.where(types == 0, VOCABULARY - 1), "token_type_ids": types, "pixel_values": pixels}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_pixels(dtype: torch.dtype, text: Text) -> None:
    exact, plain, model = (tiny_model("gemma3_wrapped") for _ in range(3))
    for each in (plain, model):
        nn.Module.to(each, dtype)
    given = shown(STARTS, text, 2)
    expected, other = (exact(**each, use_cache=False).logits for each in (given, shown(STARTS, text, 2)))
    assert torch.equal(expected, other)
    blank = exact(**{**given, "pixel_values": given["pixel_values"] * -1}, use_cache=False).logits
    assert error(blank, expected) > 0.01, "the pictures are not looked at"
    low = {**given, "pixel_values": given["pixel_values"].to(dtype)}
    own_error = error(plain(**low, use_cache=False).logits, expected)
    windlass.attach(model)
    assert error(model(**low, past_key_values=KVCache(model)).logits, expected) <= TOLERANCE + 1.2 * own_error
    cache, start, pieces = KVCache(model), 0, []
    for tokens, picture in zip(BETWEEN, (slice(0, 1), None, slice(1, 2)), strict=True):
        stop = start + tokens
        part = {"input_ids": low["input_ids"][:, start:stop], "token_type_ids": low["token_type_ids"][:, :stop]}
        if picture is not None:
            part["pixel_values"] = low["pixel_values"][picture]
        pieces.append(model(**part, past_key_values=cache).logits)
        start = stop
    assert error(torch.cat(pieces, 1), expected) <= TOLERANCE + 1.2 * own_error
    assert torch.equal(model(**low, use_cache=False).logits, plain(**low, use_cache=False).logits)


@torch.no_grad()
def test_rows_of_different_lengths_and_generate(plain_model, attached_model, text: Text) -> None:
    plain, model = plain_model("gemma3_wrapped"), attached_model("gemma3_wrapped")
    rows = [shown(STARTS, text, 3), shown((3,), text, 4, 29)]
    alone = [plain(**row, use_cache=False).logits for row in rows]
    missing = TOKENS - 29
    batch = {
        name: torch.cat((rows[0][name], nn.functional.pad(rows[1][name], (missing, 0), value=0)))
        for name in ("input_ids", "token_type_ids")
    }
    mask = torch.ones_like(batch["input_ids"])
    mask[1, :missing] = 0
    batch |= {"attention_mask": mask, "pixel_values": torch.cat([row["pixel_values"] for row in rows])}
    ours = model(**batch, past_key_values=KVCache(model, batch=2)).logits
    assert error(ours[:1], alone[0]) <= TOLERANCE
    assert error(ours[1:, missing:], alone[1]) <= TOLERANCE
    for given, count in ((rows[0], 1), (batch, 2)):
        written = model.generate(**given, past_key_values=KVCache(model, batch=count), **GREEDY)
        assert written.tolist() == plain.generate(**given, **GREEDY).tolist()


@each_family
@pytest.mark.parametrize("is_told_at_once", [True, False])
@torch.no_grad()
def test_a_picture_that_a_pass_cuts_is_refused(family: str, is_told_at_once: bool, attached_model, text: Text) -> None:
    model, ids, types = attached_model(family), text(TOKENS) % (VOCABULARY - 1), types_at(STARTS)
    cache, cut, name = KVCache(model), 12, KINDS[family]
    if not is_told_at_once:
        model(ids[:, :cut], past_key_values=cache, **{name: types[:, :cut]})
    part = slice(0, cut) if is_told_at_once else slice(cut, TOKENS)
    with pytest.raises(UsageError, match="a pass ends at column 12, inside of a picture"):
        model(ids[:, part], past_key_values=cache, **{name: types})
    assert cache.columns_seen == (0 if is_told_at_once else cut)


@each_family
@torch.no_grad()
def test_types_of_the_new_tokens_alone_are_refused(family: str, attached_model, text: Text) -> None:
    model, ids, types = attached_model(family), text(TOKENS) % (VOCABULARY - 1), types_at(STARTS)
    cache, name = KVCache(model), KINDS[family]
    model(ids[:, :17], past_key_values=cache, **{name: types[:, :17]})
    with pytest.raises(UsageError, match=f"^{name} covers 20 columns. Expected 37, the 17 seen and 20 new"):
        model(ids[:, 17:], past_key_values=cache, **{name: types[:, 17:]})
    assert cache.columns_seen == 17


@each_family
@torch.no_grad()
def test_a_picture_across_the_trained_length(family: str, text: Text) -> None:
    """Its first tokens are read as the model does, the others at shorter distances: columns of one pass."""
    model, ids = windlass.attach(tiny_model(family)), text(TOKENS) % (VOCABULARY - 1)
    as_trained = read(model, KVCache(model), family, ids, BETWEEN)
    for rotary in attached(model).rotaries:
        assert rotary is not None
        rotary.trained_length = STARTS[1] + 5
    whole, between = (read(model, KVCache(model), family, ids, passes) for passes in ((TOKENS,), BETWEEN))
    assert error(whole, as_trained) > 0.01
    assert error(between, whole) <= TOLERANCE


PREFIX = 22
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "paligemma": ({"text_config": {**TEXT, "model_type": "gemma"}, "vision_config": VISION}, "token_type_ids"),
    "gemma4_unified": ({"text_config": {**TEXT, **KINDS_OF_LAYERS}, "vision_config": VISION}, "mm_token_type_ids"),
}


@pytest.mark.parametrize("model_type", list(OTHERS))
@torch.no_grad()
def test_others(model_type: str, text: Text) -> None:
    """PaliGemma sees all of the prompt from everywhere in it, and counts positions from 1."""
    options, name = OTHERS[model_type]
    config = AutoConfig.for_model(model_type, **options, image_token_id=VOCABULARY - 1, audio_config=None)
    torch.manual_seed(0)
    plain = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    model = windlass.attach(copy.deepcopy(plain))
    ids = text(TOKENS) % (VOCABULARY - 1)
    types = types_at(STARTS)
    if model_type == "paligemma":
        types = (torch.arange(TOKENS) >= PREFIX).long()[None]
    expected = plain(ids, use_cache=False, **{name: types}).logits
    assert error(plain(ids, use_cache=False).logits, expected) > 0.01
    cache = KVCache(model)
    pieces = [model(ids[:, :29], past_key_values=cache, **{name: types[:, :29]}).logits]
    pieces += [model(piece, past_key_values=cache).logits for piece in ids[:, 29:].split(1, 1)]
    assert error(torch.cat(pieces, 1), expected) <= TOLERANCE
    with pytest.raises(UsageError, match="a pass ends at column 12, inside of a picture"):
        model(ids[:, :12], past_key_values=KVCache(model), **{name: types})
    prompt = {"input_ids": ids[:, :PREFIX], name: types[:, :PREFIX]}
    written = model.generate(**prompt, past_key_values=KVCache(model), **GREEDY)
    assert written.tolist() == plain.generate(**prompt, **GREEDY).tolist()
