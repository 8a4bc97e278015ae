"""The page: one HTML file with its figures inside, no script, nothing fetched."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from markupsafe import Markup, escape

from windlass.core.errors import UsageError
from windlass.core.files import check_writable, replacing, replacing_folder
from windlass.evals.report import TEMPLATES, summaries
from windlass.evals.report.summaries import (
    Block,
    SettingRow,
    TurnRows,
    over_lengths,
    verdict,
)
from windlass.evals.results import FULL, Case, Header, LoadedResults, read_results

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NONE: Final = "\N{EN DASH}"
MODES: Final = {False: "Question-blind", True: "Question-aware"}


@dataclass(frozen=True)
class Picture:
    """A figure: its file's name, the file, the same as an element of the page, and its caption."""

    name: str
    png: bytes
    svg: str
    caption: str


@dataclass(frozen=True)
class TaskPart:
    """The part of the page for one task, in one mode. `name` is its label without folders."""

    name: str
    scores: tuple[Block, ...]
    turns: tuple[TurnRows, ...]
    losses: tuple[Block, ...]
    pictures: tuple[Picture, ...]


@dataclass(frozen=True)
class ModePart:
    """The tasks of one mode, with the order of the overview's rows."""

    is_aware: bool
    settings: tuple[tuple[str, str], ...]
    tasks: tuple[TaskPart, ...]

    @property
    def name(self) -> str:
        """The title."""
        return MODES[self.is_aware]

    @property
    def has_overview(self) -> bool:
        """Return True where an overview says more than the tables of the tasks."""
        return sum(len(task.scores) for task in self.tasks) >= 2

    @property
    def scored(self) -> list[str]:
        """The tasks of the overview."""
        return [task.name for task in self.tasks if task.scores]

    @property
    def means(self) -> list[tuple[str, str, list[float | None]]]:
        """The label and the budget of each setting, and its mean score on every task."""
        of_tasks = [over_lengths(task.scores) for task in self.tasks if task.scores]
        rows = [(label, asked, [each.get((label, asked)) for each in of_tasks]) for label, asked in self.settings]
        return [row for row in rows if any(value is not None for value in row[2])]


def page(results: LoadedResults, told: str, modes: Sequence[ModePart], files: Sequence[str], folder: str) -> str:
    """The whole HTML text. `told` is the verdict, `files` are the results' names, `folder` is where figures lie."""
    first = results.headers[0]
    trained = "" if first.trained_length is None else f", trained on {first.trained_length:,} tokens"
    several = "" if len(files) == 1 else "s"
    facts = {
        "model": f"{first.run_model}: {_in_millions(first.parameters)} parameters{trained}",
        "cases": f"{len(results.cases):,}, from the file{several} {', '.join(files)}",
        "seed": _distinct(str(header.seed) for header in results.headers),
        "run on": _distinct(header.date for header in results.headers),
        "versions": _distinct(_versions(header) for header in results.headers),
    }
    return TEMPLATES.get_template("report.html").render(
        model=first.name,
        told=told,
        facts=facts,
        notes=results.notes,
        modes=modes,
        folder=folder,
        has_figures=any(task.pictures for mode in modes for task in mode.tasks),
    )


def _versions(header: Header) -> str:
    return f"windlass {header.windlass}, torch {header.torch}, transformers {header.transformers}"


def _distinct(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))


def _in_millions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.2f} million"


def without_folders(label: str) -> str:
    """A task's label without the folders of a file in it: `"perplexity(text.txt)"`, `"task.py:Mine"`."""
    return re.sub(r"^(\w+\()?[^()]*/(?=[^/()]+(?:\)|\.py:\w+)$)", lambda found: found[1] or "", label)


def _breakable(text: str) -> Markup:
    """A policy with many numbers may go on in a second line where they begin."""
    return escape(text).replace("(", Markup("(<wbr>"))


def _shared(row: SettingRow) -> list[str]:
    """The cells that tables of scores and of losses begin with."""
    return [row.label, row.asked, f"{row.slots:,.0f}", _percent(row.share), f"{row.count:,}"]


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{share * 100:.1f}"


def _interval(row: SettingRow) -> str:
    return NONE if row.low is None or row.high is None else f"{_percent(row.low)} to {_percent(row.high)}"


def _turn(row: SettingRow | None) -> str:
    return NONE if row is None else f"{_percent(row.value)} ({_interval(row)})"


def _losses(row: SettingRow, full: float | None) -> list[str]:
    """The nll, its error, how much it is over the full cache's, the perplexity, and the divergence."""
    error = NONE if row.high is None else f"{row.high - row.value:.4f}"
    over = NONE if full is None else f"{row.value - full:+.4f}".replace("-", "\N{MINUS SIGN}")
    perplexity = f"{math.exp(row.value):,.2f}" if row.value < 20 else f"{math.exp(min(row.value, 700.0)):.1e}"
    divergence = NONE if row.kl is None else f"{row.kl:.4f}"
    if row.kl is not None and row.kl_count < row.count:
        divergence += f" ({row.kl_count} of {row.count})"
    return [f"{row.value:.4f}", error, over, perplexity, divergence]


TEMPLATES.globals["FULL"] = FULL
TEMPLATES.filters.update(
    breakable=_breakable, shared=_shared, share=_percent, interval=_interval, turn=_turn, losses=_losses
)


TEXT, NUMBER = "---", "---:"  # rules of a column: numbers align at the right


def row(cells: Sequence[str]) -> str:
    """One line of a table."""
    return f"| {' | '.join(cells)} |"


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], text_columns: int | None = None, number: str = NUMBER
) -> str:
    """A table whose first `text_columns` columns are text and the others numbers, by default all text."""
    return "\n".join([*top(heads, text_columns, number), *map(row, rows)])


def top(heads: Sequence[str], text_columns: int | None = None, number: str = NUMBER) -> list[str]:
    """The first two lines of a `table` whose rows come later."""
    texts = len(heads) if text_columns is None else text_columns
    return [row(heads), row([TEXT] * texts + [number] * (len(heads) - texts))]


def padded(lines: Sequence[Mapping[str, str]], numbers: Collection[str]) -> str:
    """A table of at least one line, whose columns are the keys of the lines, padded so that it reads as plain text too.

    The columns in `numbers` align at the right. A bar in a cell is escaped.
    """
    cells = [[text.replace("|", "\\|") for text in line.values()] for line in lines]
    heads = list(lines[0])
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]

    def placed(texts: Sequence[str]) -> str:
        columns = zip(texts, heads, widths, strict=True)
        return row([text.rjust(width) if head in numbers else text.ljust(width) for text, head, width in columns])

    rule = row(
        ["-" * (width - 1) + ":" if head in numbers else "-" * width for head, width in zip(heads, widths, strict=True)]
    )
    return "\n".join([placed(heads), rule, *map(placed, cells)])


SUFFIXES: Final = (".html", ".htm")


@dataclass(frozen=True)
class ReportFiles:
    """A report that was written: `folder` holds `figures` PNG files, and is not there without any."""

    page: Path
    folder: Path
    cases: int
    figures: int
    notes: tuple[str, ...]


def write_report(files: Sequence[Path], output: Path) -> ReportFiles:
    """Write the page to `output`, and its figures into a folder beside it, `report_files` for `report.html`.

    Files of the same names are replaced. The page holds its figures itself and does not need the folder.

    Raises: UsageError when `output` is no HTML file or cannot be written, when the results cannot be read or have no
    cases, and when matplotlib is not installed.
    """
    _check_output(output)
    results = read_results(files)
    modes = _modes(results.cases)
    folder = output.with_name(f"{output.stem}_files")
    text = page(results, verdict(results.cases), modes, [file.name for file in files], f"{folder.name}/")
    pictures = [picture for mode in modes for task in mode.tasks for picture in task.pictures]
    try:
        with replacing(output) as file:
            file.write_text(text, encoding="utf-8", errors="replace")
            if pictures:
                with replacing_folder(folder) as new:
                    for picture in pictures:
                        (new / picture.name).write_bytes(picture.png)
    except OSError as error:
        raise UsageError(f"output {output} cannot be written: {error.strerror}. Nothing was") from None
    return ReportFiles(output, folder, len(results.cases), len(pictures), results.notes)


def _check_output(output: Path) -> None:
    if output.suffix.lower() not in SUFFIXES:
        raise UsageError(f"output {output} must end in .html, so that no results file is written over")
    check_writable(output, "output")


def _modes(cases: Sequence[Case]) -> list[ModePart]:
    labels = summaries.labels(cases)
    taken: set[str] = set()
    modes = []
    for is_aware in MODES:
        of_mode = [case for case in cases if case.is_aware is is_aware]
        if not of_mode:
            continue
        tasks = dict.fromkeys(case.task for case in of_mode)
        parts = [_task(task, [case for case in of_mode if case.task == task], labels, taken) for task in tasks]
        modes.append(ModePart(is_aware, tuple(summaries.settings(of_mode)), tuple(parts)))
    return modes


def _task(task: str, cases: Sequence[Case], labels: Sequence[str], taken: set[str]) -> TaskPart:
    """One task in one mode. The names of its figures are added to `taken`."""
    try:
        from windlass.evals.report import plots
    except ImportError as error:
        raise UsageError(
            f"a report is drawn with matplotlib, which cannot be imported ({error}). "
            "Install it: pip install 'matplotlib>=3.9,<4', or '.[report]' in the folder that windlass came from"
        ) from None

    scores, losses = summaries.score_blocks(cases), summaries.loss_blocks(cases)
    maps = summaries.depth_maps(cases)
    mode, name = MODES[cases[0].is_aware].lower(), without_folders(task)
    drawn: list[tuple[str, str, list[Figure]]] = [
        (
            "score",
            "score against bytes held. Upright strokes are 95 % intervals",
            plots.curves(scores, labels, plots.SCORE),
        ),
        (
            "depth",
            "score in percent by the needle's depth and the text's length. Dark is lost, hatched was not run",
            [] if maps is None else plots.heat_maps(maps),
        ),
        (
            "nll",
            "negative log-likelihood against bytes held, lower is better. Upright strokes are one standard error",
            plots.curves(losses, labels, plots.LOSS),
        ),
    ]
    pictures = []
    for kind, caption, figures in drawn:
        for number, figure in enumerate(figures, 1):
            place = f", {number} of {len(figures)}" if len(figures) > 1 else ""
            file = _file_name(f"{mode.removeprefix('question-')}-{name}-{kind}", taken)
            told = f"{name}, {mode}{place}: {caption}."
            pictures.append(Picture(file, plots.png(figure), plots.svg(figure, file), told))
    return TaskPart(name, scores, summaries.turns(cases), losses, tuple(pictures))


def _file_name(name: str, taken: set[str]) -> str:
    """A name that every system takes, and that no other figure has. It is added to `taken`."""
    stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:80]
    number = 1
    while (found := f"{stem}-{number}.png" if number > 1 else f"{stem}.png") in taken:
        number += 1
    taken.add(found)
    return found
