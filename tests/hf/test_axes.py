"""Models whose pictures have positions of several axes (M-RoPE), against transformers itself."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel

import windlass
from tests.helpers.axes import (
    FAMILIES,
    GREEDY,
    GRID,
    VIDEO,
    WITH_STATES,
    attached_reader,
    embedded,
    error,
    first,
    plain_reader,
    read_on,
    shown,
)
from tests.helpers.models import Text
from windlass import KVCache, Sampling
from windlass.engine.decode import Decoder, Sampler
from windlass.policies import H2O, Policy, Recent

TOLERANCE = 1e-4  # of a standard deviation
TOKENS, STARTS = 71, (6, 30)
PROMPT = 50
each_family = pytest.mark.parametrize("family", list(FAMILIES))


def one_shot(family: str, given: dict[str, Any], prompt: int, chunk: int) -> Tensor:
    """Logits of transformers: in one pass, but of a recurrent layer, whose rounding depends on the passes, in those."""
    plain = plain_reader(family)
    if family in WITH_STATES:
        return read_on(plain, DynamicCache(config=plain.config.get_text_config()), given, prompt, chunk)
    with torch.no_grad():
        logits: Tensor = plain(**given, use_cache=False).logits
    return logits


@each_family
@pytest.mark.parametrize("chunk", [TOKENS, 1, 7])
def test_a_text_with_pictures(family: str, chunk: int, text: Text) -> None:
    given, model = shown(text, TOKENS, STARTS, family), attached_reader(family)
    prompt = TOKENS if chunk == TOKENS else PROMPT
    theirs = one_shot(family, given, prompt, chunk)
    turned = {**given, "image_grid_thw": given["image_grid_thw"][:, [0, 2, 1]]}
    assert error(one_shot(family, turned, prompt, chunk), theirs) > 0.01, "the axes are not looked at"
    caches: list[tuple[int | None, Policy]] = [(None, Recent()), (90, H2O())]
    for budget, policy in caches:
        ours = read_on(model, KVCache(model, budget, policy), given, prompt, chunk)
        assert error(ours, theirs) <= TOLERANCE


@each_family
@torch.no_grad()
def test_generate_in_rows_of_different_lengths(family: str, text: Text) -> None:
    plain, model = plain_reader(family), attached_reader(family)
    rows = [shown(text, TOKENS, STARTS, family), shown(text, 44, (20,), family, seed=1)]
    missing = TOKENS - 44
    pixels = ("pixel_values", "image_grid_thw")
    batch = {name: torch.cat([row[name] for row in rows]) for name in pixels}
    for name in set(rows[0]) - set(pixels):
        batch[name] = torch.cat((rows[0][name], torch.nn.functional.pad(rows[1][name], (missing, 0), value=0)))
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][1, :missing] = 0
    alone = [plain(**row, use_cache=False).logits for row in rows]
    ours = model(**batch, past_key_values=KVCache(model, batch=2)).logits
    assert error(ours[:1], alone[0]) <= TOLERANCE
    assert error(ours[1:, missing:], alone[1]) <= TOLERANCE
    for given, count in ((rows[0], 1), (batch, 2)):
        written = model.generate(**given, past_key_values=KVCache(model, batch=count), **GREEDY)
        assert written.tolist() == plain.generate(**given, **GREEDY).tolist()


BUDGET, SINKS, LONG = 256, 5, 395


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_vl", "glm4v", "ernie4_5_vl_moe"])
@pytest.mark.parametrize("chunk", [1, 17, 50])
def test_a_picture_leaves_a_budget_part_by_part(family: str, chunk: int, text: Text) -> None:
    """The text goes on past the budget until the picture is gone, against an explicit mask."""
    grid, start, prompt = (12, 14), 31, 90
    tokens = grid[0] * grid[1] // 4
    given, plain = shown(text, LONG, (start,), family, grid), plain_reader(family)
    at = torch.arange(LONG)
    distance = at[:, None] - at
    mask = (distance >= 0) & ((at < SINKS) | (distance <= BUDGET - SINKS))
    _, axes = embedded(plain, given)
    theirs = masked(plain, given, axes, mask)
    assert error(masked(plain, given, axes, distance >= 0), theirs) > 0.01
    model = attached_reader(family)
    cache = KVCache(model, BUDGET, Recent(), sinks=SINKS, positions="original")
    pieces, held = [], set()
    with torch.no_grad():
        pieces.append(model(**first(given, prompt), past_key_values=cache).logits)
        for ids in given["input_ids"][:, prompt:].split(chunk, 1):
            pieces.append(model(ids, past_key_values=cache).logits)
            of_picture = (cache.layers[0].positions >= start) & (cache.layers[0].positions < start + tokens)
            held.add(int(of_picture.sum()))
    assert error(torch.cat(pieces, 1), theirs) <= TOLERANCE
    assert {0, tokens} < held, "the picture is evicted in parts"
    assert all(int((layer.positions >= 0).sum()) <= BUDGET for layer in cache.layers)


@torch.no_grad()
def masked(plain: PreTrainedModel, given: dict[str, Any], axes: Tensor, mask: Tensor) -> Tensor:
    bias = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[None, None]
    logits: Tensor = plain(**given, position_ids=axes, attention_mask=bias, use_cache=False).logits
    return logits


@torch.no_grad()
def test_two_texts_in_turn(text: Text) -> None:
    """A wrapper remembers how far the places of the text that it read last lag behind: which may be another one."""
    plain, model = plain_reader("qwen3_vl"), attached_reader("qwen3_vl")
    texts = [shown(text, TOKENS, (6,), seed=1), shown(text, TOKENS, STARTS, seed=2), {"input_ids": text(TOKENS) % 80}]
    caches = [KVCache(model) for _ in texts]
    pieces = [
        [model(**first(given, 50), past_key_values=cache).logits] for given, cache in zip(texts, caches, strict=True)
    ]
    for at in range(50, TOKENS):
        for given, cache, piece in zip(texts, caches, pieces, strict=True):
            piece.append(model(given["input_ids"][:, at : at + 1], past_key_values=cache).logits)
    for given, piece in zip(texts, pieces, strict=True):
        assert error(torch.cat(piece, 1), plain(**given, use_cache=False).logits) <= TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "glm4v", "qwen2_5_omni_thinker"])
@torch.no_grad()
def test_a_second_picture_in_a_later_pass(family: str, text: Text) -> None:
    plain, model, cut = plain_reader(family), attached_reader(family), 27
    given = shown(text, TOKENS, STARTS, family)
    cache, patches = KVCache(model), GRID[0] * GRID[1]
    names = [name for name in ("input_ids", "mm_token_type_ids") if name in given]
    parts = []
    for columns, picture in ((slice(0, cut), 0), (slice(cut, TOKENS), 1)):
        part: dict[str, Any] = {name: given[name][:, columns] for name in names}
        if "attention_mask" in given:
            part["attention_mask"] = given["attention_mask"][:, columns]
        part["pixel_values"] = given["pixel_values"][picture * patches : (picture + 1) * patches]
        part["image_grid_thw"] = given["image_grid_thw"][picture : picture + 1]
        parts.append(model(**part, past_key_values=cache).logits)
    assert error(torch.cat(parts, 1), plain(**given, use_cache=False).logits) <= TOLERANCE


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl", "glm4v", "ernie4_5_vl_moe", "qwen3_omni_moe_thinker"])
@pytest.mark.parametrize("has_picture", [False, True])
@torch.no_grad()
def test_a_second_turn_of_generate(family: str, has_picture: bool, text: Text) -> None:
    """The second turn brings text alone, or another picture: then with position_ids, for both pictures are told of."""
    plain, model = plain_reader(family), attached_reader(family)
    given = shown(text, TOKENS, (6,), family)
    cache = KVCache(model)
    written = model.generate(**first(given, 40), past_key_values=cache, **{**GREEDY, "max_new_tokens": 5})
    model(**shown(text, 40, (3, 22), family, seed=9), past_key_values=KVCache(model))  # another text in between
    whole = shown(text, TOKENS, (6, 50) if has_picture else (6,), family)
    whole["input_ids"] = torch.cat((written, whole["input_ids"][:, 45:]), 1)
    expected = plain.generate(**whole, **GREEDY)
    new: dict[str, Any] = {name: whole[name] for name in ("input_ids", "attention_mask") if name in whole}
    if has_picture:
        _, new["position_ids"] = embedded(plain, whole)
        new["pixel_values"] = whole["pixel_values"][GRID[0] * GRID[1] :]
        new["image_grid_thw"] = whole["image_grid_thw"][1:]
    assert model.generate(**new, past_key_values=cache, **GREEDY).tolist() == expected.tolist()


@pytest.mark.parametrize("family", ["qwen3_vl", "glm4v", "qwen3_5", "qwen2_5_omni_thinker"])
@torch.no_grad()
def test_the_engine_goes_on_after_a_picture(family: str, text: Text) -> None:
    """In chunks of a prompt, in rows of different lengths, and in decode."""
    plain, model = plain_reader(family), attached_reader(family)
    rows = [shown(text, TOKENS, STARTS, family, seed=seed) for seed in (0, 3)]
    batch = {name: torch.cat([row[name] for row in rows]) for name in rows[0]}
    cache = KVCache(model, batch=2, chunk=5)
    model(**first(batch, PROMPT), past_key_values=cache)
    ids = batch["input_ids"][:, PROMPT:].tolist()
    windlass.prefill(model, cache, [ids[0], ids[1][:1]])
    logits = windlass.prefill(model, cache, [ids[0][:1], ids[1][1:]])
    decoder = Decoder(model, cache, Sampler(Sampling(), [[7]] * 2, logits.device), logits, None)
    written: list[list[int]] = []
    for _ in range(4):
        written.append(decoder.next_tokens())
        decoder.advance([True, True], is_last=False)
    for number, row in enumerate(rows):
        tail = [*ids[number], ids[0][0]] if number == 0 else ids[number]
        row["input_ids"] = torch.cat((row["input_ids"][:, :PROMPT], torch.tensor([tail])), 1)
        for name in ("mm_token_type_ids", "attention_mask"):
            if name in row:
                missing = row["input_ids"].shape[1] - TOKENS
                row[name] = torch.nn.functional.pad(row[name], (0, missing), value=int(name == "attention_mask"))
        theirs = plain(**row, use_cache=False).logits[:, -1]
        assert error(logits[number : number + 1], theirs) <= TOLERANCE
        expected = plain.generate(**row, **{**GREEDY, "max_new_tokens": 4, "suppress_tokens": None})
        assert [step[number] for step in written] == expected[0, -4:].tolist()


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen2_vl"])
@pytest.mark.parametrize("positions", ["original", "compact"])
@torch.no_grad()
def test_a_video(family: str, positions: str, text: Text) -> None:
    """Its frames stand on an axis of their own, on which they reach further than the others."""
    plain, model, frames, start = plain_reader(family), attached_reader(family), 3, 10
    size = frames * GRID[0] * GRID[1] // 4
    given = shown(text, 90, (), family)
    given["input_ids"][:, start : start + size] = VIDEO
    given["mm_token_type_ids"] = (given["input_ids"] == VIDEO).int() * 2
    pixels = torch.randn(4 * size, 3 * 4 * 4 * 2, generator=torch.Generator().manual_seed(3))
    given |= {"pixel_values_videos": pixels, "video_grid_thw": torch.tensor([[frames, *GRID]])}
    del given["pixel_values"], given["image_grid_thw"]
    _, axes = embedded(plain, given)
    assert int(axes[0].max()) == int(axes[0, 0, -1]), "the text reaches further than the video"
    theirs = plain(**given, use_cache=False).logits
    cache = KVCache(model, positions=positions)
    assert error(read_on(model, cache, given, 80, 3), theirs) <= TOLERANCE
    assert cache.rows.rows[0].next_place == int(axes.max()) + 1


@pytest.mark.parametrize("family", ["qwen3_vl", "glm4v"])
@torch.no_grad()
def test_in_bfloat16(family: str, text: Text) -> None:
    exact, given = plain_reader(family), shown(text, TOKENS, STARTS, family)
    plain, model = (nn.Module.to(copy.deepcopy(exact), torch.bfloat16) for _ in range(2))
    low = {**given, "pixel_values": given["pixel_values"].bfloat16()}
    expected, own = exact(**given, use_cache=False).logits, plain(**low, use_cache=False).logits
    windlass.attach(model)
    ours = model(**low, past_key_values=KVCache(model)).logits
    own_error, our_error = (float((each.float() - expected).norm() / expected.norm()) for each in (own, ours))
    assert our_error <= 1.2 * own_error
    assert torch.equal(model(**low, use_cache=False).logits, own), "the model alone is as it was"


@torch.no_grad()
def test_text_alone_keeps_nothing_more(text: Text) -> None:
    model, ids = attached_reader("qwen3_vl"), text(TOKENS) % 80 + 1
    cache = KVCache(model, 40, Recent())
    for piece in ids.split(9, 1):
        model(piece, past_key_values=cache)
    model.generate(torch.cat((ids, ids[:, :3]), 1), past_key_values=cache, **GREEDY)
    assert all(layer.table.state == {} and not layer.rules.has_places for layer in cache.layers)


@torch.no_grad()
def test_a_pass_that_fails_in_a_picture_leaves_no_trace(text: Text, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = attached_reader("qwen3_vl"), shown(text, TOKENS, STARTS)
    cache, twin = KVCache(model, 40, H2O()), KVCache(model, 40, H2O())
    for each in (cache, twin):
        model(given["input_ids"][:, -5:], past_key_values=each)
    norm = model.model.language_model.norm
    with monkeypatch.context() as patch:
        patch.setattr(norm, "forward", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(**given, past_key_values=cache)
    assert not cache.layers[0].rules.has_places
    assert cache.rows == twin.rows
    ours, theirs = (model(**given, past_key_values=each).logits for each in (cache, twin))
    assert torch.equal(ours, theirs)
