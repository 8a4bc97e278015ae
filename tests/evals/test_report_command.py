"""`windlass report`: its messages, and one line for each error."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import windlass.evals.report
from tests.helpers import cli, results
from tests.helpers.cli import Ran, assert_refused
from tests.helpers.results import case, full, write

run, file = cli.run, results.file  # fixtures


def test_the_command(run: Callable[..., Ran], file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(file.parent)
    ran = run("report", str(write(file, case(), case(), full())))
    assert (ran.code, ran.out) == (0, "report.html: 2 cases, 1 figure, also in report_files\n")
    assert ran.err.startswith("windlass: note: 1 case is there more than once")
    ran = run("report", str(file), str(file), "-o", "other.html")
    assert (ran.code, ran.out) == (0, "other.html: 2 cases, 1 figure, also in other_files\n")


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("results.jsonl", "output {output} must end in .html, so that no results file is written over"),
        ("gone/a.html", "does not exist. Make it first"),
        ("folder.html", "output {output} is a folder. Give the name of a file"),
    ],
)
def test_wrong_outputs_are_one_line(run: Callable[..., Ran], file: Path, output: str, says: str):
    path = file.with_name("folder.html")
    path.mkdir()
    path = file.parent / output
    before = write(file, case()).read_bytes()
    assert_refused(run("report", str(file), "-o", str(path)), says.format(output=path))
    assert file.read_bytes() == before


def test_wrong_results_are_one_line(run: Callable[..., Ran], file: Path):
    assert_refused(run("report"), "Missing argument 'RESULTS...'")
    assert_refused(run("report", str(file)), f"results file {file} cannot be read: No such file")
    assert_refused(run("report", str(write(file))), "there are no cases to report")
    assert not Path("report.html").exists()


def test_without_matplotlib_one_line_says_what_to_install(
    run: Callable[..., Ran], file: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "windlass.evals.report.plots")
    monkeypatch.delattr(windlass.evals.report, "plots")
    output = file.with_name("a.html")
    assert_refused(
        run("report", str(write(file, case())), "-o", str(output)), "pip install 'matplotlib>=3.9,<4', or '.[report]'"
    )
    assert not output.exists()
