"""The results file: whole lines, resumed after any cut, refused where it belongs to another run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from windlass.cli.terminal import note
from windlass.core.errors import UsageError
from windlass.evals import results
from windlass.evals.report.summaries import wilson
from windlass.evals.results import Case, Header, ResultsFile, parse_line
from windlass.evals.results import open_results as opened
from windlass.evals.run import summary

HEADER: dict[str, Any] = {
    "kind": "header",
    "version": 2,
    "windlass": "0.1.0",
    "torch": "2.9",
    "transformers": "5.10",
    "model": "some/model",
    "parameters": 97,
    "dtype": "float32",
    "trained_length": 512,
    "seed": 3,
    "date": "2026-01-02T03:04:05+00:00",
    "fingerprint": "5c" * 32,
}
CASE: dict[str, Any] = {
    "kind": "case",
    "task": "passkey",
    "policy": "Recent()",
    "budget": 64,
    "asked_budget": "8x",
    "merge": "none",
    "positions": "compact",
    "store": "plain",
    "is_aware": False,
    "length": 500,
    "sample": 0,
    "turn": None,
    "depth": 0.25,
    "context_tokens": 470,
    "slots_held": 64,
    "bytes_held": 1024,
    "bytes_full": 9000,
    "expected": ["48213"],
    "output": "naïve\n\u2028 48213",
    "score": 1.0,
    "measures": {},
    "seconds": 0.5,
}


def case(sample: int, **fields: object) -> dict[str, Any]:
    return {**CASE, "sample": sample, **fields}


def read(lines: Sequence[dict[str, Any]]) -> list[Case]:
    found = [parse_line(json.dumps(line).encode(), "a line") for line in lines]
    return [line for line in found if isinstance(line, Case)]


def header_of(line: dict[str, Any]) -> Header:
    found = parse_line(json.dumps(line).encode(), "a header")
    assert isinstance(found, Header)
    return found


def open_results(path: Path, header: dict[str, Any]) -> ResultsFile:
    return opened(path, header_of(header), note)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with three cases."""
    path = tmp_path / "results.jsonl"
    open_results(path, HEADER).add(read([case(0), case(1), case(2, score=0.0)]))
    return path


def test_lines_have_the_fields_that_are_promised(path: Path):
    assert set(CASE) == set(read([CASE])[0].model_dump())
    lines = [json.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
    assert lines == [HEADER, case(0), case(1), case(2, score=0.0)]


def test_a_file_is_gone_on_with(path: Path):
    results = open_results(path, {**HEADER, "date": "later", "torch": "2.10", "windlass": "0.2.0"})
    assert [each.model_dump() for each in results.cases.values()] == [case(0), case(1), case(2, score=0.0)]
    before = path.read_text()
    results.add(read([case(1, seconds=9.9), case(3)]))  # no case is there twice
    assert path.read_text() == before + json.dumps(case(3), ensure_ascii=False) + "\n"


def test_any_cut_loses_its_own_line_only(path: Path, capsys: pytest.CaptureFixture[str]):
    whole = path.read_bytes()
    ends = [place + 1 for place, byte in enumerate(whole) if byte == ord("\n")]
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        results = open_results(path, HEADER)
        kept = sum(end <= size for end in ends)
        assert len(results.cases) == max(kept - 1, 0)
        is_cut = size not in (0, *ends)
        note = f"the last line of {path} was cut in half. It is taken off, and its case run again\n"
        assert capsys.readouterr().err == (note if is_cut else "")
        results.add(read([case(0), case(1), case(2, score=0.0)]))
        assert path.read_bytes() == whole


def test_a_line_that_is_there_twice_counts_once(path: Path):
    with path.open("a") as file:
        file.write(json.dumps(case(1, score=0.5)) + "\n")
    results = open_results(path, HEADER)
    assert len(results.cases) == 3


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("version", 3, ", line 1: not a header line of results: the version is 3, and this windlass reads version 2"),
        (
            "fingerprint",
            "7d" * 32,
            f" was made with fingerprint {'7d' * 6} of a some/model, and this run has {'5c' * 6}",
        ),
        ("parameters", 98, " was made with parameters 98, and this run has 97"),
        ("dtype", "bfloat16", " was made with dtype bfloat16, and this run has float32"),
        ("seed", 4, " was made with seed 4, and this run has 3"),
    ],
)
def test_a_file_of_another_run_stays_as_it_is(path: Path, field: str, value: object, says: str):
    # After the header of another version anything may follow, also half a line.
    text = json.dumps({**HEADER, field: value}) + '\n{"kind": "unknown"}\n{"kind": "ca'
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        open_results(path, HEADER)
    assert f"-o {path}{says}" in str(caught.value)
    assert path.read_text() == text


@pytest.mark.parametrize(
    "old", [{"model": "/moved/to/here"}, {"fingerprint": None}, {"fingerprint": None, "model": "../up/there/model"}]
)
def test_the_same_model_by_another_path_goes_on(path: Path, old: dict[str, Any]):
    text = path.read_text().replace(json.dumps(HEADER), json.dumps({**HEADER, **old}))
    path.write_text(text)
    assert len(open_results(path, HEADER).cases) == 3


def test_an_old_file_of_a_model_of_another_name_is_refused(path: Path):
    path.write_text(path.read_text().replace(json.dumps(HEADER), json.dumps({**HEADER, "fingerprint": None})))
    with pytest.raises(UsageError, match="was made with model some/model, and this run has some/other"):
        open_results(path, {**HEADER, "model": "some/other"})


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"a novel without an end", "is not a file of results"),
        (b"a novel\nof two lines\n", "line 1: not a header line of results"),
        (b"\x00\xff\n", "line 1: not a header line of results"),
        (b'{"kind": "header", "version": 2}\n', "line 1: not a header line of results"),
        (json.dumps(HEADER).encode() + b"\n\n", "line 2: not a case line of results"),
        (json.dumps(HEADER).encode() + b'\n{"kind": "case"}\n', "line 2: not a case line of results"),
    ],
)
def test_a_file_of_something_else_stays_as_it_is(tmp_path: Path, data: bytes, says: str):
    path = tmp_path / "precious.txt"
    path.write_bytes(data)
    with pytest.raises(UsageError) as caught:
        open_results(path, HEADER)
    assert says in str(caught.value)
    assert path.read_bytes() == data


def test_a_file_that_cannot_be_is_told(tmp_path: Path):
    with pytest.raises(UsageError, match=r"-o .*gone/x cannot be written: No such file or directory"):
        open_results(tmp_path / "gone" / "x", HEADER)
    with pytest.raises(UsageError, match=r"is not a regular file. Give the name of a file"):
        open_results(tmp_path, HEADER)


@pytest.mark.parametrize(
    ("mean", "samples", "low", "high"),
    # Newcombe 1998 (Statistics in Medicine 17, table I), method 3: 81 of 263, 15 of 148, 0 of 20, 1 of 29.
    [
        (81 / 263, 263, 0.2553, 0.3662),
        (15 / 148, 148, 0.0624, 0.1605),
        (0.0, 20, 0.0, 0.1611),
        (1 / 29, 29, 0.0061, 0.1718),
    ],
)
def test_intervals_are_those_of_wilson(mean: float, samples: int, low: float, high: float):
    assert wilson(mean, samples) == pytest.approx((low, high), abs=5e-5)


def shown(lines: list[dict[str, Any]]) -> list[list[str]]:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(summary(read(lines)))
    rows = [row.split("  ") for row in capture.get().splitlines() if row.strip() and "─" not in row]
    return [[cell.strip() for cell in row if cell.strip()] for row in rows]


def test_the_summary_has_a_row_for_each_combination():
    lines = [case(0), case(1), case(2, score=0.0), case(0, asked_budget="all", policy="KeyDiff()", bytes_held=3000)]
    heads, first, second = shown(lines)
    assert heads == ["task", "policy", "budget", "samples", "bytes", "score", "95 %"]
    assert first == ["passkey", "recent", "8x", "3", "1.00 KiB", "66.7 %", "20.8 to 93.9"]
    assert second[:5] == ["passkey", "key_diff", "all", "1", "2.93 KiB"]


def test_questions_on_one_text_are_one_sample():
    turns = [case(0, turn=turn, score=float(turn == 0)) for turn in range(4)] + [case(1, turn=0, length=900)]
    heads, first, _ = shown(turns)
    assert heads[3:5] == ["length", "samples"]
    assert first[3:5] == ["500", "1"]
    assert first[-2] == "25.0 %"


def test_losses_are_shown_beside_scores():
    lines = [
        case(0),
        case(0, task="perplexity", score=None, measures={"nll": 3.0, "kl": 0.5}),
        case(1, task="perplexity", score=None, measures={"nll": 4.0, "kl": None}),
    ]
    heads, first, second = shown(lines)
    assert heads[-2:] == ["nll", "kl"]
    assert first[-2:] == ["-", "-"]
    assert second[-4:] == ["-", "-", "3.5000", "0.5000"]


def test_a_full_disk_leaves_no_empty_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def append(path: Path, lines: Sequence[Any]) -> None:
        path.touch()
        if lines:
            raise UsageError(f"-o {path} cannot be written: No space left on device")

    monkeypatch.setattr(results, "_append", append)
    path = tmp_path / "r.jsonl"
    header = header_of(HEADER)
    with pytest.raises(UsageError, match="No space left"):
        opened(path, header, note)
    assert not path.exists()
    path.touch()  # of the user's own
    with pytest.raises(UsageError, match="No space left"):
        opened(path, header, note)
    assert path.exists()
