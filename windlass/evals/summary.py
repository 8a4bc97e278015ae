"""The table at the end of a run: the mean of every combination, and how sure it is."""

from collections.abc import Sequence
from statistics import fmean

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from windlass.cache.describe import in_units
from windlass.evals.report.summaries import wilson
from windlass.evals.results import Line

ALWAYS = ("task", "policy", "asked_budget")
VARIED = ("length", "merge", "positions", "store", "is_aware")  # shown where they differ


def summary(lines: Sequence[Line]) -> Table:
    """One row per combination, in the order of their first lines."""
    shown = [*ALWAYS, *(name for name in VARIED if len({line[name] for line in lines}) > 1)]
    groups: dict[tuple[object, ...], list[Line]] = {}
    for line in lines:
        groups.setdefault(tuple(line[name] for name in (*ALWAYS, *VARIED)), []).append(line)
    has_scores = any(line["score"] is not None for line in lines)
    has_losses = any(line["measures"] for line in lines)
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for name in shown:
        table.add_column(name.removeprefix("asked_"), overflow="fold")
    numbers = ["samples", "bytes"]
    numbers += ["score", "95 %"] if has_scores else []
    numbers += ["nll", "kl"] if has_losses else []
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for group in groups.values():
        first = group[0]
        held = fmean(line["bytes_held"] for line in group)
        cells = [str(len({line["sample"] for line in group})), in_units(round(held))]
        cells += _scores(group) if has_scores else []
        cells += [_mean(group, name) for name in ("nll", "kl")] if has_losses else []
        table.add_row(*(Text(str(first[name])) for name in shown), *cells)
    return table


def _scores(group: Sequence[Line]) -> list[str]:
    """The mean and its interval; the questions on one text are one sample."""
    texts: dict[int, list[float]] = {}
    for line in group:
        if line["score"] is not None:
            texts.setdefault(line["sample"], []).append(line["score"])
    if not texts:
        return ["-", "-"]
    mean = fmean(fmean(scores) for scores in texts.values())
    low, high = wilson(mean, len(texts))
    return [f"{100 * mean:.1f} %", f"{100 * low:.1f} to {100 * high:.1f}"]


def _mean(group: Sequence[Line], name: str) -> str:
    measured = [line["measures"].get(name) for line in group]
    known = [number for number in measured if number is not None]
    return f"{fmean(known):.4f}" if known else "-"
