"""Attention in bfloat16 products, where widths, counts and holes do not fill its tiles, and codes made in C++."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tests.helpers.attention_cases import BATCH, TOLERANCE, Case, compare, exactly, step
from windlass.core.inputs import AttentionInput, PackedStates, Visibility
from windlass.kernels import cpu, reference
from windlass.kernels.cpu import slots as codes
from windlass.kernels.cpu.tensors import are_steady

# Every test here runs compiled code, of which there is none where no compiler was found at installation.
if not cpu.instruction_sets():
    pytest.skip("windlass was installed without its compiled kernels", allow_module_level=True)

BFLOAT16 = torch.bfloat16
CASES = [
    Case((2, 4, 64, 64, 32), BFLOAT16, slots=129, tokens=1),
    Case((3, 1, 128, 128, 64), BFLOAT16, slots=301, tokens=1, is_per_head=False),
    Case((2, 8, 64, 64, 32), BFLOAT16, slots=17, tokens=2, mode=None),
    Case((2, 3, 80, 80, 40), BFLOAT16, slots=145, tokens=3),
    Case((2, 3, 48, 80, 24), BFLOAT16, slots=137, tokens=1, mode=None),
    Case((1, 5, 80, 96, 16), BFLOAT16, slots=77, tokens=1, extras=("sinks", "counts")),
    Case((2, 5, 96, 96, 48), BFLOAT16, slots=130, tokens=1, is_per_head=False),
    Case((2, 4, 96, 64, 32), BFLOAT16, slots=263, tokens=1, visibility=Visibility(None, 40, 9)),
    Case((1, 8, 256, 256, 128), BFLOAT16, slots=131, tokens=1, mass="rows"),
    Case((2, 3, 128, 96, 64), BFLOAT16, slots=555, tokens=16, mode="self_extend(4, 22)"),
    Case((2, 4, 128, 128, 64), BFLOAT16, slots=1300, tokens=1, mode="compact", visibility=Visibility(300)),
    Case((1, 22, 160, 128, 32), BFLOAT16, slots=201, tokens=1, is_latent=True),
    Case((2, 4, 64, 64, 32), BFLOAT16, slots=400, tokens=5, is_evicted=False, extras=("gain",)),
]


def named(case: Case) -> str:
    return " ".join(str(x) for x in vars(case).values())


@pytest.fixture(params=cpu.instruction_sets(), autouse=True)
def _instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "instruction_set", lambda: request.param)
    monkeypatch.setattr(codes, "instruction_set", lambda: request.param)


def agrees(call: AttentionInput, tolerance: float) -> None:
    ours, mass = cpu.attend(call)
    truth, expected = exactly(call)
    compare(ours, truth, tolerance)
    assert mass is not None
    assert expected is not None
    compare(mass.rows, expected.rows, tolerance)
    assert (mass.rest is None) == (expected.rest is None)
    if mass.rest is not None:
        assert expected.rest is not None
        compare(mass.rest, expected.rest, tolerance)


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("case", CASES, ids=named)
def test_widths_and_counts_that_fill_no_tile(case: Case, bits: int | None) -> None:
    agrees(step(replace(case, bits=bits)), TOLERANCE[BFLOAT16])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("shape", [(2, 3, 64, 64, 32), (1, 4, 128, 96, 64), (2, 2, 80, 48, 20)])
def test_slots_at_full_precision_are_read_there(shape: tuple[int, ...], bits: int, dtype: torch.dtype) -> None:
    case = Case(shape, BFLOAT16, bits, slots=143, tokens=2)  # type: ignore[arg-type]
    call = step(case)
    agrees(replace(call, keys=ringed(call.keys, dtype, 1), values=ringed(call.values, dtype, 2)), TOLERANCE[BFLOAT16])


def ringed(states: PackedStates, dtype: torch.dtype, seed: int) -> PackedStates:
    """As many slots as there are entries, anywhere, with numbers that are not those of the codes."""
    g = torch.Generator().manual_seed(seed)
    heads, slots, entries = states.data.shape[1], states.data.shape[2], 29
    full = torch.randn(BATCH, heads, entries, states.held_channels, generator=g).to(dtype)
    where = torch.stack([torch.randperm(slots, generator=g)[:entries] for _ in range(BATCH * heads)])
    index = torch.full((BATCH, heads, slots), -1, dtype=torch.int32)
    index.scatter_(2, where.view(BATCH, heads, entries), torch.arange(entries).int().expand(BATCH, heads, -1))
    return replace(states, full_precision=full, ring_index=index)


@pytest.mark.parametrize("tokens", range(1, 17))
def test_every_number_of_queries(tokens: int) -> None:
    agrees(step(Case((2, 1 + tokens % 3, 64, 32, 32), BFLOAT16, slots=150, tokens=tokens)), TOLERANCE[BFLOAT16])


def test_keys_rounded_once_lose_less_than_a_model_in_bfloat16_does() -> None:
    """Such a model rounds cos and sin, too."""
    call = step(Case((2, 4, 128, 128, 64), BFLOAT16, slots=700, tokens=1, is_evicted=False))
    ours, truth = cpu.attend(call)[0].double(), exactly(call)[0]
    assert call.tables is not None
    tables = call.tables[0].to(BFLOAT16), call.tables[1].to(BFLOAT16)
    theirs = reference.attend(replace(call, tables=tables))[0].double()
    assert (ours - truth).norm() < (theirs - truth).norm()


STEADY = [
    Case((2, 4, 64, 64, 32), BFLOAT16, slots=777, tokens=1, is_evicted=False),
    Case((3, 1, 128, 96, 64), BFLOAT16, slots=450, tokens=1, is_evicted=False, is_per_head=False),
    Case((2, 3, 128, 128, 64), BFLOAT16, slots=339, tokens=1, is_evicted=False, visibility=Visibility(161)),
    Case((1, 2, 64, 64, 32), BFLOAT16, slots=260, tokens=5, is_evicted=False, mode="self_extend(4, 100)"),
    Case((2, 3, 160, 64, 32), BFLOAT16, slots=405, tokens=2, is_evicted=False, extras=("sinks", "counts", "softcap")),
    Case((2, 4, 64, 64, 32), BFLOAT16, slots=300, tokens=1, is_evicted=False, extras=("gain",)),
    Case((2, 3, 64, 96, 32), torch.float16, slots=213, tokens=1, is_evicted=False),
    Case((1, 2, 128, 64, 64), torch.float16, slots=331, tokens=2, is_evicted=False, mode="self_extend(4, 100)"),
]


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("case", STEADY, ids=named)
def test_slots_in_the_order_of_the_text(case: Case, bits: int | None) -> None:
    agrees(step(replace(case, bits=bits)), TOLERANCE[case.dtype])


@pytest.mark.parametrize("case", STEADY[:3], ids=named)
def test_tables_whose_angles_do_not_grow_by_steps(case: Case) -> None:
    """As those of pictures may be: they are read row by row."""
    call = step(case)
    assert call.tables is not None
    angles = torch.randn(call.tables[0].shape, generator=torch.Generator().manual_seed(5)) * 3
    agrees(replace(call, tables=(angles.cos(), angles.sin())), TOLERANCE[BFLOAT16])


def test_which_tables_are_steady() -> None:
    assert cpu.native is not None
    look = cpu.native.is_steady
    angles = torch.arange(300)[:, None] / 10000 ** (torch.arange(16) / 16)
    cos, sin = angles.cos() * 1.3, angles.sin() * 1.3
    assert are_steady((cos, sin), look)
    assert not are_steady((cos, sin.roll(1, 0)), look)
    assert are_steady((cos, sin), look), "another table with the same cos was looked at since"
    assert not are_steady((cos[:40], sin[:40]), look), "fewer rows than slots share one"
    assert not are_steady(((angles + 1).cos(), (angles + 1).sin()), look), "row 0 is rotated"
    for row in (0, 1, 64, 150, 299):
        for which in (0, 1):
            tables = cos.clone(), sin.clone()
            tables[which][row, 7] += 0.01
            assert not are_steady(tables, look), (row, which)


def numbers(kind: str, dtype: torch.dtype) -> Tensor:
    g = torch.Generator().manual_seed(3)
    states = torch.randn(2, 5, 3, 44, generator=g)
    if kind == "extremes":
        states[0, 0], states[0, 1], states[0, 2] = 0.0, 1e30, -1e-7
        states[1, 0, 0, :2], states[1, 1, 1, 3] = torch.tensor([2.0, -2.0]), 7e4
        states[1, 2] = states[1, 2].round()  # ties
        states[0, 3, 1, -1], states[0, 3, 2, :2] = -torch.inf, torch.inf
        states[0, 4], states[1, 3] = states[0, 4] ** 3, states[1, 3] + 1000
    return states.to(dtype).transpose(1, 2)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("group", [0, 16, 32])
@pytest.mark.parametrize("kind", ["normal", "extremes"])
@pytest.mark.parametrize("has_means", [False, True])
def test_codes_are_those_of_the_reference(kind: str, group: int, dtype: torch.dtype, has_means: bool) -> None:
    states = numbers(kind, dtype)
    means = torch.randn(3, 44).to(dtype) if has_means else None
    for each in (states, states.contiguous(), states.repeat_interleave(2, -1)[..., ::2]):
        ours, truth = codes.encode(each, means, group), reference.encode(each, means, group)
        for made, expected in zip(ours, truth, strict=True):
            assert made.dtype == expected.dtype
            assert made.view(torch.uint8).equal(expected.view(torch.uint8))


def test_which_numbers_become_codes_in_c() -> None:
    assert codes.can_encode(torch.zeros(1, 1, 1, 8), 16)
    assert codes.can_encode(torch.zeros(1, 1, 1, 7), 0)
    for states in (torch.zeros(1, 1, 1, 8).double(), torch.zeros(1, 1, 1, 1025), torch.zeros(1, 1, 1, 0)):
        assert not codes.can_encode(states, 0)
    assert not codes.can_encode(torch.zeros(1, 1, 1, 7), 16)
    assert not codes.can_encode(torch.zeros(1, 1, 1, 8), 8)
