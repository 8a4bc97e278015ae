"""Measure the size of code and documents, beside the figures wanted: python -m tests.helpers.house [--write].

`--write` puts the table into docs/results/house.md.
"""

import ast
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median, quantiles

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "results" / "house.md"
PLUGINS = {Path("policies"), Path("evals/tasks")}
GUIDE = sorted({*(ROOT / "docs").glob("*.md")} - {ROOT / "docs" / "api.md", ROOT / "docs" / "log.md"})
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
CODE = re.compile(r"`[^`]*`")
DIRECTIVE = re.compile(r"(noqa|type: ignore|fmt:|pragma:)")
CPP = (".cpp", ".hpp")
CPP_COMMENT = re.compile(r"(?<!:)// ?(.*)")


@dataclass(frozen=True)
class Measure:
    """A row of the table: figures of the review, of the plan, and of this tree."""

    name: str
    before: str
    wanted: str
    reached: str


def modules(folder: str) -> list[Path]:
    """The Python files of a folder."""
    return sorted((ROOT / folder).rglob("*.py"))


def lines_of(paths: list[Path]) -> list[int]:
    """The number of lines of each file."""
    return [len(path.read_text().splitlines()) for path in paths]


@cache
def docstrings(path: Path) -> list[tuple[int, str]]:
    """Line and text of each docstring of a file."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                found.append((getattr(node, "lineno", 1), text))
    return found


def field_strings(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of each string that stands under a field or another statement."""
    for node in ast.walk(ast.parse(path.read_text())):
        body = getattr(node, "body", None)
        for statement in body[1:] if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                text = statement.value.value
                if isinstance(text, str):
                    yield statement.lineno, text


def commented(folder: str) -> list[Path]:
    """The Python and C++ files of a folder."""
    return sorted(path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", *CPP))


def comments(path: Path) -> Iterator[tuple[int, str]]:
    """Line and prose of each comment of a file. Directives of tools are no prose."""
    if path.suffix in CPP:
        for line, text in enumerate(path.read_text().splitlines(), 1):
            if found := CPP_COMMENT.search(text):
                yield line, found[1]
        return
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.COMMENT:
                parts = [part.strip() for part in token.string.split("# ")]
                text = " ".join(part for part in parts if part and not DIRECTIVE.match(part))
                if text:
                    yield token.start[0], text


def prose(page: Path) -> str:
    """The text of a page without code, comments, images' paths and links' targets."""
    text = COMMENT.sub("", FENCE.sub("", page.read_text()))
    return re.sub(r"\]\([^)]*\)", "]", CODE.sub("`code`", text))


def words(text: str) -> int:
    """The number of words of a text."""
    return len(text.split())


def before_code(readme: str) -> int:
    """The number of words before the first code block, without headings."""
    return words(re.sub(r"^#.*$", "", readme.partition("```")[0], flags=re.MULTILINE))


def per_thousand(word: str, text: str) -> float:
    """How often a word comes in a thousand words of a text."""
    return 1000 * len(re.findall(rf"\b{word}\b", text, re.IGNORECASE)) / max(words(text), 1)


def tuples_splatted(tree: ast.Module) -> set[str]:
    """The names and lines of calls that splat a tuple display, or a name that the same function binds to one."""
    found = set()
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.Module)):
        bound = set()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    bound |= set(_bound_to_tuples(target, node.value))
        for call in (node for node in ast.walk(function) if isinstance(node, ast.Call)):
            for argument in call.args:
                value = argument.value if isinstance(argument, ast.Starred) else None
                if isinstance(value, ast.Tuple) or (isinstance(value, ast.Name) and value.id in bound):
                    found.add(f"{call.lineno}: {ast.unparse(value)}")
    return found


def _bound_to_tuples(target: ast.expr, value: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Name) and isinstance(value, ast.Tuple):
        yield target.id
    elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for one, its in zip(target.elts, value.elts, strict=True):
            yield from _bound_to_tuples(one, its)


def splatted() -> list[str]:
    """The calls of the package that splat a tuple built for it, with their files."""
    found = {path: tuples_splatted(ast.parse(path.read_text())) for path in modules("windlass")}
    return sorted(f"{path.relative_to(ROOT)}:{call}" for path in found for call in found[path])


def most_in_a_folder() -> int:
    """The most files of a folder of the package, plug-in folders apart."""
    package = ROOT / "windlass"
    folders = {path.parent for path in modules("windlass")}
    counted = [folder for folder in folders if folder.relative_to(package) not in PLUGINS]
    return max(len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) for folder in counted)


def measures() -> list[Measure]:
    """Every row of the table."""
    package = modules("windlass")
    lines = lines_of(package)
    readme = (ROOT / "README.md").read_text()
    told = " ".join(text for path in package for _, text in docstrings(path))
    documents = " ".join(prose(page) for page in [*GUIDE, ROOT / "README.md"])
    guide = sum(words(page.read_text()) for page in GUIDE)
    sizes = f"{median(lines):.0f}, {quantiles(lines, n=10)[-1]:.0f}, {max(lines):,}"
    what = f"{per_thousand('what', documents):.1f} / {per_thousand('what', told):.1f}"
    bench = sum(lines_of(modules("benchmarks")))
    return [
        Measure("files / lines", "408 / 42.7k", "at most 180 / 34k", f"{len(lines)} / {sum(lines) / 1000:.1f}k"),
        Measure("median, p90, longest file", "90, 211, 300", "180, 450, 700", sizes),
        Measure("most files in a folder (plug-ins apart)", "57", "22", str(most_in_a_folder())),
        Measure("splatted argument tuples", "33", "0", str(len(splatted()))),
        Measure('"what" per 1,000 words, guide / docstrings', "7.1 / 15.6", "1 / 1", what),
        Measure("README, words / before code", "2,316 / 228", "600 / 60", f"{words(readme)} / {before_code(readme)}"),
        Measure("docs outside of results", "63.8k in all", "a guide of 15k", f"{guide / 1000:.1f}k"),
        Measure("benchmark scripts, lines", "11.9k", "5k", f"{bench / 1000:.1f}k"),
    ]


def table() -> str:
    """The page of results."""
    rows = [f"| {each.name} | {each.before} | {each.wanted} | {each.reached} |" for each in measures()]
    heads = ["| | at ae25d70 | wanted | reached |", "|---|---|---|---|"]
    counted = "counted by `python -m tests.helpers.house`"
    intro = f"Python of `windlass/` and documents, {counted}.\n`python docs/generate.py` writes this page."
    return "\n".join(["# The house", "", intro, "", *heads, *rows]) + "\n"


if __name__ == "__main__":
    print(table(), end="")
    if "--write" in sys.argv[1:]:
        PAGE.write_text(table())
