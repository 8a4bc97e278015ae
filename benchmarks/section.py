"""A section of `docs/benchmarks.md`: a table, what it shows, and where it was measured."""

from collections.abc import Sequence
from typing import Any

from windlass.evals.report.page import table

Line = dict[str, Any]


def section(title: str, command: str, text: str, heads: list[str], rows: list[list[str]], about: Line) -> str:
    """`about`: the machine, the versions and the date of the last line."""
    where = (
        f"{about['cpu']}, {about['threads']} threads, torch {about['torch']}, transformers {about['transformers']}, "
    )
    return f"## {title}\n\n{text}\n\n{table(heads, rows)}\n\n`{command}`. {where}{about['date'][:10]}.\n"


def spread(quartiles: Sequence[float]) -> str:
    """A median with its quartiles."""
    low, middle, high = quartiles
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"
