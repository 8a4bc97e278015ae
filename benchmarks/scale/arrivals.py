"""When requests come and how long they are: by the statistics of public traces.

    PYTHONPATH=benchmarks python -m scale.arrivals azure_conv TRACE.csv >> benchmarks/results/arrivals.jsonl

The traces are AzureLLMInferenceTrace_conv.csv and _code.csv of 2023 in github.com/Azure/AzurePublicDataset (CC-BY),
which Patel et al. 2024 describe ("Splitwise: efficient generative LLM inference using phase splitting"). Of them the
results file holds rates, quantiles, and how much the time between two requests varies. Requests are drawn from these,
with times between them from a gamma distribution.
"""

import csv
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parents[1] / "results"
PARTS = 100  # quantiles of lengths


@dataclass(frozen=True)
class Arrival:
    """A request: seconds after the start, tokens to read, tokens to write."""

    at: float
    prompt: int
    written: int


@dataclass(frozen=True)
class Pattern:
    """Lengths by their quantiles, and `cv`: the standard deviation of the times between requests over their mean."""

    name: str
    cv: float
    prompt: Sequence[float]
    written: Sequence[float]
    rate: float

    def draw(self, count: int, rate: float, seed: int, shrink: float = 1.0, cv: float | None = None) -> list[Arrival]:
        """So many requests, `rate` a second on average, of lengths divided by `shrink`; `cv` 1 is a Poisson process."""
        random = np.random.default_rng(seed)
        shape = (self.cv if cv is None else cv) ** -2
        times = np.cumsum(random.gamma(shape, 1 / (rate * shape), count))
        at = np.linspace(0, 1, PARTS + 1)
        lengths = [np.interp(random.random(count), at, each) / shrink for each in (self.prompt, self.written)]
        whole = [np.maximum(1, np.rint(each)).astype(int).tolist() for each in lengths]
        return [Arrival(*each) for each in zip(times.tolist(), *whole, strict=True)]


def lines(name: str) -> list[dict[str, Any]]:
    """Of a file of results."""
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def patterns() -> dict[str, Pattern]:
    """Those of the results file, by name."""
    return {
        line["name"]: Pattern(line["name"], line["cv"], line["prompt"], line["written"], line["rate"])
        for line in lines("arrivals.jsonl")
    }


def statistics(name: str, path: Path) -> dict[str, Any]:
    """The line of a trace: a CSV with TIMESTAMP, ContextTokens and GeneratedTokens."""
    with path.open() as file:
        rows = list(csv.DictReader(file))
    times = np.array([datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp() for row in rows])
    between = np.diff(times)
    at = np.linspace(0, 1, PARTS + 1)
    lengths = {
        key: [round(float(each), 1) for each in np.quantile([int(row[column]) for row in rows], at)]
        for key, column in (("prompt", "ContextTokens"), ("written", "GeneratedTokens"))
    }
    means = {
        f"mean_{key}": float(np.mean([int(row[column]) for row in rows]))
        for key, column in (("prompt", "ContextTokens"), ("written", "GeneratedTokens"))
    }
    rate, cv = len(rows) / float(times[-1] - times[0]), float(between.std() / between.mean())
    return {"kind": "arrivals", "name": name, "requests": len(rows), "rate": rate, "cv": cv, **means, **lengths}


if __name__ == "__main__":
    print(json.dumps(statistics(sys.argv[1], Path(sys.argv[2]))))
