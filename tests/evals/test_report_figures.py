"""Figures: they show the means, and can be read in black and white."""

from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from tests.helpers import results
from tests.helpers.results import case, full, write
from windlass.evals.report import plots
from windlass.evals.report.summaries import depth_maps, labels, loss_blocks, score_blocks
from windlass.evals.results import read_results

file = results.file  # fixture


def of_figure(figure: Figure) -> list[Axes]:
    return [each for each in figure.axes if each.get_visible()]


def named(figure: Any) -> list[str]:
    """The names beside the lines, from the top down."""
    return [text.get_text() for text in figure.axes[0].texts]


def test_lines_differ_without_colour(file: Path):
    lines = [case(policy=f"P{index:02}()", score=index / 16) for index in range(15)]
    read = read_results([write(file, *lines, full(score=0.9))]).cases
    blocks = score_blocks(read)
    figures: Any = plots.curves(blocks, labels(read), plots.SCORE)
    marked = [[line for line in each.axes[0].get_lines() if len(line.get_xdata())] for each in figures]
    for figure, drawn in zip(figures, marked, strict=True):
        markers = [line.get_marker() for line in drawn if line.get_marker() != "None"]
        assert len(markers) == len(set(markers)) > 0
        assert len(named(figure)) == len(drawn)
        # The full cache is the only line without a marker.
        across = [line for line in drawn if line.get_marker() == "None"]
        assert [list(line.get_ydata()) for line in across] == [[90.0, 90.0]]
    assert [len(drawn) - 1 for drawn in marked] == [12, 3]
    # A policy keeps its marker where others are absent.
    alone: Any
    (alone,) = plots.curves([type(blocks[0])(500, blocks[0].rows[-2:])], labels(read), plots.SCORE)
    by_place = {line.get_ydata()[0]: line.get_marker() for line in marked[0]}
    for line in alone.axes[0].get_lines():
        assert line.get_marker() == by_place[line.get_ydata()[0]]


def test_names_stand_beside_their_lines_and_not_on_each_other(file: Path):
    lines = [case(policy=f"P{index}()", score=1.0 - index / 1000) for index in range(8)]
    lines += [case(policy="A(seed=3, pool=12345, decay=0.125)", score=0.25)]
    read = read_results([write(file, *lines, full())]).cases
    (figure,) = plots.curves(score_blocks(read), labels(read), plots.SCORE)
    plots.png(figure)  # lays it out
    boxes = [Text.get_window_extent(text) for text in figure.axes[0].texts]  # without the strokes to the lines
    assert named(figure)[:3] == ["P0", "full cache", "P1"]
    assert "\n" in named(figure)[-1]
    for above, below in pairwise(boxes):
        assert above.y0 >= below.y1 - 1
    assert all(box.x1 <= plots.WIDTH * plots.DPI for box in boxes)


def test_lines_go_through_the_means(file: Path):
    lines = [case(score=0.5), case(asked_budget="4x", slots_held=125, bytes_held=320, score=0.25)]
    blocks = score_blocks(read_results([write(file, *lines, case(length=900, score=1.0))]).cases)
    figures: Any = plots.curves(blocks, ["full cache", "key_diff"], plots.SCORE)
    titles = [panel.get_title(loc="left") for figure in figures for panel in of_figure(figure)]
    assert titles == ["texts of 500 tokens", "texts of 900 tokens"]
    for figure in figures:
        assert figure.axes[0].get_xlabel() == "bytes held, % of the full cache's"
        assert figure.axes[0].get_ylabel() == "score, %"
    (line,) = figures[0].axes[0].get_lines()
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([25.0, 50.0], [25.0, 50.0])
    assert plots.curves(blocks, ["full cache"], plots.SCORE) == []


def test_losses_that_are_no_numbers_are_left_out_of_figures(file: Path):
    lines = [case(score=None, sample=index, measures={"nll": nll}) for index, nll in enumerate((1.0, float("nan")))]
    read = read_results([write(file, *lines, case(policy="A()", score=None, measures={"nll": 2.0}))]).cases
    (figure,) = plots.curves(loss_blocks(read), labels(read), plots.LOSS)
    assert named(figure) == ["A"]
    assert plots.png(figure).startswith(b"\x89PNG")


def test_heat_maps_print_their_numbers(file: Path):
    lines = [case(depth=0.0, score=0.0), case(depth=1.0, score=1.0), case(depth=1.0, length=900, score=0.5)]
    maps = depth_maps(read_results([write(file, *lines)]).cases)
    assert maps is not None
    (figure,) = plots.heat_maps(maps)
    (panel,) = of_figure(figure)
    numbers = {text.get_position(): (text.get_text(), text.get_color()) for text in panel.texts}
    assert numbers == {
        (0.5, 0.5): ("0", "#ffffff"),
        (0.5, 1.5): ("100", "#000000"),
        (1.5, 1.5): ("50", "#ffffff"),
    }
    assert panel.patch.get_hatch() == "/////"  # cells that were not run
    figure.draw_without_rendering()
    for text in figure.findobj(Text):  # nothing is cut off
        box = text.get_window_extent()
        assert box.y0 >= 0
        assert box.y1 <= figure.bbox.y1
    assert [text.get_text() for text in panel.get_xticklabels()] == ["500", "900"]
    assert [text.get_text() for text in panel.get_yticklabels()] == ["0%", "100%"]
    # Better is lighter, for whoever sees no colour.
    greys = [0.2126 * red + 0.7152 * green + 0.0722 * blue for red, green, blue, _ in map(plots.PAPER, range(256))]
    assert greys == sorted(greys)
