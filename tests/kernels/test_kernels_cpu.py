"""The compiled kernels against the reference in float64, with every instruction set of this CPU."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.helpers.attention_cases import BATCH, TOLERANCE, Case, cast, compare, exactly, step, table
from windlass import kernels
from windlass.core.inputs import AttentionInput, EvictionInput, PackedStates, Visibility
from windlass.core.positions import rotate
from windlass.kernels import cpu, reference, sdpa
from windlass.kernels.cpu import slots

# Every test here runs compiled code, of which there is none where no compiler was found at installation.
if not cpu.instruction_sets():
    pytest.skip("windlass was installed without its compiled kernels", allow_module_level=True)


@pytest.fixture(params=cpu.instruction_sets())
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(cpu, "instruction_set", lambda: request.param)
    return request.param


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", [*table()], ids=lambda case: " ".join(str(x) for x in vars(case).values()))
@pytest.mark.usefixtures("instruction_set")
def test_attend_equals_the_reference(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "MASK_BYTES", 2**16)  # so that a chunk takes several blocks
    monkeypatch.setattr(sdpa, "SCORE_BYTES", 2**18)
    call = step(case)
    truth, expected = exactly(call)
    for kernel in (cpu.attend, sdpa.attend) if takes_a_chunk(call) else (cpu.attend,):
        ours, mass = kernel(call)
        assert ours.dtype == case.dtype
        compare(ours, truth, TOLERANCE[case.dtype])
        assert (mass is None) == (case.mass is None)
        if mass is not None:
            assert expected is not None
            compare(mass.rows, expected.rows, TOLERANCE[case.dtype])
            assert (mass.rest is None) == (case.mass == "rows")
        if mass is not None and mass.rest is not None:
            assert expected is not None
            assert expected.rest is not None
            compare(mass.rest, expected.rest, TOLERANCE[case.dtype])


def takes_a_chunk(call: AttentionInput) -> bool:
    """Return True if PyTorch's attention may take the call in place of ours."""
    return call.queries.shape[2] > cpu.FEW_TOKENS and call.softcap is None


@pytest.mark.parametrize("tokens", [17, 23, 33, 64, 65, 150])
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("instruction_set")
def test_short_passes(tokens: int, bits: int | None, dtype: torch.dtype) -> None:
    """Three heads, whose slots end at different places, observed in each part of a pass."""
    case = Case(
        (3, 2, 64, 64, 32), dtype, bits, slots=301, tokens=tokens, mode="self_extend(4, 100)", extras=("softcap",)
    )
    call = step(case)
    call = replace(call, observed=torch.tensor([0, 16, 63, 64, 17, 149]).expand(BATCH, -1) % tokens)
    ours, mass = cpu.attend(call)
    truth, expected = exactly(call)
    assert mass is not None
    assert expected is not None
    for mine, true in ((ours, truth), (mass.rows, expected.rows), (mass.rest, expected.rest)):
        assert mine is not None
        assert true is not None
        compare(mine, true, TOLERANCE[dtype])


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "is_per_head"), [(150, True), (197, False)])
@pytest.mark.usefixtures("instruction_set")
def test_long_passes(tokens: int, is_per_head: bool, dtype: torch.dtype, bits: int | None) -> None:
    """Parts of a head, each a piece of work: the last has 22 queries, or 5, which are read as few are."""
    visibility = Visibility(sliding_window=230)
    own: dict[str, Any] = {
        "slots": 459,
        "tokens": tokens,
        "mass": None,
        "is_per_head": is_per_head,
        "visibility": visibility,
    }
    call = step(Case((3, 2, 64, 96, 32), dtype, bits, extras=("sinks", "counts"), **own))
    plain = step(Case((4, 3, 64, 64, 32), dtype, bits, mode="compact", **{**own, "visibility": Visibility()}))
    for each in (call, plain):
        compare(cpu.attend(each)[0], exactly(each)[0], TOLERANCE[dtype])


@pytest.mark.parametrize(("tokens", "group"), [(16, 130), (17, 130), (64, 16), (65, 16), (70, 9), (17, 40), (51, 20)])
@pytest.mark.usefixtures("instruction_set")
def test_many_heads_of_a_key_take_fewer_tokens_at_once(tokens: int, group: int) -> None:
    call = step(Case((1, group, 32, 32, 16), torch.bfloat16, slots=140, tokens=tokens, mass="rows"))
    compare(cpu.attend(call)[0], exactly(call)[0], TOLERANCE[torch.bfloat16])


def test_which_passes_are_fastest_by_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    few, many = step(Case(tokens=16, mass=None)), step(Case(tokens=64, mass=None))
    more, observed = (step(Case(dtype=torch.bfloat16, tokens=65, mass=mass)) for mass in (None, "rows"))
    expected = {
        "avx512_bf16": (True, True, False, True, False),
        "avx512": (True, True, False, False, False),
        "avx2": (True, True, True, True, False),
        "plain": (True, False, False, False, False),
    }
    wide = replace(more, queries=more.queries.float())
    for name, answers in expected.items():
        monkeypatch.setattr(cpu, "instruction_set", lambda found=name: found)
        assert tuple(map(cpu.is_fastest, (few, many, wide, more, observed))) == answers


@pytest.mark.parametrize("shape", [(3, 2, 96, 32, 16), (3, 1, 40, 48, 10), (1, 5, 8, 6, 3)])
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.usefixtures("instruction_set")
def test_rotated_equals_rotate(shape: tuple[int, int, int, int, int], bits: int | None, dtype: torch.dtype) -> None:
    case = Case(shape, dtype, bits, slots=301)
    call, used = step(case), 299
    assert call.tables is not None
    keys, (cos, sin), places = call.keys, call.tables, call.rotary_index.near.keys
    floats = keys.floats().double()[:, :, :used]
    angles = cos[places].double()[:, :, :used], sin[places].double()[:, :, :used]
    compare(cpu.rotated(keys, places, (cos, sin), used, dtype), rotate(floats, *angles), TOLERANCE[dtype])
    compare(cpu.rotated(keys, None, None, used, torch.float32), floats, TOLERANCE[torch.float32])


STEADY = [
    Case(slots=1000, tokens=3, mode="clamp(30)"),
    Case((2, 7, 96, 32, 16), torch.bfloat16, slots=2300, tokens=5, visibility=Visibility(reach=900, sinks=9)),
    Case((1, 6, 40, 48, 10), torch.float16, 4, "self_extend(4, 22)", slots=700, tokens=16, extras=("sinks",)),
    Case((2, 3, 64, 32, 32), torch.bfloat16, slots=1100, tokens=23, is_per_head=False),
]


@pytest.mark.parametrize("case", STEADY, ids=str)
@pytest.mark.usefixtures("instruction_set", "_threads")
def test_any_number_of_threads_gives_the_same_bits(case: Case) -> None:
    call, seen = step(case), list[Any]()
    order = torch.rand(BATCH, 3, 9001), torch.randperm(BATCH * 3 * 9001).view(BATCH, 3, 9001).int(), torch.arange(BATCH)
    for threads in (1, 2, 3):
        torch.set_num_threads(1)
        cpu.attend(step(case, seed=1))  # so that nothing of the same result is left in the scratch space
        torch.set_num_threads(threads)
        out, mass = cpu.attend(call)
        near = call.rotary_index.near.keys
        rotated = cpu.rotated(call.keys, near, call.tables, case.slots, case.dtype)
        lowest = slots.lowest(EvictionInput(*order, 4, 7, None, 2000))
        seen.append((out, mass.rows, mass.rest, rotated, lowest, slots.argsort_positions(order[1])))
    for other in seen[1:]:
        assert all(a.equal(b) for a, b in zip(seen[0], other, strict=True))


@pytest.mark.parametrize("case", STEADY, ids=str)
@pytest.mark.usefixtures("instruction_set")
def test_what_an_earlier_call_left_in_the_scratch_space_is_never_read(case: Case) -> None:
    call = step(case)
    before, mass = cpu.attend(call)
    assert mass is not None
    assert mass.rest is not None
    for poison in (torch.nan, 3e4):
        spoilt = step(replace(case, bits=None, dtype=torch.float32, slots=3 * case.slots))
        for tensor in (spoilt.queries, spoilt.keys.data, spoilt.values.data):
            tensor.fill_(poison)
        cpu.attend(spoilt)
        after, again = cpu.attend(call)
        assert after.equal(before)
        assert again.rows.equal(mass.rows)
        assert again.rest.equal(mass.rest)


@pytest.mark.usefixtures("instruction_set")
def test_queries_may_have_any_strides() -> None:
    call = step(Case(dtype=torch.bfloat16))
    truth, _ = cpu.attend(call)
    queries = call.queries
    spread = torch.empty(*queries.shape, 2, dtype=queries.dtype)[..., 1].copy_(queries)
    for same in (queries.contiguous(), queries.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0), spread):
        assert cpu.attend(replace(call, queries=same))[0].equal(truth)


@pytest.mark.parametrize("case", [Case(), Case(tokens=40)], ids=str)
def test_float64_and_what_no_kernel_knows_goes_to_the_reference(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    call = step(case)
    assert call.tables is not None
    call = replace(call, queries=call.queries.double(), tables=cast(call.tables, torch.float64))
    call = replace(call, keys=PackedStates(call.keys.data.double()), values=PackedStates(call.values.data.double()))
    for module in (cpu, sdpa):
        monkeypatch.setattr(module, "attend", lambda *_, **__: pytest.fail("not the reference"))
    assert kernels.attend(call)[0].equal(reference.attend(call)[0])
