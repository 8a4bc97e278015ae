"""A token of all decoder layers in one call of a kernel, against the same token layer by layer."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import windlass
from tests.helpers.caches import assert_same
from windlass import KVCache, UsageError, kernels
from windlass.cache.cache import TextCache
from windlass.hf.cpu_decoder import WholeDecoder
from windlass.testing import tiny_model

if not kernels.has_linear("cpu"):
    pytest.skip("no kernel for linear layers on this CPU", allow_module_level=True)

TOLERANCE = 1e-5
POLICIES = ["recent", "h2o", "tova", "snapkv", "key_diff"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The layers of each call of the kernel."""
    counted: list[int] = []
    decode_layers = kernels.decode_layers

    def counting(layers: Any, hidden: Tensor) -> None:
        counted.append(len(layers))
        decode_layers(layers, hidden)

    monkeypatch.setattr(kernels, "decode_layers", counting)
    with torch.no_grad():
        yield counted


def tokens(count: int, batch: int = 1) -> Tensor:
    return torch.arange(count * batch).view(batch, count) % 61


def fed(model: PreTrainedModel, cache: Cache, text: Tensor, single: int) -> Tensor:
    """The logits of the last `single` columns, which come one by one."""
    first = text.shape[1] - single
    model(text[:, :first], past_key_values=cache)
    return torch.cat([model(part, past_key_values=cache).logits for part in text[:, first:].split(1, 1)], 1)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("batch", [1, 3])
def test_it_equals_the_plain_model(family: str, batch: int, calls: list[int]) -> None:
    plain = tiny_model(family)
    model, text = windlass.attach(copy.deepcopy(plain)), tokens(23, batch)
    calls.clear()
    ours = fed(model, KVCache(model, batch=batch), text, 9)
    theirs = fed(plain, DynamicCache(config=plain.config), text, 9)
    assert (ours - theirs).abs().max() < TOLERANCE * theirs.std()
    assert len(calls) >= 8  # the first one may find no slots that are laid out for decode
    assert set(calls) == {plain.config.num_hidden_layers}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("batch", [1, 2])
def test_it_leaves_what_layers_by_themselves_leave(
    policy: str, batch: int, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit: logits, slots, state, and what is left after tokens were taken back."""
    model, text = windlass.attach(tiny_model("qwen3")), tokens(47, batch)
    caches = [KVCache(model, batch=batch, budget=16, policy=policy, rollback=3) for _ in range(2)]
    calls.clear()
    ours = fed(model, caches[0], text, 15)
    assert len(calls) >= 14
    with monkeypatch.context() as patched:
        patched.setattr(WholeDecoder, "result", lambda *_: None)
        theirs = fed(model, caches[1], text, 15)
    assert torch.equal(ours, theirs)
    assert_same(*caches)
    for cache in caches:
        cache.rollback(2)
    assert_same(*caches)


def test_padding_and_rows_of_several_lengths_are_the_same() -> None:
    model, text = windlass.attach(tiny_model("llama")), tokens(20, 2)
    caches = [KVCache(model, batch=2, budget=8) for _ in range(2)]
    mask = torch.ones(2, 20, dtype=torch.long)
    mask[1, :7] = 0
    outs = []
    for cache, own in zip(caches, (False, True), strict=True):
        with torch.no_grad(), pytest.MonkeyPatch.context() as patched:
            if own:
                patched.setattr(WholeDecoder, "result", lambda *_: None)
            model(text[:, :12], attention_mask=mask[:, :12], past_key_values=cache)
            for end in range(13, 21):
                part = model(text[:, end - 1 : end], attention_mask=mask[:, :end], past_key_values=cache).logits
                outs.append(part)
    for one, other in zip(outs[:8], outs[8:], strict=True):
        assert torch.equal(one, other)
    assert_same(*caches)


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_between_two_layers_that_are_kept_leaves_no_trace(
    at: int, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = windlass.attach(tiny_model("llama")), tokens(31)
    cache = KVCache(model, budget=12, policy="h2o", rollback=2)
    keep = TextCache.keep_decoded

    def interrupted(self: TextCache, layer: int, done: Any) -> None:
        if layer == at:
            raise error
        keep(self, layer, done)

    with torch.no_grad():
        fed(model, cache, text[:, :25], 6)
        before = copy.deepcopy(cache)
        with monkeypatch.context() as patched:
            patched.setattr(TextCache, "keep_decoded", interrupted)
            with pytest.raises(error):
                model(text[:, 25:26], past_key_values=cache)
        assert_same(cache, before)
        after = [fed(model, each, text[:, 25:], 5) for each in (cache, before)]
    assert torch.equal(*after)
    assert_same(cache, before)


def test_layers_that_are_hooked_left_out_or_of_several_kinds_are_called_by_themselves(calls: list[int]) -> None:
    plain = tiny_model("llama")
    model = windlass.attach(copy.deepcopy(plain))
    calls.clear()
    handle = model.model.layers[1].register_forward_hook(lambda module, args, output: output * 2)  # noqa: ARG005
    other = plain.model.layers[1].register_forward_hook(lambda module, args, output: output * 2)  # noqa: ARG005
    ours, theirs = (
        fed(model, KVCache(model), tokens(19), 4),
        fed(plain, DynamicCache(config=plain.config), tokens(19), 4),
    )
    assert (ours - theirs).abs().max() < TOLERANCE * theirs.std()
    handle.remove()
    other.remove()
    assert not calls
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "max_window_layers": 1}
    heads: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    windowed = Qwen2ForCausalLM(Qwen2Config(**sizes, **heads, use_sliding_window=True, sliding_window=7)).eval()
    twin = windlass.attach(copy.deepcopy(windowed))
    ours, theirs = (
        fed(twin, KVCache(twin), tokens(19), 4),
        fed(windowed, DynamicCache(config=windowed.config), tokens(19), 4),
    )
    assert (ours - theirs).abs().max() < TOLERANCE * theirs.std()
    assert not calls


def test_layers_in_another_order_than_the_code_says_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer that is not given what the one before returned."""
    model, text = windlass.attach(tiny_model("llama")), tokens(19)
    cache, result = KVCache(model), WholeDecoder.result

    def given_another(self: WholeDecoder, layer: Any, hidden: Tensor, *others: Any) -> Tensor | None:
        return result(self, layer, hidden.clone(), *others)

    with torch.no_grad():
        fed(model, cache, text, 3)
        before = copy.deepcopy(cache)
        with monkeypatch.context() as patched:
            patched.setattr(WholeDecoder, "result", given_another)
            with pytest.raises(UsageError, match="in another order, or with other masks"):
                model(text[:, -1:], past_key_values=cache)
        assert_same(cache, before)
        assert torch.equal(*(fed(model, each, text, 3) for each in (cache, before)))
