"""The documentation's tables, out of the samples that `run.py` wrote.

    PYTHONPATH=benchmarks python -m peers.tables .venv-peers/samples.jsonl

One section per run: medians, each with Windlass' ratio to it. Rows and columns are
those that were measured; none is left out for its result. A pure function of the lines.
"""

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from windlass.evals.report.markdown import table

OURS = "windlass"
ABSENT = "-"
WEIGHTS = {"auto": "bfloat16", "int8": "weights of 8 bits", "int4": "weights of 4 bits"}


@dataclass
class Run:
    """One run: its first line, its peers in order, and the rates of each test by peer."""

    about: dict[str, Any]
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)
    rates: dict[tuple[str, int, int], dict[str, list[float]]] = field(default_factory=dict)


def tables(lines: Iterable[str]) -> str:
    """Markdown of all runs, in the order in which they were measured.

    Raises: ValueError when a sample comes before a run, or a peer before its description.
    """
    return "\n\n".join(_section(run) for run in _runs(lines) if run.rates) + "\n"


def _runs(lines: Iterable[str]) -> list[Run]:
    """Every run, in the order of the lines."""
    runs: list[Run] = []
    current: Run | None = None
    for line in lines:
        entry: dict[str, Any] = json.loads(line)
        if entry["kind"] == "run":
            current = Run(entry)
            runs.append(current)
        elif current is None:
            raise ValueError(f"the line {line[:80]!r} comes before the run it belongs to")
        elif entry["kind"] == "peer":
            current.peers[entry["peer"]] = entry
        elif entry["peer"] not in current.peers:
            raise ValueError(f"a sample of {entry['peer']!r} comes before the peer's description")
        else:
            test = current.rates.setdefault((entry["test"], entry["tokens"], entry["depth"]), {})
            test.setdefault(entry["peer"], []).append(entry["tokens"] / entry["seconds"])
    return runs


def _section(run: Run) -> str:
    about = run.about
    others = [peer for peer in run.peers if peer != OURS]
    weights = WEIGHTS[about.get("weights", "auto")]
    title = f"### `{about['shape']}`: {about['layers']} layers, {about['params'] / 1e9:.2f}B parameters, {weights}"
    heads = ["test", OURS, *(cell for peer in others for cell in (peer, "ratio"))]
    rows = [[_label(*test), *_cells(run.rates[test], others)] for test in sorted(run.rates)]
    return f"{title}\n\n{table(heads, rows, 1, number='--:')}\n\n{_conditions(run)}"


def _label(test: str, tokens: int, depth: int) -> str:
    """The test as llama-bench names it."""
    return f"{test}{tokens}" + (f" @ d{depth}" if depth else "")


def _cells(rates: dict[str, list[float]], others: list[str]) -> list[str]:
    """A row's medians, each peer's with Windlass' median over it."""
    ours = median(rates[OURS]) if OURS in rates else None
    cells = [ABSENT if ours is None else f"{ours:.2f}"]
    for peer in others:
        if peer not in rates:
            cells += [ABSENT] * 2
            continue
        theirs = median(rates[peer])
        cells += [f"{theirs:.2f}", ABSENT if ours is None else f"{ours / theirs:.2f}"]
    return cells


def _conditions(run: Run) -> str:
    """What a reader needs to judge the numbers."""
    about = run.about
    spread = max((max(each) - min(each)) / median(each) for test in run.rates.values() for each in test.values())
    said = [
        f"- {peer} {entry['version']}: {entry['settings']}, {entry['threads']} "
        f"thread{'' if entry['threads'] == 1 else 's'}"
        for peer, entry in run.peers.items()
    ]
    return "\n".join(
        [
            f"Tokens per second, median of {about['rounds']} rounds that alternate between the peers; ratio: "
            f"{OURS} over the peer, above 1 where {OURS} is faster. `pp` reads a prompt, `tg` decodes, `@ d` behind so "
            f"many tokens. {about['cpu']}, {about['cores']} cores, {about['system']}, Python {about['python']}, "
            f"{about['date']}. Largest range of the samples of one cell, over their median: {spread:.0%}.",
            "",
            *said,
        ]
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("samples", type=Path, nargs="+")
    options = parser.parse_args()
    lines = [line for path in options.samples for line in path.read_text().splitlines()]
    print(tables(lines), end="")


if __name__ == "__main__":
    main()
