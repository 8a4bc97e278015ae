"""Pass keys found under KeyDiff with un-rotated keys and with rotated ones: a table of `docs/findings.md`.

    python benchmarks/rotated_keys.py --samples 200

The texts, chunks and questions are those of `windlass eval --tasks passkey_novel --lengths 500`, one text at a time:
rotated storage takes no padding. Prints a JSON line for each storage and budget, with a 95 % Wilson interval.
"""

import argparse
import json
from importlib import resources

import torch
from machine import machine

from windlass.cache.options import CacheOptions
from windlass.evals.grid import Cell, SampleSpec, Settings, fit, load_task
from windlass.evals.report.summaries import wilson
from windlass.evals.run import CHUNK, answered
from windlass.evals.speed.measure import RotatedStorage
from windlass.evals.task import Budget
from windlass.hf.kv_cache import KVCache
from windlass.hf.load import load
from windlass.policies import KeyDiff

TASK = "passkey_novel"
STORAGES = {"unrotated": KVCache, "rotated": RotatedStorage}


def main() -> None:
    """Read the arguments, print a line for each storage and budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--divisors", type=int, nargs="+", default=[8, 10, 16])
    parser.add_argument("--length", type=int, default=500)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with resources.as_file(resources.files("windlass") / "assets" / "finder-3m") as folder:
        model, tokenizer = load(str(folder), "float32")
    task = load_task(TASK)[1]
    specs = [SampleSpec(task, TASK, options.length, 0, number) for number in range(options.samples)]
    texts = [fit(spec, tokenizer) for spec in specs]
    for storage, kind in STORAGES.items():
        for divisor in options.divisors:
            found = 0.0
            for spec, text in zip(specs, texts, strict=True):
                budget = text.context_tokens // divisor
                cache = kind(model, budget=budget, policy=KeyDiff(), chunk=min(CHUNK, budget), rollback=0)
                cell = Cell(spec, Settings(Budget(f"{divisor}x", divisor=divisor), CacheOptions(policy=KeyDiff())))
                [[outcome]] = answered(model, tokenizer, cache, [cell], [text])
                found += outcome.score or 0.0
            score = found / len(texts)
            line = {"task": TASK, "storage": storage, "budget": f"{divisor}x", "samples": len(texts), "score": score}
            print(json.dumps({**line, "interval": wilson(score, len(texts)), "machine": machine(1)}), flush=True)


if __name__ == "__main__":
    main()
