"""The benchmark: what is timed, in which order, on which cache, and what is said about it."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import windlass
from windlass import bench
from windlass.bench_depth import LayerShape, fill, layer_shapes
from windlass.bench_grid import Lists, Row, Settings, Task, rows_of
from windlass.bench_shapes import SHAPES, random_model, shape_of
from windlass.bench_table import Conditions, footnote, ratios, table
from windlass.cli import main
from windlass.engine import prefill
from windlass.low_bit import store_of
from windlass.positions import position_mode
from windlass.rotated import RotatedStorage

QUICK = ("bench", "--shape", "tiny", "--threads", "1", "-r", "2")
CONDITIONS = Conditions("tiny", 130440, 65220, "bfloat16", 512, 2, "2026-01-02T03:04:05+00:00")


@dataclass(frozen=True)
class Ran:
    code: int
    out: str
    err: str

    @property
    def rows(self) -> list[dict[str, str]]:
        """The first table, a dict per row."""
        return cells(self.out.split("\n\n")[0])


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    def go(*arguments: str) -> Ran:
        return Ran(main((*QUICK, *arguments)), *capsys.readouterr())

    return go


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return windlass.attach(random_model(SHAPES["tiny"], torch.bfloat16))


def cells(markdown: str) -> list[dict[str, str]]:
    heads, rule, *lines = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in markdown.splitlines())
    assert all(re.fullmatch("-+:?", cell) for cell in rule)
    return [dict(zip(heads, line, strict=True)) for line in lines]


def row(storage: str, *samples_s: float, place: int = 0, is_prompt: bool = False) -> Row:
    settings = Settings(None, windlass.Recent(), position_mode("original"), store_of("plain"), storage, 1)
    places = {"task": 0, "budget": 0, "policy": 0, "positions": 0, "store": 0, "storage": place, "threads": 0}
    return Row(Task(is_prompt, 8, 4096), settings, places, list(samples_s))


# Shapes.


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
    # What is no parameter is not lost, and stays in float32.
    for (name, ours), (_, theirs) in zip(made.named_buffers(), twin.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    made.requires_grad_(False)
    hidden = made.get_decoder()(torch.arange(97)[None], output_hidden_states=True).hidden_states
    sizes = [float(states.float().square().mean().sqrt()) for states in hidden]
    assert all(0.5 < size < 3 for size in sizes), sizes
    weight = made.get_parameter("model.layers.0.mlp.up_proj.weight")
    assert len(weight.unique(dim=0)) == len(weight)


# Lists.


def test_lists_make_every_combination():
    names = ["pp512", "tg16", "tg32"]
    typed = Lists("512,0", "16, 32", "0,4096", "all,64", "SnapKV(observed_queries=8, pool=7),recent")
    rows = rows_of(typed, 512)
    assert [str(each.task) for each in rows[::4]] == names + [f"{n} @ d4096" for n in names]
    assert [each.settings.labels["budget"] for each in rows[:4]] == ["all", "all", "64", "64"]
    assert [each.settings.labels["policy"][:12] for each in rows[:4]] == ["SnapKV(obser", "Recent"] * 2
    modes = rows_of(Lists(positions="self_extend(8, 64),original,clamp(9)", store="int4,plain", threads="1,3"), 512)
    assert len({(tuple(each.settings.labels.items()), each.task) for each in modes}) == len(modes) == 2 * 3 * 2 * 2
    assert {each.settings.labels["positions"] for each in modes} == {"self_extend(8, 64)", "original", "clamp(9)"}


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--shape", "2b"), "--shape '2b' is unknown; use one of: tiny, 1b, 8b, 7b-mha"),
        (("some/model",), "give either a model or --shape with one of its names"),
        (("-d", "0,,1"), "-d '0,,1' has an empty value; put one comma between two values"),
        (("-n", "x"), "-n 'x' is not a whole number from 0 to 1073741824"),
        (("-p", "-1"), "-p '-1' is not a whole number from 0 to 1073741824"),
        (("-p", "0", "-n", "0"), "-p 0 and -n 0 leave nothing to measure; give one of them a number of tokens"),
        (("--threads", "0"), "--threads '0' is not a whole number from 1 to 1024"),
        (("--budget", "none"), "--budget 'none' is not a whole number from 1 to 1073741824"),
        (("--budget", "all,5"), "budget (5 tokens) must be at least sinks (4) + window (1) + 1, which is 6"),
        (("--chunk", "0"), "chunk must be from 1 to 1073741824, got 0"),
        (("--storage", "turned"), "--storage 'turned' is not one of: unrotated, rotated"),
        (("--storage", "unrotated,rotated", "--positions", "compact"), "--storage rotated and --positions compact exc"),
        (("--store", "int3"), "store='int3' is not a store; use one of: plain, int8, int4"),
        (("--policy", "h2"), "policy 'h2' is unknown; did you mean h2o?"),
        (("--dtype", "half"), "dtype 'half' is unknown; use one of: auto, float32, bfloat16, float16"),
        (("-o", "/nowhere/x"), "-o /nowhere/x cannot be written: No such file or directory"),
        (("-d", "1073741824"), "this needs about "),
        (("--repetitions", "0"), "Invalid value for '--repetitions'"),
    ],
)
def test_one_clear_line_for_what_is_wrong(run: Callable[..., Ran], arguments: tuple[str, ...], why: str):
    ran = run(*arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith(f"windlass: error: {why}")
    assert ran.err.count("\n") == 1


def test_layers_are_for_shapes(capsys: pytest.CaptureFixture[str]):
    assert main(("bench", str(Path(windlass.__file__).parent / "assets" / "passkey-3m"), "--layers", "2")) == 2
    assert "--layers goes with --shape" in capsys.readouterr().err


def test_memory_that_will_not_suffice_is_told(run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(bench, "_free_bytes", lambda: 500_000)
    # Weights 130,440; a cache 1.5 x 1,008 slots x 192 bytes; so one fits and two do not.
    assert run("-p", "0", "-n", "8", "-d", "1000").code == 0
    ran = run("-p", "0", "-n", "8", "-d", "1000,1000")
    assert ran.code == 2
    assert ran.err == (
        "windlass: error: this needs about 694.38 KiB of memory (weights 127.38 KiB, the caches of all rows "
        "567.00 KiB), but 488.28 KiB are free; give a lower -d or --layers, or fewer values\n"
    )


# What is timed.


def squares() -> Iterator[float]:
    """Times so that the run number k takes 4 k + 1 seconds."""
    k = 0
    while True:
        yield float(k * k)
        k += 1


def test_rows_take_turns(capsys: pytest.CaptureFixture[str]):
    times = squares()
    lists = Lists("7", "3", "0,20", storage="unrotated,rotated", threads="1")
    options = bench.Options(None, "tiny", None, lists, 512, 3, "auto", None)
    assert bench.bench(options, True, lambda: next(times)) == 0
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
        (0, 20, 0, "all", "h2o", "unrotated"),
        (0, 20, 200, "all", "h2o", "unrotated"),
        (60, 0, 0, "64", "h2o", "unrotated"),
        (60, 0, 200, "64", "h2o", "unrotated"),
        (60, 0, 200, "64", "recent", "rotated"),
        (0, 7, 200, "64", "recent", "rotated"),
        (0, 20, 0, "64", "recent", "unrotated"),
        (0, 20, 30, "64", "h2o", "rotated"),
        (0, 20, 200, "64", "recent", "rotated"),
        (0, 20, 200, "64", "h2o", "unrotated"),
    ],
)
def test_each_run_starts_at_its_depth(
    model: PreTrainedModel, prompt: int, decode: int, depth: int, budget: str, policy: str, storage: str
):
    [each] = rows_of(Lists(str(prompt), str(decode), str(depth), budget, policy, storage=storage), 32)
    timer = bench.Timer(model, layer_shapes(model), each, 32)
    assert isinstance(timer.cache, RotatedStorage) == (storage == "rotated")
    timer.warm_up(lambda: 0.0)
    held = depth if budget == "all" else min(depth, 64)
    expected = [*range(held)] if held == depth else [0, 1, 2, 3, *range(depth - 60, depth)]
    slots = [layer.store.slots for layer in timer.cache.layers]
    for _ in range(2):
        assert timer.cache.next_positions == [depth]
        for layer in timer.cache.layers:
            positions = layer.positions[0, 0]
            assert positions[positions >= 0].sort().values.tolist() == expected
            assert layer.most_held == held
        timer.run(lambda: 0.0)
        assert timer.cache.next_positions == [depth + prompt + decode]
        assert [layer.store.slots for layer in timer.cache.layers] == slots, "grown or packed while timed"
        timer.take_back()


def test_a_filled_cache_is_as_after_reading(model: PreTrainedModel):
    ids = torch.randint(97, (200,)).tolist()
    for budget, chunk in ((64, 32), (300, 32), (None, 200)):
        read, filled = (windlass.KVCache(model, budget=budget, chunk=chunk) for _ in range(2))
        prefill(model, read, [ids])
        fill(filled, layer_shapes(model), 200)
        assert filled.describe() == read.describe()
        assert filled.standing.prompts == read.standing.prompts
        for ours, theirs in zip(filled.layers, read.layers, strict=True):
            assert torch.equal(ours.positions.clamp(min=-1).sort().values, theirs.positions.clamp(min=-1).sort().values)
            assert ours.has_evicted == theirs.has_evicted
            assert ours.store.keys().isfinite().all()
            held = ours.store.keys()[ours.positions.expand(1, 3, -1) >= 0]
            assert 0.9 < float(held.float().std()) < 1.1
            assert len(held.unique(dim=0)) == len(held)


def test_a_sliding_window_is_filled_as_the_model_would(attached_model: Callable[..., PreTrainedModel]):
    model = attached_model("gemma3")
    shapes = layer_shapes(model)
    assert [shape.sliding_window for shape in shapes] == [11, None, 11, None]
    assert shapes[0] == LayerShape(3, 8, 8, torch.float32, 11)
    read, filled = windlass.KVCache(model), windlass.KVCache(model)
    prefill(model, read, [list(range(50))])
    fill(filled, shapes, 50)
    assert [layer.most_held for layer in filled.layers] == [layer.most_held for layer in read.layers] == [11, 50] * 2
    fed = [prefill(model, each, [[5]]) for each in (read, filled)]
    assert fed[0].shape == fed[1].shape
    assert [layer.most_held for layer in filled.layers] == [11, 51] * 2


# What is said about it.


def test_bytes_and_speeds_worked_by_hand(model: PreTrainedModel):
    # 60 wide, 15 query heads and 3 kv heads of 8, MLP 52, vocabulary 97, 2 layers; bfloat16.
    layer = 60 * 120 + 2 * 60 * 24 + 120 * 60 + 3 * 60 * 52 + 2 * 60
    weights = 2 * (2 * layer + 97 * 60 + 60)
    assert bench.weight_bytes(model) == weights
    expected = {
        ("all", "plain"): 2 * 3 * (8 + 8) * 2 * (101 + 102 + 103 + 104) / 4,
        ("all", "int8"): 2 * 3 * (8 + 8 + 2 * 2) * 102.5,  # a byte a channel, two float16 scales
        ("64", "plain"): 2 * 3 * (8 + 8) * 2 * 65,  # the new token is read before one is evicted
        ("102", "plain"): 2 * 3 * (8 + 8) * 2 * (101 + 102 + 103 + 103) / 4,
    }
    for (budget, store), read in expected.items():
        [each] = rows_of(Lists("0", "4", "100", budget, store=store, threads="1"), 512)
        timer = bench.Timer(model, layer_shapes(model), each, 512)
        timer.warm_up(lambda: 0.0)
        assert each.bytes_per_token == pytest.approx(weights + read)
    each.samples_s = [0.5, 0.25, 0.1, 0.2]  # 8, 16, 40 and 20 tokens a second
    assert each.tokens_per_s == 18
    assert each.half_range == (25 - 14) / 2
    assert each.gb_per_s == pytest.approx(18 * (weights + expected["102", "plain"]) / 1e9)
    assert row("unrotated", 2.0).half_range == 0.0


def test_a_shared_embedding_is_read_as_the_head():
    config = SHAPES["tiny"].config
    config.tie_word_embeddings = True
    tied = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert bench.weight_bytes(tied) == 2 * (SHAPES["tiny"].parameters - 97 * 60)


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
    # 8 tokens: 40 and 20 a second against 80 and 16; medians 30 and 48.
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


def test_cells_survive_a_bar():
    shown = table([row("a|b", 1.0)], CONDITIONS)
    assert "a\\|b" in shown
    assert footnote([row("x", 1.0), row("y", 1.0, 2.0)], CONDITIONS).startswith(
        "t/s: median ± half the interquartile range of 1 or 2 runs, rows in turn;"
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


def test_an_interrupt_shows_what_was_measured(run: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    count, timed, file = [], bench.Timer.run, tmp_path / "out.jsonl"

    def interrupted(timer: bench.Timer, clock: bench.Clock) -> float:
        count.append(1)
        if len(count) == 6:
            raise KeyboardInterrupt
        return timed(timer, clock)

    monkeypatch.setattr(bench.Timer, "run", interrupted)
    # Three rows warm up, then two are timed.
    ran = run("-p", "9", "-n", "2,3", "-o", str(file))
    assert ran.code == 130
    assert [each["test"] for each in ran.rows] == ["pp9", "tg2"]
    assert ran.err == "interrupted; 2 of 6 runs are done\n"
    assert [len(json.loads(line)["samples_s"]) for line in file.read_text().splitlines()] == [1, 1]
    count[:] = [1] * 5
    ran = run("-p", "9", "-n", "2,3")
    assert (ran.code, ran.out, ran.err) == (130, "", "interrupted; 0 of 6 runs are done\n")


def test_a_model_of_a_folder(capsys: pytest.CaptureFixture[str]):
    name = str(Path(windlass.__file__).parent / "assets" / "passkey-3m")
    assert main(("bench", name, "-p", "5", "-n", "2", "-d", "20", "--threads", "1", "-r", "1", "--json")) == 0
    prompt, decode = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (prompt["model"], prompt["test"], decode["test"]) == (name, "pp5 @ d20", "tg2 @ d20")
