"""Linear layers that our kernel serves, the passes in which it does, and unchanged others."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import windlass
from tests.helpers.caches import assert_same
from tests.helpers.models import read
from windlass import KVCache, UsageError, kernels
from windlass.core.inputs import GroupCodes, LinearInput
from windlass.hf.passes import WholePass
from windlass.hf.weights import PACKED_BLOCKS, quantize
from windlass.kernels import cpu
from windlass.kernels.cpu import MAX_ROWS
from windlass.testing import tiny_model

if not kernels.has_linear("cpu"):
    pytest.skip("no kernel for linear layers on this CPU", allow_module_level=True)

from windlass.kernels.cpu.decode import DecoderSteps, FewTokens

TOLERANCE = 1e-5


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The rows of each linear layer that our kernels serve, alone or in a decoder layer, one after the other."""
    counted: list[int] = []
    steps, linear, before, after = (
        DecoderSteps.step,
        kernels.linear,
        FewTokens.before_attention,
        FewTokens.after_attention,
    )

    def counting(call: LinearInput) -> Tensor:
        counted.append(call.rows)
        return linear(call)

    def counting_before(self: FewTokens, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        counted.extend([hidden.shape[0] * hidden.shape[1]] * 3)
        return before(self, hidden)

    def counting_after(self: FewTokens, hidden: Tensor, attended: Tensor) -> Tensor:
        counted.extend([hidden.shape[0] * hidden.shape[1]] * 4)
        return after(self, hidden, attended)

    def counting_layers(self: DecoderSteps, *given: Any) -> Tensor:
        counted.extend([self._batch] * 7 * len(self._layers))
        return steps(self, *given)

    monkeypatch.setattr(DecoderSteps, "step", counting_layers)
    monkeypatch.setattr(kernels, "linear", counting)
    monkeypatch.setattr(FewTokens, "before_attention", counting_before)
    monkeypatch.setattr(FewTokens, "after_attention", counting_after)
    with torch.no_grad():
        yield counted


def tokens(count: int, batch: int = 1) -> Tensor:
    return torch.arange(count * batch).view(batch, count) % 61


def linear_count(model: PreTrainedModel) -> int:
    return sum(type(module) is nn.Linear for module in model.modules())


def llama(mlp: int, heads: int = 2, head_dim: int = 64) -> PreTrainedModel:
    """A small model of sizes that codes of 4 bits can have."""
    sizes: dict[str, Any] = {"hidden_size": 128, "intermediate_size": mlp, "vocab_size": 320, "head_dim": head_dim}
    config = LlamaConfig(num_hidden_layers=2, num_attention_heads=heads, num_key_value_heads=1, **sizes)
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_each_linear_layer_is_served_in_passes_of_few_rows_with_our_cache(family: str, rows: list[int]) -> None:
    plain = tiny_model(family)
    model = windlass.attach(copy.deepcopy(plain))
    text, count = tokens(27, 2), linear_count(model)
    cache, own = KVCache(model, batch=2, budget=32), DynamicCache(config=plain.config)
    for part in text.split([9, 1, 7, 8, 2], 1):
        rows.clear()
        ours = model(part, past_key_values=cache).logits
        theirs = plain(part, past_key_values=own).logits
        assert rows == ([2 * part.shape[1]] * count if 2 * part.shape[1] <= MAX_ROWS else [])
        assert (ours - theirs).abs().max() < TOLERANCE * theirs.std()


def test_only_passes_with_our_cache_and_without_gradients_are_served(rows: list[int]) -> None:
    model = windlass.attach(tiny_model("llama"))
    rows.clear()
    model(tokens(5))
    model(tokens(5), past_key_values=DynamicCache(config=model.config))
    model.model(tokens(5))
    with torch.enable_grad():
        model(tokens(5), past_key_values=KVCache(model))
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens(5), past_key_values=KVCache(model))
    assert not rows
    model.model(tokens(5), past_key_values=KVCache(model))
    assert len(rows) == linear_count(model) - 1
    model.lm_head(torch.zeros(1, 1, model.config.hidden_size))
    assert len(rows) == linear_count(model) - 1


def test_a_pass_that_fails_or_is_interrupted_serves_nothing_after_it(rows: list[int]) -> None:
    model = windlass.attach(tiny_model("llama"))
    for error in (ValueError, KeyboardInterrupt):

        def fail(*_: object, error: type[BaseException] = error) -> None:
            raise error

        handle = model.lm_head.register_forward_pre_hook(fail)
        with pytest.raises(error):
            model(tokens(5), past_key_values=KVCache(model))
        handle.remove()
        rows.clear()
        model(tokens(5))
        assert not rows


def test_a_pass_that_fails_in_the_head_leaves_no_trace() -> None:
    """Memory runs out there first: logits of a large vocabulary are the largest tensor of a pass."""
    model = windlass.attach(tiny_model("llama"))
    cache, text = KVCache(model, budget=12), tokens(40)

    def fail(*_: object) -> None:
        raise MemoryError

    read(model, cache, text[:, :15], 15)
    for start, end in ((15, 20), (20, 21), (21, 40)):
        before = copy.deepcopy(cache)
        handle = model.lm_head.register_forward_pre_hook(fail)
        with torch.no_grad(), pytest.raises(MemoryError):
            model(text[:, start:end], past_key_values=cache)
        handle.remove()
        assert_same(cache, before)
        assert cache.columns_seen == start
        read(model, cache, text[:, start:end], 20)


def test_hooks_and_wrappers_of_a_linear_layer_are_respected(rows: list[int]) -> None:
    """A LoRA adapter wraps a layer and adds to its outputs. A hook may change them."""
    plain = tiny_model("llama")
    model = windlass.attach(copy.deepcopy(plain))

    rows.clear()

    class Adapted(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.down = base, nn.Linear(base.in_features, 3, bias=False)
            self.down.weight.data.copy_(torch.linspace(-1, 1, self.down.weight.numel()).view_as(self.down.weight))

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.base(inputs)
            return outputs + self.down(inputs).sum(-1, keepdim=True)

    for each in (plain, model):
        mlp = each.model.layers[1].mlp
        mlp.up_proj = Adapted(mlp.up_proj)
        mlp.down_proj.register_forward_hook(lambda module, args, output: output * 2)  # noqa: ARG005
    ours, theirs = model(tokens(7), past_key_values=KVCache(model)).logits, plain(tokens(7)).logits
    assert len(rows) == linear_count(model) - 1  # the adapter's own came after attach
    assert (ours - theirs).abs().max() < TOLERANCE * theirs.std()


def test_weights_that_are_replaced_or_moved_are_read_where_they_are(rows: list[int]) -> None:
    model = windlass.attach(tiny_model("llama"))
    model.model.layers[0].mlp.up_proj.weight = nn.Parameter(
        torch.full_like(model.model.layers[0].mlp.up_proj.weight, 0.01)
    )
    rows.clear()
    assert torch.allclose(
        model(tokens(3), past_key_values=KVCache(model)).logits, model(tokens(3)).logits, atol=TOLERANCE
    )
    assert rows
    model.bfloat16()
    rows.clear()
    assert model(tokens(3), past_key_values=KVCache(model)).logits.dtype == torch.bfloat16
    assert len(rows) == linear_count(model)


def test_the_option_leaves_all_layers_to_pytorch(rows: list[int]) -> None:
    model = windlass.attach(tiny_model("llama"), own_linear=False)
    assert not rows
    read(model, KVCache(model), tokens(9), 4)
    assert not rows
    assert windlass.attach(model, own_linear=False) is model
    with pytest.raises(UsageError, match=r"own_linear=True, but the model is attached with False. Detach it first"):
        windlass.attach(model)
    windlass.detach(model)
    windlass.attach(model)
    rows.clear()
    read(model, KVCache(model), tokens(9), 4)
    assert rows


def test_detach_and_copies_leave_each_model_its_own_layers(rows: list[int]) -> None:
    model = windlass.attach(tiny_model("llama"))
    other = copy.deepcopy(model)
    for weight in other.parameters():
        weight.zero_()
    rows.clear()
    assert model(tokens(3), past_key_values=KVCache(model)).logits.any()
    assert not other(tokens(3), past_key_values=KVCache(other)).logits.any()
    assert len(rows) == 2 * linear_count(model)
    windlass.detach(model)
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_token_does_not_depend_on_the_size_of_its_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit, where PyTorch's own layers round a pass of one otherwise than one of several."""
    model = windlass.attach(tiny_model("llama"))
    linear = model.model.layers[0].mlp.up_proj
    states = torch.randn(1, 12, linear.in_features)
    monkeypatch.setattr(WholePass, "is_served", True)
    with torch.no_grad():
        whole = linear(states)
        assert torch.equal(torch.cat([linear(part) for part in states.split(1, 1)], 1), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("count", [7, pytest.param(71, marks=pytest.mark.slow)])
def test_codes_of_torchao_are_read_where_they_are(
    rows: list[int], dtype: torch.dtype, weights: str, count: int
) -> None:
    pytest.importorskip("torchao")
    if weights == "int4" and torch.backends.cpu.get_cpu_capability() not in PACKED_BLOCKS:
        pytest.skip("codes of 4 bits are packed in a way of which our kernel knows nothing")
    model = llama(192)
    nn.Module.to(model, dtype)
    exact = copy.deepcopy(model).double()
    quantize(model, weights)
    for name, module in model.named_modules():
        if type(module) is nn.Linear:
            own: Any = module.weight
            if weights == "int8":
                worth = own.qdata.double() * own.scale.double()
            else:  # tests/kernels/test_linear.py compares this with PyTorch's packed weights
                block = PACKED_BLOCKS[torch.backends.cpu.get_cpu_capability()]
                worth = GroupCodes(own.qdata, own.scale_and_zero, own.block_size[1], block, len(own.qdata)).floats(
                    torch.float64
                )
            exact.get_submodule(name).weight.data = worth
    windlass.attach(model)
    rows.clear()
    ours = model(tokens(count), past_key_values=KVCache(model)).logits
    assert len(rows) == linear_count(model)
    truth, theirs = exact(tokens(count)).logits, model(tokens(count)).logits
    most = 1.1
    if weights == "int4":  # inputs in 8 bits are coarser than bfloat16, and many rows meet weights rounded to float16
        most = 2.5 if dtype is torch.bfloat16 else 1.25
    assert (ours - truth).std() <= most * (theirs - truth).std() + TOLERANCE * truth.std()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("count", [29, 83])
@pytest.mark.parametrize("instructions", cpu.instruction_sets())
def test_prompts_of_16_bits_are_multiplied_as_floats_where_that_is_faster(
    rows: list[int], dtype: torch.dtype, count: int, instructions: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if instructions == "plain":
        pytest.skip("linear layers are left to PyTorch")
    monkeypatch.setattr(cpu, "instruction_set", lambda: instructions)
    plain = llama(224)
    nn.Module.to(plain, dtype)
    model = windlass.attach(copy.deepcopy(plain))
    rows.clear()
    ours, theirs = model(tokens(count), past_key_values=KVCache(model)).logits, plain(tokens(count)).logits
    truth = plain.double()(tokens(count)).logits
    is_whole = dtype is torch.bfloat16 and (count <= 32 or not torch.cpu._is_amx_tile_supported())
    by_layers = linear_count(model) - 1 if is_whole else 0  # the kernel of a layer takes them, but not the head
    assert len(rows) == (linear_count(model) if instructions in ("avx2", "avx512") else by_layers)
    assert (ours - truth).std() <= 1.1 * (theirs - truth).std()


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.usefixtures("rows")
def test_codes_that_are_replaced_are_read_where_they_are(weights: str) -> None:
    pytest.importorskip("torchao")
    model, other = llama(192), llama(192)
    for each in (model, other):
        quantize(each, weights)
    windlass.attach(model)
    before = model(tokens(3), past_key_values=KVCache(model)).logits
    ours: Any = model.model.layers[0].mlp.up_proj.weight
    theirs: Any = other.model.layers[1].mlp.up_proj.weight
    ours.qdata = theirs.qdata
    after = model(tokens(3), past_key_values=KVCache(model)).logits
    assert (after - before).abs().max() > 0.01 * before.std()
    assert (after - model(tokens(3)).logits).abs().max() < TOLERANCE * after.std()


def test_codes_of_sizes_that_our_kernel_does_not_know_are_left_to_torchao(rows: list[int]) -> None:
    pytest.importorskip("torchao")
    model = llama(192, heads=4, head_dim=48)  # 48 are no whole blocks, which torchao makes of 32 or 64, as the CPU is
    quantize(model, "int4")
    windlass.attach(model)
    rows.clear()
    ours, theirs = model(tokens(7), past_key_values=KVCache(model)).logits, model(tokens(7)).logits
    assert len(rows) == linear_count(model) - 2 * 2  # the two of each layer that give 48 outputs
    assert (ours - theirs).abs().max() < TOLERANCE * theirs.std()
