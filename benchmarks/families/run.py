"""Every class of transformers' causal-LM and image-text mappings, attached and compared with itself unattached.

    PYTHONPATH=benchmarks python -m families.run                      # continues benchmarks/results/families.jsonl
    PYTHONPATH=benchmarks python -m families.run --only llama,gemma3 --print
    PYTHONPATH=benchmarks python -m families.run --jobs 2 --write docs/results/models.md

Tiny random models, no download. Each class runs in a process of its own with a time limit, so that a crash is a
result, too. A class that has a line in the results is not run again.
"""

import argparse
import json
import multiprocessing
import time
import traceback
import warnings
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
from families.checks import Findings, examine
from families.page import page
from families.tiny import Family, families
from machine import machine
from transformers.utils import logging

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "families.jsonl"
CLIENTS = RESULTS.with_name("clients.jsonl")
Line = dict[str, Any]


@dataclass(frozen=True)
class Child:
    """A process that examines one class."""

    family: Family
    process: multiprocessing.process.BaseProcess
    answers: Connection
    began: float


def start(family: Family) -> Child:
    """A fork of a server that has imported transformers."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["families.checks"])
    answers, question = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(family, question))
    process.start()
    question.close()
    return Child(family, process, answers, time.monotonic())


def _answer(family: Family, answers: Connection) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    try:
        findings = examine(family)
    except BaseException:
        findings = Findings("raises", "the sweep itself failed: " + traceback.format_exc().strip().splitlines()[-1])
    answers.send(asdict(findings))


def finish(child: Child, limit: float) -> Line:
    """The result line of a class. A process without output crashed, or was too slow and is killed."""
    seconds = time.monotonic() - child.began
    try:
        found = child.answers.recv() if child.answers.poll() else None
    except EOFError:
        found = None
    if found is None and seconds < limit:
        child.process.join(5)
        found = asdict(Findings("raises", f"the process died with code {child.process.exitcode}"))
    elif found is None:
        found = asdict(Findings("raises", f"not done within {limit:.0f} s"))
    child.process.kill()
    child.process.join()
    return {"kind": "family", **asdict(child.family), **found, "seconds": round(seconds, 1), **machine(1)}


def sweep(wanted: list[Family], jobs: int, limit: float) -> Any:
    """Result lines, as they come."""
    waiting, running = list(reversed(wanted)), list[Child]()
    while waiting or running:
        while waiting and len(running) < jobs:
            running.append(start(waiting.pop()))
        left = max(0.0, min(child.began for child in running) + limit - time.monotonic())
        spoke = wait([child.answers for child in running], timeout=left)
        for child in list(running):
            if child.answers in spoke or time.monotonic() - child.began >= limit:
                running.remove(child)
                yield finish(child, limit)


def read(results: Path) -> list[Line]:
    """The lines of a file, none if it does not exist yet."""
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def main() -> None:
    """Run what has no result yet, append it, and write the page if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", help="model types or class names, with commas. They run again, with results of their own"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for one class")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--write", type=Path, help="write the page of all results there")
    options = parser.parse_args()
    names = set(filter(None, options.only.split(",")))
    lines = read(options.results)
    done = {(line["mapping"], line["model_type"], line["variant"]) for line in lines}
    wanted = [
        family
        for family in families()
        if (
            names & {family.model_type, family.class_name, family.mapping}
            if names
            else (family.mapping, family.model_type, family.variant) not in done
        )
    ]
    for line in sweep(wanted, options.jobs, options.limit):
        print(
            f"{line['outcome']:14}{line['model_type']} {line['variant']} ({line['seconds']} s) {line['reason'][:150]}"
        )
        if names:
            print(json.dumps({key: line[key] for key in ("errors", "notes")}), flush=True)
            continue
        with options.results.open("a") as results:
            results.write(json.dumps(line) + "\n")
    if options.write:
        options.write.write_text(page(read(options.results), read(CLIENTS)))


if __name__ == "__main__":
    main()
