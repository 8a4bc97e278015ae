"""Words and sizes of the house: the rules for docstrings and documents, and the figures that may only get better."""

import re
from pathlib import Path

import pytest

from tests.helpers import house

ROOT = house.ROOT
BANNED = ("What", "That", "Those", "Of", "Likewise", "Whether")
FOLDERS = ("windlass", "tests", "benchmarks")
RESULTS = sorted([*(ROOT / "docs" / "results").glob("*.md"), ROOT / "docs" / "log.md"])
CODE = re.compile(r"`[^`]*`")
MOST_README_WORDS, MOST_WORDS_BEFORE_CODE, MOST_GUIDE_WORDS, MOST_GUIDE_PAGES = 600, 60, 15_000, 10
MOST_BENCHMARK_LINES = 5_000
MOST_WHATS = 2.0  # per 1,000 words of README and guide. Wanted: 1
MOST_WHATS_OF_COMMENTS = 1.0  # per 1,000 words


def banned(text: str) -> bool:
    """Return True if a docstring begins with a word that says nothing."""
    return text.split(maxsplit=1)[0].rstrip(",.:") in BANNED


def semicolons(text: str) -> list[str]:
    """The lines of prose that have a semicolon."""
    return [line for line in text.splitlines() if ";" in line]


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_verb_or_a_noun(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in house.modules(folder)
        for line, text in house.docstrings(path)
        if banned(text)
    ]
    assert found == [], "\n".join(found)


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_have_no_semicolon(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in house.modules(folder)
        for line, text in house.docstrings(path)
        if semicolons(CODE.sub("", text))
    ]
    assert found == [], "\n".join(found)


def test_field_strings_are_plain() -> None:
    """A string under a field begins with a verb or a noun, and has no semicolon."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in house.modules("windlass")
        for line, text in house.field_strings(path)
        if banned(text) or semicolons(CODE.sub("", text))
    ]
    assert found == [], "\n".join(found)


def test_comments_are_plain() -> None:
    texts = {path: [*house.comments(path)] for path in house.commented("windlass")}
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path, own in texts.items()
        for line, text in own
        if semicolons(CODE.sub("", text))
    ]
    assert found == [], "\n".join(found)
    words = " ".join(text for own in texts.values() for _, text in own)
    assert house.per_thousand("what", words) <= MOST_WHATS_OF_COMMENTS


@pytest.mark.parametrize("page", [ROOT / "README.md", *house.GUIDE, *RESULTS], ids=lambda page: page.name)
def test_prose_has_no_semicolon(page: Path) -> None:
    assert semicolons(house.prose(page)) == []


def test_each_wrong_word_is_seen(tmp_path: Path) -> None:
    assert [banned(text) for text in ("What it is.", "Of these, one.", "Those.")] == [True] * 3
    assert [banned(text) for text in ("Whatever it is.", "Offer one.")] == [False] * 2
    page = tmp_path / "page.md"
    page.write_text("# A\n\n```sh\na; b\n```\n\n`c; d` and <!-- e; f --> [g](h;i)\n\n| one; two |\n")
    assert semicolons(house.prose(page)) == ["| one; two |"]
    assert house.before_code("# A\n\none two\n\n```sh\nthree\n```\n") == 2


def test_each_comment_and_field_string_is_read(tmp_path: Path) -> None:
    python, cpp = tmp_path / "a.py", tmp_path / "a.cpp"
    python.write_text(
        '"""D; e."""\nA = 1  # of a; b\n"""What; f."""\n\n\ndef g(a):  # noqa: ARG001  # h `i; j`\n    """D."""\n'
        "    b = a  # type: ignore[x]\n    # C:\n    return '# k; l', b  # fmt: skip\n"
    )
    cpp.write_text('a("http://b; c"); // d; e\nf *= g; // h\n')
    assert [*house.field_strings(python)] == [(3, "What; f.")]
    assert [*house.comments(python)] == [(2, "of a; b"), (6, "h `i; j`"), (9, "C:")]
    assert [*house.comments(cpp)] == [(1, "d; e"), (2, "h")]


def test_documents_are_short() -> None:
    readme = (ROOT / "README.md").read_text()
    assert house.words(readme) <= MOST_README_WORDS
    assert house.before_code(readme) <= MOST_WORDS_BEFORE_CODE
    assert len(house.GUIDE) <= MOST_GUIDE_PAGES
    assert sum(house.words(page.read_text()) for page in house.GUIDE) <= MOST_GUIDE_WORDS
    assert sum(house.lines_of(house.modules("benchmarks"))) <= MOST_BENCHMARK_LINES
    text = " ".join(house.prose(page) for page in [*house.GUIDE, ROOT / "README.md"])
    assert house.per_thousand("what", text) <= MOST_WHATS


def test_the_table_has_every_figure() -> None:
    """After a change of sizes: python docs/generate.py."""
    rows, stored = (
        [line.strip("|").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
        for text in (house.table(), house.PAGE.read_text())
    )
    assert len(rows) == 8
    assert all(re.search(r"\d", cells[-1]) for cells in rows)
    assert [cells[:-1] for cells in rows] == [cells[:-1] for cells in stored]
