"""Results files: each case counts once, damage is reported, foreign files are refused in one line."""

import json
import math
from pathlib import Path

import pytest

from tests.helpers import results
from tests.helpers.results import HEADER, Line, case, cases, full, write
from windlass.core.errors import UsageError
from windlass.evals.results import read_results

file = results.file  # fixture


def test_a_case_counts_once(file: Path):
    other = write(file.with_name("more.jsonl"), case(), case(score=0.5), case(sample=1))
    found = read_results([write(file, case(), case(seconds=9.0), case(is_aware=True)), other])
    assert [(each.is_aware, each.sample, each.score) for each in found.cases] == [
        (False, 0, 1.0),
        (True, 0, 1.0),
        (False, 1, 1.0),
    ]
    assert len(found.notes) == 1
    assert found.notes[0].startswith("3 cases are there more than once")
    assert found.notes[0].endswith("Of these 1 differ: the first was taken.")


def test_the_full_cache_of_every_policy_is_one(file: Path):
    found = read_results([write(file, full(), full() | {"policy": "KeyDiff()"})])
    assert [each.label for each in found.cases] == ["full cache"]
    assert found.notes[0].startswith("1 case is there more than once, counting the full cache of every policy as one")
    assert "differ" not in found.notes[0]


@pytest.mark.parametrize(
    "change",
    [
        {"task": "niah"},
        {"policy": "KeyDiff(pool=3)"},
        {"asked_budget": "64"},
        {"merge": "mean(next)"},
        {"positions": "compact"},
        {"store": "int8"},
        {"length": 501},
        {"sample": 1},
        {"turn": 0},
        {"depth": 0.5},
    ],
)
def test_other_cases_are_no_duplicates(file: Path, change: Line):
    assert len(cases(file, case(), case(**change))) == 2


def test_another_seed_is_another_case(file: Path):
    other = write(file.with_name("more.jsonl"), HEADER | {"seed": 8}, case())
    found = read_results([write(file, case()), other])
    assert [each.seed for each in found.cases] == [7, 8]
    assert [header.seed for header in found.headers] == [7, 8]
    assert found.notes == ()


@pytest.mark.parametrize("last", [json.dumps(case(sample=1))[:-20].encode(), '{"task": "é'.encode()[:-1], b"{"])
def test_a_last_line_cut_in_half_is_left_out_and_told(file: Path, last: bytes):
    write(file, case())
    file.write_bytes(file.read_bytes() + last)
    found = read_results([file])
    assert len(found.cases) == 1
    assert found.notes == (f"{file.name}: the last line is cut in half, as of a run that was stopped. It is left out.",)


@pytest.mark.parametrize("end", ["", "\n", "\n\n", "\r\n"])
def test_a_last_line_that_is_whole_counts(file: Path, end: str):
    found = read_results([write(file, case(), case(sample=1), end=end)])
    assert (len(found.cases), found.notes) == (2, ())


def refused(file: Path) -> str:
    with pytest.raises(UsageError) as caught:
        read_results([file])
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is not a results file: its first line is no header"),
        ("a novel\n", "is not a results file"),
        ("[1]\n", "is not a results file"),
        ('{"kind": "case"}\n', "is not a results file"),
        ('{"model": "1b", "test": "pp512"}\n', "is not a results file"),
        ('{"kind": "hea', "is not a results file"),
        (json.dumps(HEADER), "there are no cases to report"),
        (json.dumps(HEADER) + '\n{"kind": "ca', "there are no cases to report"),
        (json.dumps(HEADER | {"version": 3}), "line 1: the version is 3, and this windlass reads version 2. Update"),
        (json.dumps(HEADER | {"version": 0}), "reads version 2. Run the evaluation again"),
        (json.dumps(HEADER) + "\nnonsense\n" + json.dumps(case()), "line 2: it is no object of JSON"),
        (json.dumps(HEADER) + '\n{"kind": "row"}\n', "line 2: kind must be header or case, got 'row'"),
    ],
)
def test_other_files_are_refused(file: Path, text: str, says: str):
    file.write_text(text)
    assert says in refused(file)
    assert str(file) in refused(file)


def test_files_that_cannot_be_read_are_refused(file: Path):
    assert refused(file) == f"results file {file} cannot be read: No such file or directory"
    assert "Is a directory" in refused(file.parent)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"score": 1.5}, "score must be less than or equal to 1, got 1.5"),
        ({"score": math.nan}, "score must be less than or equal to 1, got nan"),
        ({"score": True}, "score must be a valid number, got True"),
        ({"score": None}, "there is neither a score nor an nll"),
        ({"depth": -0.1}, "depth must be greater than or equal to 0, got -0.1"),
        ({"is_aware": 1}, "is_aware must be a valid boolean, got 1"),
        ({"policy": None}, "policy must be a valid string, got None"),
        ({"sample": 1.5}, "sample must be a valid integer, got 1.5"),
        ({"bytes_full": 0}, "bytes_full must be greater than or equal to 1, got 0"),
        ({"measures": 3}, "measures must be an object, got 3"),
        ({"measures": {"nll": "low"}}, "nll must be a valid number, got 'low'"),
        ({"slots_held": True}, "slots_held must be a valid integer, got True"),
    ],
)
def test_damaged_fields_are_told(file: Path, change: Line, says: str):
    assert f"line 2: {says}" in refused(write(file, case(**change)))


def test_fields_that_no_table_needs_may_be_missing(file: Path):
    line = case(depth=0.5, turn=2)
    for name in ("context_tokens", "expected", "output", "measures", "seconds"):
        del line[name]
    (found,) = cases(file, line)
    assert (found.score, found.turn, found.depth, found.slots_held, found.expected) == (1.0, 2, 0.5, 250, ())
    assert found.context_tokens is found.output is found.nll is found.seconds is None


def test_a_case_is_written_as_it_was_read(file: Path):
    lines = [case(), full(depth=0.25, turn=1), case(task="perplexity", score=None, measures={"nll": 2.5, "kl": None})]
    assert [each.model_dump() for each in cases(file, *lines)] == lines
    (header,) = read_results([file]).headers
    assert header.model_dump() == HEADER


def test_missing_and_unknown_fields_are_told(file: Path):
    line = case()
    del line["is_aware"]
    assert "line 3: there is no field 'is_aware'" in refused(write(file, case(), line))
    assert "line 2: there is an unknown field 'speed'" in refused(write(file, case() | {"speed": 3}))


@pytest.mark.parametrize(
    ("change", "other"),
    [
        ({"model": "stories260K", "fingerprint": "1a" * 32}, "stories260K in float32"),
        ({"dtype": "bfloat16"}, "finder-3m in bfloat16"),
        ({"fingerprint": "1a" * 32}, "finder-3m in float32"),
        ({"model": "stories260K", "fingerprint": None}, "stories260K in float32"),
    ],
)
def test_two_models_are_not_mixed(file: Path, change: Line, other: str):
    found = refused(write(file, case(), HEADER | change, case(sample=1)))
    assert "two models, finder-3m in float32 (" in found
    assert f"{other} (" in found
    assert ("Their weights differ" in found) == (other == "finder-3m in float32")


@pytest.mark.parametrize(
    "change",
    [
        {"model": "moved-elsewhere"},
        {"model": "/home/jo/models/finder-3m", "fingerprint": None},
        {"model": "models/finder-3m", "fingerprint": None},
    ],
)
def test_one_model_by_any_name(file: Path, change: Line):
    """By its fingerprint, or in an older file without one, by the last part of its path."""
    found = read_results([write(file, case(), HEADER | change, case(sample=1))])
    assert len(found.cases) == 2
    assert "jo" not in "".join(header.name for header in found.headers)
