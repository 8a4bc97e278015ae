"""Decoder layers that a kernel computes, the passes in which it does, and unchanged others."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, GemmaConfig, GemmaForCausalLM, PreTrainedModel

import windlass
from tests.helpers.models import read
from windlass import KVCache, kernels
from windlass.evals.speed.measure import RotatedStorage
from windlass.hf.cpu_decoder import LAYER, NORMED_ATTENTION, rounding_of
from windlass.hf.model_facts import has_code_of
from windlass.kernels.cpu import MAX_ROWS
from windlass.testing import tiny_model

if not kernels.has_linear("cpu"):
    pytest.skip("no kernel for linear layers on this CPU", allow_module_level=True)

from windlass.kernels.cpu.decode import DecoderSteps, FewTokens

TOLERANCE = 1e-5
SERVED = ["llama", "mistral", "qwen2", "qwen3", "gemma"]
OTHERS = ["gemma3", "olmo2", "granite", "phi3", "smollm3", "cohere", "stablelm", "mixtral"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The tokens of each layer that a kernel computes, all rows counted."""
    counted: list[int] = []
    after = FewTokens.after_attention

    def counting(self: FewTokens, hidden: Tensor, attended: Tensor) -> Tensor:
        counted.append(hidden.shape[0] * hidden.shape[1])
        return after(self, hidden, attended)

    steps = DecoderSteps.step

    def counting_layers(self: DecoderSteps, *given: Any) -> Tensor:
        counted.extend([self._batch] * len(self._layers))
        return steps(self, *given)

    monkeypatch.setattr(FewTokens, "after_attention", counting)
    monkeypatch.setattr(DecoderSteps, "step", counting_layers)
    with torch.no_grad():
        yield counted


def made(family: str) -> PreTrainedModel:
    if family != "gemma":
        return tiny_model(family)
    sizes: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 56, "vocab_size": 128, "head_dim": 12}
    config = GemmaConfig(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=1, **sizes)
    return GemmaForCausalLM(config).eval()


def tokens(count: int, batch: int = 1) -> Tensor:
    return torch.arange(count * batch).view(batch, count) % 61


def assert_equal_to_plain(model: PreTrainedModel, plain: PreTrainedModel, parts: list[int], batch: int = 2) -> None:
    cache, own = KVCache(model, batch=batch), DynamicCache(config=plain.config)
    for part in tokens(sum(parts), batch).split(parts, 1):
        ours, theirs = (each(part, past_key_values=kept).logits for each, kept in ((model, cache), (plain, own)))
        assert (ours - theirs).abs().max() < TOLERANCE * theirs.std()


@pytest.mark.parametrize("family", [*SERVED, *OTHERS])
def test_layers_of_known_code_are_served_in_passes_of_few_tokens(family: str, calls: list[int]) -> None:
    plain = made(family)
    model = windlass.attach(copy.deepcopy(plain))
    layers = plain.config.num_hidden_layers
    calls.clear()
    assert_equal_to_plain(model, plain, [9, 1, 7, 8, 2])
    few = [2 * count for count in (1, 7, 8, 2) if 2 * count <= MAX_ROWS]
    assert calls == ([count for count in few for _ in range(layers)] if family in SERVED else [])


def test_code_that_differs_is_not_known() -> None:
    llama, qwen, gemma = (made(family).model.layers[0] for family in ("llama", "qwen3", "gemma3"))
    assert has_code_of(llama, LAYER)
    assert has_code_of(qwen, LAYER)
    assert not has_code_of(gemma, LAYER)
    assert has_code_of(qwen.self_attn, NORMED_ATTENTION)
    assert not has_code_of(llama.self_attn, NORMED_ATTENTION)
    assert rounding_of(llama.self_attn) is None

    class Other(type(llama)):  # type: ignore[misc]  # a class that is known only when it runs
        def forward(self, hidden_states: Tensor, **kwargs: Any) -> Any:
            return super().forward(hidden_states, **kwargs)

    llama.__class__ = Other
    assert not has_code_of(llama, LAYER)


@pytest.mark.parametrize("name", ["before_attention", "after_attention"])
def test_a_kernel_that_gives_something_else_serves_nothing(
    name: str, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it would with a release of transformers whose modules compute something else."""
    plain, own = tiny_model("qwen3"), getattr(FewTokens, name)

    def changed(self: FewTokens, *given: Tensor) -> Any:
        out = own(self, *given)
        return out * 1.1 if isinstance(out, Tensor) else (out[0], out[1] * 1.1, out[2])

    with monkeypatch.context() as patched:
        patched.setattr(FewTokens, name, changed)
        model = windlass.attach(copy.deepcopy(plain))
    calls.clear()
    assert_equal_to_plain(model, plain, [3, 1, 1])
    assert not calls


def double(module: nn.Module, args: object, output: Tensor) -> Tensor:  # noqa: ARG001
    return output * 2


def hooked(name: str) -> Callable[[nn.Module], None]:
    def change(layer: nn.Module) -> None:
        layer.get_submodule(name).register_forward_hook(double)

    return change


def with_other_norm(layer: Any) -> None:
    layer.input_layernorm = nn.LayerNorm(layer.input_layernorm.weight.numel())


def with_other_projection(layer: Any) -> None:
    layer.self_attn.k_proj = nn.Sequential(layer.self_attn.k_proj, nn.Dropout(0.0))


def with_other_activation(layer: Any) -> None:
    layer.mlp.act_fn = nn.ReLU()


def with_own_forward(layer: Any) -> None:
    own = layer.mlp.forward
    layer.mlp.forward = lambda inputs: own(inputs) * 2


CHANGES = [
    *(hooked(name) for name in ("input_layernorm", "mlp.act_fn", "mlp.up_proj", "self_attn.q_proj", "mlp")),
    *(with_other_norm, with_other_projection, with_other_activation, with_own_forward),
]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_first", [True, False])
def test_what_is_changed_after_attach_is_respected(
    change: Callable[[nn.Module], None], is_first: bool, calls: list[int]
) -> None:
    """In one layer. The others are served as before, whether or not the layer was served before the change."""
    torch.manual_seed(0)
    plain = tiny_model("qwen3")
    model = windlass.attach(copy.deepcopy(plain))
    if not is_first:
        read(model, KVCache(model), tokens(5), 5)
    for each in (plain, model):
        torch.manual_seed(1)
        change(each.model.layers[1])
    calls.clear()
    assert_equal_to_plain(model, plain, [3, 1, 1])
    assert len(calls) == 3 * (plain.config.num_hidden_layers - 1)


def test_hooks_of_all_modules_are_respected(calls: list[int]) -> None:
    plain = tiny_model("llama")
    model, seen = windlass.attach(copy.deepcopy(plain)), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, out: seen.append(module))  # noqa: ARG005
    calls.clear()
    assert_equal_to_plain(model, plain, [3, 1])
    handle.remove()
    assert not calls
    assert model.model.layers[0].mlp.act_fn in seen


def test_weights_that_are_replaced_or_changed_are_read_where_they_are(calls: list[int]) -> None:
    plain = tiny_model("qwen2")
    model = windlass.attach(copy.deepcopy(plain))
    read(model, KVCache(model), tokens(5), 5)
    for each in (plain, model):
        layer = each.model.layers[0]
        layer.mlp.up_proj.weight = nn.Parameter(torch.full_like(layer.mlp.up_proj.weight, 0.02))
        layer.self_attn.q_proj.bias.data = torch.full_like(layer.self_attn.q_proj.bias, 0.3)
        layer.input_layernorm.weight.data = torch.full_like(layer.input_layernorm.weight, 0.4)
        each.model.layers[1].mlp.down_proj.weight.mul_(3)
    calls.clear()
    assert_equal_to_plain(model, plain, [3, 1])
    assert calls
    model.double()
    calls.clear()
    assert_equal_to_plain(model, plain.double(), [3, 1])
    assert not calls


def test_only_passes_with_our_cache_and_without_gradients_are_served(calls: list[int]) -> None:
    model = windlass.attach(tiny_model("llama"))
    calls.clear()
    model(tokens(3))
    model(tokens(3), past_key_values=DynamicCache(config=model.config))
    with torch.enable_grad():
        model(tokens(3), past_key_values=KVCache(model))
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens(3), past_key_values=KVCache(model))
    assert not calls
    hidden = model(tokens(3), past_key_values=KVCache(model), output_hidden_states=True).hidden_states
    assert len(hidden) == model.config.num_hidden_layers + 1
    other = windlass.attach(tiny_model("llama"), own_linear=False)
    calls.clear()
    read(other, KVCache(other), tokens(5), 5)
    assert not calls


@pytest.mark.parametrize("family", SERVED[:4])
def test_keys_that_are_stored_rotated_are_rotated(family: str, calls: list[int]) -> None:
    plain = made(family)
    model = windlass.attach(copy.deepcopy(plain))
    cache, own = RotatedStorage(model), DynamicCache(config=plain.config)
    calls.clear()
    for part in tokens(9).split([5, 1, 3], 1):
        ours, theirs = (each(part, past_key_values=kept).logits for each, kept in ((model, cache), (plain, own)))
        assert (ours - theirs).abs().max() < TOLERANCE * theirs.std()
    assert len(calls) == 3 * plain.config.num_hidden_layers


def test_detach_and_copies_leave_each_model_its_own_layers(calls: list[int]) -> None:
    model = windlass.attach(tiny_model("llama"))
    read(model, KVCache(model), tokens(5), 5)
    other = copy.deepcopy(model)
    for weight in other.parameters():
        weight.zero_()
    calls.clear()
    assert model(tokens(3), past_key_values=KVCache(model)).logits.any()
    assert not other(tokens(3), past_key_values=KVCache(other)).logits.any()
    assert len(calls) == 2 * model.config.num_hidden_layers
    windlass.detach(model)
    assert not any("forward" in vars(module) for module in model.modules())
