"""The page: one HTML file with its figures inside, no script, nothing fetched."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Final

from windlass.core.errors import UsageError
from windlass.core.files import check_writable, replacing, replacing_folder
from windlass.evals.report import summaries
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

CSS: Final = """\
:root { color-scheme: light dark; --paper: #fff; --ink: #1b1b1b; --faint: #555; --mark: #0072b2;
  --plot-0: #0072b2; --plot-1: #d55e00; --plot-2: #009e73; --plot-3: #cc79a7; --plot-4: #5b5b5b; --plot-5: #e69f00;
  --plot-6: #56b4e9; --plot-7: #1b1b1b; --plot-8: #d0d0d0; }
@media (prefers-color-scheme: dark) { :root { --paper: #16181b; --ink: #e6e3dd; --faint: #a5a19a; --mark: #6fb7ea;
  --plot-0: #5aaef0; --plot-1: #ff8f4a; --plot-2: #35c99f; --plot-3: #e8a3ca; --plot-4: #b5b5b5; --plot-5: #f2b43c;
  --plot-6: #8fd0f7; --plot-7: #e6e3dd; --plot-8: #3d4146; } }
body { max-width: 47rem; margin: 3.5rem auto 5rem; padding: 0 1.25rem; background: var(--paper); color: var(--ink);
  font: 17px/1.5 Charter, "Bitstream Charter", "Iowan Old Style", "Source Serif 4", Palatino, "Palatino Linotype",
  Georgia, "Liberation Serif", serif; }
h1 { font-size: 1.9rem; font-weight: 600; line-height: 1.15; margin: 0; overflow-wrap: anywhere; }
h1 + p { margin: .3rem 0 1.6rem; font-style: italic; color: var(--faint); }
h2 { font-size: 1.35rem; font-weight: 600; margin: 3.2rem 0 .4rem; padding-top: .7rem;
  border-top: 2px solid var(--ink); }
h3 { font-size: 1.1rem; font-weight: 600; margin: 2.4rem 0 .6rem; overflow-wrap: anywhere; }
a { color: inherit; text-decoration-thickness: 1px; text-underline-offset: .15em; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1.2rem; margin: 0; font-size: .92rem; }
dt { font-style: italic; color: var(--faint); }
dd { margin: 0; overflow-wrap: anywhere; }
nav { margin-top: 1.4rem; font-size: .92rem; }
nav p { margin: .15rem 0; }
.note { margin: 1.1rem 0 0; padding-left: .8rem; border-left: 3px solid var(--ink); font-size: .92rem;
  overflow-wrap: anywhere; }
.verdict { margin: 0 0 1.8rem; padding: .9rem 1.1rem; border: 1px solid var(--mark); border-left-width: 5px;
  font-size: 1.12rem; overflow-wrap: anywhere; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20.5rem), 1fr)); gap: 0 1.6rem; }
figure { margin: 1.1rem 0 1.6rem; }
svg { display: block; width: 100%; max-width: 34rem; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
tbody tr[title]:hover { background: color-mix(in srgb, var(--mark) 14%, transparent); }
figcaption, caption { font-size: .86rem; font-style: italic; color: var(--faint); text-align: left; }
figcaption { margin-top: .4rem; }
caption { padding-bottom: .45rem; }
.wide { overflow-x: auto; margin: 1.2rem 0 1.8rem; }
table { border-collapse: collapse; width: 100%; font-size: .84rem; line-height: 1.3;
  font-variant-numeric: lining-nums tabular-nums; border-bottom: 1px solid var(--ink); }
thead tr { border-top: 1px solid var(--ink); border-bottom: 1px solid var(--ink); }
th { font-weight: 400; font-style: italic; vertical-align: bottom; }
th, td { padding: .22rem 0 .22rem .9rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { padding-left: 0; text-align: left; white-space: normal; overflow-wrap: anywhere;
  min-width: 8.5rem; }
td { vertical-align: baseline; }
.group th { padding-top: .7rem; font-weight: 600; font-style: normal; }
.full td { font-style: italic; border-bottom: 1px dotted #888; }
footer { margin-top: 2.5rem; font-size: .86rem; font-style: italic; color: var(--faint); }
@media (max-width: 30rem) { body { margin-top: 1.5rem; padding: 0 .8rem; font-size: 16px; }
  dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: .5rem; } table { font-size: .8rem; }
  th, td { padding-left: .55rem; } th:first-child, td:first-child { min-width: 5.5rem; } }
@media print { body { max-width: none; margin: 0; padding: 0; font-size: 10.5pt; }
  figure, tr { break-inside: avoid; } .wide { overflow: visible; } }
"""


NONE: Final = "\N{EN DASH}"
MODES: Final = {
    False: (
        "Question-blind",
        "The text was read and compressed before the question came, as where one text serves many questions.",
    ),
    True: (
        "Question-aware",
        "The question was in view while the text was compressed. That is easier, and not to be compared with "
        "question-blind rows.",
    ),
}
COLUMNS: Final = {
    "policy": "What chose the tokens that stay. How evicted tokens were merged, positions and store are named after it "
    "where they are not none, original and plain. “Full cache” evicts nothing: what the others are held against.",
    "budget": "As it was asked for: tokens that a layer keeps (64), or the text's tokens divided (4x), or all.",
    "slots": "Tokens that a layer held when the question was answered, on average.",
    "bytes": "Bytes allocated, in percent of those that the keys and values of the whole text take; the full cache "
    "counts as 100, whatever room it keeps free.",
    "texts": "Independent texts. Turns on one text are not independent: they count as one, with their mean.",
    "score": "Mean score in percent; 100: everything that was asked for is in the answer.",
    "95 %": "Wilson's interval for that mean, by the number of texts. Where scores lie between 0 and 1 it is wider "
    "than it need be, not narrower, because right-or-wrong scores vary most. It is about one row: rows were asked the "
    "same questions, so that a difference between two rows is often surer than their intervals look.",
    "of full": "Score in percent of the full cache's score on that length.",
    "nll": "Mean negative log-likelihood, in nats per token, lower is better; ± is one standard error over texts, and "
    "“over full” the difference to the full cache. “exp” is the perplexity.",
    "KL": "Mean divergence of the next-token distribution from the full cache's, in nats per token, where that was "
    "measured.",
}


@dataclass(frozen=True)
class Picture:
    """A figure: its file's name, the file, the same as an element of the page, and what it shows."""

    name: str
    png: bytes
    svg: str
    caption: str


@dataclass(frozen=True)
class TaskPart:
    """All that the page shows of one task, in one mode."""

    task: str
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


@dataclass(frozen=True)
class TableRow:
    """A row of a table: whether it is what others are compared with, and what is told when somebody points at it."""

    cells: Sequence[str]
    is_full: bool = False
    told: str = ""


def page(results: LoadedResults, told: str, modes: Sequence[ModePart], files: Sequence[str], folder: str) -> str:
    """The whole HTML text. `told` is the verdict, `files` are the results' names, `folder` is where figures lie."""
    model = escape(results.headers[0].name)
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            '<meta name="color-scheme" content="light dark">',
            f"<title>{model}: windlass report</title>\n<style>\n{CSS}</style>\n</head>\n<body>\n<header>",
            f"<h1>{model}</h1>\n<p>How much of the model is left, per byte of cache.</p>",
            f'<p class="verdict">{escape(told)}</p>' if told else "",
            _facts(results, files),
            *(f'<p class="note">Note: {escape(note)}</p>' for note in results.notes),
            _contents(modes),
            "</header>",
            *(_mode(mode) for mode in modes),
            '<section id="columns">\n<h2>What the columns mean</h2>',
            _definitions(COLUMNS.items()),
            f"</section>\n{_footer(modes, folder)}</body>\n</html>\n",
        ]
    )


def _footer(modes: Sequence[ModePart], folder: str) -> str:
    has_figures = any(task.pictures for mode in modes for task in mode.tasks)
    return f"<footer>The figures are PNG files too, in {escape(folder)}.</footer>\n" if has_figures else ""


def _facts(results: LoadedResults, files: Sequence[str]) -> str:
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
    return _definitions(facts.items())


def _versions(header: Header) -> str:
    return f"windlass {header.windlass}, torch {header.torch}, transformers {header.transformers}"


def _distinct(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))


def _in_millions(count: int) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 1e9 else f"{count / 1e6:.2f} million"


def _definitions(items: Iterable[tuple[str, str]]) -> str:
    return "<dl>\n" + "\n".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in items) + "\n</dl>"


def _contents(modes: Sequence[ModePart]) -> str:
    lines = []
    for mode in modes:
        links = ", ".join(
            f'<a href="#{_anchor(mode, task)}">{escape(without_folders(task.task))}</a>' for task in mode.tasks
        )
        lines.append(f"<p>{MODES[mode.is_aware][0]}: {links}.</p>")
    return "<nav>\n" + "\n".join(lines) + '\n<p><a href="#columns">What the columns mean</a>.</p>\n</nav>'


def _anchor(mode: ModePart, task: TaskPart) -> str:
    return f"{'aware' if mode.is_aware else 'blind'}-{mode.tasks.index(task) + 1}"


def _mode(mode: ModePart) -> str:
    name, told = MODES[mode.is_aware]
    parts = [f"<section>\n<h2>{name}</h2>\n<p>{told}</p>"]
    parts.append(_overview(mode))
    for task in mode.tasks:
        parts.append(f'<section id="{_anchor(mode, task)}">\n<h3>{escape(without_folders(task.task))}</h3>')
        parts += [_figures(task.pictures)] if task.pictures else []
        parts += [_score_table(task.scores)] if task.scores else []
        parts += [_turn_table(task.turns)] if task.turns else []
        parts += [_loss_table(task.losses)] if task.losses else []
        parts.append("</section>")
    return "\n".join([*(part for part in parts if part), "</section>"])


def without_folders(label: str) -> str:
    """A task's label without the folders of a file in it: `"perplexity(text.txt)"`, `"task.py:Mine"`."""
    return re.sub(r"^(\w+\()?[^()]*/(?=[^/()]+(?:\)|\.py:\w+)$)", lambda found: found[1] or "", label)


def _figures(pictures: Sequence[Picture]) -> str:
    """Beside each other where there is room."""
    shown = [
        f"<figure>\n{picture.svg}\n<figcaption>{escape(picture.caption)}</figcaption>\n</figure>"
        for picture in pictures
    ]
    return "\n".join(['<div class="plots">', *shown, "</div>"])


def _overview(mode: ModePart) -> str:
    """Every setting's score on every task; empty where the tables below say no less."""
    scored = [task for task in mode.tasks if task.scores]
    if sum(len(task.scores) for task in scored) < 2:
        return ""
    means = [over_lengths(task.scores) for task in scored]
    rows = []
    for label, asked in mode.settings:
        values = [of_task.get((label, asked)) for of_task in means]
        if any(value is not None for value in values):
            cells = [label, asked, *(NONE if each is None else _percent(each) for each in values)]
            rows.append(TableRow(cells, label == FULL))
    heads = ["policy", "budget", *(without_folders(task.task) for task in scored)]
    told = (
        "Mean scores in percent, each length of a task weighing the same; "
        f"{NONE}: not run, or not on all of the task's lengths."
    )
    return _table(told, heads, [("", rows)])


def _score_table(blocks: Sequence[Block]) -> str:
    heads = ["policy", "budget", "slots", "bytes, %", "texts", "score, %", "95 %", "of full, %"]
    bodies = []
    for block in blocks:
        full = next((row.value for row in block.rows if row.is_full), 0.0)
        rows = [
            TableRow(
                [*_shared(row), _percent(row.value), _interval(row), _percent(row.value / full) if full else NONE],
                row.is_full,
                row.told,
            )
            for row in block.rows
        ]
        bodies.append((f"{block.length:,} tokens", rows))
    return _table("Scores.", heads, bodies)


def _turn_table(turns: Sequence[TurnRows]) -> str:
    heads = ["policy", "budget", *(f"turn {turn + 1}" for turn in range(len(turns[0].rows)))]
    bodies = []
    for length in dict.fromkeys(each.length for each in turns):
        rows = [
            TableRow(
                [
                    each.label,
                    each.asked,
                    *(NONE if row is None else f"{_percent(row.value)} ({_interval(row)})" for row in each.rows),
                ],
                each.label == FULL,
            )
            for each in turns
            if each.length == length
        ]
        bodies.append((f"{length:,} tokens", rows))
    return _table("Scores in percent, question by question on the same text, with their 95 % intervals.", heads, bodies)


def _loss_table(blocks: Sequence[Block]) -> str:
    heads = ["policy", "budget", "slots", "bytes, %", "texts", "nll", "±", "over full", "exp", "KL"]
    bodies = []
    for block in blocks:
        full = next((row.value for row in block.rows if row.is_full), None)
        rows = []
        for row in block.rows:
            error = NONE if row.high is None else f"{row.high - row.value:.4f}"
            over = NONE if full is None else f"{row.value - full:+.4f}".replace("-", "\N{MINUS SIGN}")
            numbers = [f"{row.value:.4f}", error, over, _perplexity(row.value), _divergence(row)]
            rows.append(TableRow([*_shared(row), *numbers], row.is_full, row.told))
        bodies.append((f"{block.length:,} tokens", rows))
    return _table("Negative log-likelihood, lower is better.", heads, bodies)


def _shared(row: SettingRow) -> list[str]:
    """The cells that tables of scores and of losses begin with."""
    return [row.label, row.asked, f"{row.slots:,.0f}", _percent(row.share), f"{row.count:,}"]


def _percent(share: float) -> str:
    return f"{share * 100:.1f}"


def _interval(row: SettingRow) -> str:
    return NONE if row.low is None or row.high is None else f"{_percent(row.low)} to {_percent(row.high)}"


def _perplexity(nll: float) -> str:
    return f"{math.exp(nll):,.2f}" if nll < 20 else f"{math.exp(min(nll, 700.0)):.1e}"


def _divergence(row: SettingRow) -> str:
    if row.kl is None:
        return NONE
    return f"{row.kl:.4f}" + (f" ({row.kl_count} of {row.count})" if row.kl_count < row.count else "")


def _table(told: str, heads: Sequence[str], bodies: Sequence[tuple[str, Sequence[TableRow]]]) -> str:
    """A table; each body has a name. Escapes every text."""
    lines = [f'<div class="wide">\n<table>\n<caption>{escape(told)}</caption>', f"<thead>{_cells('th', heads)}</thead>"]
    for name, rows in bodies:
        lines.append("<tbody>")
        if name:
            lines.append(f'<tr class="group"><th colspan="{len(heads)}" scope="rowgroup">{escape(name)}</th></tr>')
        lines += [_cells("td", row.cells, "full" if row.is_full else "", row.told) for row in rows]
        lines.append("</tbody>")
    return "\n".join([*lines, "</table>\n</div>"])


def _cells(tag: str, texts: Sequence[str], kind: str = "", told: str = "") -> str:
    # A policy with many numbers may go on in a second line where they begin.
    cells = "".join(f"<{tag}>{escape(text).replace('(', '(<wbr>')}</{tag}>" for text in texts)
    attributes = (f' class="{kind}"' if kind else "") + (f' title="{escape(told)}"' if told else "")
    return f"<tr{attributes}>{cells}</tr>"


TEXT, NUMBER = "---", "---:"  # what a column's rule says: numbers align at the right


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
    """What a report came to: `folder` holds `figures` PNG files, and is not there without any."""

    page: Path
    folder: Path
    cases: int
    figures: int
    notes: tuple[str, ...]


def write_report(files: Sequence[Path], output: Path) -> ReportFiles:
    """Write the page to `output`, and its figures into a folder beside it, `report_files` for `report.html`.

    Files of the same names are replaced; the page holds its figures itself and does not need the folder.

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
        raise UsageError(f"output {output} cannot be written: {error.strerror}; nothing was") from None
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
    """One task in one mode; the names of its figures are added to `taken`."""
    try:
        from windlass.evals.report import plots
    except ImportError as error:
        raise UsageError(
            f"a report is drawn with matplotlib, which cannot be imported ({error}); "
            "install it: pip install 'matplotlib>=3.9,<4', or '.[report]' in the folder that windlass came from"
        ) from None

    scores, losses = summaries.score_blocks(cases), summaries.loss_blocks(cases)
    maps = summaries.depth_maps(cases)
    mode = MODES[cases[0].is_aware][0].lower()
    drawn: list[tuple[str, str, list[Figure]]] = [
        (
            "score",
            "score against bytes held; upright strokes are 95 % intervals",
            plots.curves(scores, labels, plots.SCORE),
        ),
        (
            "depth",
            "score in percent by the needle's depth and the text's length; dark is lost, hatched was not run",
            [] if maps is None else plots.heat_maps(maps),
        ),
        (
            "nll",
            "negative log-likelihood against bytes held, lower is better; upright strokes are one standard error",
            plots.curves(losses, labels, plots.LOSS),
        ),
    ]
    pictures = []
    for kind, caption, figures in drawn:
        for number, figure in enumerate(figures, 1):
            place = f", {number} of {len(figures)}" if len(figures) > 1 else ""
            shown = without_folders(task)
            name = _file_name(f"{mode.removeprefix('question-')}-{shown}-{kind}", taken)
            told = f"{shown}, {mode}{place}: {caption}."
            pictures.append(Picture(name, plots.png(figure), plots.svg(figure, name), told))
    return TaskPart(task, scores, summaries.turns(cases), losses, tuple(pictures))


def _file_name(name: str, taken: set[str]) -> str:
    """A name that every system takes, and that no other figure has; it is added to `taken`."""
    stem = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:80]
    number = 1
    while (found := f"{stem}-{number}.png" if number > 1 else f"{stem}.png") in taken:
        number += 1
    taken.add(found)
    return found
