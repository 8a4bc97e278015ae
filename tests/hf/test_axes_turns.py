"""How rotary modules turn keys whose positions have several axes, as releases of transformers differ in it."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen2_vl import modeling_qwen2_vl

import windlass
from tests.helpers.axes import attached_reader, error, plain_reader, read_on, shown
from tests.helpers.models import Text
from windlass import KVCache, UsageError

TOLERANCE = 1e-4  # of a standard deviation
TOKENS, STARTS, PROMPT = 71, (6, 30), 50


def _split_later(freq: Tensor) -> Tensor:
    """As releases before had it: tables (axes, batch, tokens, channels), which attention splits."""
    return torch.cat((freq, freq), -1)


@torch.no_grad()
def test_tables_that_attention_splits(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    given, expected = shown(text, TOKENS, STARTS, "qwen2_vl"), one_shot_of("qwen2_vl", text)
    model = copy.deepcopy(plain_reader("qwen2_vl"))
    rotary = model.get_decoder().rotary_emb
    sections = [*rotary.mrope_section] * 2

    def split(queries: Tensor, keys: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        assert cos.shape[0] == 3
        cos, sin = (
            torch.cat([part[at % 3] for at, part in enumerate(each.split(sections, -1))], -1) for each in (cos, sin)
        )
        return plainly(queries, keys, cos, sin)

    plainly = modeling_qwen2_vl.apply_rotary_pos_emb
    monkeypatch.setattr(modeling_qwen2_vl, "apply_rotary_pos_emb", split)
    monkeypatch.setattr(rotary, "recomposition_frequencies", _split_later)
    assert error(model(**given, use_cache=False).logits, expected) <= TOLERANCE, "the patches are wrong"
    windlass.attach(model)
    for chunk in (1, 7):
        assert error(read_on(model, KVCache(model), given, PROMPT, chunk), expected) <= TOLERANCE


@torch.no_grad()
def test_a_module_that_takes_positions_of_axes_alone(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    """As releases before had it."""
    given, expected = shown(text, TOKENS, STARTS, "glm4v"), one_shot_of("glm4v", text)
    model = copy.deepcopy(plain_reader("glm4v"))
    rotary = model.get_decoder().rotary_emb
    own = rotary.forward

    def strict(states: Tensor, position_ids: Tensor) -> Any:
        assert position_ids.ndim == 3, "one axis"
        return own(states, position_ids)

    monkeypatch.setattr(rotary, "forward", strict)
    windlass.attach(model)
    for chunk in (1, 7):
        assert error(read_on(model, KVCache(model), given, PROMPT, chunk), expected) <= TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_omni_moe_thinker", "qwen2_5_omni_thinker", "qwen3_vl"])
@torch.no_grad()
def test_positions_that_a_wrapper_counts_by_the_mask(family: str, text: Text) -> None:
    """Rows padded on the left, with the mask of the whole text in each pass."""
    plain, model, rows = plain_reader(family), attached_reader(family), (text(45, seed=4) % 40, text(29, seed=5) % 40)
    ids = torch.cat((rows[0], torch.nn.functional.pad(rows[1], (16, 0), value=7)))
    mask = torch.ones_like(ids)
    mask[1, :16] = 0
    alone = [plain(row, attention_mask=torch.ones_like(row), use_cache=False).logits for row in rows]
    for chunk in (1, 7):
        cache = KVCache(model, batch=2)
        ours = torch.cat(
            [
                model(ids[:, at : at + chunk], attention_mask=mask[:, : at + chunk], past_key_values=cache).logits
                for at in range(0, 45, chunk)
            ],
            1,
        )
        assert error(ours[:1], alone[0]) <= TOLERANCE
        assert error(ours[1:, 16:], alone[1]) <= TOLERANCE
    for other in (torch.ones(2, 46), torch.ones(2, 47)):  # padding is now a token, or there is a column too many
        with pytest.raises(UsageError, match="attention_mask"):
            model(ids[:, :1], attention_mask=other, past_key_values=cache)
    assert cache.next_positions == [45, 29]


@torch.no_grad()
def one_shot_of(family: str, text: Text) -> Tensor:
    logits: Tensor = plain_reader(family)(**shown(text, TOKENS, STARTS, family), use_cache=False).logits
    return logits


@torch.no_grad()
def test_turns_that_do_not_add_up_are_refused(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    """The channels of a pair stand on different axes: no turn of the pair, and none that could be made up later."""
    model = copy.deepcopy(plain_reader("qwen3_vl"))
    rotary = model.get_decoder().rotary_emb
    own = rotary.recomposition_frequencies

    def torn(freq: Tensor) -> Tensor:
        other, its = own(freq.flip(0).clone()), own(freq)
        return torch.cat((its[..., : its.shape[-1] // 2], other[..., its.shape[-1] // 2 :]), -1)

    monkeypatch.setattr(rotary, "recomposition_frequencies", torn)
    windlass.attach(model)
    cache, given = KVCache(model), shown(text, TOKENS, STARTS)
    model(given["input_ids"][:, :4], past_key_values=cache)
    with pytest.raises(
        UsageError, match=r"this model does not turn keys by one axis after the other\. Read text alone"
    ):
        model(**given, past_key_values=cache)
    assert cache.next_positions == [4]
