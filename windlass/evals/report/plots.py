"""The figures. Made to be read in black and white: markers, dashes, hatching and printed numbers, not colour alone."""

import io
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from windlass.evals.case import FULL
from windlass.evals.report.summaries import Block, DepthMap, DepthMaps, SettingRow

MOST_LINES: Final = 12  # in one figure, as many as there are markers
MOST_MAPS: Final = 6  # rows of heat maps in one figure
LONGEST: Final = 80  # characters of a name that has no more room
WIDTH: Final = 7.2  # inches
DPI: Final = 160
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "h", "d")
DASHES: Final = ((0.0, ()), (0.0, (5.0, 1.5)), (0.0, (5.0, 1.5, 1.0, 1.5)), (0.0, (1.0, 1.0)), (0.0, (9.0, 2.0)))
# Okabe and Ito's colours, which differ for every kind of sight.
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#000000", "#e69f00", "#56b4e9")
REFERENCE: Final = (0.0, (1.5, 2.5))
PAPER: Final = LinearSegmentedColormap.from_list("paper", ["#1d2b3a", "#7c93a8", "#ffffff"])
STYLE: Final[dict[Any, Any]] = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "hatch.linewidth": 0.5,
    "legend.frameon": False,
}


@dataclass(frozen=True)
class Measure:
    """What is drawn: its name with its unit, what a value is multiplied with, and whether it is a share."""

    name: str
    scale: float
    is_share: bool


SCORE: Final = Measure("score, %", 100.0, True)
LOSS: Final = Measure("nll, nats per token", 1.0, False)


def png(figure: Figure) -> bytes:
    """The figure as a PNG file; the same figure gives the same bytes."""
    data = io.BytesIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # A name may have letters that the font lacks; the tables show them.
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        figure.savefig(data, format="png", dpi=DPI, metadata={"Software": None})
    return data.getvalue()


def curves(blocks: Sequence[Block], labels: Sequence[str], measure: Measure) -> list[Figure]:
    """Values against the share of bytes, a line a label and a panel a length; the full cache is a line across.

    A label has the same marker in every figure that is made with the same `labels`. More than `MOST_LINES` of them
    go on in a further figure, so that no two lines of a figure share a marker. Empty without any but the full cache.
    """
    names = [label for label in labels if label != FULL]
    drawn = {row.label for block in blocks for row in block.rows if math.isfinite(row.value)}
    figures = []
    for start in range(0, len(names), MOST_LINES):
        part = names[start : start + MOST_LINES]
        places = {label: place for place, label in enumerate(part) if label in drawn}
        if places:
            with matplotlib.rc_context(STYLE):
                figures.append(_curve_figure(blocks, places, measure))
    return figures


def heat_maps(maps: DepthMaps) -> list[Figure]:
    """Scores by depth and length: a row of maps a label, a column a budget; dark is lost, hatched was not run."""
    by_label: dict[str, list[DepthMap]] = {}
    for each in maps.maps:
        by_label.setdefault(each.label, []).append(each)
    rows = list(by_label.items())
    with matplotlib.rc_context(STYLE):
        return [_map_figure(maps, rows[start : start + MOST_MAPS]) for start in range(0, len(rows), MOST_MAPS)]


def _curve_figure(blocks: Sequence[Block], places: Mapping[str, int], measure: Measure) -> Figure:
    across = min(2, len(blocks))
    down = math.ceil(len(blocks) / across)
    longest = max(map(len, places))
    columns = 4 if longest <= 16 else 3 if longest <= 24 else 2 if longest <= 40 else 1
    lines = math.ceil((len(places) + 1) / columns)
    figure = Figure(figsize=(WIDTH, 2.5 * down + 0.17 * lines + 0.2), layout="constrained")
    panels: list[Axes] = list(figure.subplots(down, across, squeeze=False, sharex=True, sharey=True).flat)
    has_full = False
    for block, panel in zip(blocks, panels, strict=False):
        panel.set_title(f"{block.length:,} tokens")
        for row in block.rows:
            if row.is_full and math.isfinite(row.value):
                has_full = True
                panel.axhline(row.value * measure.scale, color="#000000", linewidth=1.0, linestyle=REFERENCE)
        for label, place in places.items():
            _draw(panel, [row for row in block.rows if row.label == label], place, measure)
    for panel in panels[len(blocks) :]:
        panel.remove()
    _set_axes(panels[: len(blocks)], across, measure, [row.share for block in blocks for row in block.rows])
    handles = [Line2D([], [], color="#000000", linewidth=1.0, linestyle=REFERENCE)] if has_full else []
    texts = [FULL] if has_full else []
    handles += [_styled([], [], place) for place in places.values()]
    texts += [plain(label) for label in places]
    figure.legend(handles, texts, loc="outside lower left", ncols=columns, handlelength=3.2)
    return figure


def _draw(panel: Axes, rows: Sequence[SettingRow], place: int, measure: Measure) -> None:
    rows = sorted((row for row in rows if math.isfinite(row.value)), key=lambda row: row.share)
    shares = [row.share * 100 for row in rows]
    values = [row.value * measure.scale for row in rows]
    for share, row in zip(shares, rows, strict=True):
        if row.low is not None and row.high is not None:
            low, high = row.low * measure.scale, row.high * measure.scale
            panel.vlines(share, low, high, color=COLOURS[place % len(COLOURS)], linewidth=0.6)
    panel.add_line(_styled(shares, values, place))


def _styled(shares: Sequence[float], values: Sequence[float], place: int) -> Line2D:
    colour = COLOURS[place % len(COLOURS)]
    return Line2D(
        shares,
        values,
        color=colour,
        linewidth=1.1,
        linestyle=DASHES[place % len(DASHES)],
        marker=MARKERS[place],
        markersize=4.8,
        markerfacecolor="none" if place % 2 else colour,
        markeredgecolor=colour,
    )


def _set_axes(panels: Sequence[Axes], across: int, measure: Measure, shares: Sequence[float]) -> None:
    """Halves of the full cache along the bottom, and the names of both axes at the outer panels only."""
    low, high = min(shares) * 100 / 1.2, max(100.0, *shares) * 1.2
    halves = [100 / 2**power for power in range(-4, 24) if low <= 100 / 2**power <= high]
    every = math.ceil(len(halves) / 8)
    for index, panel in enumerate(panels):
        panel.set_xscale("log", base=2)
        panel.set_xlim(low, high)
        panel.set_xticks(halves[::every], [f"{half:.3g}" for half in halves[::every]])
        panel.minorticks_off()
        if measure.is_share:
            panel.set_ylim(-4, 104)
            panel.set_yticks([0, 25, 50, 75, 100])
        else:
            panel.autoscale(axis="y")
        panel.grid(axis="y", color="#d0d0d0", linewidth=0.5)
        panel.set_axisbelow(True)
        if index % across == 0:
            panel.set_ylabel(measure.name)
        is_lowest = index + across >= len(panels)
        panel.tick_params(labelbottom=is_lowest)
        if is_lowest:
            panel.set_xlabel("bytes held, % of the full cache's")


def _map_figure(maps: DepthMaps, rows: Sequence[tuple[str, Sequence[DepthMap]]]) -> Figure:
    budgets = list(dict.fromkeys(each.asked for each in maps.maps if each.label != FULL and each.asked != "all"))
    across = max(3, len(budgets))
    width = max(WIDTH, across * (0.26 * len(maps.lengths) + 0.7))
    height = len(rows) * (0.17 * len(maps.depths) + 0.75) + 0.15
    figure = Figure(figsize=(width, height), layout="constrained")
    for index, ((label, of_label), part) in enumerate(
        zip(rows, figure.subfigures(len(rows), 1, squeeze=False).flat, strict=True)
    ):
        part.suptitle(plain(label), x=0.01, ha="left", fontsize=9, fontweight="bold")
        panels: list[Axes] = list(part.subplots(1, across, squeeze=False).flat)
        for each in of_label:
            place = 0 if each.asked == "all" else budgets.index(each.asked)
            _draw_map(panels[place], maps, each)
            if index == len(rows) - 1:
                panels[place].set_xlabel("tokens")
        shown = [panel for panel in panels if panel.has_data()]
        shown[0].set_ylabel("depth")
        for panel in shown[1:]:
            panel.tick_params(labelleft=False)
        for panel in panels:
            panel.set_visible(panel.has_data())
    return figure


def _draw_map(panel: Axes, maps: DepthMaps, drawn: DepthMap) -> None:
    cells = np.array([[math.nan if cell is None else cell for cell in row] for row in drawn.cells])
    panel.set_title("nothing evicted" if drawn.asked == "all" else f"budget {plain(drawn.asked)}")
    # Shows where there is no cell above it.
    panel.patch.set(hatch="/////", edgecolor="#9a9a9a", facecolor="#ffffff")
    panel.pcolormesh(np.ma.masked_invalid(cells), cmap=PAPER, vmin=0, vmax=1, edgecolors="#b8b8b8", linewidth=0.5)
    for depth, row in enumerate(drawn.cells):
        for length, cell in enumerate(row):
            if cell is not None:
                ink = "#ffffff" if cell < 0.55 else "#000000"
                number = f"{cell * 100:.0f}"
                panel.text(length + 0.5, depth + 0.5, number, color=ink, size=6.5, ha="center", va="center")
    panel.invert_yaxis()
    panel.set_xticks([index + 0.5 for index in range(len(maps.lengths))], [_short(each) for each in maps.lengths])
    panel.set_yticks([index + 0.5 for index in range(len(maps.depths))], maps.depths)
    panel.tick_params(length=0, labelsize=6.5)


def _short(length: int) -> str:
    return f"{length // 1000}k" if length >= 10_000 and length % 1000 == 0 else str(length)


def plain(name: str) -> str:
    """A name as matplotlib takes it: no mathematics, one line, not longer than there is room for."""
    text = re.sub(r"\s+", " ", name)
    text = text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
    # A leading underscore would hide it from the legend.
    return (" " + text if text.startswith("_") else text).replace("$", r"\$")
