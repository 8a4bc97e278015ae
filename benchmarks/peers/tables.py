"""The documentation's tables, out of the samples that `run.py` wrote.

    PYTHONPATH=benchmarks python -m peers.tables .venv-peers/samples.jsonl

One section per model and day: medians, and the ratios of Windlass to each within a round. All measured rows
are shown, good or bad. A pure function of the lines.
"""

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from peers.shape import shape_of

from windlass.evals.report.page import table

OURS = "windlass"
ABSENT = "-"
WEIGHTS = {"auto": "bfloat16", "int8": "weights of 8 bits", "int4": "weights of 4 bits"}
HEADS = ["test", "library", "its tokens/s", "windlass", "windlass / it, quartiles", "rounds", "plain read GB/s"]
HEADS += ["windlass of a plain read"]
Test = tuple[str, int, int]
Rates = dict[tuple[int, int], float]  # by the number of the run and of its round


@dataclass
class Run:
    """The runs of one model on one day: their first line, their peers in order, and what each test measured.

    `rates`: tokens per second by test and peer. `reads`: how fast memory was read in these rounds.
    """

    about: dict[str, Any]
    peers: dict[str, dict[str, Any]] = field(default_factory=dict)
    rates: dict[Test, dict[str, Rates]] = field(default_factory=dict)
    reads: dict[Test, Rates] = field(default_factory=dict)


def tables(lines: Iterable[str]) -> str:
    """Markdown of all runs, in the order in which they were measured.

    Raises: ValueError when a sample comes before a run, or a peer before its description.
    """
    return "\n\n".join(_section(run) for run in runs(lines) if run.rates) + "\n"


def runs(lines: Iterable[str]) -> list[Run]:
    """Every run, in the order of the lines. A repeated measurement is added to the earlier one.

    Raises: ValueError when a sample comes before a run, or a peer before its description.
    """
    found: dict[tuple[Any, ...], Run] = {}
    current: Run | None = None
    number = 0
    for line in lines:
        entry: dict[str, Any] = json.loads(line)
        if entry["kind"] == "run":
            key = tuple(entry.get(name) for name in ("shape", "layers", "weights", "cpu", "date", "threads"))
            current, number = found.setdefault(key, Run(entry)), number + 1
            continue
        if current is None:
            raise ValueError(f"the line {line[:80]!r} comes before the run it belongs to")
        if entry["kind"] == "peer":
            current.peers[entry["peer"]] = entry
            continue
        test = entry["test"], entry["tokens"], entry["depth"]
        if entry["kind"] == "read":
            current.reads.setdefault(test, {})[number, entry["round"]] = entry["gb_per_s"]
        elif entry["peer"] not in current.peers:
            raise ValueError(f"a sample of {entry['peer']!r} comes before the peer's description")
        else:
            by_peer = current.rates.setdefault(test, {})
            by_peer.setdefault(entry["peer"], {})[number, entry["round"]] = entry["tokens"] / entry["seconds"]
    return list(found.values())


def _section(run: Run) -> str:
    about = run.about
    weights = WEIGHTS[about.get("weights", "auto")]
    title = f"### `{about['shape']}`: {about['layers']} layers, {about['params'] / 1e9:.2f}B parameters, {weights}"
    rows = [row for test in sorted(run.rates) for row in _rows(run, test)]
    return f"{title}\n\n{table(HEADS, rows, 2, number='--:')}\n\n{_conditions(run)}"


def _label(test: str, tokens: int, depth: int) -> str:
    """The test as llama-bench names it."""
    return f"{test}{tokens}" + (f" @ d{depth}" if depth else "")


def _rows(run: Run, test: Test) -> list[list[str]]:
    """A row per other peer, of the rounds that it shares with Windlass: medians, and those of the ratios."""
    rates = run.rates[test]
    ours, reads = rates.get(OURS, {}), run.reads.get(test, {})
    rows = []
    for peer in [each for each in run.peers if each != OURS and each in rates] or [ABSENT]:
        theirs = rates.get(peer, ours)
        rounds = sorted(set(ours) & set(theirs)) or sorted(theirs)
        cells = [_label(*test), peer, ABSENT if peer == ABSENT else _middle(theirs, rounds), _middle(ours, rounds)]
        cells += [ABSENT if peer == ABSENT else _ratio(ours, theirs, rounds), str(len(rounds)), _middle(reads, rounds)]
        rows.append([*cells, _ratio(_bytes_read(run, test), reads, rounds)])
    return rows


def _middle(rates: Rates, rounds: Sequence[tuple[int, int]]) -> str:
    """The median of these rounds."""
    return f"{median(rates[each] for each in rounds):.2f}" if set(rounds) <= set(rates) else ABSENT


def _ratio(over: Rates, under: Rates, rounds: Sequence[tuple[int, int]]) -> str:
    """The median of the ratios of these rounds, with quartiles."""
    if len(rounds) < 2 or not set(rounds) <= set(over) & set(under):
        return ABSENT
    low, middle, high = quantiles([over[each] / under[each] for each in rounds], n=4, method="inclusive")
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def _bytes_read(run: Run, test: Test) -> Rates:
    """Gigabytes of weights and cache a second that Windlass read, in decode."""
    name, tokens, depth = test
    if name != "tg":
        return {}
    shape = shape_of(run.about["shape"], run.about["layers"])
    held = shape.token_bytes(depth + tokens // 2, run.about.get("weights", "auto"))
    return {each: held * rate / 1e9 for each, rate in run.rates[test].get(OURS, {}).items()}


def _conditions(run: Run) -> str:
    """The conditions of the measurement."""
    about = run.about
    said = [
        f"- {peer} {entry['version']}: {entry['settings']}, {entry['threads']} "
        f"thread{'' if entry['threads'] == 1 else 's'}"
        for peer, entry in run.peers.items()
    ]
    return "\n".join(
        [
            "Medians of rounds in which the libraries take turns. The ratio is that within a round, above 1 where "
            f"{OURS} is faster. `pp` reads a prompt, `tg` decodes, `@ d` behind so many tokens. A plain read is "
            "PyTorch's sum of a gibibyte of float32, once a round. `of it`: the bytes of weights and cache of a token. "
            f"{about['cpu']}, {about['cores']} cores, {about['system']}, Python {about['python']}, {about['date']}.",
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
