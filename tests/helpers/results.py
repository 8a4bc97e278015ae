"""Lines of a results file, the file, and the cases read from it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from windlass.evals.results import Case, read_results

Line = dict[str, Any]
HEADER: Line = {
    "kind": "header",
    "version": 2,
    "windlass": "0.1.0",
    "torch": "2.13.0",
    "transformers": "5.10.1",
    "model": "finder-3m",
    "dtype": "float32",
    "parameters": 3_541_248,
    "trained_length": 512,
    "seed": 7,
    "date": "2026-11-21T10:00:00+00:00",
    "fingerprint": "0f" * 32,
}


def case(**changes: object) -> Line:
    """A line of a results file: KeyDiff at half of 500 tokens, question-blind, right."""
    line: Line = {
        "kind": "case",
        "task": "passkey",
        "policy": "KeyDiff()",
        "budget": 250,
        "asked_budget": "2x",
        "merge": "none",
        "positions": "original",
        "store": "plain",
        "is_aware": False,
        "length": 500,
        "sample": 0,
        "turn": None,
        "depth": None,
        "context_tokens": 493,
        "slots_held": 250,
        "bytes_held": 640,
        "bytes_full": 1280,
        "expected": ["48213"],
        "output": " 48213.",
        "score": 1.0,
        "measures": {},
        "seconds": 0.25,
    }
    assert set(changes) <= set(line)
    return line | changes


def full(**changes: object) -> Line:
    """The same with nothing evicted."""
    return case(policy="Recent()", budget=None, asked_budget="all", slots_held=500, bytes_held=1280, **changes)


def write(path: Path, *lines: Mapping[str, object], end: str = "\n") -> Path:
    """A results file: a header and `lines`, then `end`."""
    path.write_text("\n".join(json.dumps(line) for line in (HEADER, *lines)) + end)
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "results.jsonl"


def cases(file: Path, *lines: Line) -> tuple[Case, ...]:
    return read_results([write(file, *lines)]).cases
