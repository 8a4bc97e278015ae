"""Verdicts in a sentence, from results made by hand."""

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import results
from tests.helpers.results import Line, case, cases, full
from windlass.evals.report.summaries import Texts, compared, listed, sign_test, verdict

file = results.file  # fixture


def scored(policy: str, scores: list[float], **changes: Any) -> list[Line]:
    return [case(policy=policy, sample=sample, score=score, **changes) for sample, score in enumerate(scores)]


def whole(*scores: float, **changes: Any) -> list[Line]:
    return [full(sample=sample, score=score, **changes) for sample, score in enumerate(scores)]


@pytest.mark.parametrize(
    ("wins", "losses", "likely"),
    # 2 * (1 + 6) / 2^6, and so on
    [(5, 0, 0.0625), (6, 0, 0.03125), (0, 6, 0.03125), (5, 1, 0.21875), (3, 3, 1.0), (0, 0, 1.0)],
)
def test_sign_tests_by_hand(wins: int, losses: int, likely: float) -> None:
    assert sign_test(wins, losses) == likely


def test_texts_are_compared_where_both_were_run() -> None:
    one: Texts = {("a",): 1.0, ("b",): 0.5, ("c",): 0.0}
    other: Texts = {("a",): 0.0, ("b",): 0.5, ("d",): 1.0}
    assert compared(one, other) == (1, 0)
    assert compared(other, one) == (0, 1)


def test_names_in_a_list() -> None:
    assert listed(["a"]) == "a"
    assert listed(["a", "b"]) == "a and b"
    assert listed(["a", "b", "c", "d"]) == "a, b, c and d"
    assert listed(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"


def test_the_fewest_bytes_that_keep_the_score(file: Path) -> None:
    lines = whole(*[1.0] * 10)
    for asked, held in (("2x", 640), ("8x", 205)):
        lines += scored("KeyDiff()", [1.0] * 10, asked_budget=asked, bytes_held=held)
        lines += scored("Recent()", [1.0, 1.0, *[0.0] * 8], asked_budget=asked, bytes_held=held - 5)
    assert verdict(cases(file, *lines)) == (
        "key_diff at 8x keeps 100 % of the score in 16 % of the bytes (10 texts, 95 % interval of the score 72 to "
        "100 %). The worst, recent, loses 80 points."
    )


def test_what_chance_could_have_made_is_said(file: Path) -> None:
    # Five texts of ten that one finds and the other does not are not enough. Six are.
    lines = whole(*[1.0] * 10) + scored("KeyDiff()", [1.0] * 10) + scored("H2O()", [0.0] * 5 + [1.0] * 5)
    found = verdict(cases(file, *lines, *scored("Recent()", [0.0] * 6 + [1.0] * 4)))
    assert found.endswith(". The worst, recent, loses 60 points. 10 texts do not tell h2o from it.")


def test_a_score_that_nobody_keeps(file: Path) -> None:
    lines = whole(*[1.0] * 4) + scored("KeyDiff()", [1.0, 1.0, 0.0, 0.0]) + scored("Recent()", [1.0, 0.0, 0.0, 0.0])
    assert verdict(cases(file, *lines)) == (
        "No setting keeps 95 % of the score. The best: key_diff at 2x keeps 50 % of the score in 50 % of the "
        "bytes (4 texts, 95 % interval of the score 15 to 85 %). 4 texts do not tell recent from it."
    )


def test_a_model_that_cannot_do_it(file: Path) -> None:
    assert verdict(cases(file, *whole(0.0, 0.0), *scored("KeyDiff()", [0.0, 0.0]))) == (
        "The full cache itself scores 0 %: this model cannot do the task, so its score tells nothing about policies."
    )


def test_without_a_full_cache_or_without_others(file: Path) -> None:
    assert verdict(cases(file, *scored("KeyDiff()", [1.0, 0.0]))) == (
        "key_diff at 2x scores 50 % in 50 % of the bytes (2 texts, 95 % interval of the score 9 to 91 %)."
    )
    assert verdict(cases(file, *whole(1.0, 0.0))) == "The full cache scores 50 %. No other setting was run."
    assert verdict(()) == ""


def test_a_setting_counts_that_was_run_everywhere(file: Path) -> None:
    lines = whole(1.0) + whole(1.0, length=900) + scored("KeyDiff()", [1.0]) + scored("KeyDiff()", [1.0], length=900)
    # The best is not compared where it was not run, nor on a part of the texts.
    found = verdict(cases(file, *lines, *scored("H2O()", [1.0], bytes_held=64)))
    assert found.startswith("key_diff at 2x keeps 100 % of the score in 50 %")


def test_losses(file: Path) -> None:
    def read(policy: str, nlls: list[float], **changes: Any) -> list[Line]:
        return [
            case(policy=policy, task="text", score=None, sample=sample, measures={"nll": nll}, **changes)
            for sample, nll in enumerate(nlls)
        ]

    lines = [full(task="text", score=None, sample=sample, measures={"nll": 2.0}) for sample in range(6)]
    lines += read("KeyDiff()", [2.02] * 6) + read("Recent()", [2.1] * 6)
    # exp(0.02) and exp(0.1)
    assert verdict(cases(file, *lines)) == (
        "key_diff at 2x has a perplexity 2.0 % above the full cache's in 50 % of the bytes (6 texts). "
        "The perplexity of recent is 10.5 % above it, too."
    )


def test_modes_are_apart(file: Path) -> None:
    lines = whole(1.0) + scored("KeyDiff()", [1.0]) + scored("Recent()", [1.0], is_aware=True)
    told = verdict(cases(file, *lines))
    assert told.startswith("Question-blind: key_diff at 2x keeps 100 %")
    assert "Question-aware: recent at 2x scores 100 %" in told
