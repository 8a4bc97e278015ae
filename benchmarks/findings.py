"""The page `docs/findings.md`, out of the samples in `benchmarks/results` and the words in `benchmarks/findings.md`.

    python benchmarks/findings.py > docs/findings.md

A line `<!-- table: NAME -->` of the words is replaced by that table, so that every number in it was measured.
"""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
WORDS = HERE / "findings.md"
Line = dict[str, Any]
SETTINGS = ("model", "task", "length", "policy", "budget", "merge", "positions", "store", "storage", "is_aware")


def main() -> None:
    """Print the page."""
    words = WORDS.read_text()
    print(re.sub(r"<!-- table: (\w+) -->", lambda found: TABLES[found[1]](), words), end="")


def lines_of(name: str) -> list[Line]:
    """The lines of a file of results."""
    return [json.loads(line) for line in (HERE / "results" / f"{name}.jsonl").read_text().splitlines()]


def scored(line: Line) -> str:
    """A mean score in per cent with its 95 % interval."""
    low, high = line["interval"]
    return f"{100 * line['score']:.1f} [{100 * low:.0f}, {100 * high:.0f}]"


def pivot(lines: Sequence[Line], rows: Sequence[str], column: str, columns: Sequence[object] | None = None) -> str:
    """Scores by the fields `rows` down and `column` across, in the order of the lines; of one value none is shown."""
    columns = list(dict.fromkeys(line[column] for line in lines)) if columns is None else columns
    told = [name for name in rows if len({line[name] for line in lines}) > 1]
    cells: dict[tuple[object, ...], dict[object, str]] = {}
    for line in lines:
        cells.setdefault(tuple(line[name] for name in told), {})[line[column]] = scored(line)
    body = [[*map(_shown, key), *(found.get(each, "") for each in columns)] for key, found in cells.items()]
    return table([*told, *map(_shown, columns)], body, len(told))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """Markdown; the first `left` columns are text, the others numbers."""
    line = ["---"] * left + ["---:"] * (len(heads) - left)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, line, *rows))


def of_full(name: str, **wanted: object) -> Callable[[], str]:
    """Scores of all policies at each budget, and in brackets the share of the full cache's."""

    def make() -> str:
        lines = chosen(name, **wanted)
        full = {(line["task"], line["length"]): line["score"] for line in lines if line["budget"] == "all"}
        found: dict[tuple[str, str], dict[str, str]] = {}
        for line in lines:
            label = "full cache" if line["budget"] == "all" else _shown(line["policy"])
            share = line["score"] / full[line["task"], line["length"]]
            cell = scored(line) + ("" if line["budget"] == "all" else f" {share:.0%}")
            found.setdefault((line["task"], label), {})[line["budget"]] = cell
        budgets = [each for each in dict.fromkeys(line["budget"] for line in lines) if each != "all"]
        rows = [[*key, *(cells.get(each, cells.get("all", "")) for each in budgets)] for key, cells in found.items()]
        return table(["task", "policy", *budgets], rows, 2)

    return make


def chosen(name: str, **wanted: object) -> list[Line]:
    """The lines that have all these values; a list or tuple allows any of its own."""
    return [
        line
        for line in lines_of(name)
        if all(
            line[field] in value if isinstance(value, list | tuple) else line[field] == value
            for field, value in wanted.items()
        )
    ]


def _shown(value: object) -> str:
    text = str(value).removesuffix("()")
    return text.replace("keep_prompt=True, seed=0", "")


TABLES: dict[str, Callable[[], str]] = {}

if __name__ == "__main__":
    main()
