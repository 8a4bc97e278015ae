"""Linear layers of few rows against float64, with every instruction set of this CPU."""

import pytest
import torch
from torch import Tensor

from windlass.core.linear import LinearInput
from windlass.kernels import cpu, reference

if not cpu.instruction_sets():
    pytest.skip("windlass was installed without its compiled kernels", allow_module_level=True)

# Units in the last place of the result's largest number: one rounding, and that of the sums in float32.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
SHAPES = [(1, 8, 64), (2, 37, 203), (16, 24, 1000), (5, 9, 31), (3, 1, 1), (9, 19, 4096)]  # rows, outputs, inputs


@pytest.fixture(params=cpu.instruction_sets())
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(cpu, "instruction_set", lambda: request.param)
    return request.param


def made(shape: tuple[int, int, int], dtype: torch.dtype, has_codes: bool, has_bias: bool) -> LinearInput:
    """A linear layer of random numbers."""
    rows, outputs, width = shape
    generator = torch.Generator().manual_seed(rows * width + outputs)
    inputs = torch.randn(rows, width, generator=generator).to(dtype)
    inputs[:, :: max(1, width // 3)] *= 300  # some channels are far larger than others, as in real models
    bias = torch.randn(outputs, generator=generator).to(dtype) if has_bias else None
    if not has_codes:
        return LinearInput(inputs, torch.randn(outputs, width, generator=generator).to(dtype), bias)
    codes = torch.randint(-128, 128, (outputs, width), generator=generator, dtype=torch.int8)
    return LinearInput(inputs, codes, bias, torch.rand(outputs, generator=generator) / 64)


def exact(call: LinearInput) -> Tensor:
    """The same layer in float64."""
    weights = call.weights.double() if call.scales is None else call.weights.double() * call.scales.double()[:, None]
    return reference.linear(
        LinearInput(call.inputs.double(), weights, None if call.bias is None else call.bias.double())
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("has_codes", [False, True])
@pytest.mark.usefixtures("instruction_set")
def test_linear_equals_the_layer_in_float64(shape: tuple[int, int, int], dtype: torch.dtype, has_codes: bool) -> None:
    for has_bias in (False, True):
        call = made(shape, dtype, has_codes, has_bias)
        assert cpu.can_multiply(call)
        ours, truth = cpu.linear(call), exact(call)
        assert ours.dtype == dtype
        assert (ours.double() - truth).abs().max() <= TOLERANCE[dtype] * truth.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("has_codes", [False, True])
@pytest.mark.usefixtures("instruction_set")
def test_no_row_depends_on_the_others_or_on_the_number_of_threads(dtype: torch.dtype, has_codes: bool) -> None:
    call = made((13, 29, 717), dtype, has_codes, True)
    together, threads = cpu.linear(call), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for rows in (1, 2, 3, 7):
            parts = [LinearInput(each, call.weights, call.bias, call.scales) for each in call.inputs.split(rows)]
            assert torch.equal(torch.cat([cpu.linear(each) for each in parts]), together)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("instruction_set")
def test_codes_are_multiplied_without_error_where_inputs_have_few_bits() -> None:
    """Whole inputs below 2^7 and one scale: sums are whole numbers below 2^24, rounded once."""
    codes = torch.randint(-128, 128, (11, 999), dtype=torch.int8)
    inputs = torch.randint(-127, 128, (2, 999)).bfloat16()
    whole = inputs.long() @ codes.long().T
    assert torch.equal(cpu.linear(LinearInput(inputs, codes, None, torch.ones(11))), whole.bfloat16())


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.usefixtures("instruction_set")
def test_what_is_no_number_stays_in_its_row(value: float) -> None:
    call = made((3, 10, 128), torch.bfloat16, True, False)
    expected = cpu.linear(call)
    call.inputs[1, 5], call.inputs[1, 9] = value, 1.0
    ours = cpu.linear(call)
    assert not ours[1].isfinite().any()
    assert torch.equal(ours[::2], expected[::2])


@pytest.mark.usefixtures("instruction_set")
def test_tiny_and_no_inputs_are_not_lost() -> None:
    codes = torch.full((4, 70), 3, dtype=torch.int8)
    for size in (0.0, 1e-20, 1e20):
        inputs = torch.full((1, 70), size).bfloat16()
        expected = 210 * inputs[:, :4].double()
        out = cpu.linear(LinearInput(inputs, codes, None, torch.ones(4)))
        assert torch.allclose(out.double(), expected, rtol=2**-8, atol=0)


def test_what_the_kernel_does_not_know_is_left_to_pytorch() -> None:
    known = made((4, 6, 32), torch.bfloat16, False, True)
    assert cpu.can_multiply(known)
    transposed = torch.randn(32, 6).bfloat16().T
    too_many = torch.randn(17, 32).bfloat16()
    unknown = (
        LinearInput(known.inputs.double(), known.weights.double()),
        LinearInput(known.inputs.float(), known.weights),
        LinearInput(known.inputs, transposed),
        LinearInput(too_many, known.weights),
        LinearInput(known.inputs[:0], known.weights),
        LinearInput(known.inputs, known.weights, torch.zeros(6)),
    )
    assert not any(cpu.can_multiply(call) for call in unknown)
