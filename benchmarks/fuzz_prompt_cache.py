"""Spoils prompt-cache files whose checksum is right, and loads them: nothing but a clear line may come of it.

    PYTHONPATH=. python benchmarks/fuzz_prompt_cache.py --mutations 10000 >> benchmarks/results/fuzz_prompt_cache.jsonl

Each mutation spoils one place of a small honest file (stores, policies with state, merges, windows, edited rows): a
field, a tensor, a sign of the document or of the header. Processes of their own do it, so that a crash is counted and
the next mutation goes on. Prints a JSON object: how many were refused, how many were loaded and harmless, and the
numbers that must be 0, each with the seeds by which it is seen again (`--first SEED --mutations 1`).
"""

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from machine import machine

from tests.helpers.prompt_cache_files import honest_files
from tests.helpers.prompt_cache_judge import LOADED, REFUSED, SILENT, TRACEBACK, verdict
from tests.helpers.prompt_cache_mutations import mutated
from windlass import attach
from windlass.hf import prompt_cache
from windlass.testing import tiny_model

MOST_BYTES = 16 * 2**30  # of a process: what asks for more fails at once, and is seen
MACHINE_BYTES = 2**30  # the memory that the checks are told of, so that they give the same on every machine
CRASH = "crash"


def _memory_of(_device: torch.device) -> int | None:
    return MACHINE_BYTES


def work(first: int, mutations: int) -> None:
    """Judge these mutations; prints a line for each before and after, so that the last one is known after a crash."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    torch.set_num_threads(1)
    prompt_cache.memory_of = _memory_of
    models = {family: attach(tiny_model(family)) for family in ("llama", "gemma2")}
    with tempfile.TemporaryDirectory() as folder:
        files = honest_files(models.__getitem__, Path(folder))
        for seed in range(first, first + mutations):
            print(json.dumps({"begun": seed}), flush=True)
            draw = random.Random(seed)
            honest = files[draw.randrange(len(files))]
            what, data = mutated(honest, draw)
            word, why = verdict(honest, data, Path(folder) / "spoiled")
            line = {"seed": seed, "verdict": word, "file": honest.name, "what": what, "why": why[:200]}
            print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.first, options.mutations)
        return
    counts: Counter[str] = Counter()
    bad: dict[str, list[int]] = {word: [] for word in (CRASH, TRACEBACK, SILENT)}
    started, seed, end = time.perf_counter(), options.first, options.first + options.mutations
    while seed < end:
        command = [sys.executable, __file__, "--worker", "--first", str(seed), "--mutations", str(end - seed)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            is_begun = False
            for row in process.stdout:
                line = json.loads(row)
                if "begun" in line:
                    seed, is_begun = line["begun"], True
                    continue
                counts[line["verdict"]] += 1
                if line["verdict"] in bad:
                    bad[line["verdict"]].append(seed)
                    print(json.dumps(line), file=sys.stderr, flush=True)
                seed, is_begun = seed + 1, False
        if process.returncode:
            if not is_begun:
                raise SystemExit(f"the process failed before it began seed {seed}: {process.returncode}")
            counts[CRASH] += 1
            bad[CRASH].append(seed)
            print(f"seed {seed}: the process ended with {process.returncode}", file=sys.stderr, flush=True)
            seed += 1
    print(
        json.dumps(
            {
                "mutations": options.mutations,
                "first": options.first,
                REFUSED: counts[REFUSED],
                LOADED: counts[LOADED],
                **{word: counts[word] for word in bad},
                "seeds": bad,
                "minutes": round((time.perf_counter() - started) / 60, 1),
                **machine(1),
            }
        )
    )


if __name__ == "__main__":
    main()
