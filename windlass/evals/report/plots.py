"""The figures. Made to be read in black and white: markers, dashes, hatching and printed numbers, not colour alone."""

import io
import math
import re
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Final
from urllib.parse import quote, unquote

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from windlass.evals.report.summaries import Block, DepthMap, DepthMaps, SettingRow
from windlass.evals.results import FULL

MOST_LINES: Final = 12  # in one figure, as many as there are markers
MOST_MAPS: Final = 12  # heat maps in one figure
ACROSS: Final = 3
LABEL: Final = 26  # characters of a line of a name beside a curve
TIP: Final = "tip:"  # begins the id of an element with a tooltip. The rest of the id is the tooltip, quoted
LONGEST: Final = 80  # characters of a name that has no more room
WIDTH: Final = 4.6  # inches: text of 8.5 points can be read on a telephone
DPI: Final = 220
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*", "h", "d")
DASHES: Final = ((0.0, ()), (0.0, (5.0, 1.5)), (0.0, (5.0, 1.5, 1.0, 1.5)), (0.0, (1.0, 1.0)), (0.0, (9.0, 2.0)))
# Okabe and Ito's colours, which differ for every kind of sight.
COLOURS: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#5b5b5b", "#e69f00", "#56b4e9")
INK: Final = "#1b1b1b"
RULE: Final = "#d0d0d0"
REFERENCE: Final = (0.0, (1.5, 2.5))
PAPER: Final = LinearSegmentedColormap.from_list("paper", ["#1d2b3a", "#7c93a8", "#ffffff"])
STYLE: Final[dict[Any, Any]] = {
    "font.family": "DejaVu Sans",
    "font.size": 8.5,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "hatch.linewidth": 0.5,
    "svg.fonttype": "none",
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}


@dataclass(frozen=True)
class Measure:
    """A measure that is drawn: its name with its unit, the factor of a value, and whether it is a share."""

    name: str
    scale: float
    is_share: bool


SCORE: Final = Measure("score, %", 100.0, True)
LOSS: Final = Measure("nll, nats per token", 1.0, False)


def png(figure: Figure) -> bytes:
    """The figure as a PNG file. The same figure gives the same bytes."""
    data = io.BytesIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        # A name may have letters that the font lacks. The tables show them.
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        figure.savefig(data, format="png", dpi=DPI, metadata={"Software": None})
    return data.getvalue()


def svg(figure: Figure, name: str) -> str:
    """The figure as an element of HTML, in colours of the page's style sheet, with exact numbers on hover.

    `name` is no other figure's. The same figure and name give the same text.
    """
    data = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing", category=UserWarning)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(data, format="svg", transparent=True, metadata=nothing)
    text = data.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    text = re.sub(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" role="img">', text, count=1)
    text = re.sub(rf'id="{TIP}([^"]*)">', lambda found: f"><title>{escape(unquote(found[1]))}</title>", text)
    text = text.replace("<g >", "<g>")
    for place, colour in enumerate((*COLOURS, INK, RULE)):
        text = text.replace(colour, f"var(--plot-{place})")
    used = set(re.findall(r'#([\w.-]+)[")]', text))
    return re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", text).strip()


def curves(blocks: Sequence[Block], labels: Sequence[str], measure: Measure) -> list[Figure]:
    """Values against the share of bytes, with a line for each label and a figure for each length.

    The full cache is a line across. A label has the same marker in every figure that is made with the same `labels`.
    More than `MOST_LINES` of them go on in a further figure, so that no two lines of a figure share a marker. Empty
    without any but the full cache.
    """
    names = [label for label in labels if label != FULL]
    figures = []
    for block in blocks:
        for start in range(0, len(names), MOST_LINES):
            part = names[start : start + MOST_LINES]
            there = {row.label for row in block.rows if math.isfinite(row.value)}
            places = {label: place for place, label in enumerate(part) if label in there}
            if places:
                with matplotlib.rc_context(STYLE):
                    figures.append(_curve_figure(block, places, measure))
    return figures


def heat_maps(maps: DepthMaps) -> list[Figure]:
    """Scores by depth and length, with a map for each label and budget. Dark is lost, hatched was not run."""
    drawn = maps.maps
    with matplotlib.rc_context(STYLE):
        return [_map_figure(maps, drawn[start : start + MOST_MAPS]) for start in range(0, len(drawn), MOST_MAPS)]


def _curve_figure(block: Block, places: Mapping[str, int], measure: Measure) -> Figure:
    height = max(3.0, 0.9 + 0.21 * (len(places) + 1))
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    panel = figure.subplots()
    panel.set_title(f"texts of {block.length:,} tokens")
    ends: list[tuple[float, float, str, str]] = []
    for label, place in places.items():
        rows = [row for row in block.rows if row.label == label and math.isfinite(row.value)]
        if rows:
            ends.append((*_draw(panel, rows, place, measure), plain(label), COLOURS[place % len(COLOURS)]))
    _set_axes(panel, measure, [row.share for row in block.rows])
    for row in block.rows:
        if row.is_full and math.isfinite(row.value):
            value = row.value * measure.scale
            panel.axhline(value, color=INK, linewidth=1.0, linestyle=REFERENCE)
            ends.append((panel.get_xlim()[1], value, FULL, INK))
            _tip(panel, 100.0, value, row)
    _label(panel, ends)
    return figure


def _draw(panel: Axes, rows: Sequence[SettingRow], place: int, measure: Measure) -> tuple[float, float]:
    """Draw one line with its strokes and hover texts. Returns its right end."""
    rows = sorted(rows, key=lambda row: row.share)
    shares = [row.share * 100 for row in rows]
    values = [row.value * measure.scale for row in rows]
    colour = COLOURS[place % len(COLOURS)]
    for share, row in zip(shares, rows, strict=True):
        if row.low is not None and row.high is not None:
            panel.vlines(share, row.low * measure.scale, row.high * measure.scale, color=colour, linewidth=0.6)
    panel.add_line(
        Line2D(
            shares,
            values,
            color=colour,
            linewidth=1.3,
            linestyle=DASHES[place % len(DASHES)],
            marker=MARKERS[place],
            markersize=5.5,
            markerfacecolor="none" if place % 2 else colour,
            markeredgecolor=colour,
        )
    )
    for share, value, row in zip(shares, values, rows, strict=True):
        _tip(panel, share, value, row)
    return shares[-1], values[-1]


def _tip(panel: Axes, share: float, value: float, row: SettingRow) -> None:
    """Lets a browser tell the exact numbers where the mouse is over a point."""
    panel.scatter([share], [value], s=110, alpha=0.0, gid=TIP + quote(row.told))


def _label(panel: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Names at the right of the panel, each beside the end of its line or a little off, so that none covers another."""
    low, high = panel.get_ylim()
    inches = max(1.0, panel.figure.get_size_inches()[1] - 0.9)  # type: ignore[union-attr]
    line = (high - low) * 0.2 / inches
    lowest = high + line
    for share, value, name, colour in sorted(ends, key=lambda end: -end[1]):
        lines = textwrap.wrap(name, LABEL, max_lines=2, placeholder="…")
        half = line * (1.4 * len(lines) - 0.4) / 2
        at = min(value, lowest - half)
        lowest = at - half
        panel.annotate(
            "\n".join(lines),
            (share, value),
            (1.03, at),
            textcoords=("axes fraction", "data"),
            color=colour,
            fontsize=8.5,
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.4, "alpha": 0.6, "shrinkB": 4},
        )


def _set_axes(panel: Axes, measure: Measure, shares: Sequence[float]) -> None:
    """Halves of the full cache along the bottom, and the names of both axes."""
    low, high = min(shares) * 100 / 1.2, max(shares) * 100 * 1.2
    halves = [100 / 2**power for power in range(-4, 24) if low <= 100 / 2**power <= high]
    if len(halves) < 2:
        halves = [min(shares) * 100, max(shares) * 100]
    every = math.ceil(len(halves) / 6)
    panel.set_xscale("log", base=2)
    panel.set_xlim(low, high)
    panel.set_xticks(halves[::every], [f"{half:.3g}" for half in halves[::every]])
    panel.minorticks_off()
    if measure.is_share:
        panel.set_ylim(-4, 104)
        panel.set_yticks([0, 25, 50, 75, 100])
    else:
        panel.autoscale(axis="y")
    panel.grid(axis="y", color=RULE, linewidth=0.5)
    panel.set_axisbelow(True)
    panel.set_ylabel(measure.name)
    panel.set_xlabel("bytes held, % of the full cache's")


def _map_figure(maps: DepthMaps, drawn: Sequence[DepthMap]) -> Figure:
    """Up to `ACROSS` maps beside each other, as many rows as it takes."""
    names = [_title(each) for each in drawn]
    across = 1 if len(maps.lengths) > 6 else 2 if len(maps.lengths) > 3 or max(map(len, names)) > 18 else ACROSS
    down = math.ceil(len(drawn) / across)
    width = max(WIDTH, across * (0.34 * len(maps.lengths) + 0.4))
    figure = Figure(figsize=(width, down * (0.21 * len(maps.depths) + 0.75) + 0.3), layout="constrained")
    panels: list[Axes] = list(figure.subplots(down, across, squeeze=False).flat)
    for index, (panel, each) in enumerate(zip(panels, drawn, strict=False)):
        _draw_map(panel, maps, each)
        panel.set_title(textwrap.fill(_title(each), 48 // across), fontsize=8)
        panel.tick_params(labelleft=index % across == 0)
    figure.supxlabel("length of the text, tokens", fontsize=8.5)
    figure.supylabel("depth of the answer", fontsize=8.5)
    for panel in panels[len(drawn) :]:
        panel.remove()
    return figure


def _title(drawn: DepthMap) -> str:
    return plain(drawn.label) if drawn.asked == "all" else f"{plain(drawn.label)} at {plain(drawn.asked)}"


def _draw_map(panel: Axes, maps: DepthMaps, drawn: DepthMap) -> None:
    # Shows where there is no cell above it.
    panel.patch.set(hatch="/////", edgecolor="#9a9a9a", facecolor="none")
    panel.set_xlim(0, len(maps.lengths))
    panel.set_ylim(len(maps.depths), 0)
    for depth, row in enumerate(drawn.cells):
        for length, cell in enumerate(row):
            if cell is not None:
                where = f"depth {maps.depths[depth]}, {maps.lengths[length]:,} tokens"
                told = f"{drawn.label} at {drawn.asked}, {where}: score {100 * cell:.2f} %"
                square = Rectangle((length, depth), 1, 1, facecolor=PAPER(cell), edgecolor="#b8b8b8", linewidth=0.5)
                square.set_gid(TIP + quote(told))
                panel.add_patch(square)
                ink = "#ffffff" if cell < 0.55 else "#000000"
                panel.text(
                    length + 0.5,
                    depth + 0.5,
                    f"{cell * 100:.0f}",
                    color=ink,
                    size=7.5,
                    ha="center",
                    va="center",
                    gid=TIP + quote(told),
                )
    panel.set_xticks([index + 0.5 for index in range(len(maps.lengths))], [_short(each) for each in maps.lengths])
    panel.set_yticks([index + 0.5 for index in range(len(maps.depths))], maps.depths)
    panel.tick_params(length=0, labelsize=7.5)


def _short(length: int) -> str:
    return f"{length // 1000}k" if length >= 10_000 and length % 1000 == 0 else str(length)


def plain(name: str) -> str:
    """A name as matplotlib takes it: no mathematics, one line, not longer than there is room for."""
    text = re.sub(r"\s+", " ", name)
    text = text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
    # A leading underscore would hide it from the legend.
    return (" " + text if text.startswith("_") else text).replace("$", r"\$")
