"""`mean_key_cosine`: the reference and every backend against loops.

`KeyDiff` ranks by it: with any backend, scores differ by one step at most.
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.attention_cases import AXES, BATCH, Case, held, noise, positions
from windlass import kernels
from windlass.core.inputs import PackedStates
from windlass.kernels import cpu, reference
from windlass.policies import KeyDiff
from windlass.policies.base import Slots
from windlass.stores.formats import store_of

TOLERANCE = 1e-5  # of a cosine
Backend = Callable[[PackedStates, Tensor], Tensor]

HAS_TRITON = importlib.util.find_spec("triton") is not None
TRITON = [pytest.param("triton", marks=pytest.mark.gpu if torch.cuda.is_available() else ())] if HAS_TRITON else []
BACKENDS = ["reference", *(pytest.param(name, id=f"cpu {name}") for name in cpu.instruction_sets()), *TRITON]
ZEROS = 5  # a slot whose key is all zeros
CASES = [
    Case(shape, dtype, bits, slots=slots, is_per_head=is_per_head)
    for shape, dtype, bits, slots, is_per_head in [
        (AXES["shape"][0], torch.bfloat16, None, 300, True),
        (AXES["shape"][1], torch.bfloat16, 8, 63, True),
        (AXES["shape"][2], torch.float32, None, 63, False),
        (AXES["shape"][3], torch.float32, 4, 77, False),
        (AXES["shape"][4], torch.float16, None, 145, True),
        (AXES["shape"][2], torch.float16, 8, 33, False),
        (AXES["shape"][0], torch.float32, 4, 1, True),
        (AXES["shape"][4], torch.float32, None, 700, False),
    ]
]
# Where no slot is free between others, keys are read in place, many at once.
CASES += [
    Case(shape, dtype, bits, slots=155, is_per_head=False, is_evicted=False)
    for shape, dtype, bits in [
        (AXES["shape"][0], torch.bfloat16, None),
        (AXES["shape"][4], torch.float32, None),
        (AXES["shape"][4], torch.float16, None),
        (AXES["shape"][1], torch.float32, 8),
        (AXES["shape"][0], torch.float32, 4),
    ]
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Backend:
    """One way to compute it, which takes and gives tensors on the CPU."""
    if request.param == "reference":
        return reference.mean_key_cosine
    if request.param != "triton":
        monkeypatch.setattr(cpu, "instruction_set", lambda: request.param)
        return cpu.mean_key_cosine
    from windlass.kernels import triton
    from windlass.kernels.triton import tiles

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(tiles, "stream_plan", lambda _: tiles.Plan(1, 64, 4, 2))
    monkeypatch.setattr(tiles, "multiprocessors", lambda _: 30)  # two or three parts for each row and head

    def mean_key_cosine(keys: PackedStates, where: Tensor) -> Tensor:
        parts = vars(keys).items()
        there: dict[str, Any] = {name: part.to(device) if isinstance(part, Tensor) else part for name, part in parts}
        return triton.mean_key_cosine(PackedStates(**there), where.to(device)).cpu()

    return mean_key_cosine


def keys_of(case: Case) -> tuple[PackedStates, Tensor]:
    """Random keys, one of them zeros, and positions in which row 2 is empty."""
    keys, where = held(case, noise(case), case.shape[2], has_means=True), positions(case)
    if keys.scales is None and case.slots > ZEROS:
        keys.data[:, :, ZEROS] = 0
        where[[0, 1, 3], :, ZEROS] = 2 * case.slots
    return keys, where


def by_loops(keys: Tensor, where: Tensor) -> Tensor:
    """The cosines, key by key in float64."""
    batch, kv_heads, slots, _ = keys.shape
    cosines = torch.zeros(batch, kv_heads, slots, dtype=torch.float64)
    for row in range(batch):
        for head in range(kv_heads):
            own = where[row, head % where.shape[1]].tolist()
            units = {}
            for slot in range(slots):
                if own[slot] >= 0:
                    key = keys[row, head, slot].double()
                    units[slot] = key / max(float(key.norm()), 1e-12)
            total = sum(units.values(), torch.zeros(keys.shape[3], dtype=torch.float64))
            for slot, unit in units.items():
                cosines[row, head, slot] = unit @ total / max(float(total.norm()), 1e-12)
    return cosines


def check(ours: Tensor, truth: Tensor, where: Tensor) -> None:
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), truth, atol=TOLERANCE, rtol=0)
    assert (ours.masked_select(where < 0) == 0).all()


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.shape} {case.dtype} {case.bits} {case.slots}")
def test_it_is_the_cosine_with_the_mean_direction(case: Case, backend: Backend) -> None:
    keys, where = keys_of(case)
    before = keys.data.clone(), where.clone()
    check(backend(keys, where), by_loops(keys.floats(), where), where)
    assert keys.data.equal(before[0])
    assert where.equal(before[1])


@pytest.mark.parametrize("number", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bits", [8, 4])
def test_slots_at_full_precision_are_read_so(bits: int, number: torch.dtype, backend: Backend) -> None:
    case = Case(bits=bits, slots=70)
    keys, where = keys_of(case)
    ring_index = torch.full((BATCH, case.shape[0], case.slots), -1, dtype=torch.int32)
    for entry, slot in enumerate((3, 20, 21, 66)):
        ring_index[:, :, slot] = 3 - entry
    ring = torch.randn(BATCH, case.shape[0], 5, keys.channels).to(number)
    keys = dataclasses.replace(keys, full_precision=ring, ring_index=ring_index)
    truth = keys.floats().clone()
    for entry, slot in enumerate((3, 20, 21, 66)):
        assert truth[:, :, slot].equal(ring[:, :, 3 - entry].float())
    check(backend(keys, where), by_loops(truth, where), where)


def test_what_lies_in_free_slots_is_never_read(backend: Backend) -> None:
    case = Case(slots=75)
    keys, where = keys_of(case)
    truth = by_loops(keys.data, where)
    poison = 3e4 if backend is reference.mean_key_cosine else torch.nan  # the reference multiplies with 0
    spoilt = PackedStates(keys.data.masked_fill((where < 0)[..., None], poison))
    check(backend(spoilt, where), truth, where)


def test_equal_calls_give_equal_bits(backend: Backend) -> None:
    case = Case((2, 7, 96, 32, 16), torch.bfloat16, slots=600)
    keys, where = keys_of(case)
    first = backend(keys, where)
    backend(PackedStates(keys.data * 3 + 1), where)  # so that nothing of the same result is left in scratch space
    assert backend(keys, where).equal(first)


@pytest.mark.parametrize("backend", TRITON, indirect=True)
@pytest.mark.parametrize("multiprocessors", [1, 1000])
def test_slots_may_be_read_in_any_number_of_parts(
    backend: Backend, multiprocessors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from windlass.kernels.triton import tiles

    monkeypatch.setattr(tiles, "stream_plan", lambda _: tiles.Plan(1, 16, 4, 2))
    monkeypatch.setattr(tiles, "multiprocessors", lambda _: multiprocessors)
    keys, where = keys_of(Case(slots=301, is_per_head=False))  # 19 parts: more than are added up at once
    check(backend(keys, where), by_loops(keys.data, where), where)


@pytest.fixture
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.skipif(not cpu.instruction_sets(), reason="windlass was installed without its compiled kernels")
@pytest.mark.parametrize("bits", [None, 8])
@pytest.mark.usefixtures("_threads")
def test_any_number_of_threads_gives_the_same_bits(bits: int | None) -> None:
    keys, where = keys_of(Case(AXES["shape"][0], torch.bfloat16, bits, slots=2300, is_evicted=False))
    seen = []
    for threads in (1, 2, 3, BATCH * 2 + 1, 40):  # more than there are rows and heads share them
        torch.set_num_threads(threads)
        seen.append(cpu.mean_key_cosine(keys, where))
    assert all(other.equal(seen[0]) for other in seen[1:])


@pytest.mark.parametrize("store", ["plain", "int8", "int4(sinks=2, newest=9)"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scores_of_two_backends_differ_by_one_step_at_most(
    store: str, dtype: torch.dtype, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots = filled(store, dtype)
    scores = []
    for kernel in (reference.mean_key_cosine, backend):
        monkeypatch.setattr(kernels, "mean_key_cosine", kernel)
        scores.append(KeyDiff().score(slots).masked_fill(slots.positions < 0, 0.0))
    truth, ours = scores
    assert truth.equal(truth.round())
    assert (ours - truth).abs().max() <= 1
    above = truth[..., None, :] - truth[..., :, None] > 2
    assert above.float().mean() > 0.4  # all but equal ones and their neighbours, one way round
    assert (ours[..., None, :] > ours[..., :, None])[above].all()


def test_keys_of_a_low_bit_store_are_compared_as_they_are_read() -> None:
    for store in ("int8", "int4(sinks=2, newest=9)"):
        slots = filled(store, torch.float32)
        truth = -by_loops(slots.keys(), slots.positions) * 2**16
        torch.testing.assert_close(KeyDiff().score(slots).double(), truth, atol=1.5, rtol=0)


def filled(store: str, dtype: torch.dtype) -> Slots:
    """A layer of 90 slots that holds 80 tokens, as a policy sees it."""
    shape, own = (BATCH, 3, 80), store_of(store).fresh(torch.randn(3, 10))
    keys, values = (torch.randn(*shape, width).to(dtype) + 0.7 for width in (10, 6))
    own.allocate(keys, values, 90)
    order = torch.stack([torch.randperm(90)[:80] for _ in range(BATCH * 3)]).view(shape)
    at = torch.arange(80, dtype=torch.int32).expand(shape)
    own.write(order, keys, values, at)
    where = torch.full((BATCH, 3, 90), -1, dtype=torch.int32).scatter(2, order, at)
    ends = torch.full((BATCH,), 80)
    return Slots(own, where, {}, ends, ends, lambda states, _: states)


def test_a_type_that_no_kernel_knows_goes_to_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "mean_key_cosine", lambda *_: pytest.fail("not the reference"))
    keys, where = keys_of(Case())
    for unknown in (
        PackedStates(keys.data.double()),
        PackedStates(torch.randn(BATCH, 3, 63, cpu.MAX_CHANNELS + 1)),
    ):
        assert kernels.mean_key_cosine(unknown, where).equal(reference.mean_key_cosine(unknown, where))
