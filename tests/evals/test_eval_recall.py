"""Report of an evaluation on the evicted tokens that its caches recall."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers import cli
from tests.helpers.cli import Ran
from tests.helpers.models import MODEL
from windlass import UsageError
from windlass.evals.grid import ListOptions, grid_of

run = cli.run  # fixture


def lists(recall: str, store: str = "int8") -> ListOptions:
    return ListOptions(
        "passkey", "90", {"policies": "recent", "budgets": "all,16", "recall": recall, "recall_store": store}
    )


def test_a_full_cache_recalls_nothing() -> None:
    settings = grid_of(lists("0,16,24", "int8,int4")).settings
    asked = [(each.budget.asked, each.labels["recalled"]) for each in settings]
    found = ["none", "16 in int8", "16 in int4", "24 in int8", "24 in int4"]
    assert sorted(asked) == sorted([("all", "none"), *(("16", each) for each in found)])


def test_half_is_of_each_budget() -> None:
    found = grid_of(replace(lists("half"), options=lists("half").options | {"budgets": "all,16,50"})).settings
    assert [(each.budget.slots, each.options.recall) for each in found] == [(None, 0), (16, 8), (50, 24)]
    with pytest.raises(UsageError, match=r"--recall half is half of a number, and --budgets has 4x\. Give a"):
        grid_of(ListOptions("passkey", "90", {"budgets": "4x", "recall": "half"}))


@pytest.mark.parametrize(("recall", "store"), [("12", "int8"), ("x", "int8"), ("8", "int5")])
def test_what_cannot_be_recalled(recall: str, store: str) -> None:
    with pytest.raises(UsageError):
        grid_of(lists(recall, store))


def test_lines_tell_what_was_recalled(run: Callable[..., Ran], tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    options = ("--policies", "recent", "--budgets", "16", "--lengths", "140", "--samples", "1", "--dtype", "float32")
    ran = run("eval", MODEL, *options, "--recall", "0,160", "--recall-store", "plain", "-o", str(file))
    assert ran.code == 0
    cases = [json.loads(line) for line in file.read_text().splitlines()[1:]]
    assert {case.get("recalled"): case["score"] for case in cases} == {None: 0.0, "160 in plain": 1.0}
    assert "160 in plain" in ran.out
