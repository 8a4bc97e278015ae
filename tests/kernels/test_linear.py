"""Linear layers of few rows against float64, with every instruction set of this CPU."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.helpers.linears import made, packed, rounded
from windlass import kernels
from windlass.core.inputs import GroupCodes, LinearInput, LinearLayer
from windlass.kernels import cpu, reference

if not cpu.instruction_sets():
    pytest.skip("windlass was installed without its compiled kernels", allow_module_level=True)

# Units in the last place of the result's largest number: one rounding, and that of the sums in float32.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
KINDS = [
    "floats",
    "int8",
    "int4 in 64",
    "int4 in 32",
    "groups of 4",
    "groups of 8",
    "groups of 4 with zeros",
    "groups of 4 with supers",
    "groups of 8 with supers",
]
SHAPES = [(1, 8, 64), (2, 37, 203), (16, 24, 1000), (5, 9, 31), (3, 1, 1), (9, 19, 4096)]  # rows, outputs, inputs


@pytest.fixture(params=cpu.instruction_sets())
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(cpu, "instruction_set", lambda: request.param)
    return request.param


def exact(call: LinearInput) -> Tensor:
    """The same layer in float64, of rounded inputs where the kernel rounds them."""
    weights, inputs = call.layer.weights, call.inputs.double()
    bias = None if call.layer.bias is None else call.layer.bias.double()
    if isinstance(weights, GroupCodes):
        has_digits = cpu.has_digits(call.layer, call.inputs.dtype)
        inputs = rounded(call.inputs, weights.group, not has_digits) if is_rounded(call) else inputs
        return reference.linear(LinearInput(inputs, LinearLayer(weights.floats(torch.float64), bias)))
    floats = weights.double() if call.layer.scales is None else weights.double() * call.layer.scales.double()[:, None]
    return reference.linear(LinearInput(inputs, LinearLayer(floats, bias)))


def is_rounded(call: LinearInput) -> bool:
    """Inputs of bfloat16 are, for codes of 4 bits, and for codes of 8 bits in groups where no panel is decoded."""
    weights, dtype = call.layer.weights, call.inputs.dtype
    if not isinstance(weights, GroupCodes) or dtype is not torch.bfloat16:
        return False
    has_panels = cpu.has_panels(call.layer, dtype) and call.rows > cpu.MAX_ROWS
    return cpu.can_multiply(call) and not has_panels and (weights.bits == 4 or cpu.instruction_set() != "plain")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("instruction_set")
def test_linear_equals_the_layer_in_float64(shape: tuple[int, int, int], dtype: torch.dtype, kind: str) -> None:
    for has_bias in (False, True):
        call = made(shape, dtype, kind, has_bias)
        assert cpu.can_multiply(call)
        ours, truth = cpu.linear(call), exact(call)
        assert ours.dtype == dtype
        assert (ours.double() - truth).abs().max() <= TOLERANCE[dtype] * truth.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("instruction_set")
def test_many_rows_are_multiplied_by_panels_of_the_weights(
    dtype: torch.dtype, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel, where that is fast, and else 70 outputs at a time, or a block of 64 or 32."""
    monkeypatch.setattr(kernels, "PANEL", 70 * 512)
    for shape in ((21, 200, 512), (193, 200, 512), (17, 29, 717), (530, 41, 300)):
        rows, call = shape[0], made(shape, dtype, kind, True)
        call = replace(call, inputs=call.inputs / 16)  # no result too large for float16
        ours, truth = kernels.linear(call), exact(call)
        assert ours.dtype == dtype
        assert (ours.double() - truth).abs().max() <= 2 * TOLERANCE[dtype] * truth.abs().max()
        assert kernels.needs_panels(call) is (kind != "floats" or cpu.product_dtype(call.inputs) is not dtype)
        is_slow = dtype.itemsize == 2 and kernels.needs_panels(call)
        most = cpu.most_rows(call.layer, dtype)
        has_panels = cpu.has_panels(call.layer, dtype)
        assert cpu.can_multiply(call) is (has_panels or (is_slow and (most is None or rows <= most)))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("instruction_set")
def test_no_row_depends_on_the_others_or_on_the_number_of_threads(dtype: torch.dtype, kind: str) -> None:
    call = made((13, 29, 717), dtype, kind, True)
    together, threads = cpu.linear(call), torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for rows in (1, 2, 3, 6, 7):
            parts = [
                LinearInput(each, LinearLayer(call.layer.weights, call.layer.bias, call.layer.scales))
                for each in call.inputs.split(rows)
            ]
            assert torch.equal(torch.cat([cpu.linear(each) for each in parts]), together)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("instruction_set")
def test_no_row_of_many_depends_on_the_others(dtype: torch.dtype, kind: str) -> None:
    call, threads = made((261, 29, 718), dtype, kind, True), torch.get_num_threads()
    together = cpu.linear(call)
    torch.set_num_threads(3)
    try:
        for rows in (17, 20, 131):
            parts = [
                cpu.linear(LinearInput(each, call.layer)) for each in call.inputs[: 261 // rows * rows].split(rows)
            ]
            assert torch.equal(torch.cat(parts), together[: 261 // rows * rows])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.usefixtures("instruction_set")
def test_codes_are_multiplied_without_error_where_inputs_have_few_bits() -> None:
    """Whole inputs below 2^7 and one scale: sums are whole numbers below 2^24, rounded once."""
    codes = torch.randint(-128, 128, (11, 999), dtype=torch.int8)
    inputs = torch.randint(-127, 128, (2, 999)).bfloat16()
    whole = inputs.long() @ codes.long().T
    assert torch.equal(cpu.linear(LinearInput(inputs, LinearLayer(codes, None, torch.ones(11)))), whole.bfloat16())


@pytest.mark.parametrize("block", [64, 32])
def test_the_reference_unpacks_codes_of_4_bits(block: int) -> None:
    codes = torch.randint(0, 16, (2 * block, 96), dtype=torch.uint8)
    pairs = torch.randn(3, 2 * block, 2)
    floats = GroupCodes(packed(codes, block), pairs, 32, block, len(codes)).floats(torch.float64)
    for output, k in ((0, 0), (block - 1, 95), (block + 7, 33), (block // 2, 31), (2 * block - 1, 64)):
        scale, zero = pairs[k // 32, output].double()
        assert floats[output, k] == (int(codes[output, k]) - 8) * scale + zero


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_pytorch_packs_codes_of_4_bits_in_the_same_way(dtype: torch.dtype) -> None:
    block = {"AVX512": 64, "AVX2": 32}.get(torch.backends.cpu.get_cpu_capability())
    if block is None:
        pytest.skip("PyTorch packs them otherwise on this CPU")
    codes = torch.randint(0, 16, (3 * block, 256), dtype=torch.uint8)
    theirs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
    assert torch.equal(theirs.view(torch.uint8), packed(codes, block))
    call = made((3, 3 * block, 256), dtype, f"int4 in {block}", False)
    assert isinstance(call.layer.weights, GroupCodes)
    product = torch.ops.aten._weight_int4pack_mm_for_cpu
    ours = product(call.inputs, call.layer.weights.codes, call.layer.weights.group, call.layer.weights.pairs)
    truth = exact(call)
    assert (ours.double() - truth).abs().max() <= 2 * TOLERANCE[dtype] * truth.abs().max()


@pytest.mark.parametrize("kind", [each for each in KINDS if each.startswith("groups")])
@pytest.mark.usefixtures("instruction_set")
def test_decoded_weights_are_those_of_the_reference(kind: str) -> None:
    weights = made((3, 150, 700), torch.float32, kind, False).layer.weights
    assert isinstance(weights, GroupCodes)
    truth = weights.floats(torch.float32)
    assert weights.codes.shape[0] == 192
    for dtype in TOLERANCE:
        for block in (0, 1):
            panel = torch.empty(150 - 64 * block, weights.in_features, dtype=dtype)
            cpu.decode_into(panel, weights, block)
            assert torch.equal(panel, truth[64 * block :].to(dtype))
    some = torch.tensor([149, 3, 64])
    assert torch.equal(weights.floats(torch.float32, some), truth[some])
    for dtype in TOLERANCE:
        rows = torch.tensor([[149, 3, 64], [0, 97, 32]], dtype=torch.int32)
        found = cpu.decoded_outputs(weights, rows, dtype)
        assert found is not None
        assert torch.equal(found, truth[rows.long()].to(dtype))
    assert cpu.decoded_outputs(weights, torch.tensor([3, 150]), torch.float32) is None
    assert cpu.decoded_outputs(weights, torch.tensor([-1, 3]), torch.float32) is None


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("instruction_set")
def test_what_is_no_number_stays_in_its_row(value: float, kind: str) -> None:
    call = made((3, 10, 128), torch.bfloat16, kind, False)
    expected = cpu.linear(call)
    call.inputs[1, 5], call.inputs[1, 9] = value, 1.0
    ours = cpu.linear(call)
    assert not ours[1].isfinite().any()
    assert torch.equal(ours[::2], expected[::2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_inputs_beside_an_outlier_are_rounded_to_a_part_of_it(dtype: torch.dtype, instruction_set: str) -> None:
    """Whole numbers, which have a unit for each row, are multiplied where inputs are bfloat16. Others stay."""
    call = made((3, 21, 515), dtype, "int8", False)
    assert isinstance(call.layer.weights, Tensor)
    call.inputs[1, 77] = 3000.0
    call.layer.weights[:, 77] = 0  # so that the other inputs are all of the result
    truth, inputs = exact(call), call.inputs.double()
    if instruction_set == "avx512_bf16" and dtype is torch.bfloat16:
        unit = inputs.abs().amax(-1, keepdim=True) / 32512
        truth = exact(replace(call, inputs=(inputs / unit).round() * unit))
    error = (cpu.linear(call).double() - truth).abs().amax(-1)
    assert (error <= TOLERANCE[dtype] * truth.abs().amax(-1)).all()


@pytest.mark.usefixtures("instruction_set")
def test_tiny_and_no_inputs_are_not_lost() -> None:
    codes = torch.full((4, 70), 3, dtype=torch.int8)
    for size in (0.0, 1e-20, 1e20):
        inputs = torch.full((1, 70), size).bfloat16()
        expected = 210 * inputs[:, :4].double()
        out = cpu.linear(LinearInput(inputs, LinearLayer(codes, None, torch.ones(4))))
        assert torch.allclose(out.double(), expected, rtol=2**-8, atol=0)


def test_what_the_kernel_does_not_know_is_left_to_pytorch() -> None:
    known = made((4, 6, 32), torch.bfloat16, "floats", True)
    nibbles = made((4, 64, 128), torch.bfloat16, "int4 in 64", False)
    assert isinstance(known.layer.weights, Tensor)
    assert isinstance(nibbles.layer.weights, GroupCodes)
    assert cpu.can_multiply(known)
    assert cpu.can_multiply(nibbles)
    transposed = torch.randn(32, 6).bfloat16().T
    too_many = torch.randn(cpu.MANY_ROWS + 1, 32)
    unknown = (
        LinearInput(known.inputs.double(), LinearLayer(known.layer.weights.double())),
        LinearInput(known.inputs.float(), LinearLayer(known.layer.weights)),
        LinearInput(known.inputs, LinearLayer(transposed)),
        LinearInput(too_many, LinearLayer(known.layer.weights.float())),
        LinearInput(known.inputs[:0], LinearLayer(known.layer.weights)),
        LinearInput(known.inputs, LinearLayer(known.layer.weights, torch.zeros(6))),
        LinearInput(nibbles.inputs, LinearLayer(replace(nibbles.layer.weights, block=16))),
        LinearInput(
            nibbles.inputs,
            LinearLayer(
                replace(
                    nibbles.layer.weights,
                    codes=nibbles.layer.weights.codes[:48],
                    pairs=nibbles.layer.weights.pairs[:, :48],
                )
            ),
        ),
    )
    assert not any(cpu.can_multiply(call) for call in unknown)


@pytest.mark.parametrize(
    ("kind", "dtype", "name", "has_tiles", "most"),
    [
        ("int4 in 64", torch.bfloat16, "avx512_bf16", False, None),
        ("int4 in 64", torch.bfloat16, "avx512_bf16", True, cpu.MANY_ROWS),
        ("int4 in 64", torch.bfloat16, "avx512", False, None),
        ("int4 in 32", torch.bfloat16, "avx2", False, None),
        ("int4 in 32", torch.bfloat16, "plain", False, cpu.MANY_ROWS),
        ("groups of 8", torch.bfloat16, "avx2", False, None),
        ("groups of 8", torch.bfloat16, "avx512", False, cpu.MANY_ROWS),
        ("groups of 4", torch.float32, "avx2", False, None),
        ("int4 in 64", torch.float16, "avx2", False, None),
        ("int4 in 64", torch.float16, "avx512_bf16", False, cpu.MANY_ROWS),
        ("int8", torch.bfloat16, "avx512_bf16", False, cpu.MANY_ROWS),
        ("int8", torch.bfloat16, "avx2", False, None),
        ("floats", torch.bfloat16, "avx2", False, None),
        ("floats", torch.float16, "avx2", False, None),
        ("floats", torch.bfloat16, "avx512", False, cpu.MANY_ROWS),
    ],
)
def test_most_rows_depend_on_the_instructions_of_the_cpu(
    kind: str, dtype: torch.dtype, name: str, has_tiles: bool, most: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "instruction_set", lambda: name)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: has_tiles)
    call = made((3, 64, 128), dtype, kind, False)
    assert cpu.most_rows(call.layer, dtype) == most
    for rows in (cpu.MANY_ROWS, cpu.MANY_ROWS + 1, 999):
        many = LinearInput(call.inputs[:1].expand(rows, -1), call.layer)
        assert cpu.can_multiply(many) is (most is None or rows <= most)
