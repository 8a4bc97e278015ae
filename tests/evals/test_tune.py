"""Tune: budgets out of bytes, rounds, and verdicts, by hand, and a run on the shipped model that continues."""

import json
import shlex
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import windlass
from tests.helpers import cli
from tests.helpers.cli import Ran, assert_refused
from tests.helpers.models import MODEL
from windlass.cache.options import CacheOptions, policy_of
from windlass.core.errors import UsageError
from windlass.core.parse import parse_bytes
from windlass.evals import tune
from windlass.evals.grid import Settings
from windlass.evals.task import Budget
from windlass.evals.texts import novel
from windlass.evals.tune import (
    CandidateResult,
    Records,
    TuneRunner,
    budget_within,
    bytes_of,
    cells_of,
    command,
    duration,
    is_surely_better,
    layer_bytes,
    placed,
    records_of,
    rounds_of,
    sentence,
    tasks_on,
)
from windlass.hf.forward import LayerShape, layer_shapes

run, model, tokenizer = cli.run, cli.model, cli.tokenizer  # fixtures
# 3 heads of keys, 6 wide, and values, 10 wide. The second layer sees 20 tokens.
SHAPES = [LayerShape(6, 3, 6, 10, torch.float32, None), LayerShape(6, 3, 6, 10, torch.float32, 20)]
SLACK = 16 + 5  # free slots in decode, and slots of tokens that may come back


@pytest.mark.parametrize(
    ("policy", "store", "per_slot", "fixed"),
    [
        # keys and values, and one position for all heads
        ("recent", "plain", 3 * (6 + 10) * 4 + 4, 0),
        # a code a channel, two scales of 2 bytes, beside offsets of 2 bytes in int4, and the mean key of each head
        ("recent", "int8", 3 * (6 + 10 + 2 * 2) + 4, 3 * 6 * 4),
        ("recent", "int4", 3 * (3 + 5 + 2 * 4) + 4, 3 * 6 * 4),
        # 2 + 7 + 5 tokens and a spare one in full precision, with the slot (4) of each head and the index (8) of each
        # token, and the count of the row (8)
        ("recent", "int8(sinks=2, newest=7)", 3 * 20 + 4, 72 + 15 * (3 * (16 * 4 + 4) + 8) + 8),
        # positions for each head
        ("key_diff", "plain", 3 * (6 + 10) * 4 + 3 * 4, 0),
        # and a sum of attention for each
        ("h2o", "plain", 3 * (6 + 10) * 4 + 3 * 8, 0),
    ],
)
def test_bytes_by_hand(policy: str, store: str, per_slot: int, fixed: int) -> None:
    options = CacheOptions(policy=policy_of(policy), store=store, rollback=5)
    layers = [layer_bytes(shape, options) for shape in SHAPES]
    assert [(layer.per_slot, layer.fixed) for layer in layers] == [(per_slot, fixed)] * 2
    assert bytes_of(layers, options, 12) == 2 * (fixed + per_slot * (12 + SLACK))
    # Beyond 20 tokens the second layer holds no more.
    assert bytes_of(layers, options, 50) == 2 * fixed + per_slot * (50 + 20 + 2 * SLACK)
    # One byte less is one token less.
    size = int(bytes_of(layers, options, 50))
    assert [budget_within(layers, options, each) for each in (size - 1, size, size + per_slot - 1)] == [49, 50, 50]
    assert budget_within(layers, options, size + 700, Records(fixed=200.0, per_token=10.0)) == 50
    with pytest.raises(
        UsageError, match=r"--bytes 100 B are too few for policy .*: 6 tokens a layer, the fewest, take"
    ):
        budget_within(layers, options, 100)


@pytest.mark.parametrize(("policy", "store"), [("key_diff", "plain"), ("h2o", "int8(sinks=4, newest=9)")])
def test_a_cache_holds_no_more_than_was_asked_for(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, policy: str, store: str
) -> None:
    size = 500_000
    options = CacheOptions(policy=policy_of(policy), store=store, chunk=64, positions="compact")
    ids = tokenizer(novel()[:3000])["input_ids"]
    layers = [layer_bytes(shape, options) for shape in layer_shapes(model)]
    budget = budget_within(layers, options, size, records_of(model, ids, options, layers))
    cache = windlass.KVCache(model, budget, options.policy, chunk=64, positions="compact", store=store)
    windlass.prefill(model, cache, [ids])
    held = []
    for _ in windlass.stream(model, tokenizer, " He said", cache, max_tokens=24):
        held.append(cache.bytes_held)
    assert budget < len(ids)
    assert 0.85 * size < max(held[1:]) <= size


@pytest.mark.parametrize(
    ("typed", "size"),
    [("64MiB", 2**26), ("1.5 GiB", 3 * 2**29), ("4096", 4096), ("2k", 2048), ("7 mb", 7 * 2**20), ("12B", 12)],
)
def test_bytes_as_people_write_them(typed: str, size: int) -> None:
    assert parse_bytes("--bytes", typed) == size


@pytest.mark.parametrize("typed", ["", "0", "-1", "12Q", "MiB", "1e9", "nan", "0.0001"])
def test_what_is_no_number_of_bytes(typed: str) -> None:
    with pytest.raises(UsageError, match=r"is no number of bytes\. Write it as 64MiB"):
        parse_bytes("--bytes", typed)


@pytest.mark.parametrize(
    ("tokens", "budget", "trained", "wanted"),
    [
        (900, 300, 1000, (300, "original")),
        (900, 300, None, (300, "original")),
        (5000, 872, 1000, (872, "compact")),  # with a chunk of 128
        (5000, 873, 1000, (873, "self_extend(6, 64)")),  # 5000 / (1000 - 64), rounded up
        (50_000, 873, 1000, (872, "compact")),  # 54 would be too much
        (50_000, 873, 300, (172, "compact")),
        (50_000, 873, 128, (64, "compact")),
    ],
)
def test_where_a_text_is_read(tokens: int, budget: int, trained: int | None, wanted: tuple[int, str]) -> None:
    found, mode = placed(tokens, budget, trained)
    assert (found, str(mode)) == wanted


def test_rounds() -> None:
    assert rounds_of(9, 10) == [(0, 3, 9), (3, 5, 5), (5, 10, 3)]
    assert rounds_of(3, 20) == [(0, 5, 3), (5, 10, 2), (10, 20, 2)]
    assert rounds_of(1, 1) == [(0, 1, 1)]


def ranked(
    policy: str, found: list[float], nll: float | list[float], positions: str = "original", store: str = "plain"
) -> CandidateResult:
    nlls = nll if isinstance(nll, list) else [nll] * len(found)
    of_text = [("task", 500, 0, sample, None) for sample in range(len(found))]
    options = CacheOptions(policy=policy_of(policy), chunk=128, positions=positions, store=store)
    settings = Settings(Budget("1812", 1812), options)
    return CandidateResult(settings, dict(zip(of_text, found, strict=True)), dict(zip(of_text, nlls, strict=True)), 900)


def test_the_best_that_is_surely_better() -> None:
    best, worst = ranked("key_diff", [1.0] * 8, 3.0, store="int8"), ranked("recent", [0.0] * 8, 2.0)
    assert sentence([best, worst], None, 2**20) == (
        "Of 2 candidates within 1.00 MiB, key_diff in int8 did best, with 1,812 tokens a layer: it found 100 % "
        "of the hidden facts in 8 texts (95 % interval 68 to 100 %) with a perplexity of 20.09. On 8 texts it is "
        "significantly better than recent in plain."
    )
    assert not is_surely_better(worst, best)


def test_a_small_difference_is_called_one() -> None:
    best, other = ranked("key_diff", [1.0] * 8, 2.0), ranked("key_diff", [1.0] * 8, 2.001, store="int4")
    assert sentence([best, other], None, 2**20).endswith(
        "On 8 texts it is significantly better than key_diff in int4, by perplexity alone, for they found as much."
    )


def test_nothing_is_significantly_better() -> None:
    full = ranked("recent", [1.0] * 8, 2.0)
    best = ranked("key_diff", [1.0] * 5 + [0.0] * 3, 2.02, store="int8", positions="compact")
    others = [ranked("snapkv", [0.0] * 8, 2.0), ranked("recent", [1.0] * 4 + [0.0] * 4, 2.0)]
    told = sentence([best, *others], full, 2**20)
    assert "it found 62 % of the hidden facts in 8 texts (95 % interval 31 to 86 %)" in told
    assert "with a perplexity of 7.538, 2.0 % above the full cache's" in told
    assert told.endswith(
        ". None is significantly better than another: 8 texts do not tell snapkv in plain and recent in plain from it."
    )


def test_perplexity_decides_where_nothing_is_found() -> None:
    best, other = ranked("key_diff", [0.0] * 6, 2.0), ranked("recent", [0.0] * 6, 2.1)
    assert best.order < other.order
    assert is_surely_better(best, other)
    assert not is_surely_better(other, best)
    assert (
        "found none of the hidden facts in 6 texts, as all others, and was chosen for a perplexity of 7.389"
        in sentence([best, other], None, 2**20)
    )


def test_the_line_to_paste() -> None:
    best = ranked("snapkv(pool=7)", [1.0], 2.0, store="int8", positions="self_extend(8, 64)")
    line = command("my model", "text.txt", best, ["--dtype", "float32"])
    assert shlex.split(line) == [
        *("windlass", "generate", "my model", "--budget", "1812", "--policy", "snapkv(pool=7)", "--store", "int8"),
        *("--positions", "self_extend(8, 64)", "--chunk", "128", "--dtype", "float32", "--file", "text.txt"),
    ]


def test_another_text_is_another_task(tmp_path: Path) -> None:
    path = tmp_path / "my.txt"
    labels: list[str] = []
    for text in ("One text. It is short.", "Another text. It is short."):
        path.write_text(text)
        labels += tasks_on(path, "passkey_novel,perplexity,vt")
    assert [label.partition(" ")[0] for label in labels] == ["passkey_novel(my.txt", "perplexity(my.txt", "vt"] * 2
    assert len(set(labels)) == 5


def test_a_run_goes_on_and_says_what_to_paste(run: Callable[..., Ran], tmp_path: Path) -> None:
    text, output = tmp_path / "my.txt", tmp_path / "r.jsonl"
    text.write_text(novel()[:1500])
    lists = ("--policies", "recent,key_diff", "--store", "plain", "--samples", "1", "--length", "160")
    asked = ("tune", MODEL, "-f", str(text), "--bytes", "330KiB", "--dtype", "float32", *lists, "-o", str(output))
    ran = run(*asked)
    assert ran.code == 0
    assert ran.err.startswith("2 candidates on texts of 160 tokens")
    header, *cases = map(json.loads, output.read_text().splitlines())
    assert (header["model"], str(tmp_path) in json.dumps(header)) == ("finder-3m", False)
    assert all(case["bytes_held"] <= 330 * 1024 for case in cases if case["budget"] is not None)
    assert {case["task"].partition("(")[0] for case in cases} == {"passkey_novel", "perplexity"}
    # Two tasks, for two candidates and the full cache beside them.
    assert len(cases) == 2 * 3
    line = next(line for line in ran.out.splitlines() if "windlass generate" in line)
    words = shlex.split(line)
    assert words[:3] == ["windlass", "generate", MODEL]
    assert "--chunk" in words
    assert run(*words[1:], "-n", "3").code == 0
    # The rest of a file that was cut is run again, and nothing else.
    lines = output.read_bytes().splitlines(keepends=True)
    output.write_bytes(b"".join(lines[:-3]))
    again = run(*asked)
    assert (again.code, again.out) == (0, ran.out)
    assert len(output.read_bytes().splitlines()) == len(lines)


def test_the_time_decides_how_many_texts_are_read(
    run: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, output = tmp_path / "my.txt", tmp_path / "r.jsonl"
    text.write_text(novel()[:1500])
    lists = ("--policies", "recent,key_diff", "--store", "plain", "--length", "160", "-o", str(output))
    asked = ("tune", MODEL, "-f", str(text), "--bytes", "330KiB", "--dtype", "float32", *lists)
    # Two candidates and the full cache, two tasks: 6 cells for one text, 12 for two, 18 for three.
    monkeypatch.setattr(TuneRunner, "_cell_s", lambda *_: 1000.0)
    said = "2 candidates on one text of 160 tokens take about 100 minutes, more than --minutes 10. Raise it, or lower"
    assert_refused(run(*asked), said)
    assert not output.exists()
    monkeypatch.setattr(TuneRunner, "_cell_s", lambda *_: 49.0)
    start = "2 candidates on texts of 160 tokens, at most 2 for each"
    ran = run(*asked)
    assert (ran.code, ran.err) == (0, f"{start} in --minutes 10: about 10 minutes. Results go to {output}\n")
    assert len(output.read_text().splitlines()) == 1 + 12
    again = run(*asked, "--samples", "2")
    assert (again.out, again.err) == (ran.out, f"{start}: less than a minute. Results go to {output}\n")


def test_texts_that_the_time_does_not_allow_are_left_out_as_it_passes(
    run: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, output = tmp_path / "my.txt", tmp_path / "r.jsonl"
    text.write_text(novel()[:1500])
    lists = ("--policies", "recent,key_diff", "--store", "plain", "--length", "160", "-o", str(output))
    monkeypatch.setattr(TuneRunner, "_cell_s", lambda *_: 1.0)
    # The first text takes 200 s: 6 cells. Three more would take 600 s, and two more take the 400 s that are left.
    clock = iter([0.0, 200.0, 400.0, 600.0])
    monkeypatch.setattr(tune, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    ran = run("tune", MODEL, "-f", str(text), "--bytes", "330KiB", "--dtype", "float32", *lists, "--samples", "4")
    assert ran.code == 0
    assert len(output.read_text().splitlines()) == 1 + 3 * 6


def test_the_speed_is_that_of_a_text_of_each_task(
    run: Callable[..., Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "my.txt"
    text.write_text(novel()[:9000])
    clock = chain([0.0, 3.0, 10.0, 14.0], repeat(14.0))
    monkeypatch.setattr(tune, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(TuneRunner, "measured", Mock(return_value=[]))
    lists = ("--policies", "recent,key_diff", "--store", "plain", "--length", "1024", "-o", str(tmp_path / "r.jsonl"))
    ran = run("tune", MODEL, "-f", str(text), "--bytes", "330KiB", "--dtype", "float32", *lists, "--minutes", "0.6")
    # Twice the 512 tokens that take 3 and 4 seconds: 7 seconds for a cell, 42 for the 6 of one text.
    assert_refused(ran, "2 candidates on one text of 1,024 tokens take about 1 minute, more than --minutes 0.6")


def test_times_in_words() -> None:
    told = ["less than a minute", "about 1 minute", "about 9 minutes", "about 119 minutes", "about 3 hours"]
    assert [duration(each) for each in (20, 40, 550, 7150, 10_000)] == told
    assert cells_of(rounds_of(9, 10), has_full=True) == 3 * 10 + 2 * 6 + 5 * 4
    assert cells_of(rounds_of(9, 10), has_full=False) == 3 * 9 + 2 * 5 + 5 * 3


def test_a_text_that_fits_needs_no_choice(run: Callable[..., Ran], tmp_path: Path) -> None:
    text = tmp_path / "my.txt"
    text.write_text(novel()[:3000])
    ran = run(
        "tune",
        MODEL,
        "-f",
        str(text),
        "--bytes",
        "1GiB",
        "--policies",
        "recent",
        "--store",
        "plain",
        "-o",
        str(tmp_path / "r.jsonl"),
    )
    assert (ran.code, ran.err) == (0, "")
    assert "1.00 GiB hold all of a text" in ran.out
    assert not (tmp_path / "r.jsonl").exists()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--bytes", "12Q"), "--bytes '12Q' is no number of bytes. Write it as 64MiB"),
        (("--bytes", "9KiB"), "--bytes 9.00 KiB are too few for policy Recent() in store plain"),
        (("--bytes", "1MiB", "--length", "99999"), "--length 99999 is more than the"),
        (("--bytes", "1MiB", "--tasks", "nothing"), "nothing"),
        (("--bytes", "1MiB", "--policies", "keydif"), "Did you mean key_diff?"),
    ],
)
def test_wrong_options_are_one_line(
    run: Callable[..., Ran], tmp_path: Path, options: tuple[str, ...], says: str
) -> None:
    text = tmp_path / "my.txt"
    text.write_text(novel()[:3000])
    assert_refused(run("tune", MODEL, "-f", str(text), *options), says)
    assert_refused(
        run("tune", MODEL, "-f", str(tmp_path / "none"), *options[:2]),
        "number of bytes" if "12Q" in options else "none",
    )
