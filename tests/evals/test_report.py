"""Reports: results files to rows, against numbers worked by hand."""

import math
from pathlib import Path

import pytest

from tests.helpers import results
from tests.helpers.results import case, cases, full
from windlass.evals.report.summaries import (
    depth_maps,
    labels,
    loss_blocks,
    over_lengths,
    score_blocks,
    settings,
    turns,
    wilson,
)

file = results.file  # fixture


@pytest.mark.parametrize(
    ("mean", "count", "low", "high"),
    [(0.8, 10, 0.4902, 0.9433), (0.0, 20, 0.0, 0.1611), (1.0, 20, 0.8389, 1.0), (0.5, 4, 0.1500, 0.8500)],
)
def test_wilson_by_hand(mean: float, count: int, low: float, high: float):
    found = wilson(mean, count)
    assert [round(end, 4) for end in found] == [low, high]


@pytest.mark.parametrize(("mean", "count"), [(0.37, 6), (0.998, 31), (0.02, 200), (0.5, 1)])
def test_wilson_ends_are_where_the_test_of_a_share_begins_to_refuse_it(mean: float, count: int):
    for end in wilson(mean, count):
        assert (mean - end) ** 2 == pytest.approx(1.959963984540054**2 * end * (1 - end) / count, rel=1e-9)


def test_score_rows_by_hand(file: Path):
    lines = [case(sample=sample, score=score) for sample, score in enumerate((1.0, 0.0, 1.0, 1.0, 0.5))]
    lines += [case(policy="H2O(window=3)", sample=sample, score=1.0, bytes_held=768) for sample in range(3)]
    lines += [case(asked_budget="4x", budget=125, slots_held=125, bytes_held=320, score=0.25)]
    lines += [case(length=900, store="int8", positions="compact", score=0.0, slots_held=450)]
    lines += [full(sample=sample) for sample in range(2)]
    short, long = score_blocks(cases(file, *lines))
    assert (short.length, long.length) == (500, 900)
    # Largest budgets first, the best first within one.
    assert [(row.label, row.asked, row.count, row.slots, row.share, row.value) for row in short.rows] == [
        ("full cache", "all", 2, 500, 1.0, 1.0),
        ("h2o(window=3)", "2x", 3, 250, 0.6, 1.0),
        ("key_diff", "2x", 5, 250, 0.5, pytest.approx(0.7)),
        ("key_diff", "4x", 1, 125, 0.25, 0.25),
    ]
    # centre (0.7 + 0.384146) / 1.768292, half 1.959964 / 1.768292 * sqrt(0.042 + 0.038415)
    assert short.rows[2].low == pytest.approx(0.2988, abs=5e-5)
    assert short.rows[2].high == pytest.approx(0.9274, abs=5e-5)
    assert [(row.label, row.value, row.low) for row in long.rows] == [("key_diff, compact, int8", 0.0, 0.0)]


def test_turns_on_one_text_count_as_one(file: Path):
    scores = [(1.0, 0.0), (1.0, 1.0), (0.0, 0.0)]
    # Each turn asks for a needle at a depth of its own.
    lines = [
        case(sample=sample, turn=turn, depth=(1 + sample + 4 * turn) / 10, score=score)
        for sample, pair in enumerate(scores)
        for turn, score in enumerate(pair)
    ]
    lines += [full(turn=0)]
    read = cases(file, *lines)
    ((whole, row),) = [block.rows for block in score_blocks(read)]
    assert (row.value, row.count, (row.low, row.high)) == (0.5, 3, wilson(0.5, 3))
    unbroken, broken = turns(read)
    assert [(each.value, each.count) for each in broken.rows if each] == [
        (pytest.approx(2 / 3), 3),
        (pytest.approx(1 / 3), 3),
    ]
    assert (unbroken.label, unbroken.rows[1]) == ("full cache", None)
    assert whole.count == 1
    assert turns([each for each in read if each.turn is None]) == ()


def test_samples_at_several_depths_are_texts_of_their_own(file: Path):
    read = cases(file, *(case(depth=depth, sample=sample) for depth in (0.0, 0.5, 1.0) for sample in range(2)))
    assert score_blocks(read)[0].rows[0].count == 6


def test_depths_by_lengths(file: Path):
    lines = [case(depth=0.0, score=1.0), case(depth=0.0, sample=1, score=0.5), case(depth=0.25, score=0.0)]
    lines += [case(depth=1.0, length=2000, score=1.0), full(depth=0.25), case(task="passkey", sample=9)]
    found = depth_maps(cases(file, *lines))
    assert found is not None
    assert (found.depths, found.lengths) == (("0%", "25%", "100%"), (500, 2000))
    assert [(each.label, each.asked) for each in found.maps] == [("full cache", "all"), ("key_diff", "2x")]
    assert found.maps[0].cells == ((None, None), (1.0, None), (None, None))
    assert found.maps[1].cells == ((0.75, None), (0.0, None), (None, 1.0))
    assert depth_maps(cases(file, case())) is None


def test_depths_anywhere_are_in_ten_parts(file: Path):
    # 0/12, 1/12 ... 12/12: the first two are in the first tenth, the last two in the last.
    lines = [case(depth=index / 12, sample=index, score=float(index in (1, 12))) for index in range(13)]
    found = depth_maps(cases(file, *lines))
    assert found is not None
    assert (found.depths[0], found.depths[9], len(found.depths)) == ("0 to 10%", "90 to 100%", 10)
    assert [row[0] for row in found.maps[0].cells] == [0.5, *[0.0] * 8, 0.5]


def test_few_samples_make_fewer_parts_and_none_is_empty(file: Path):
    # Of ten parts the second is empty, of five none is.
    depths = [0.01, 0.25, 0.31, 0.45, 0.52, 0.63, 0.75, 0.85, 0.95, 0.999, 0.111 + 0.1, 0.333]
    found = depth_maps(cases(file, *(case(depth=depth, sample=index) for index, depth in enumerate(depths))))
    assert found is not None
    assert found.depths == ("0 to 20%", "20 to 40%", "40 to 60%", "60 to 80%", "80 to 100%")
    assert all(row[0] is not None for row in found.maps[0].cells)
    # Seven random depths are no grid.
    found = depth_maps(cases(file, *(case(depth=depth, sample=index) for index, depth in enumerate((0.123, 0.777)))))
    assert found is not None
    assert found.depths == ("0 to 50%", "50 to 100%")


def test_the_full_cache_is_what_bytes_are_measured_by(file: Path):
    """Its own slack is not counted."""
    read = cases(file, full() | {"bytes_held": 1394}, case(bytes_held=697))
    assert [(row.label, row.share) for row in score_blocks(read)[0].rows] == [
        ("full cache", 1.0),
        ("key_diff", pytest.approx(697 / 1280)),
    ]


def test_losses_by_hand(file: Path):
    measures = [{"nll": 2.0}, {"nll": 3.0}, {"nll": 2.5, "kl": 0.125}]
    lines = [case(task="perplexity", score=None, sample=index, measures=each) for index, each in enumerate(measures)]
    lines += [full(task="perplexity", score=None, measures={"nll": 1.75, "kl": None})]
    ((whole, row),) = [block.rows for block in loss_blocks(cases(file, *lines))]
    assert (row.value, row.count, row.kl, row.kl_count) == (2.5, 3, 0.125, 1)
    assert row.low is not None
    assert row.value - row.low == pytest.approx(0.5 / math.sqrt(3))  # the deviation of 2, 2.5, 3 is 0.5
    assert (whole.value, whole.low, whole.high, whole.kl, whole.is_full) == (1.75, None, None, None, True)
    assert score_blocks(cases(file, *lines)) == ()


def test_least_losses_come_first(file: Path):
    lines = [case(score=None, measures={"nll": nll}, policy=policy) for policy, nll in (("A()", 3), ("B()", 2))]
    assert [row.label for row in loss_blocks(cases(file, *lines))[0].rows] == ["B", "A"]


def test_over_lengths_a_setting_needs_all_of_them(file: Path):
    lines = [case(score=1.0), case(sample=1, score=1.0), case(length=900, score=0.5), case(policy="A()", score=1.0)]
    assert over_lengths(score_blocks(cases(file, *lines))) == {("key_diff", "2x"): 0.75, ("A", "2x"): None}


def test_the_order_of_settings(file: Path):
    lines = [case(asked_budget="64", slots_held=64), case(policy="A()"), full(), full(store="int8"), case()]
    read = cases(file, *lines)
    assert labels(read) == ["full cache", "A", "full cache, int8", "key_diff"]
    assert settings(read) == [
        ("full cache", "all"),
        ("full cache, int8", "all"),
        ("A", "2x"),
        ("key_diff", "2x"),
        ("key_diff", "64"),
    ]
