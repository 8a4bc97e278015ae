"""`benchmarks/gpu.sh`: parsing of its lines, time limits of its parts, and its parts on the CPU."""

import argparse
import json
import subprocess
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from gpu import __main__ as gpu
from gpu import attention as gpu_attention
from gpu import bars as gpu_bars
from gpu import checks as gpu_machine
from gpu import decode as gpu_decode
from gpu import memory as gpu_memory
from gpu import peers as gpu_peers
from gpu import recall as gpu_recall
from gpu import tables as gpu_tables
from gpu.part import TINY, OutOfTime, Part, Sizes, summary

import windlass
from windlass.hf.forward import layer_shapes

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
RUN = {"kind": "run", "date": "2026-01-02T03:04:05+00:00", "device": "cuda", "is_tiny": False}
MACHINE = {"kind": "machine", "part": "machine", "device": "Some GPU", "memory_bytes": 141 * 2**30}
MACHINE |= {"multiprocessors": 132, "cuda": "13.0", "torch": "2.13", "triton": "3.7", "transformers": "5.23"}
MACHINE |= {"copy_gb_per_s": 4000.0, "read_gb_per_s": 4100.0}


def decode(rate: float, group: str, depth: int = 4096, **more: object) -> dict[str, Any]:
    line = {"kind": "decode", "part": "decode-8b", "group": group, "way": "as it is", "model": "8b", "batch": 1}
    line |= {"test": f"tg16 @ d{depth}", "budget": None, "policy": "Recent()", "positions": "original"}
    line |= {
        "store": "plain",
        "storage": "unrotated",
        "threads": 1,
        "graph": "on",
        "depth": depth,
        "tokens_per_s": rate,
    }
    line |= {"half_interquartile_range_per_s": 0.5, "gb_per_s": 16.0 * rate, "bytes_held": 2**30, "step_bytes": 2**20}
    return line | more


def attention(slots: int, what: str, median_s: float) -> dict[str, Any]:
    line = {"kind": "attention", "part": "attention", "shape": "1b", "batch": 16, "slots": slots, "what": what}
    return line | {"gb_per_s": 8.0 / median_s, "median_s": median_s, "not_recorded": None}


def peer(name: str, depth: int, rate: float) -> dict[str, Any]:
    line = {"kind": "peers", "part": "peers-1b", "shape": "1b", "batch": 1, "depth": depth, "tokens": 16, "peer": name}
    return line | {"tokens_per_s": rate, "low_s": 0.1, "high_s": 0.2, "step_bytes": None}


def met(lines: list[dict[str, Any]]) -> list[list[str]]:
    """Worst value, number of places and whether it will do, of each bar."""
    return [[cells[2].split(" ")[0], *cells[3:]] for cells in (bar.cells(lines) for bar in gpu_bars.BARS)]


def test_bars_worked_by_hand():
    storage = [
        decode(rate, "storage", depth, storage=storage)
        for depth, rotated, unrotated in ((0, 250.0, 245.0), (4096, 200.0, 210.0), (65536, 100.0, 96.0))
        for storage, rate in (("rotated", rotated), ("unrotated", unrotated))
    ]
    seconds = {"rotated": 0.0020, "unrotated": 0.0025, "unrotated, mass": 0.003, "int8": 0.002, "int4": 0.001}
    alone = [attention(slots, name, s) for slots in (1024, 65536) for name, s in {**seconds, "pytorch": 0.005}.items()]
    alone[1] |= {"gb_per_s": 1.0}  # with 1,024 slots nothing is asked
    policies = [decode(100.0, "policies", policy="Recent()"), decode(80.0, "policies", policy="H2O()")]
    peers = [
        *(peer("windlass, budget all, graph on", depth, 130.0) for depth in (4096, 65536)),
        *(peer("transformers static, compiled", depth, 100.0) for depth in (4096, 65536)),
        peer("windlass, budget 4096, graph on", 65536, 190.0),
    ]
    lines = [RUN, MACHINE, *storage, *alone, *policies, *peers]
    assert met(lines) == [
        ["0.960", "3", "no"],
        ["0.800", "1", "yes"],  # 8 GB in 2.5 ms are 3,200 of 4,000 GB/s
        ["0.384", "3", "no"],  # 96 tokens of 16 GB
        ["1.300", "1", "yes"],
        ["1.900", "1", "no"],
        ["1.250", "1", "no"],
    ]
    text = gpu_tables.section(lines)
    for row in (
        "| 1b | 16 | 65,536 | 3,200 | 0.80 | 0.800 | 0.83 | 1.25 | 2.50 | 2.00 |",
        "| 8b | tg16 @ d65536 | on | 96.0 ± 0.5 | 1,536 | 0.38 | 0.960 | 1,024 | 1 |",
        "| 8b | tg16 @ d4096 | all | on | H2O() | 80.0 ± 0.5 | 1,280 | 0.800 |",
        "| 1b | 1 | 65,536 | windlass, budget 4096, graph on | 190.0 | 80.0 to 160.0 | 1.90 | - |",
    ):
        assert row in text
    assert "Some GPU, 141 GiB, 132 multiprocessors, CUDA 13.0" in text


def test_what_was_not_measured_is_told():
    lines: list[dict[str, Any]] = [
        {**RUN, "date": "of an older run"},
        {"kind": "skipped", "part": "attention", "what": "something older", "why": "a reason"},
        RUN,
        {"kind": "skipped", "part": "attention", "what": "8b b16 65536 slots", "why": "needs about 90 GiB"},
        {"kind": "end", "part": "attention", "why": None, "seconds": 1.0},
        {"kind": "failed", "part": "decode-1b", "why": "cut after 75 s", "seconds": 75.0},
        decode(2.0, "stores"),
    ]
    text = gpu_tables.section(lines)
    assert met(lines[2:]) == [["not", "-", "-"]] * len(gpu_bars.BARS)
    assert text.endswith(
        "### Not measured\n\n- 8b b16 65536 slots: needs about 90 GiB\n- decode-1b: cut after 75 s\n"
        "- decode-8b: the run was stopped in it\n"
    )
    assert "older" not in text
    assert "Whole decode\n" not in text


def test_the_page_has_the_tables_of_the_results():
    page = (ROOT / "docs" / "results" / "benchmarks.md").read_text()
    lines = (ROOT / "benchmarks" / "results" / "gpu.jsonl").read_text().splitlines()
    assert page.endswith(gpu_tables.section([json.loads(line) for line in lines]))


@pytest.mark.parametrize("sizes", [Sizes(), TINY])
def test_no_part_starves_another(sizes: Sizes):
    weights = {name: share.weight for name, share in gpu.shares(sizes).items()}
    left_s, whole = gpu.SECONDS, sum(weights.values())
    assert left_s <= 600
    for name in weights:
        may_s = gpu.seconds_of(name, weights, gpu.SECONDS, left_s)
        assert may_s == pytest.approx(gpu.SECONDS * weights[name] / whole), "all before took all they might"
        left_s -= may_s
    assert left_s == pytest.approx(0)
    *_, last = weights
    assert gpu.seconds_of(last, weights, gpu.SECONDS, 300.0) == 300, "what others leave"


@pytest.fixture
def part(tmp_path: Path) -> Part:
    return Part("part", CPU, tmp_path / "gpu.jsonl", 60.0, True)


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "gpu.jsonl").read_text().splitlines()]


def test_a_summary_worked_by_hand():
    assert summary([5.0, 1.0, 4.0, 2.0, 3.0]) == {"median_s": 3.0, "low_s": 2.0, "high_s": 4.0, "rounds": 5}


def test_works_alternate(part: Part):
    order: list[str] = []
    timed = part.alternate({name: partial(order.append, name) for name in "abc"})
    assert "".join(order) == "aabbcc" + "cbaabc" * 4 + "cba"
    assert [line["rounds"] for line in timed.values()] == [9] * 3


def test_time_and_memory_that_run_out_are_told(part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def raising(error: Exception) -> None:
        raise error

    part.attempt("a", lambda: raising(torch.OutOfMemoryError("CUDA out of memory.\nA page of advice.")))
    part.attempt("b", lambda: raising(OutOfTime()))
    with pytest.raises(ValueError, match="a fault"):
        part.attempt("c", lambda: raising(ValueError("a fault")))
    monkeypatch.setattr(gpu_attention, "free_bytes", Mock(return_value=1000))
    gpu_attention.measure(part)
    late = Part("late", CPU, tmp_path / "gpu.jsonl", 0.0, True)
    gpu_decode.measure(late, "tiny")
    with pytest.raises(OutOfTime):
        late.alternate({"a": lambda: None})
    lines = lines_of(tmp_path)
    assert {line["kind"] for line in lines} == {"skipped"}
    whys = [line["why"] for line in lines]
    assert whys[:2] == ["not enough memory: CUDA out of memory.", "no time left to finish it"]
    assert [why.split(",")[0].split(" ")[0] for why in whys[2:6]] == ["needs"] * 4
    assert whys[6:] == ["no time left for it"] * 10


def test_parts_run_on_the_cpu(part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gpu.part.MOST_ROUNDS", 3)
    part.sizes = replace(TINY, batches=(3,), slots=(64,), depths=(48,))
    with torch.no_grad():
        gpu_machine.measure(part)
        gpu_attention.measure(part)
        gpu_memory.measure(part)
        gpu_decode.measure(part, "tiny")
        gpu_recall.measure(part, "tiny")
    lines = lines_of(tmp_path)
    assert [line["kind"] for line in lines] == ["machine"] + ["attention"] * 6 + ["memory"] * 3 + ["decode"] * 10 + [
        "recall"
    ] * 5
    plain, codes = (next(line for line in lines if line.get("what") == what) for what in ("unrotated", "int8"))
    assert plain["bytes"] == 3 * plain["layers"] * 2 * 3 * 64 * 8 * 2
    assert codes["bytes"] == 3 * codes["layers"] * 2 * 3 * 64 * (8 + 2)
    assert all(line["rounds"] == 3 for line in lines if line["kind"] == "attention")
    assert [line["storage"] for line in lines if line.get("group") == "storage"] == ["rotated", "unrotated"]
    assert [line["store"] for line in lines if line.get("group") == "stores"] == ["plain", "int8", "int4"]
    assert {line["batch"] for line in lines if line["kind"] == "decode"} == {3}
    recalls = {line["what"]: line for line in lines if line["kind"] == "recall"}
    assert [*recalls] == ["no recall", "full cache", "plain", "int8", "int4"]
    sizes = [recalls[name]["recall_bytes"] for name in ("no recall", "full cache", "int4", "int8", "plain")]
    assert sizes[:2] == [0, 0]
    assert 0 < sizes[2] < sizes[3] < sizes[4]
    assert "Not measured" not in gpu_tables.section([{**RUN, "is_tiny": True}, *lines, {"kind": "end", "part": "part"}])


def test_peers_write_the_same_tokens(part: Part, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("gpu.part.MOST_ROUNDS", 3)
    monkeypatch.setattr(torch, "compile", lambda forward, **_: forward)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    with torch.no_grad():
        gpu_peers.measure(part, "tiny")
        plain, _ = gpu_decode.pair("tiny", CPU)
        shapes = layer_shapes(windlass.attach(gpu_decode.pair("tiny", CPU)[1]))
        models = gpu_peers.Models(plain, plain, plain.forward, shapes)
        for kind in (gpu_peers.Static, gpu_peers.Dynamic):
            each = kind(models, part, 3, 48)
            for _ in range(2):
                each.warm_up(lambda: 0.0)
                assert int(each._cache.get_seq_length()) == 48
                each.run(lambda: 0.0)
                assert int(each._cache.get_seq_length()) == 48 + TINY.tokens
                each.take_back()
    names = [
        "windlass, budget all, graph off",
        "windlass, budget 40, graph off",
        "transformers static, compiled",
        "transformers dynamic",
    ]
    assert [line["peer"] for line in lines_of(tmp_path)] == names * 4


def test_a_part_that_takes_too_long_is_cut(tmp_path: Path):
    out = tmp_path / "out"
    options = argparse.Namespace(out=out, device="cpu", tiny=True, seconds=0.2, parts=["machine", "memory"])
    assert gpu.run_all(options) == 2
    run, first, second = lines_of(out)
    assert run["kind"] == "run"
    assert [(line["kind"], line["part"]) for line in (first, second)] == [("failed", "machine"), ("failed", "memory")]
    assert first["why"].startswith("cut after")


def test_the_script_asks_for_a_folder():
    ran = subprocess.run([ROOT / "benchmarks" / "gpu.sh"], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == "gpu.sh: give a folder for the results: benchmarks/gpu.sh OUT\n"
