"""Tasks from typed specs, texts of their own, and one clear line for each error."""

from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from tests.helpers import models
from windlass.core.errors import UsageError
from windlass.evals.grid import ListOptions, SampleSpec, fit, grid_of, load_task
from windlass.evals.tasks import NAMES

tokenizer = models.tokenizer  # fixture
FILE = """
import random
from dataclasses import dataclass
from windlass.evals import Question, Sample, Task

@dataclass(frozen=True)
class Colour(Task):
    answer_tokens: int = 3

    def compose(self, draw: random.Random, length: int, units: int) -> Sample:
        question = Question(" What is the sky?", " It is", ("blue",))
        return Sample("The sky is blue." + " Here we go." * units, (question,))

class Empty(Task):
    pass

class Broken(Task):
    answer_tokens = 3

    def compose(self, draw, length, units):
        return 1 / 0
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize("typed", ["niah_single_2", "NIAH-Single-2"])
def test_names_ignore_case(typed: str):
    assert load_task(typed) == ("niah_single_2", NAMES["niah_single_2"])


def test_a_task_of_ones_own_is_a_file(file: Path, tokenizer: PreTrainedTokenizerBase):
    label, task = load_task(f"{file}:Colour")
    assert label == f"{file}:Colour"
    fitted = fit(SampleSpec(task, label, 100, 0, 0), tokenizer)
    assert 90 < fitted.total_tokens <= 100
    assert fitted.sample.context.count("Here") == fitted.units
    assert list(file.parent.iterdir()) == [file]


@pytest.mark.parametrize("name", ["perplexity", "passkey_novel", "niah_single_2", "multiturn", "passkey_words_novel"])
def test_another_text_can_be_read(name: str, tmp_path: Path, tokenizer: PreTrainedTokenizerBase):
    file = tmp_path / "zoo.txt"
    file.write_text("A zebra ran. " * 400)
    label, task = load_task(f"{name}({file})")
    assert label == f"{name}({file})"
    fitted = fit(SampleSpec(task, label, 700, 0, 0), tokenizer)
    assert fitted.sample.context.count("zebra") > 30
    with pytest.raises(UsageError, match=r"length 99999 is more than task .* can fill: all it has makes \d{4} tokens"):
        fit(SampleSpec(task, label, 99999, 0, 0), tokenizer)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("vt(a.txt)", "task vt reads no text, so it takes no file. Use vt"),
        ("niah_single(a.txt)", "task niah_single reads no text"),
        ("perplexity(gone.txt)", "text file gone.txt cannot be read: No such file or directory"),
        ("{file}:Empty", "task Empty of {file} is not whole. It needs a method compose and a number answer_tokens"),
    ],
)
def test_one_clear_line_for_what_is_no_task(spec: str, says: str, file: Path):
    with pytest.raises(UsageError) as caught:
        load_task(spec.format(file=file))
    assert says.format(file=file) in str(caught.value)


def test_a_task_that_fails_is_named(file: Path, tokenizer: PreTrainedTokenizerBase):
    label, task = load_task(f"{file}:Broken")
    with pytest.raises(UsageError, match=r"task .*mine.py:Broken: ZeroDivisionError: division by zero"):
        fit(SampleSpec(task, label, 100, 0, 0), tokenizer)


@pytest.mark.parametrize("name", ["passkey", "cwe", "niah_multikey_2", "vt", "perplexity"])
def test_a_length_that_is_too_short_is_told(name: str, tokenizer: PreTrainedTokenizerBase):
    with pytest.raises(UsageError, match=rf"length 3 is too short for task {name}, which takes (\d+) tokens") as caught:
        fit(SampleSpec(NAMES[name], name, 3, 0, 0), tokenizer)
    least = int(str(caught.value).split("takes ")[1].split()[0])
    # Another length draws other words.
    assert fit(SampleSpec(NAMES[name], name, least + 30, 0, 0), tokenizer).total_tokens <= least + 30
    with pytest.raises(UsageError, match="too short"):
        fit(SampleSpec(NAMES[name], name, max(least - 30, 1), 0, 0), tokenizer)


def test_lists_make_every_combination():
    grid = grid_of(
        ListOptions(
            "vt,fwe,vt",
            "80,90,80",
            {
                "policies": "recent,key_diff,SnapKV(pool=7)",
                "budgets": "all,64,2.5x",
                "merge": "none",
                "positions": "compact",
                "store": "int8",
            },
        )
    )
    assert list(grid.tasks) == ["vt", "fwe"]
    assert grid.lengths == [80, 90]
    assert [(each.labels["policy"][:6], each.labels["asked_budget"]) for each in grid.settings] == [
        ("Recent", "all"),  # once: it evicts nothing under any policy
        ("Recent", "64"),
        ("Recent", "2.5x"),
        ("KeyDif", "64"),
        ("KeyDif", "2.5x"),
        ("SnapKV", "64"),
        ("SnapKV", "2.5x"),
    ]
    assert [grid.settings[place].budget.of(499) for place in range(3)] == [None, 64, 199]
    assert {(each.labels["positions"], each.labels["store"]) for each in grid.settings} == {("compact", "int8")}


def test_rules_of_merging_are_a_list_too_and_a_cache_without_budget_has_none():
    grid = grid_of(
        ListOptions(
            "vt", "80", {"policies": "key_diff", "budgets": "all,4x", "merge": "none,mean_count,mean_count(next)"}
        )
    )
    assert [(each.labels["policy"], each.labels["asked_budget"], each.labels["merge"]) for each in grid.settings] == [
        ("Recent()", "all", "none"),
        ("KeyDiff()", "4x", "none"),
        ("KeyDiff()", "4x", "mean_count"),
        ("KeyDiff()", "4x", "mean_count(next)"),
    ]


@pytest.mark.parametrize(
    ("lists", "says"),
    [
        (ListOptions("vt", "80", {"budgets": "64,"}), "--budgets '64,' has an empty value"),
        (
            ListOptions("vt", "80", {"budgets": "0.5x"}),
            "--budgets '0.5x' is not a part of the text. Write 4x for a quarter of it",
        ),
        (ListOptions("vt", "80", {"budgets": "x"}), "--budgets 'x' is not a part of the text"),
        (ListOptions("vt", "80", {"budgets": "many"}), "--budgets 'many' is not a whole number from 1 to 1073741824"),
        (ListOptions("vt", "1k", {}), "--lengths '1k' is not a whole number from 1 to 1073741824"),
        (ListOptions("vt", "80", {"merge": "mean_count,d2o"}), "merge='d2o' is not a rule. Use one of: mean_count"),
        (ListOptions("vt", "80", {"merge": "blur"}), "merge='blur' is not a rule. Use one of: mean_count"),
        (ListOptions("passkey,,vt", "80", {}), "--tasks 'passkey,,vt' has an empty value"),
    ],
)
def test_wrong_lists_are_told(lists: ListOptions, says: str):
    with pytest.raises(UsageError) as caught:
        grid_of(lists)
    assert says in str(caught.value)
