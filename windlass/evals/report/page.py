"""The page: one HTML file with its figures inside, no script, nothing fetched."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from windlass.evals.case import FULL, Header
from windlass.evals.report.read import LoadedResults
from windlass.evals.report.style import CSS
from windlass.evals.report.summaries import Block, SettingRow, TurnRows, over_lengths

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
class Row:
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
            rows.append(Row(cells, label == FULL))
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
            Row(
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
            Row(
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
            rows.append(Row([*_shared(row), *numbers], row.is_full, row.told))
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


def _table(told: str, heads: Sequence[str], bodies: Sequence[tuple[str, Sequence[Row]]]) -> str:
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
