"""Other programs on an attached model, compared with the same programs on a plain one.

    make bench-clients     # their environment of its own, then this, then the section of docs/results/models.md

Each case runs in a process of its own: a crash is a result, too. A case that has a line in the results is not run
again. Equal means logits within 1e-5 of plain's,
relative to their norm, 24 greedy tokens as plain's, and a run in a budget of 128 at `compact` positions.
"""

import argparse
import importlib.metadata
import json
import os
import subprocess
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "clients.jsonl"
PACKAGES = ("peft", "torchao", "bitsandbytes", "accelerate", "lm-eval")
LIMIT_S = 600.0
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


def answer(name: str) -> dict[str, Any]:
    """Run one case, here."""
    from clients.cases import CASES

    from windlass.core.errors import WindlassError

    try:
        found = CASES[name]()
    except WindlassError as error:
        return {"result": "refused", "reason": str(error)}
    except Exception as error:
        lines = str(error).strip().splitlines()
        return {"result": "raises", "reason": f"{type(error).__name__}: {lines[0] if lines else ''}"}
    return {**asdict(found), "result": found.result, "reason": ""}


def measured(name: str) -> dict[str, Any]:
    """Run one case in a process of its own."""
    command = [sys.executable, "-m", "clients.run", "--case", name]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, env={**os.environ, **OFFLINE}, check=False
        )
    except subprocess.TimeoutExpired:
        return {"result": "raises", "reason": f"not done within {LIMIT_S:.0f} s"}
    answers = [line for line in done.stdout.splitlines() if line.startswith('{"result"') or '"result":' in line]
    if done.returncode or not answers:
        return {"result": "crashes", "reason": f"the process ended with code {done.returncode}"}
    found: dict[str, Any] = json.loads(answers[-1])
    return found


def main() -> None:
    """Run all cases and write their lines, or one and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help="this one alone, in this process")
    parser.add_argument("--only", default="", help="only cases whose names contain this. Results are not saved")
    options = parser.parse_args()
    if options.case:
        warnings.filterwarnings("ignore")
        print(json.dumps(answer(options.case)))
        return
    from clients.cases import CASES
    from machine import machine

    versions = {package: importlib.metadata.version(package) for package in PACKAGES}
    done = {json.loads(line)["client"] for line in RESULTS.read_text().splitlines()} if RESULTS.exists() else set()
    for name in CASES:
        if options.only not in name or (not options.only and name in done):
            continue
        line = {"kind": "client", "client": name, **measured(name), "versions": versions, **machine(1)}
        print(f"{line['result']:8} {name}: {line['reason'][:160]} {line.get('logits_error')}", flush=True)
        if not options.only:
            with RESULTS.open("a") as results:
                results.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
