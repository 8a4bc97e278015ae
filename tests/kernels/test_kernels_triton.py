"""Triton's attention against the reference in float64: in its interpreter on a CPU, and on a GPU where there is one."""

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from windlass import KVCache, kernels
from windlass.core.inputs import AttentionInput, Mass, PackedStates, Visibility
from windlass.kernels import reference
from windlass.policies import NAMES

if importlib.util.find_spec("triton") is None:
    pytest.skip("there is no Triton for this system", allow_module_level=True)

from triton.runtime.errors import OutOfResources

from tests.helpers import models
from tests.helpers.attention_cases import BATCH, TOLERANCE, Case, cast, compare, exactly, noise, step, table
from tests.helpers.interpreted import interpret_quickly
from tests.helpers.models import Models, Text
from windlass.kernels import triton
from windlass.kernels.triton import tiles

attending = import_module("windlass.kernels.triton.attend")
DEVICES: list[Any] = ["cpu"] if not torch.cuda.is_available() else []
DEVICES = [*DEVICES, pytest.param("cuda", marks=pytest.mark.gpu)]


one_layer = models.one_layer  # fixture


@pytest.fixture
def _interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_quickly(monkeypatch)


def plans(monkeypatch: pytest.MonkeyPatch, rows: int, block: int, multiprocessors: int) -> None:
    """Blocks as large as the interpreter likes them, which takes the same time for a large one as for a small one."""
    at = tiles.Plan(rows, block, 4, 2)
    monkeypatch.setattr(tiles, "attend_plan", lambda *_: at)
    monkeypatch.setattr(tiles, "mass_plan", lambda *_: at)
    monkeypatch.setattr(tiles, "multiprocessors", lambda _: multiprocessors)


def on(device: str, call: AttentionInput) -> AttentionInput:
    """The same call, with its tensors there."""

    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device)
        if isinstance(value, tuple):
            return tuple(map(moved, value))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return dataclasses.replace(value, **{name: moved(part) for name, part in vars(value).items()})
        return value

    return moved(call)


def check(ours: tuple[Tensor, Mass | None], truth: tuple[Tensor, Mass | None], dtype: torch.dtype) -> None:
    (out, mass), (expected, masses) = ours, truth
    assert out.dtype == dtype
    compare(out.cpu(), expected, TOLERANCE[dtype])
    assert (mass is None) == (masses is None)
    if mass is not None and masses is not None:
        compare(mass.rows.cpu(), masses.rows, TOLERANCE[dtype])
        assert (mass.rest is None) == (masses.rest is None)
    if mass is not None and mass.rest is not None:
        assert masses is not None
        assert masses.rest is not None
        compare(mass.rest.cpu(), masses.rest, TOLERANCE[dtype])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", [*table()], ids=lambda case: " ".join(str(x) for x in vars(case).values()))
@pytest.mark.usefixtures("_interpreter")
def test_attend_equals_the_reference(case: Case, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu":
        rows = case.tokens * case.shape[1]
        large = 256 if case.slots > 100 else 32
        plans(monkeypatch, 128 if rows > 64 else 64, large, 24 if case.tokens == 1 else 1)
    call = step(case)
    check(triton.attend(on(device, call)), exactly(call), case.dtype)


SPLIT = [
    Case(slots=101, tokens=3, mode="clamp(30)"),
    Case((2, 7, 96, 32, 16), torch.bfloat16, slots=103, tokens=2, extras=("sinks", "counts"), mass="rows"),
    Case((1, 6, 40, 48, 10), torch.float16, 4, "self_extend(4, 22)", Visibility(None, 40, 9), slots=105, tokens=5),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", SPLIT, ids=str)
@pytest.mark.usefixtures("_interpreter")
def test_slots_may_be_read_in_any_number_of_parts(case: Case, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = step(case)
    truth = exactly(call)
    for multiprocessors in (14, 1000):
        plans(monkeypatch, 32, 32, multiprocessors)
        check(triton.attend(on(device, call)), truth, case.dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.usefixtures("_interpreter")
def test_queries_may_have_any_strides(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plans(monkeypatch, 32, 64, 1)
    call = on(device, step(Case(tokens=2)))
    truth, _ = triton.attend(call)
    queries = call.queries
    spread = torch.empty(*queries.shape, 2, dtype=queries.dtype, device=device)[..., 1].copy_(queries)
    for same in (queries.contiguous(), queries.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0), spread):
        assert triton.attend(dataclasses.replace(call, queries=same))[0].equal(truth)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.usefixtures("_interpreter")
def test_slots_at_full_precision_are_read_so(bits: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plans(monkeypatch, 16, 64, 1)
    case = Case(bits=bits, tokens=3, slots=70)
    call, randn = step(case), noise(case, seed=1)
    ring_index = torch.full((BATCH, case.shape[0], case.slots), -1, dtype=torch.int32)
    for entry, slot in enumerate((3, 20, 21, 66)):
        ring_index[:, :, slot] = 3 - entry
    for name in ("keys", "values"):
        states = getattr(call, name)
        ring = randn(BATCH, case.shape[0], 5, states.channels)
        states = dataclasses.replace(states, full_precision=ring, ring_index=ring_index)
        call = dataclasses.replace(call, **{name: states})
    check(triton.attend(on(device, call)), exactly(call), case.dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.usefixtures("_interpreter")
def test_tables_of_any_float_type_are_read(dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plans(monkeypatch, 32, 64, 1)
    call = step(Case((3, 2, 40, 24, 10), tokens=2))
    assert call.tables is not None
    call = dataclasses.replace(call, tables=cast(call.tables, dtype))
    check(triton.attend(on(device, call)), exactly(call), torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tokens", [1, 40])
@pytest.mark.usefixtures("_interpreter")
def test_what_lies_in_free_slots_and_beyond_the_last_is_never_read(
    tokens: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans(monkeypatch, 64, 32, 24 if tokens == 1 else 1)
    case = Case(slots=75, tokens=tokens, mass="rest")
    call = step(case)
    truth = exactly(call)
    where = call.slot_positions
    for name in ("keys", "values"):
        held = getattr(call, name).data.masked_fill((where < 0)[..., None], torch.nan)
        beyond = torch.full((held.shape[0] + 1, *held.shape[1:]), torch.nan)
        beyond[:-1] = held
        states: dict[str, Any] = {name: PackedStates(beyond[:-1])}
        call = dataclasses.replace(call, **states)
    beyond = torch.full((BATCH + 1, *where.shape[1:]), 0, dtype=torch.int32)
    beyond[:-1] = where
    call = dataclasses.replace(call, slot_positions=beyond[:-1])
    assert call.tables is not None
    cos, sin = (torch.cat((table, torch.full((200, 3), torch.nan)))[: len(table)] for table in call.tables)
    call = dataclasses.replace(call, tables=(cos, sin))
    check(triton.attend(on(device, call)), truth, case.dtype)


def test_a_type_that_no_kernel_knows_is_refused() -> None:
    call = step(Case())
    queries, keys, values = call.queries, call.keys, call.values
    assert triton.can_read(queries, keys, values)
    assert not triton.can_read(queries.double(), keys, values)
    assert not triton.can_read(queries, PackedStates(keys.data.double()), values)
    assert not triton.can_read(queries, keys, PackedStates(torch.zeros(BATCH, 3, 63, 1100)))


def test_parts_of_the_slots_fill_the_multiprocessors_but_once() -> None:
    device = torch.device("cpu")
    for programs, slots in ((8, 4096), (128, 65536), (3, 70), (10**6, 9), (8, 1024)):
        load = programs * slots // tiles.DEFAULT_MULTIPROCESSORS
        decode = tiles.attend_plan(4, 128, 2, 16, load)
        count, each = tiles.splits(programs, slots, decode, device)
        assert (count - 1) * each < slots <= count * each
        assert each % decode.block == 0
        assert count == 1 or programs * count <= decode.programs * tiles.DEFAULT_MULTIPROCESSORS
    assert tiles.splits(128, 4608, tiles.attend_plan(2048, 128, 2, 16, 4468), device)[0] == 1
    few = tiles.attend_plan(4, 64, 2, 16, 62)
    assert tiles.splits(8, 1024, few, device) == (16, few.block)  # all multiprocessors have work
    many = tiles.attend_plan(4, 64, 2, 16, 248)
    assert tiles.splits(8, 4096, many, device) == (64, 2 * many.block)  # no split of one block


class Limited:
    """A kernel on a GPU whose shared memory holds blocks of so many slots and rows."""

    def __init__(self, kernel: Any, block: int, rows: int) -> None:
        self.kernel, self.block, self.rows = kernel, block, rows
        self.asked: list[tuple[int, int, int]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            self.asked.append((options["num_stages"], options["BLOCK"], options["ROWS"]))
            if options["BLOCK"] > self.block or options["ROWS"] > self.rows:
                raise OutOfResources(10**6, 10**5, "shared memory")
            self.kernel[grid](*args, **options)

        return launch


@pytest.mark.parametrize(("block", "rows"), [(16, 128), (16, 32), (8, 8)])
@pytest.mark.usefixtures("_interpreter")
def test_a_gpu_of_less_shared_memory_takes_smaller_blocks(
    block: int, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case((1, 5, 48, 40, 24), slots=70, tokens=15)
    monkeypatch.setattr(tiles, "attend_plan", lambda *_: tiles.Plan(128, 64, 8, 2))
    kernel = Limited(attending.attend_kernel, block, rows)
    monkeypatch.setattr(attending, "attend_kernel", kernel)
    call = step(case)
    if block < tiles.MIN_BLOCK:
        with pytest.raises(OutOfResources):
            triton.attend(call)
    else:
        check(triton.attend(call), exactly(call), case.dtype)
    smaller = [(2, 64, 128), (1, 64, 128), (1, 32, 128), (1, 16, 128), (1, 16, 64), (1, 16, 32), (1, 16, 16)]
    fits = next((at for at, (_, b, r) in enumerate(smaller) if b <= block and r <= rows), len(smaller) - 1)
    assert kernel.asked == smaller[: fits + 1]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="they are run")
def test_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    names = [
        "decode 128 plain original mass",
        "prefill 64 int4 self_extend(8, 512)",
        "mean_key_cosine 128 int4",
        "evict",
        "prefill 128 narrow",
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": "benchmarks"}
    root = Path(__file__).parents[2]
    told = subprocess.run(
        [sys.executable, "-m", "gpu.code", *names],
        env=environment,
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    made = [json.loads(line) for line in told.stdout.splitlines()]
    attending, reading = (
        ["attend_kernel", "join_kernel", "mass_kernel", "attend_kernel"],
        ["sums_kernel", "cosines_kernel"],
    )
    assert [row["kernel"] for row in made] == [*attending, "attend_kernel", *reading, "_evict"]
    for row in made:
        assert row["unset_registers"] == 0, row
        # Decode with heads of 128 channels spills 64 bytes, and was the fastest of its plans on an H200.
        assert row["spill_bytes"] <= (64 if row["variant"].startswith("decode 128") else 0), row
        assert row["shared_bytes"] <= 227 * 1024, row


def test_tables_of_another_type_are_the_float32_ones_rounded(attached_model: Models) -> None:
    rotary = KVCache(attached_model("llama")).layers[0].rotary
    assert rotary is not None
    for length in (30, 700):  # the second is built again
        exact = rotary.tables(length, torch.device("cpu"))
        narrow = rotary.tables(length, torch.device("cpu"), torch.float16)
        assert rotary.tables(length, torch.device("cpu"), torch.float16)[0] is narrow[0]
        assert all(a.dtype == torch.float32 and a.half().equal(b) for a, b in zip(exact, narrow, strict=True))
    assert kernels.table_dtype(torch.empty(1, 1, 1, 1, dtype=torch.bfloat16)) == torch.float32


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_on_a_gpu_triton_serves_what_it_knows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    call = on("cuda", step(Case(dtype=torch.float16)))
    call = dataclasses.replace(call, queries=call.queries.to(dtype))
    other = triton if dtype == torch.float64 else reference
    monkeypatch.setattr(other, "attend", lambda *_, **__: pytest.fail("not the one"))
    assert kernels.attend(call)[0].dtype == dtype
    assert kernels.table_dtype(call.queries) == (torch.float32 if dtype == torch.float64 else dtype)


WHOLE = [
    {"policy": NAMES["h2o"](), "store": "int8(sinks=2, newest=4)", "positions": "compact"},
    pytest.param(
        {"policy": NAMES["snapkv"](), "store": "int4", "positions": "self_extend(4, 8)"}, marks=pytest.mark.slow
    ),
    pytest.param({"positions": "clamp(10)", "merge": "mean_count(nearest)"}, marks=pytest.mark.slow),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a CPU, through the interpreter")
@pytest.mark.parametrize("options", WHOLE, ids=str)
@pytest.mark.usefixtures("_interpreter")
def test_a_model_reads_the_same_through_triton(
    options: dict[str, Any],
    one_layer: tuple[PreTrainedModel, PreTrainedModel],
    text: Text,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans(monkeypatch, 64, 64, 4)
    model, ids, read = one_layer[1], text(17, rows=2), []
    monkeypatch.setattr(kernels, "_is_compiled", lambda _: False)
    for is_triton in (False, True):
        monkeypatch.setattr(kernels, "_has_triton", lambda _, chosen=is_triton: chosen)
        cache = KVCache(model, budget=11, sinks=2, window=4, chunk=11, batch=2, **options)
        with torch.no_grad():
            parts = *ids[:, :15].split(11, 1), *ids[:, 15:].split(1, 1)
            read.append(torch.cat([model(part, past_key_values=cache).logits for part in parts], 1))
    assert not read[1].equal(read[0])  # another order of sums, so it did run
    assert (read[1] - read[0]).norm() <= 1e-5 * read[0].norm()
