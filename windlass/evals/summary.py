"""The table at the end of a run: the mean of every combination, and how sure it is."""

from collections.abc import Sequence
from statistics import fmean

from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from windlass.core.units import in_units
from windlass.evals.case import Case
from windlass.evals.report.summaries import wilson
from windlass.policies.spelling import spelled

ALWAYS = ("task", "policy", "asked_budget")
VARIED = ("length", "merge", "positions", "store", "shares", "recalled", "is_aware")  # shown where they differ


def summary(cases: Sequence[Case]) -> Table:
    """One row per combination, in the order of their first cases."""
    shown = [*ALWAYS, *(name for name in VARIED if len({getattr(case, name) for case in cases}) > 1)]
    groups: dict[tuple[object, ...], list[Case]] = {}
    for case in cases:
        groups.setdefault(tuple(getattr(case, name) for name in (*ALWAYS, *VARIED)), []).append(case)
    has_scores = any(case.score is not None for case in cases)
    has_losses = any(case.nll is not None for case in cases)
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for name in shown:
        table.add_column(name.removeprefix("asked_"), overflow="fold")
    numbers = ["samples", "bytes"]
    numbers += ["score", "95 %"] if has_scores else []
    numbers += ["nll", "kl"] if has_losses else []
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    for group in groups.values():
        held = fmean(case.bytes_held for case in group)
        cells = [str(len({case.sample for case in group})), in_units(round(held))]
        cells += _scores(group) if has_scores else []
        cells += [_mean([case.nll for case in group]), _mean([case.kl for case in group])] if has_losses else []
        table.add_row(*(Text(_label(group[0], name)) for name in shown), *cells)
    return table


def _label(case: Case, name: str) -> str:
    return spelled(case.policy) if name == "policy" else str(getattr(case, name))


def _scores(group: Sequence[Case]) -> list[str]:
    """The mean and its interval; the questions on one text are one sample."""
    texts: dict[int, list[float]] = {}
    for case in group:
        if case.score is not None:
            texts.setdefault(case.sample, []).append(case.score)
    if not texts:
        return ["-", "-"]
    mean = fmean(fmean(scores) for scores in texts.values())
    low, high = wilson(mean, len(texts))
    return [f"{100 * mean:.1f} %", f"{100 * low:.1f} to {100 * high:.1f}"]


def _mean(measured: Sequence[float | None]) -> str:
    known = [number for number in measured if number is not None]
    return f"{fmean(known):.4f}" if known else "-"
