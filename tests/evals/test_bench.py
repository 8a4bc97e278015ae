"""The benchmark: timed parts, their order and caches, and its end."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from transformers import PreTrainedModel

import windlass
from tests.helpers import bench_run
from tests.helpers.bench_run import Ran
from tests.helpers.caches import bytes_of_slots
from tests.helpers.models import Models
from windlass.cli import measure as cli_bench
from windlass.cli.app import main
from windlass.engine.generate import prefill
from windlass.evals.speed import measure as bench
from windlass.evals.speed.measure import Clock, RotatedStorage, Timer, fill
from windlass.evals.speed.rows import rows_of
from windlass.evals.speed.workloads import BenchLists
from windlass.hf.forward import LayerShape, layer_shapes
from windlass.policies import Recent

run, model = bench_run.run, bench_run.model  # fixtures


def test_lists_make_every_combination():
    names = ["pp512", "tg16", "tg32"]
    typed = BenchLists(
        "512,0", "16, 32", "0,4096", {"budget": "all,64", "policy": "SnapKV(observed_queries=8, pool=7),recent"}
    )
    rows = rows_of(typed, 512)
    assert [str(each.workload) for each in rows[::4]] == names + [f"{n} @ d4096" for n in names]
    assert [each.setup.texts["budget"] for each in rows[:4]] == ["all", "all", "64", "64"]
    assert [each.setup.texts["policy"][:12] for each in rows[:4]] == ["SnapKV(obser", "Recent"] * 2
    modes = rows_of(
        BenchLists(options={"positions": "self_extend(8, 64),original,clamp(9)", "store": "int4,plain"}, threads="1,3"),
        512,
    )
    assert len({(tuple(each.setup.texts.items()), each.workload) for each in modes}) == len(modes) == 2 * 3 * 2 * 2
    assert {each.setup.texts["positions"] for each in modes} == {"self_extend(8, 64)", "original", "clamp(9)"}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--shape", "2b"), "--shape '2b' is unknown. Use one of: tiny, 1b, 8b, 7b-mha, qwen3-next, dsv3"),
        (("some/model",), "give either a model or --shape with one of its names"),
        (("-d", "0,,1"), "-d '0,,1' has an empty value. Put one comma between two values"),
        (("-n", "x"), "-n 'x' is not a whole number from 0 to 1073741824"),
        (("-p", "-1"), "-p '-1' is not a whole number from 0 to 1073741824"),
        (("-p", "0", "-n", "0"), "-p 0 and -n 0 leave nothing to measure. Give one of them a number of tokens"),
        (("--threads", "0"), "--threads '0' is not a whole number from 1 to 1024"),
        (("--batch", "1,0"), "--batch '0' is not a whole number from 1 to 65536"),
        (("--graph", "yes"), "--graph 'yes' is unknown. Use one of: off, on"),
        (("--graph", "off,on"), "--graph off,on: on a cpu steps run eagerly. Use --device cuda, or off"),
        (("--budget", "none"), "--budget 'none' is not a whole number from 1 to 1073741824"),
        (("--budget", "all,5"), "budget (5 tokens) must be at least sinks (4) + window (1) + 1, which is 6"),
        (("--chunk", "0"), "chunk must be from 1 to 1073741824, got 0"),
        (("--storage", "turned"), "--storage 'turned' is unknown. Use one of: unrotated, rotated"),
        (("--storage", "unrotated,rotated", "--positions", "compact"), "--storage rotated and --positions compact exc"),
        (("--store", "int3"), "store='int3' is not a store. Use one of: plain, int8, int4"),
        (("--policy", "h2"), "policy 'h2' is unknown. Did you mean h2o?"),
        (("--dtype", "half"), "dtype 'half' is unknown. Use one of: auto, float32, bfloat16, float16"),
        (("-o", "/nowhere/x"), "-o /nowhere/x: the folder /nowhere does not exist"),
        (("-d", "1073741824"), "this needs about "),
        (("--repetitions", "0"), "Invalid value for '--repetitions'"),
    ],
)
def test_one_clear_line_for_what_is_wrong(
    run: Callable[..., Ran], arguments: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch
):
    # Weights take a minute: errors must show before.
    monkeypatch.setattr(bench, "random_model", Mock(side_effect=AssertionError))
    ran = run(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"windlass: error: {why}")
    assert ran.err.count("\n") == 1


def test_layers_are_for_shapes(capsys: pytest.CaptureFixture[str]):
    assert main(("bench", str(Path(windlass.__file__).parent / "assets" / "finder-3m"), "--layers", "2")) == 2
    assert "--layers goes with --shape" in capsys.readouterr().err


def test_memory_that_will_not_suffice_is_told(run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "free_bytes", Mock(return_value=500_000))
    # Weights take 130,440 bytes, a cache 1.5 x 1,008 slots x 192 bytes: one fits, two do not.
    assert run("-p", "0", "-n", "8", "-d", "1000").code == 0
    ran = run("-p", "0", "-n", "8", "-d", "1000,1000")
    assert ran.code == 2
    assert ran.err == (
        "windlass: error: this needs about 694.38 KiB of memory (weights 127.38 KiB, the caches of all rows "
        "567.00 KiB), but 488.28 KiB are free. Give a lower -d or --layers, or fewer values\n"
    )


def squares() -> Iterator[float]:
    """Times so that the run number k takes 4 k + 1 seconds."""
    k = 0
    while True:
        yield float(k * k)
        k += 1


def test_rows_take_turns(capsys: pytest.CaptureFixture[str]):
    times = squares()
    lists = BenchLists("7", "3", "0,20", storage="unrotated,rotated", threads="1")
    request = bench.BenchRequest(None, "tiny", None, lists, 512, 3, "auto")
    assert cli_bench.bench(request, None, cli_bench.OutputFormat("json"), lambda: next(times)) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(each["test"], each["storage"]) for each in rows[:3]] == [
        ("pp7", "unrotated"),
        ("pp7", "rotated"),
        ("tg3", "unrotated"),
    ]
    assert len(rows) == 8
    for index, each in enumerate(rows):  # the first 8 runs warm up
        assert each["samples_s"] == [4 * (8 * turn + index) + 1 for turn in (1, 2, 3)]


@pytest.mark.parametrize(
    ("prompt", "decode", "depth", "budget", "policy", "storage"),
    [
        (60, 0, 0, "all", "recent", "unrotated"),
        (60, 0, 200, "all", "recent", "rotated"),
        (0, 17, 0, "all", "h2o", "unrotated"),
        (0, 17, 200, "all", "h2o", "unrotated"),
        (60, 0, 0, "64", "h2o", "unrotated"),
        (60, 0, 200, "64", "h2o", "unrotated"),
        (60, 0, 200, "64", "recent", "rotated"),
        (0, 7, 200, "64", "recent", "rotated"),
        (0, 17, 0, "64", "recent", "unrotated"),
        (0, 17, 30, "64", "h2o", "rotated"),
        (0, 17, 200, "64", "recent", "rotated"),
        (0, 17, 200, "64", "h2o", "unrotated"),
    ],
)
def test_each_run_starts_at_its_depth(
    model: PreTrainedModel, prompt: int, decode: int, depth: int, budget: str, policy: str, storage: str
):
    [each] = rows_of(
        BenchLists(str(prompt), str(decode), str(depth), {"budget": budget, "policy": policy}, storage), 32
    )
    timer = Timer(model, layer_shapes(model), each)
    assert isinstance(timer.cache, RotatedStorage) == (storage == "rotated")
    timer.warm_up(lambda: 0.0)
    held = depth if budget == "all" else min(depth, 64)
    expected = [*range(held)] if held == depth else [0, 1, 2, 3, *range(depth - 60, depth)]
    slots = [layer.store.slots for layer in timer.cache.layers]
    for is_last in (False, True):
        assert timer.cache.next_positions == [depth]
        for layer in timer.cache.layers:
            positions = layer.positions[0, 0]
            assert positions[positions >= 0].sort().values.tolist() == expected
            assert layer.table.occupancy_bound == held
        if is_last:
            return
        timer.run(lambda: 0.0)
        assert timer.cache.next_positions == [depth + prompt + decode]
        assert [layer.store.slots for layer in timer.cache.layers] == slots, "grown or packed while timed"
        timer.take_back()


def test_a_filled_cache_is_as_after_reading(model: PreTrainedModel):
    ids = torch.randint(97, (200,)).tolist()
    for budget, chunk in ((64, 32), (300, 32), (None, 200)):
        read, filled = (windlass.KVCache(model, budget=budget, chunk=chunk, policy=Recent()) for _ in range(2))
        prefill(model, read, [ids])
        fill(filled, layer_shapes(model), 200)
        # Reading leaves a record of its last step, which filling has not: that is the last line.
        assert filled.describe().splitlines()[:-1] == read.describe().splitlines()[:-1]
        assert bytes_of_slots(filled) == bytes_of_slots(read)
        assert filled.rows.prompts == read.rows.prompts
        for ours, theirs in zip(filled.layers, read.layers, strict=True):
            assert torch.equal(ours.positions.clamp(min=-1).sort().values, theirs.positions.clamp(min=-1).sort().values)
            assert ours.history.has_evicted == theirs.history.has_evicted
            assert ours.store.keys().isfinite().all()
            held = ours.store.keys()[ours.positions.expand(1, 3, -1) >= 0]
            assert 0.9 < float(held.float().std()) < 1.1
            assert len(held.unique(dim=0)) == len(held)


def test_a_sliding_window_is_filled_as_the_model_would(attached_model: Models):
    model = attached_model("gemma3")
    shapes = layer_shapes(model)
    assert [shape.sliding_window for shape in shapes] == [11, None, 11, None]
    assert shapes[0] == LayerShape(15, 3, 8, 8, torch.float32, 11)
    read, filled = windlass.KVCache(model), windlass.KVCache(model)
    prefill(model, read, [list(range(50))])
    fill(filled, shapes, 50)
    assert (
        [layer.table.occupancy_bound for layer in filled.layers]
        == [layer.table.occupancy_bound for layer in read.layers]
        == [11, 50] * 2
    )
    for ours, theirs in zip(filled.layers, read.layers, strict=True):
        held = [layer.positions[layer.positions >= 0].sort().values for layer in (ours, theirs)]
        assert torch.equal(*held)
    prefill(model, filled, [[5]])
    assert [layer.table.occupancy_bound for layer in filled.layers] == [11, 51] * 2


def test_an_interrupt_shows_what_was_measured(run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    count, timed, file = [], Timer.run, tmp_path / "out.jsonl"

    def interrupted(timer: Timer, clock: Clock) -> float:
        count.append(1)
        if len(count) == 6:
            raise KeyboardInterrupt
        return timed(timer, clock)

    monkeypatch.setattr(Timer, "run", interrupted)
    # Three rows warm up, then two are timed.
    ran = run("-p", "9", "-n", "2,3", "-o", str(file))
    assert ran.code == 130
    assert [each["test"] for each in ran.rows] == ["pp9", "tg2"]
    assert ran.err == "interrupted, 2 of 6 runs are done\n"
    assert [len(json.loads(line)["samples_s"]) for line in file.read_text().splitlines()] == [1, 1]
    count[:] = [1] * 5
    ran = run("-p", "9", "-n", "2,3")
    assert (ran.code, ran.out, ran.err) == (130, "", "interrupted, 0 of 6 runs are done\n")


def test_a_terminal_gets_a_bar(run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch):
    assert run("-p", "9", "-n", "2").err == ""
    monkeypatch.setenv("FORCE_COLOR", "1")  # makes a pipe a terminal for Rich
    ran = run("-p", "9", "-n", "2")
    for line in ("warming up pp9", "warming up tg2", "timing pp9", "timing tg2"):
        assert line in ran.err
    assert "5/6" in ran.err
    assert "timing" not in ran.out


def test_a_model_of_a_folder(capsys: pytest.CaptureFixture[str]):
    name = str(Path(windlass.__file__).parent / "assets" / "finder-3m")
    assert main(("bench", name, "-p", "5", "-n", "2", "-d", "20", "--threads", "1", "-r", "1", "--json")) == 0
    prompt, decode = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (prompt["model"], prompt["test"], decode["test"]) == ("finder-3m", "pp5 @ d20", "tg2 @ d20")
