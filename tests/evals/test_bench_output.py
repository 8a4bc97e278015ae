"""Output of a benchmark: shapes, bytes and speeds worked by hand, the table, the ratios and the JSON lines."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.helpers import bench_run
from tests.helpers.bench_run import Ran, cells
from windlass.cache.options import CacheOptions
from windlass.evals.speed.measure import Timer
from windlass.evals.speed.rows import SHAPES, BenchRow, BenchSetup, random_model, rows_of, shape_of
from windlass.evals.speed.table import Conditions, as_json, footnote, ratios, table
from windlass.evals.speed.workloads import BenchLists, Workload
from windlass.hf.forward import layer_shapes
from windlass.hf.weights import weight_bytes

run, model = bench_run.run, bench_run.model  # fixtures
CONDITIONS = Conditions("tiny", 130440, 65220, "bfloat16", 512, 2, "2026-01-02T03:04:05+00:00")


def row(storage: str, *samples_s: float, place: int = 0, is_prompt: bool = False) -> BenchRow:
    setup = BenchSetup(CacheOptions(), storage, 1, "off")
    places = {
        "task": 0,
        "budget": 0,
        "policy": 0,
        "positions": 0,
        "store": 0,
        "storage": place,
        "threads": 0,
        "graph": 0,
    }
    return BenchRow(Workload(is_prompt, 8, 4096), setup, places, list(samples_s))


def test_shapes_are_those_of_the_models_they_are_named_for():
    assert SHAPES["8b"].parameters == 8_030_261_248  # Llama 3 8B
    assert SHAPES["7b-mha"].parameters == 6_738_415_616  # Llama 2 7B
    assert SHAPES["1b"].parameters == 2 * 32000 * 2048 + 16 * (2 * 40 * 64 * 2048 + 3 * 2048 * 8192 + 4096) + 2048


def test_a_random_model_is_whole():
    shape, label = shape_of("tiny", 3)
    assert label == "tiny (3 layers)"
    made = random_model(shape, torch.bfloat16)
    assert sum(each.numel() for each in made.parameters()) == shape.parameters
    assert {each.dtype for each in made.parameters()} == {torch.bfloat16}
    twin = AutoModelForCausalLM.from_config(shape.config)
    # Buffers are not lost, and stay in float32.
    for (name, ours), (_, theirs) in zip(made.named_buffers(), twin.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    made.requires_grad_(False)
    hidden = made.get_decoder()(torch.arange(97)[None], output_hidden_states=True).hidden_states
    sizes = [float(states.float().square().mean().sqrt()) for states in hidden]
    assert all(0.5 < size < 3 for size in sizes), sizes
    weight = made.get_parameter("model.layers.0.mlp.up_proj.weight")
    assert len(weight.unique(dim=0)) == len(weight)


def test_bytes_and_speeds_worked_by_hand(model: PreTrainedModel):
    # 60 wide, 15 query heads and 3 kv heads of 8, MLP 52, vocabulary 97, 2 layers, bfloat16.
    layer = 60 * 120 + 2 * 60 * 24 + 120 * 60 + 3 * 60 * 52 + 2 * 60
    weights = 2 * (2 * layer + 97 * 60 + 60)
    assert weight_bytes(model) == weights
    expected = {
        ("all", "plain"): 2 * 3 * (8 + 8) * 2 * (101 + 102 + 103 + 104) / 4,
        ("all", "int8"): 2 * 3 * (8 + 8 + 2 * 2) * 102.5,  # a byte a channel, two float16 scales
        ("all", "int8(sinks=2, newest=5)"): 2 * 3 * ((8 + 8 + 2 * 2) * (102.5 - 7) + (8 + 8) * 2 * 7),
        ("64", "plain"): 2 * 3 * (8 + 8) * 2 * 65,  # the new token is read before one is evicted
        ("102", "plain"): 2 * 3 * (8 + 8) * 2 * (101 + 102 + 103 + 103) / 4,
    }
    for (budget, store), read in expected.items():
        [each] = rows_of(BenchLists("0", "4", "100", {"budget": budget, "store": store}, threads="1"), 512)
        timer = Timer(model, layer_shapes(model), each)
        timer.warm_up(lambda: 0.0)
        assert each.bytes_per_token == pytest.approx(weights + read)
        [rows] = rows_of(BenchLists("0", "4", "100", {"budget": budget, "store": store}, threads="1", batch="3"), 512)
        timer = Timer(model, layer_shapes(model), rows)
        timer.warm_up(lambda: 0.0)
        assert rows.bytes_per_token == pytest.approx(weights / 3 + read), "a batch shares the weights"
    each.samples_s = [0.5, 0.25, 0.1, 0.2]  # 8, 16, 40 and 20 tokens a second
    assert each.tokens_per_s == 18
    assert each.half_range == (25 - 14) / 2
    assert each.gb_per_s == pytest.approx(18 * (weights + expected["102", "plain"]) / 1e9)
    assert row("unrotated", 2.0).half_range == 0.0


def test_a_shared_embedding_is_read_as_the_head():
    config = SHAPES["tiny"].config
    config.tie_word_embeddings = True
    tied = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert weight_bytes(tied) == 2 * (SHAPES["tiny"].parameters - 97 * 60)


def test_the_table_is_that_of_llama_bench(run: Callable[..., Ran]):
    ran = run("-p", "9", "-n", "2", "-d", "0,30", "--layers", "1")
    assert (ran.code, ran.err) == (0, "")
    heads = ["model", "size", "params", "backend", "threads", "test", "t/s", "GB/s"]
    assert [list(each) for each in ran.rows] == [heads] * 4
    assert [each["test"] for each in ran.rows] == ["pp9", "tg2", "pp9 @ d30", "tg2 @ d30"]
    assert {each["model"] for each in ran.rows} == {"tiny (1 layer)"}
    assert {(each["size"], each["params"], each["threads"]) for each in ran.rows} == {("75.12 KiB", "0.04 M", "1")}
    assert {re.sub(r"\(\w+\)", "(set)", each["backend"]) for each in ran.rows} == {"cpu (set)"}
    assert all(re.fullmatch(r"\d+\.\d\d ± \d+\.\d\d", each["t/s"]) for each in ran.rows)
    assert [each["GB/s"] == "-" for each in ran.rows] == [True, False, True, False]
    assert "half the interquartile range of 2 runs" in ran.out
    assert f"torch {torch.__version__}" in ran.out
    assert "against" not in ran.out


def test_settings_have_a_column_where_they_are_not_the_default(run: Callable[..., Ran]):
    more = ("--budget", "all,20", "--store", "int8", "--chunk", "4", "--dtype", "float32", "--policy", "tova")
    ran = run("-p", "9", "-n", "0", *more, "--positions", "compact")
    heads = ["model", "size", "params", "backend", "threads", "chunk", "dtype"]
    assert list(ran.rows[0]) == [*heads, "budget", "policy", "positions", "store", "test", "t/s", "GB/s"]
    assert list(ran.rows[1].values())[4:11] == ["1", "4", "float32", "20", "TOVA", "compact", "int8"]


def test_ratios_are_against_the_first_of_a_list():
    first, second = row("unrotated", 0.2, 0.4), row("rotated", 0.1, 0.5, place=1)
    [lines] = ratios([first, second])
    # 8 tokens: 40 and 20 a second against 80 and 16, with medians of 30 and 48.
    assert cells(lines) == [
        {
            "test": "tg8 @ d4096",
            "storage": "rotated",
            "against": "unrotated",
            "ratio": "1.600",
            "rounds": "0.800 to 2.000",
        }
    ]
    assert cells(ratios([first, row("unrotated", 0.2, 0.4, place=1)])[0])[0]["ratio"] == "1.000", "a list with a twin"
    assert ratios([first]) == []
    assert ratios([second]) == [], "interrupted before the first was timed"


def test_ratios_keep_everything_else_equal(run: Callable[..., Ran]):
    ran = run("-p", "9", "-n", "0", "-d", "0,30", "--storage", "unrotated,rotated", "--budget", "all,20")
    budgets, storages = (cells(part) for part in ran.out.split("\n\n")[2:])
    keys = ("storage", "test", "budget", "against")
    expected = [(storage, test, "20", "all") for test in ("pp9", "pp9 @ d30") for storage in ("unrotated", "rotated")]
    assert [tuple(each[key] for key in keys) for each in budgets] == expected
    keys = ("budget", "test", "storage", "against")
    expected = [(n, test, "rotated", "unrotated") for test in ("pp9", "pp9 @ d30") for n in ("all", "20")]
    assert [tuple(each[key] for key in keys) for each in storages] == expected
    speeds = {(each["test"], each["budget"], each["storage"]): float(each["t/s"].split()[0]) for each in ran.rows}
    for each in storages:
        mine, base = (speeds[each["test"], each["budget"], kind] for kind in ("rotated", "unrotated"))
        assert float(each["ratio"]) == pytest.approx(mine / base, abs=1e-3)


def test_a_table_for_the_eye_fits_a_terminal(run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch):
    lists = ("-d", "0,30", "--storage", "unrotated,rotated", "--budget", "all,20", "--policy", "tova")
    ran = run("-p", "9", "-n", "2", *lists, "--format", "table")
    head, _, heads, _, *lines = ran.out.splitlines()
    assert re.sub(r"\(\w+\)", "(set)", head) == (
        "tiny, 127.38 KiB, 0.07 M parameters, bfloat16; cpu (set), 1 thread; policy TOVA"
    )
    assert heads.split() == ["test", "budget", "storage", "t/s", "±", "GB/s"]
    rows = [line.split() for line in lines[:16]]
    assert rows[0][:3] == ["pp9", "all", "unrotated"]
    assert rows[15][:5] == ["tg2", "@", "d30", "20", "rotated"]
    assert max(map(len, ran.out.splitlines()[1:20])) <= 80
    assert "against" not in ran.out
    assert "half the interquartile range of 2 runs" in ran.out
    with_ratios = run("-p", "9", "-n", "0", "--budget", "all,20", "--format", "table", "--ratios")
    assert "against" in with_ratios.out
    # A long name is folded where a terminal is too narrow for it.
    monkeypatch.setattr("windlass.cli.measure.PIPE_WIDTH", 80)
    policies = "Smoothed(SnapKV(observed_queries=4, pool=3)),Smoothed(SnapKV(observed_queries=5, pool=3))"
    more = ("--budget", "all,20", "--positions", "compact,self_extend(8, 64)", "--store", "plain,int8")
    ran = run("-p", "9", "-n", "0", "-r", "1", *more, "--policy", policies, "--format", "table")
    assert max(map(len, ran.out.splitlines())) <= 80


def test_forms_that_exclude_each_other(run: Callable[..., Ran]):
    for options, says in (
        (("--json", "--format", "md"), "--json and --format md exclude each other"),
        (("--json", "--ratios"), "--ratios goes with --format table or md"),
        (("--format", "csv"), "--format 'csv' is unknown. Use one of: table, md, json"),
    ):
        ran = run(*options)
        assert (ran.code, ran.out) == (2, "")
        assert ran.err.startswith(f"windlass: error: {says}")


def test_a_gpu_is_named_where_threads_would_be():
    on_gpu = replace(CONDITIONS, gpu="Some GPU")
    [shown] = cells(table([row("unrotated", 1.0)], on_gpu))
    assert (shown["threads"], shown["backend"].split(" ")[0]) == ("Some GPU", "cuda")
    assert as_json(row("unrotated", 1.0), on_gpu)["gpu"] == "Some GPU"
    assert as_json(row("unrotated", 1.0), CONDITIONS)["gpu"] is None


def test_cells_survive_a_bar():
    shown = table([row("a|b", 1.0)], CONDITIONS)
    assert "a\\|b" in shown
    assert footnote([row("x", 1.0), row("y", 1.0, 2.0)], CONDITIONS).startswith(
        "t/s: median ± half the interquartile range of 1 or 2 runs, rows in turn."
    )


def test_json_lines_hold_every_sample_and_setting(run: Callable[..., Ran], tmp_path: Path):
    file = tmp_path / "out.jsonl"
    file.write_text('{"older": 1}\n')
    ran = run("-p", "9", "-n", "2", "-d", "30", "--policy", "h2o", "--budget", "20", "--json", "-o", str(file))
    assert file.read_text() == '{"older": 1}\n' + ran.out
    prompt, decode = (json.loads(line) for line in ran.out.splitlines())
    for each in (prompt, decode):
        assert each["cpu"]
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", each["date"])
        assert set(each["versions"]) == {"windlass", "torch", "transformers"}
        assert len(each["samples_s"]) == each["repetitions"] == 2
        speeds = [9 / s if each is prompt else 2 / s for s in each["samples_s"]]
        assert each["tokens_per_s"] == pytest.approx(sum(speeds) / 2)
        assert (each["budget"], each["policy"], each["positions"]) == (20, "H2O()", "original")
        assert (each["store"], each["storage"], each["threads"], each["chunk"]) == ("plain", "unrotated", 1, 512)
        assert (each["model"], each["dtype"], each["parameters"]) == ("tiny", "bfloat16", 65220)
    assert (prompt["test"], prompt["prompt_tokens"], prompt["decode_tokens"]) == ("pp9 @ d30", 9, 0)
    assert (decode["test"], decode["prompt_tokens"], decode["decode_tokens"]) == ("tg2 @ d30", 0, 2)
    assert (prompt["gb_per_s"], prompt["depth"]) == (None, 30)
    assert decode["gb_per_s"] == pytest.approx(decode["bytes_per_token"] * decode["tokens_per_s"] / 1e9)
