"""The page: its words, its independence of other files, and the command's messages."""

import errno
import re
import struct
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.helpers import cli, results
from tests.helpers.results import HEADER, Line, case, full, write
from windlass.core.errors import UsageError
from windlass.evals.report import plots
from windlass.evals.report.page import write_report

run, file = cli.run, results.file  # fixtures
NASTY = '<script>alert(1)</script> & "it\'s"'


class Page(HTMLParser):
    """The page as a browser reads it: texts by section, rows of cells, and fetched addresses."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.words: list[str] = []
        self.titles: list[str] = []
        self.rows: list[list[str]] = []
        self._open: list[str] = []
        self.feed(text)
        assert self._open == [], "every element is closed"

    @property
    def text(self) -> str:
        return " ".join(self.words)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [value or "" for name, value in attributes if name in ("src", "href", "data", "srcset")]
        self.titles += [value or "" for name, value in attributes if name == "title"]
        if tag not in ("meta", "img", "wbr"):
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] in ("td", "th"):
            self.rows[-1][-1] += data
        if self._open[-2:] == ["g", "title"]:
            self.titles.append(data)
        self.words.append(data.strip())


@pytest.fixture
def page(file: Path) -> Callable[..., Page]:
    """The page of some lines."""

    def make(*lines: Line) -> Page:
        output = file.with_name("report.html")
        write_report([write(file, *lines)], output)
        return Page(output.read_text())

    return make


def test_the_head_tells_what_was_run(page: Callable[..., Page]):
    found = page(case(), full(), case()).text
    for told in (
        "finder-3m in float32: 3.54 million parameters, trained on 512 tokens",
        "2, from the file results.jsonl",
        "2026-11-21T10:00:00+00:00",
        "windlass 0.1.0, torch 2.13.0, transformers 5.10.1",
        "Note: 1 case is there more than once",
        "Wilson's interval",
        "The figures are PNG files too, in report_files/.",
    ):
        assert told in found


def test_score_tables(page: Callable[..., Page]):
    lines = [case(sample=sample, score=float(sample > 1)) for sample in range(10)]
    found = page(*lines, full(score=1.0), case(length=1500, score=0.0))
    assert ["policy", "budget", "slots", "bytes, %", "texts", "score, %", "95 %", "of full, %"] in found.rows
    assert ["key_diff", "2x", "250", "50.0", "10", "80.0", "49.0 to 94.3", "80.0"] in found.rows
    assert ["full cache", "all", "500", "100.0", "1", "100.0", "20.7 to 100.0", "100.0"] in found.rows
    assert ["1,500 tokens"] in found.rows
    # There is no full cache at that length. The setting loses, and is listed.
    assert ["key_diff", "2x", "250", "50.0", "1", "0.0", "0.0 to 79.3", "\N{EN DASH}"] in found.rows
    # The overview: both lengths weigh the same.
    assert ["key_diff", "2x", "40.0"] in found.rows
    assert ["full cache", "all", "\N{EN DASH}"] not in found.rows


def test_turn_and_loss_tables(page: Callable[..., Page]):
    lines = [case(task="multiturn", turn=turn, score=float(turn == 0)) for turn in (0, 1)]
    lines += [case(task="text", score=None, measures={"nll": 2.0, "kl": 0.25}, sample=1)]
    lines += [case(task="text", score=None, measures={"nll": 3.0}, sample=2)]
    lines += [full(task="text", score=None, measures={"nll": 2.75, "kl": 0.0})]
    found = page(*lines)
    assert ["policy", "budget", "turn 1", "turn 2"] in found.rows
    assert ["key_diff", "2x", "100.0 (20.7 to 100.0)", "0.0 (0.0 to 79.3)"] in found.rows
    assert [
        "full cache",
        "all",
        "500",
        "100.0",
        "1",
        "2.7500",
        "\N{EN DASH}",
        "+0.0000",
        "15.64",
        "0.0000",
    ] in found.rows
    losing = [
        "key_diff",
        "2x",
        "250",
        "50.0",
        "2",
        "2.5000",
        "0.5000",
        "\N{MINUS SIGN}0.2500",
        "12.18",
        "0.2500 (1 of 2)",
    ]
    assert losing in found.rows


def test_blind_and_aware_are_apart(page: Callable[..., Page]):
    found = page(case(score=0.25), case(is_aware=True, score=0.75, sample=1), case(is_aware=True, score=0.75, sample=2))
    values = [row[5] for row in found.rows if row[0] == "key_diff"]
    assert values == ["25.0", "75.0"]
    text = found.text
    assert text.index("Question-blind ") < text.index(" 25.0 ") < text.index(" Question-aware ") < text.index(" 75.0 ")


def test_a_mode_without_cases_is_not_there(page: Callable[..., Page]):
    found = page(case(is_aware=True)).text
    assert "Question-aware" in found
    assert "Question-blind" not in found.partition("What the columns mean")[0]


def test_the_page_begins_with_the_verdict(page: Callable[..., Page]):
    found = page(*(case(sample=sample) for sample in range(8)), *(full(sample=sample) for sample in range(8)))
    told = "key_diff at 2x keeps 100 % of the score in 50 % of the bytes (8 texts, 95 % interval "
    assert f"{told}of the score 68 to 100 %)." in found.words


def test_no_path_of_the_machine_is_on_the_page(file: Path):
    """Old files have the typed path."""
    labels = ("perplexity(/home/jo/a text.txt)", "/home/jo/task.py:Mine")
    lines = [case(task=label, depth=0.5) for label in labels]
    data = write(file, HEADER | {"model": "/home/jo/models/finder-3m", "fingerprint": None}, *lines)
    data.write_text("\n".join(data.read_text().splitlines()[1:]) + '\n{"cut')
    text = write_report([data], file.with_name("a.html")).page.read_text()
    assert "jo" not in text.replace("stroke-linejoin", "")
    assert str(file.parent) not in text
    for shown in ("<h1>finder-3m</h1>", "perplexity(a text.txt)", "task.py:Mine"):
        assert shown in text


def test_results_without_figures(file: Path):
    written = write_report([write(file, full())], file.with_name("page.htm"))
    assert (written.figures, written.cases) == (0, 1)
    assert not written.folder.exists()
    assert "PNG" not in Page(written.page.read_text()).text


def test_names_are_shown_as_they_are(page: Callable[..., Page], file: Path):
    found = page(case(task=NASTY, policy=f"{NASTY}()", asked_budget="<2x>", depth=0.5))
    assert "script" not in found.tags
    assert found.text.count(NASTY) >= 3
    assert [NASTY, "<2x>"] in [row[:2] for row in found.rows]
    folder = file.with_name("report_files")
    assert sorted(path.name for path in folder.iterdir()) == [
        "blind-script-alert-1-script-it-s-depth.png",
        "blind-script-alert-1-script-it-s-score.png",
    ]


@pytest.mark.parametrize("name", ["_hidden", "$x_{$", "50$", "數字", "a\nb", "x" * 300])
def test_figures_take_any_name(file: Path, name: str):
    """Whatever matplotlib thinks of it. Warnings are errors here."""
    assert write_report([write(file, case(policy=name, task=name, depth=0.5))], file.with_name("a.html")).figures == 2


def test_figures_have_files_of_their_own(file: Path):
    tasks = ("a/b", "a b", "A-B", "數")
    written = write_report([write(file, *(case(task=task) for task in tasks))], file.with_name("a.html"))
    assert len(list(written.folder.iterdir())) == written.figures == 4


def test_the_page_needs_nothing_else(page: Callable[..., Page], file: Path):
    found = page(case(depth=0.5), full(depth=0.5), case(task="b", score=None, measures={"nll": 1.0}))
    assert [each for each in found.fetched if not each.startswith("#")] == []
    outside = [path.read_bytes() for path in file.with_name("report_files").iterdir()]
    assert len(outside) == found.tags.count("svg") == 3
    for picture in outside:
        assert picture.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", picture[16:24])
        assert width == round(plots.WIDTH * plots.DPI)
        assert 150 < height < width
    assert not {"script", "link", "img", "iframe"} & set(found.tags)


def test_points_and_rows_tell_exact_numbers(page: Callable[..., Page]):
    found = page(*(case(sample=sample, score=float(sample > 1)) for sample in range(10)), full(depth=0.5))
    told = "key_diff at 2x: 0.8000, from 0.4902 to 0.9433; 10 texts; 50.00 % of the bytes, 250.0 slots"
    assert found.titles.count(told) == 2  # of the row, and of the point
    assert "full cache at all, depth 50%, 500 tokens: score 100.00 %" in found.titles


def test_figures_follow_the_colours_of_the_page(page: Callable[..., Page], file: Path):
    page(case(), full())
    text = file.with_name("report.html").read_text()
    assert "@media (prefers-color-scheme: dark)" in text
    drawn = text[text.index("<svg") : text.index("</svg>")]
    assert "var(--plot-0)" in drawn
    assert not set(re.findall("#[0-9a-f]{6}", drawn)) & {*plots.COLOURS, plots.INK, plots.RULE}
    used = set(re.findall(r"var\((--[\w-]+)\)", text))
    assert all(text.count(f"{name}: #") == 2 for name in used)  # in light and in dark


def test_a_full_disk_leaves_nothing(file: Path, monkeypatch: pytest.MonkeyPatch):
    before = {path.name for path in file.parent.iterdir()}
    written: list[Path] = []

    def write_bytes(path: Path, _data: bytes) -> int:
        written.append(path)
        if len(written) == 2:
            path.write_text("half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return path.write_text("whole")

    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(UsageError, match=r"a\.html cannot be written: No space left on device"):
        write_report([write(file, case(depth=0.5), full(depth=0.5))], file.with_name("a.html"))
    assert {path.name for path in file.parent.iterdir()} - before == {file.name}


def test_an_interrupt_leaves_an_older_report(file: Path, monkeypatch: pytest.MonkeyPatch):
    output = file.with_name("a.html")
    write_report([write(file, case())], output)
    before = {path: path.read_bytes() for path in file.parent.rglob("*.*") if path.is_file()}
    monkeypatch.setattr(Path, "write_bytes", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_report([file], output)
    assert {path: path.read_bytes() for path in file.parent.rglob("*.*") if path.is_file()} == before


def test_the_same_results_make_the_same_page(file: Path):
    pages = []
    for name in ("one", "two"):
        file.with_name(name).mkdir()
        pages.append(write_report([write(file, case(), full())], file.with_name(name) / "a.html").page.read_bytes())
    assert pages[0] == pages[1]
