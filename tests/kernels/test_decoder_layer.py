"""A decoder layer of few tokens against plain PyTorch in float64, with every instruction set of this CPU."""

from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.linears import made
from windlass.core.inputs import Activation, DecoderLayer, GroupCodes, LinearLayer, Norm, Rounding
from windlass.kernels import cpu, reference

if not cpu.instruction_sets():
    pytest.skip("windlass was installed without its compiled kernels", allow_module_level=True)

from windlass.kernels.cpu.decode import FewTokens, can_serve

# Roundings of a number on its way through the layer, each of half a unit in the last place, and sums in float32.
TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 2**-6, torch.float16: 2**-9}
SETTINGS = [
    ("floats", Rounding.NARROW, Activation.SILU, True),
    ("floats", Rounding.WIDE, Activation.GELU_TANH, False),
    ("int8", Rounding.ONE_MORE, Activation.SILU, False),
    ("int4 in 64", Rounding.NARROW, Activation.GELU_TANH, True),
]
# Width, head_dim, heads, kv_heads, inner: sizes for 4 bits are rounded up to whole blocks and groups.
SIZES = [(70, 10, 7, 1, 117), (128, 64, 2, 1, 192)]


@pytest.fixture(params=cpu.instruction_sets())
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(cpu, "instruction_set", lambda: request.param)
    return request.param


def linear(outputs: int, inputs: int, dtype: torch.dtype, kind: str, has_bias: bool) -> LinearLayer:
    """With results of about the size of its inputs."""
    layer = made((1, outputs, inputs), dtype, kind, has_bias).layer
    if isinstance(layer.weights, GroupCodes):
        return replace(layer, weights=replace(layer.weights, pairs=layer.weights.pairs * (0.2 / inputs**0.5)))
    if layer.scales is not None:
        return replace(layer, scales=layer.scales / inputs**0.5)
    return replace(layer, weights=layer.weights / inputs**0.5)


def layer_of(
    size: tuple[int, ...], dtype: torch.dtype, setting: tuple[str, Rounding, Activation, bool]
) -> DecoderLayer:
    (width, head_dim, heads, kv_heads, inner), (kind, rounding, activation, has_more) = size, setting
    generator = torch.Generator().manual_seed(width)

    def norm(count: int) -> Norm:
        return Norm((torch.rand(count, generator=generator) * 2 - 0.5).to(dtype), 1e-5, rounding)

    sizes = {
        "query": (heads * head_dim, width),
        "key": (kv_heads * head_dim, width),
        "value": (kv_heads * head_dim, width),
        "output": (width, heads * head_dim),
        "gate": (inner, width),
        "up": (inner, width),
        "down": (width, inner),
    }
    linears = {name: linear(*each, dtype, kind, has_more and name != "up") for name, each in sizes.items()}
    of_heads = (norm(head_dim), norm(head_dim)) if has_more else (None, None)
    return DecoderLayer(
        **linears,
        first_norm=norm(width),
        second_norm=norm(width),
        query_norm=of_heads[0],
        key_norm=of_heads[1],
        activation=activation,
        head_dim=head_dim,
    )


def exact(layer: DecoderLayer) -> DecoderLayer:
    """The same layer in float64."""

    def of(part: Any) -> Any:
        if isinstance(part, Norm):
            return replace(part, weights=part.weights.double())
        if not isinstance(part, LinearLayer):
            return part
        weights = part.weights.floats(torch.float64) if isinstance(part.weights, GroupCodes) else part.weights.double()
        weights = weights if part.scales is None else weights * part.scales.double()[:, None]
        return LinearLayer(weights, None if part.bias is None else part.bias.double())

    return DecoderLayer(**{field.name: of(getattr(layer, field.name)) for field in fields(layer)})


def inputs_of(layer: DecoderLayer, batch: int, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(batch, tokens, layer.query.in_features, generator=generator)
    hidden[..., ::7] *= 20
    heads = layer.query.out_features // layer.head_dim
    attended = torch.randn(batch, tokens, heads, layer.head_dim, generator=generator)
    return hidden.to(dtype), attended.to(dtype)


def assert_near(ours: Tensor, truth: Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == dtype
    assert ours.shape == truth.shape
    assert (ours.double() - truth).abs().max() <= TOLERANCE[dtype] * truth.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.usefixtures("instruction_set")
def test_it_equals_plain_pytorch_in_float64(
    dtype: torch.dtype, setting: tuple[str, Rounding, Activation, bool]
) -> None:
    for size, (batch, tokens) in product(SIZES, [(1, 1), (3, 1), (2, 8), (2, 19)]):
        if size[0] % 64 and setting[0].startswith("int4"):
            continue
        layer = layer_of(size, dtype, setting)
        assert can_serve(layer, dtype)
        kernel, truth, (hidden, attended) = (
            FewTokens(layer, dtype),
            exact(layer),
            inputs_of(layer, batch, tokens, dtype),
        )
        theirs = reference.before_attention(truth, hidden.double())
        for ours, expected in zip(kernel.before_attention(hidden), theirs, strict=True):
            assert_near(ours, expected, dtype)
        expected = reference.after_attention(truth, hidden.double(), attended.double())
        assert_near(kernel.after_attention(hidden, attended), expected, dtype)


@pytest.mark.parametrize("rounding", Rounding)
@pytest.mark.parametrize("activation", Activation)
def test_it_rounds_where_transformers_rounds(rounding: Rounding, activation: Activation) -> None:
    """In bfloat16 most numbers are the reference's own, which rounds as modules do. Sums may fall to either side."""
    layer = layer_of((128, 64, 2, 1, 192), torch.bfloat16, ("floats", rounding, activation, True))
    kernel, (hidden, attended) = FewTokens(layer, torch.bfloat16), inputs_of(layer, 2, 4, torch.bfloat16)
    ours = (*kernel.before_attention(hidden), kernel.after_attention(hidden, attended))
    before = reference.before_attention(layer, hidden)
    theirs = (*before, reference.after_attention(layer, hidden, attended))
    for one, other in zip(ours, theirs, strict=True):
        assert (one == other).float().mean() > 0.9


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.usefixtures("instruction_set")
def test_no_token_depends_on_the_others_or_on_the_number_of_threads(
    dtype: torch.dtype, setting: tuple[str, Rounding, Activation, bool]
) -> None:
    layer = layer_of(SIZES[1], dtype, setting)
    kernel, (hidden, attended) = FewTokens(layer, dtype), inputs_of(layer, 1, 299, dtype)
    queries, keys, values = kernel.before_attention(hidden)
    together, threads = kernel.after_attention(hidden, attended), torch.get_num_threads()
    torch.set_num_threads(3)
    size = cpu.MAX_ROWS + 1 if cpu.has_panels(layer.query, dtype) else 1
    try:
        for at in (0, 10, 15, 16, 63, 64, 149, 150, 255, 256, 298):  # rows are multiplied by 4, 16, 64 or 256
            token = slice(min(at, 299 - size), min(at, 299 - size) + size)
            alone = kernel.before_attention(hidden[:, token].contiguous())
            for one, other in zip(alone, (queries, keys, values), strict=True):
                assert torch.equal(one, other[:, :, token])
            assert torch.equal(kernel.after_attention(hidden[:, token], attended[:, token]), together[:, token])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("name", "has_amx", "dtype", "kind", "most"),
    [
        ("plain", False, torch.float32, 0, 16),
        ("plain", False, torch.float16, 0, 16),
        ("plain", False, torch.bfloat16, 0, 32),
        ("plain", False, torch.float32, 2, 64),
        ("avx2", False, torch.float32, 0, 16),
        ("avx2", False, torch.float16, 0, None),
        ("avx2", False, torch.bfloat16, 0, None),
        ("avx512_bf16", False, torch.float16, 0, 16),
        ("avx512_bf16", False, torch.bfloat16, 0, None),
        ("avx512_bf16", True, torch.bfloat16, 0, 32),
    ],
)
def test_most_tokens_of_a_layer(
    name: str, has_amx: bool, dtype: torch.dtype, kind: int, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "instruction_set", lambda: name)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_amx)
    assert FewTokens(layer_of(SIZES[1], dtype, SETTINGS[kind]), dtype).most_tokens == most


def test_what_does_not_fit_together_is_not_served() -> None:
    layer = layer_of(SIZES[0], torch.float32, SETTINGS[0])
    assert can_serve(layer, torch.float32)
    other = layer_of(SIZES[1], torch.float32, SETTINGS[0])
    assert not can_serve(layer, torch.bfloat16)
    for name in ("query", "key", "output", "gate", "up", "down", "first_norm", "second_norm", "query_norm"):
        assert not can_serve(replace(layer, **{name: getattr(other, name)}), torch.float32), name
    assert not can_serve(replace(layer, head_dim=11), torch.float32)
    doubled = replace(layer, first_norm=replace(layer.first_norm, weights=layer.first_norm.weights.double()))
    assert not can_serve(doubled, torch.float32)
