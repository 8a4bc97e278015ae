"""The samples in `benchmarks/results`, and the tables that are made of them by row and column."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from windlass.evals.report.page import table

HERE = Path(__file__).parent
Line = dict[str, Any]


def lines_of(name: str) -> list[Line]:
    """The lines of a file of results."""
    return [json.loads(line) for line in (HERE / "results" / f"{name}.jsonl").read_text().splitlines()]


def scored(line: Line) -> str:
    """A mean score in per cent with its 95 % interval."""
    low, high = line["interval"]
    return f"{100 * line['score']:.1f} [{abs(100 * low):.0f}, {100 * high:.0f}]"  # no -0


def pivot(lines: Sequence[Line], rows: Sequence[str], column: str) -> str:
    """Scores by the fields `rows` down and `column` across, in the order of the lines; of one value none is shown."""
    columns = sorted({line[column] for line in lines}, key=_order) if column == "budget" else None
    columns = columns or list(dict.fromkeys(line[column] for line in lines))
    told = [name for name in rows if len({line[name] for line in lines}) > 1]
    cells: dict[tuple[object, ...], dict[object, str]] = {}
    for line in lines:
        cells.setdefault(tuple(line[name] for name in told), {})[line[column]] = scored(line)
    body = [[*map(shown, key), *(found.get(each, "") for each in columns)] for key, found in cells.items()]
    return table([*told, *map(shown, columns)], body, len(told))


def of_full(name: str, **wanted: object) -> Callable[[], str]:
    """Scores of all policies at each budget, and in brackets the share of the full cache's."""

    def make() -> str:
        lines = chosen(name, **wanted)
        full = {(line["task"], line["length"]): line["score"] for line in lines if line["budget"] == "all"}
        found: dict[tuple[str, str], dict[str, str]] = {}
        for line in lines:
            label = "full cache" if line["budget"] == "all" else shown(line["policy"])
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


def _order(budget: str) -> float:
    return float(budget.removesuffix("x")) if budget.endswith("x") else 0.0


def shown(value: object) -> str:
    text = str(value).removesuffix("()")
    return text.replace("keep_prompt=True, seed=0", "")


def counted(**wanted: object) -> Callable[[], str]:
    """Pass keys found by `benchmarks/merging.py`, rules across, in per cent."""

    def make() -> str:
        lines = [
            {**line, "score": line["found"] / line["samples"], "slots": line["budget"] or "all"}
            for line in chosen("merging", **wanted)
        ]
        return pivot(lines, ("policy", "tokens", "slots"), "merge")

    return make


def scores(rows: Sequence[str], column: str, **wanted: object) -> Callable[[], str]:
    """A pivot of `results/worth.jsonl`: mean scores of tasks, as `windlass eval` measures them."""
    return lambda: pivot(chosen("worth", **wanted), rows, column)
