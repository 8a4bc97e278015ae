"""The compiled kernels against the reference in float64, with every instruction set of this CPU."""

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from windlass import kernels
from windlass.held import Held
from windlass.kernels import blocks, cpu, reference
from windlass.kernels.reference import Mass, Visibility
from windlass.positions import position_mode
from windlass.rotary import rotate

# Every test here runs compiled code, of which there is none where no compiler was found at installation.
if not cpu.instruction_sets():
    pytest.skip("windlass was installed without its compiled kernels", allow_module_level=True)

BATCH, OBSERVED = 4, 3
ALL = Visibility()
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}  # of norms, per row and head


@dataclass(frozen=True)
class Case:
    """A step, and how it is read. `bits` is None where keys and values are held as floats."""

    shape: tuple[int, int, int, int, int] = (3, 5, 8, 6, 3)  # kv_heads, group, head_dim, value_dim, pairs
    dtype: torch.dtype = torch.float32
    bits: int | None = None
    mode: str | None = "original"  # None: no rotation
    visibility: Visibility = ALL
    extras: tuple[str, ...] = ()
    mass: str | None = "rest"
    slots: int = 63
    tokens: int = 4
    is_per_head: bool = True
    is_evicted: bool = True


AXES = {
    "shape": [(2, 3, 64, 64, 32), (3, 1, 128, 128, 64), (3, 5, 8, 6, 3), (1, 6, 40, 48, 10), (2, 7, 96, 32, 16)],
    "dtype": list(TOLERANCE),
    "bits": [None, 8, 4],
    "mode": [None, "original", "compact", "self_extend(4, 22)", "clamp(30)"],
    "visibility": [ALL, Visibility(700), Visibility(None, 40, 9), Visibility(70, 50, 13)],
    "extras": [(), ("softcap",), ("sinks", "counts"), ("counts",)],
    "mass": [None, "rows", "rest"],
    "slots": [1, 63, 1000],
    "tokens": [1, 5, 16, 17, 40],
    "is_per_head": [True, False],
    "is_evicted": [True, False],
}


def table() -> Iterator[Case]:
    """Cases in which every value of an axis meets every value of every other axis."""
    pairs = {(a, x, b, y) for a, b in itertools.combinations(AXES, 2) for x in AXES[a] for y in AXES[b]}
    draw = random.Random(0)

    def met(row: dict[str, object]) -> set[tuple[str, object, str, object]]:
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(AXES, 2)} & pairs

    while pairs:
        rows = [{axis: draw.choice(values) for axis, values in AXES.items()} for _ in range(30)]
        a, x, b, y = min(pairs, key=str)
        best = max(({**row, a: x, b: y} for row in rows), key=lambda row: len(met(row)))
        pairs -= met(best)
        yield Case(**best)


def noise(case: Case, seed: int = 0) -> Callable[..., Tensor]:
    g = torch.Generator().manual_seed(seed + case.slots + case.tokens)
    return lambda *shape: torch.randn(*shape, generator=g)


def held(case: Case, randn: Callable[..., Tensor], width: int, has_centres: bool) -> Held:
    """Random keys or values about as large as 1; scales of either sign."""
    kv_heads = case.shape[0]
    if case.bits is None:
        return Held(randn(BATCH, kv_heads, case.slots, width).to(case.dtype), 8 * case.dtype.itemsize)
    most = 2 ** (case.bits - 1)
    codes = (randn(BATCH, kv_heads, case.slots, width * case.bits // 8) * most).to(torch.int64)
    scales = (randn(BATCH, kv_heads, case.slots, 1) / most).half()
    centres = randn(kv_heads, width) if has_centres else None
    if case.bits == 4:
        return Held((codes * 37 % 256).to(torch.uint8), 4, scales, centres)
    return Held(codes.clamp(-128, 127).to(torch.int8), 8, scales, centres)


def positions(case: Case, seed: int = 0) -> Tensor:
    """Rows with free and reserved slots in the middle or none yet evicted; row 2 is empty."""
    g = torch.Generator().manual_seed(seed + case.slots)
    ranked = case.shape[0] if case.is_per_head else 1
    if case.is_evicted:
        drawn = [torch.randperm(2 * case.slots, generator=g)[: case.slots] for _ in range(BATCH * ranked)]
        where = torch.stack(drawn).reshape(BATCH, ranked, case.slots)
        where[torch.rand(where.shape, generator=g) < 0.2] = -1
        where[0, :, case.slots // 3 : case.slots // 2] = -2
        where[1, :, case.slots // 4 : case.slots // 4 * 3] = -1  # more than one block of slots
    else:
        where = torch.arange(case.slots) + case.slots // 3
        where = (where + case.slots + 1).where(where < case.slots, -1).repeat(BATCH, ranked, 1)
    where[2] = -1
    return where.to(torch.int32)


def step(case: Case, seed: int = 0) -> dict[str, object]:
    """The arguments of `attend`; queries are a transposed view, as transformers gives them."""
    kv_heads, group, head_dim, value_dim, pairs = case.shape
    randn, where = noise(case, seed), positions(case, seed)
    end = 2 * case.slots + 1
    queries = torch.arange(end - case.tokens, end).clamp(min=-1).repeat(BATCH, 1)
    queries[3, : (case.tokens + 1) // 2] = -1  # padding
    reading = tables = None
    if case.mode is not None:
        mode = position_mode(case.mode)
        reading = mode.read(where, queries)
        most_held = int((where >= 0).sum(-1).max()) + 1  # the queries' own tokens count, too
        length = mode.bound(end, most_held, case.tokens)  # no more: reading past it shows under a sanitizer
        angles = torch.arange(length)[:, None] / 10000 ** (torch.arange(pairs) / pairs)
        tables = angles.cos() * 1.1, angles.sin() * 1.1
    columns = torch.stack([torch.randperm(case.tokens + 2)[:OBSERVED] for _ in range(BATCH)])
    columns = columns.where(columns < case.tokens, -1)
    return {
        "queries": randn(BATCH, case.tokens, kv_heads * group, head_dim).to(case.dtype).transpose(1, 2),
        "keys": held(case, randn, head_dim, has_centres=True),
        "values": held(case, randn, value_dim, has_centres=False),
        "slot_positions": where,
        "query_positions": queries,
        "reading": reading,
        "tables": tables,
        "scale": head_dim**-0.5,
        "visibility": case.visibility,
        "softcap": 5.0 if "softcap" in case.extras and case.tokens <= cpu.MOST_TOKENS else None,
        "sink_logits": randn(kv_heads * group) if "sinks" in case.extras else None,
        "log_counts": randn(*where.shape).abs() if "counts" in case.extras else None,
        "observed": None if case.mass is None else columns,
        "is_rest_wanted": case.mass == "rest",
    }


def exactly(call: dict[str, object]) -> tuple[Tensor, Mass | None]:
    """What the reference gives in float64."""
    keys, values = (Held(call[name].floats().double(), 64) for name in ("keys", "values"))
    tables = call["tables"] and tuple(table.double() for table in call["tables"])
    return reference.attend(
        **{**call, "queries": call["queries"].double(), "keys": keys, "values": values, "tables": tables}
    )


def compare(ours: Tensor, truth: Tensor, tolerance: float) -> None:
    """Equal within `tolerance` of the norm for each row and head, and zero where the truth is."""
    error, size = (ours.double() - truth).flatten(2).norm(dim=-1), truth.double().flatten(2).norm(dim=-1)
    assert ours.shape == truth.shape
    assert ours.isfinite().all()
    assert (ours[truth == 0] == 0).all()
    assert (error <= tolerance * size).all(), float((error / size).nan_to_num().max())


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
    monkeypatch.setattr(blocks, "MASK_BYTES", 2**16)  # so that a chunk takes several blocks
    monkeypatch.setattr(blocks, "SCORE_BYTES", 2**18)
    call = step(case)
    kernel = cpu.attend if case.tokens <= cpu.MOST_TOKENS else blocks.attend
    ours, mass = kernel(**call)
    truth, expected = exactly(call)
    assert ours.dtype == case.dtype
    compare(ours, truth, TOLERANCE[case.dtype])
    assert (mass is None) == (case.mass is None)
    if mass is not None:
        compare(mass.rows, expected.rows, TOLERANCE[case.dtype])
        assert (mass.rest is None) == (case.mass == "rows")
    if mass is not None and mass.rest is not None:
        compare(mass.rest, expected.rest, TOLERANCE[case.dtype])


@pytest.mark.parametrize("shape", [(3, 2, 96, 32, 16), (3, 1, 40, 48, 10), (1, 5, 8, 6, 3)])
@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.usefixtures("instruction_set")
def test_turned_equals_rotate(shape: tuple[int, ...], bits: int | None, dtype: torch.dtype) -> None:
    case = Case(shape, dtype, bits, slots=301)
    call, used = step(case), 299
    keys, (cos, sin), places = call["keys"], call["tables"], call["reading"].near.keys
    floats = keys.floats().double()[:, :, :used]
    angles = cos[places].double()[:, :, :used], sin[places].double()[:, :, :used]
    compare(cpu.turned(keys, places, (cos, sin), used, dtype), rotate(floats, *angles), TOLERANCE[dtype])
    compare(cpu.turned(keys, None, None, used, torch.float32), floats, TOLERANCE[torch.float32])


STEADY = [
    Case(slots=1000, tokens=3, mode="clamp(30)"),
    Case((2, 7, 96, 32, 16), torch.bfloat16, slots=2300, tokens=5, visibility=Visibility(reach=900, sinks=9)),
    Case((1, 6, 40, 48, 10), torch.float16, 4, "self_extend(4, 22)", slots=700, tokens=16, extras=("sinks",)),
]


@pytest.mark.parametrize("case", STEADY, ids=str)
@pytest.mark.usefixtures("instruction_set", "_threads")
def test_any_number_of_threads_gives_the_same_bits(case: Case) -> None:
    call, seen = step(case), []
    order = torch.rand(BATCH, 3, 9001), torch.randperm(BATCH * 3 * 9001).view(BATCH, 3, 9001).int(), torch.arange(BATCH)
    for threads in (1, 2, 3):
        torch.set_num_threads(1)
        cpu.attend(**step(case, seed=1))  # so that nothing of the same result is left in the scratch space
        torch.set_num_threads(threads)
        out, mass = cpu.attend(**call)
        near = call["reading"].near.keys
        turned = cpu.turned(call["keys"], near, call["tables"], case.slots, case.dtype)
        lowest = cpu.lowest(*order, 4, 7, None, 2000)
        seen.append((out, mass.rows, mass.rest, turned, lowest, cpu.text_order(order[1])))
    for other in seen[1:]:
        assert all(a.equal(b) for a, b in zip(seen[0], other, strict=True))


@pytest.mark.parametrize("case", STEADY, ids=str)
@pytest.mark.usefixtures("instruction_set")
def test_what_an_earlier_call_left_in_the_scratch_space_is_never_read(case: Case) -> None:
    call = step(case)
    before, mass = cpu.attend(**call)
    for poison in (torch.nan, 3e4):
        spoilt = step(replace(case, bits=None, dtype=torch.float32, slots=3 * case.slots))
        for tensor in (spoilt["queries"], spoilt["keys"].codes, spoilt["values"].codes):
            tensor.fill_(poison)
        cpu.attend(**spoilt)
        after, again = cpu.attend(**call)
        assert after.equal(before)
        assert again.rows.equal(mass.rows)
        assert again.rest.equal(mass.rest)


@pytest.mark.usefixtures("instruction_set")
def test_queries_may_have_any_strides() -> None:
    call = step(Case(dtype=torch.bfloat16))
    truth, _ = cpu.attend(**call)
    queries = call["queries"]
    spread = torch.empty(*queries.shape, 2, dtype=queries.dtype)[..., 1].copy_(queries)
    for same in (queries.contiguous(), queries.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0), spread):
        assert cpu.attend(**{**call, "queries": same})[0].equal(truth)


@pytest.mark.parametrize("case", [Case(), Case(tokens=40), Case(tokens=40, extras=("softcap",))], ids=str)
def test_float64_and_what_no_kernel_knows_goes_to_the_reference(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    call = step(case)
    if case.extras:
        call["softcap"] = 5.0
    else:
        call.update(queries=call["queries"].double(), tables=tuple(table.double() for table in call["tables"]))
    if case.tokens <= cpu.MOST_TOKENS:
        call.update({name: Held(call[name].codes.double(), 64) for name in ("keys", "values")})
    for module in (cpu, blocks):
        monkeypatch.setattr(module, "attend", lambda *_, **__: pytest.fail("not the reference"))
    assert kernels.attend(**call)[0].equal(reference.attend(**call)[0])
