"""Attention within chunks of a text, tables of complex numbers, and queries scaled by columns: Llama 4."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    PreTrainedModel,
)

import windlass
from tests.helpers.models import Models, Text, given_cache, greedy, read
from windlass import KVCache, UnsupportedModel
from windlass.hf.attach import attached
from windlass.hf.mask import Mask
from windlass.hf.passes import cache_name
from windlass.hf.probe import QueryScale
from windlass.policies import H2O, KeyDiff, Policy, Recent
from windlass.positions.rotary import cos_sin, unturned
from windlass.testing import SLIDING_WINDOW as CHUNK
from windlass.testing import VOCABULARY, tiny_model

TOLERANCE = 1e-4  # of a standard deviation
TOKENS, SINKS = 45, 3
CHUNKED, FULL = [0, 1, 3], 2  # layers


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) <= TOLERANCE * float(theirs.std())


@torch.no_grad()
def kept_by_recent(model: PreTrainedModel, ids: Tensor, budget: int) -> Tensor:
    """Logits of transformers itself under the masks that a budget amounts to, token by token."""
    at = torch.arange(ids.shape[1])
    within = (at <= at[:, None]) & ((at < SINKS) | (at[:, None] - at <= budget - SINKS))
    same = (at <= at[:, None]) & (at // CHUNK == at[:, None] // CHUNK)
    seen = {"full_attention": within, "chunked_attention": same if budget >= CHUNK else same & within}
    lowest = torch.finfo(torch.float32).min
    masks = {name: torch.zeros(each.shape).masked_fill(~each, lowest)[None, None] for name, each in seen.items()}
    return model(ids, attention_mask=masks, use_cache=False).logits


@pytest.mark.parametrize("chunk", [1, 7, TOKENS])
@pytest.mark.parametrize("budget", [20, 8])
def test_a_budget_equals_explicit_masks(
    budget: int, chunk: int, plain_model: Models, attached_model: Models, text: Text
) -> None:
    """A chunk of attention fits into the first budget, and not into the second."""
    ids, model = text(TOKENS, seed=3), attached_model("llama4")
    cache = KVCache(model, budget, Recent(), sinks=SINKS, positions="original")
    assert_close(read(model, cache, ids, chunk), kept_by_recent(plain_model("llama4"), ids, budget))
    held = [layer.table.occupancy_bound for layer in cache.layers]
    assert held == [min(budget, CHUNK)] * 2 + [budget] + [min(budget, CHUNK)]


def test_a_layer_holds_no_more_than_a_chunk(attached_model: Models, text: Text) -> None:
    model = attached_model("llama4")
    cache = KVCache(model, chunk=7)
    read(model, cache, text(TOKENS), 7)
    greedy(model, cache, text(1), 20)
    for layer in CHUNKED:
        assert int((cache.layers[layer].positions >= 0).sum(-1).max()) == CHUNK
        assert cache.layers[layer].table.slots <= CHUNK + 32
    assert int((cache.layers[FULL].positions >= 0).sum(-1).max()) == TOKENS + 21
    assert f"attention within chunks of {CHUNK} in 3 layers" in cache.describe()


@pytest.mark.parametrize("policy", [H2O(), KeyDiff()], ids=repr)
def test_tokens_of_past_chunks_leave_first(policy: Policy, attached_model: Models, text: Text) -> None:
    """Even sinks, and the newest tokens, which no later query sees either."""
    model, budget, ids = attached_model("llama4"), 8, text(TOKENS, seed=4)
    cache = KVCache(model, budget, policy, sinks=SINKS, window=2)
    read(model, cache, ids[:, : 2 * CHUNK], 1)
    for fed in range(1, CHUNK):
        read(model, cache, ids[:, 2 * CHUNK + fed - 1 : 2 * CHUNK + fed], 1)
        for layer in CHUNKED:
            held = cache.layers[layer].positions
            assert bool(((held >= 2 * CHUNK).sum(-1) == min(fed, budget)).all())


@pytest.mark.parametrize("budget", [None, 20, 8])
@pytest.mark.parametrize("before", [20, 23, 35])
def test_a_step_is_rolled_back(budget: int | None, before: int, attached_model: Models, text: Text) -> None:
    """Before, over and after a border of chunks, which are at 11, 22 and 33."""
    model, ids, other = attached_model("llama4"), text(TOKENS, seed=6), text(4, seed=7)
    cache, twin = (KVCache(model, budget, Recent(), sinks=SINKS) for _ in range(2))
    read(model, cache, ids[:, :before], 1)
    read(model, cache, other, 1)
    cache.rollback(4)
    expected = read(model, twin, ids, 1)[:, before:]
    assert_close(read(model, cache, ids[:, before:], 1), expected)
    assert greedy(model, cache, ids[:, -1:], 5) == greedy(model, twin, ids[:, -1:], 5)


def one_layer(is_chunked: bool) -> PreTrainedModel:
    """Its keys depend on the tokens alone, so any edit is exact."""
    model = tiny_model("llama4")
    config = type(model.config)(
        **{
            **model.config.to_dict(),
            "num_hidden_layers": 1,
            "no_rope_layers": [int(is_chunked)],
            "layer_types": None,
            "moe_layers": [],
        }
    )
    torch.manual_seed(5)
    made: PreTrainedModel = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    return made


@pytest.mark.parametrize("is_chunked", [True, False])
def test_after_an_edit_tokens_stand_where_they_stand(is_chunked: bool, text: Text) -> None:
    """Chunks are those of positions, and so is the scale of queries. Neither is of columns."""
    model, ids, after = one_layer(is_chunked), text(10, seed=8), text(30, seed=9)
    assert model.config.layer_types == ["chunked_attention" if is_chunked else "full_attention"]
    left = torch.cat((ids[:, :2], ids[:, 7:], after), 1)
    with torch.no_grad():
        expected = model(left, use_cache=False).logits[:, 5:]
    cache = KVCache(windlass.attach(model), positions="original")
    read(model, cache, ids, 10)
    cache.drop(2, 7)
    cache.shift(7, 10, -5)
    assert_close(read(model, cache, after, 4), expected)


def test_a_cache_comes_back_from_a_file(attached_model: Models, text: Text, tmp_path: Path) -> None:
    model, ids = attached_model("llama4"), text(TOKENS, seed=10)
    for budget, policy in ((None, None), (20, H2O()), (8, H2O())):
        cache = KVCache(model, budget, policy)
        read(model, cache, ids[:, :30], 7)
        cache.save(tmp_path / "cache")
        back = KVCache.load(tmp_path / "cache", model)
        assert_close(read(model, back, ids[:, 30:], 1), read(model, cache, ids[:, 30:], 1))


def test_an_import_is_kept_in_a_file(attached_model: Models, plain_model: Models, text: Text, tmp_path: Path) -> None:
    """The chunk and window layers of transformers' caches are alike, and ours are not."""
    plain, model, ids = plain_model("llama4"), attached_model("llama4"), text(TOKENS, seed=12)
    theirs = DynamicCache(config=plain.config)
    with torch.no_grad():
        expected = plain(ids, use_cache=False).logits[:, 30:]
        plain(ids[:, :30], past_key_values=theirs)
    KVCache.from_rotated(model, theirs).save(tmp_path / "cache")
    assert_close(read(model, KVCache.load(tmp_path / "cache", model), ids[:, 30:], 1), expected)


def test_what_attach_finds(attached_model: Models) -> None:
    found = attached(attached_model("llama4"))
    assert found.query_scales == {FULL: QueryScale(6.0, 0.4)}
    for layer, rotary in enumerate(found.rotaries):
        assert (rotary is None) == (layer == FULL)
        assert rotary is None or rotary.layout.name == "interleaved, half table"


class OtherScale(nn.Module):
    """An attention module that makes more of the columns than a known scale."""

    def __init__(self, attention: nn.Module, what: str) -> None:
        super().__init__()
        self.attention, self.layer_idx, self._what = attention, attention.layer_idx, what

    def forward(self, hidden_states: Tensor, **options: Any) -> Any:
        cache = given_cache(options)
        seen = 0 if cache is None else cache.get_seq_length(self.layer_idx)
        projection = getattr(self.attention, f"{self._what}_proj")
        hook = projection.register_forward_hook(lambda _module, _args, output: output * (1 + seen))
        out = self.attention(hidden_states, **options, **{cache_name(self.attention.forward): cache})
        hook.remove()
        return out


@pytest.mark.parametrize("what", ["q", "k"])
def test_more_that_depends_on_columns_is_refused(what: str) -> None:
    model = tiny_model("llama4")
    model.model.layers[FULL].self_attn = OtherScale(model.model.layers[FULL].self_attn, what)
    with pytest.raises(UnsupportedModel, match="makes of it more than a known scale"):
        windlass.attach(model)


@pytest.mark.skipif(transformers.__version__ == "5.24.0", reason="there the model itself raises AttributeError")
def test_the_text_part_of_the_model_with_pictures(text: Text) -> None:
    small = {"hidden_size": 20, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 80}
    vision = {**small, "image_size": 28, "patch_size": 14, "vision_output_dim": 20, "projector_input_dim": 20}
    config = AutoConfig.for_model(
        "llama4",
        text_config=tiny_model("llama4").config.to_dict(),
        vision_config={**vision, "projector_output_dim": 20},
        image_token_index=VOCABULARY - 1,
    )
    torch.manual_seed(1)
    model = AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    ids = text(TOKENS, seed=11)
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        windlass.attach(model)
        assert_close(read(model, KVCache(model), ids, 7), expected)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    ours = model.generate(ids, past_key_values=KVCache(model), **options)
    assert ours.tolist() == windlass.detach(model).generate(ids, **options).tolist()


def test_what_rotary_modules_return() -> None:
    angles = torch.linspace(0, 3, 10).view(1, 2, 5)
    cos, sin = angles.cos() * 1.3, angles.sin() * 1.3
    numbers = torch.polar(torch.full_like(angles, 1.3), angles)
    for output in (numbers, (cos, sin)):
        for ours, expected in zip(cos_sin(output), (cos, sin), strict=True):
            assert torch.allclose(ours, expected)
        one, zero = cos_sin(unturned(output))
        assert bool((one == 1).all())
        assert bool((zero == 0).all())
    assert unturned(numbers).dtype == numbers.dtype
    for other in (cos, (cos, sin, sin), None):
        with pytest.raises(UnsupportedModel, match=r"neither \(cos, sin\) nor complex"):
            cos_sin(other)


def test_masks_are_told_apart() -> None:
    def mask(window: int | None, rule: Any, is_causal: bool = True) -> Mask:
        return Mask(window, rule, is_causal, 1, range(1), torch.device("cpu"))

    chunked = mask(5, lambda _b, _h, q, k: (k <= q) & (k // 5 == q // 5))
    sliding = mask(5, lambda _b, _h, q, k: (k <= q) & (k > q - 5))
    shifted = mask(5, lambda _b, _h, q, k: (k <= q) & ((k + 1) // 5 == (q + 1) // 5))
    looks_ahead = mask(5, lambda _b, _h, q, k: k // 5 == q // 5)
    causal = mask(None, lambda _b, _h, q, k: k <= q)
    assert [each.is_chunked() for each in (chunked, sliding, shifted, looks_ahead, causal)] == [True] + [False] * 4
    assert [each.is_sliding_window() for each in (chunked, sliding, causal)] == [False, True, True]
