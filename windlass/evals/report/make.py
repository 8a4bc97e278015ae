"""From results files to a page and its figures."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from windlass.core.errors import UsageError
from windlass.core.files import check_writable, replacing, replacing_folder
from windlass.evals.case import Case
from windlass.evals.report import summaries
from windlass.evals.report.page import MODES, ModePart, Picture, TaskPart, page, without_folders
from windlass.evals.report.read import read_results
from windlass.evals.report.verdict import verdict

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIXES: Final = (".html", ".htm")


@dataclass(frozen=True)
class Written:
    """What a report came to: `folder` holds `figures` PNG files, and is not there without any."""

    page: Path
    folder: Path
    cases: int
    figures: int
    notes: tuple[str, ...]


def write_report(files: Sequence[Path], output: Path) -> Written:
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
    return Written(output, folder, len(results.cases), len(pictures), results.notes)


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
