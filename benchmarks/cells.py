"""Scores of a task under budgets and rules of merging: digits against words, through merged tokens.

    python benchmarks/cells.py needles-3m --samples 100 >> benchmarks/results/words.jsonl

A pass key of up to five digits, or of three words, in a novel; a magic number of seven digits, or two words. Prints one
JSON line per task, budget and rule, with a 95 % Wilson interval. Texts are read in chunks of 128, 20 side by side; the
question comes afterwards.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from machine import machine
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.cache.options import CacheOptions
from windlass.evals.grid import Cell, SampleSpec, Settings, SizedSample, fit
from windlass.evals.report.summaries import wilson
from windlass.evals.run import answered, cache_of
from windlass.evals.task import Budget, Task
from windlass.evals.tasks import NAMES
from windlass.evals.tasks.niah import Needles
from windlass.hf.load import load
from windlass.policies import KeyDiff, Policy

ROWS = 20  # texts that are read together
MAGIC = NAMES["magic_single"]
assert isinstance(MAGIC, Needles), "magic numbers are needles"
TASKS: Mapping[str, Task] = {**NAMES, "magic_words": replace(MAGIC, value_kind="words")}


class Cells:
    """A model, and the texts of one length that it is asked about."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, length: int, samples: int) -> None:
        self.model, self.tokenizer, self.length, self.samples = model, tokenizer, length, samples
        self.texts = cache(self._texts)

    def _texts(self, label: str) -> list[SizedSample]:
        specs = (SampleSpec(TASKS[label], label, self.length, 0, number) for number in range(self.samples))
        return [fit(spec, self.tokenizer) for spec in specs]

    def measure(self, label: str, policy: Policy, ratio: int | None, merge: str | None) -> dict[str, Any]:
        """One line: `ratio` of None holds all tokens."""
        started, total, slots, held = time.perf_counter(), 0.0, 0, 0
        texts = self.texts(label)
        for first in range(0, len(texts), ROWS):
            some = texts[first : first + ROWS]
            budget = None if ratio is None else max(each.context_tokens for each in some) // ratio
            options = CacheOptions(policy=policy, positions="original", merge=merge)
            asked = Settings(Budget("all"), options)
            made = cache_of(self.model, asked, budget, True, batch=len(some))
            cells = [
                Cell(SampleSpec(TASKS[label], label, self.length, 0, number), asked) for number in range(len(some))
            ]
            outcomes = answered(self.model, self.tokenizer, made, cells, some)
            total += sum(each.score or 0.0 for (each,) in outcomes)
            slots, held = (
                max(slots, *(int(each.slots_held) for (each,) in outcomes)),
                max(held, outcomes[0][0].bytes_held),
            )
        line = {"task": label, "length": self.length, "policy": repr(policy), "merge": merge or "none"}
        line |= {"budget": "all" if ratio is None else f"{ratio}x", "slots": slots, "bytes_held": held}
        line |= {"samples": len(texts), "score": total / len(texts), "interval": wilson(total / len(texts), len(texts))}
        return {**line, "seconds": time.perf_counter() - started}


def settings(ratios: list[int], rules: list[str]) -> Iterator[tuple[int | None, str | None]]:
    """Budgets and rules; first the full cache."""
    yield None, None
    for ratio in ratios:
        for rule in rules:
            yield ratio, None if rule == "none" else rule


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--length", type=int, default=500)
    parser.add_argument("--ratios", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rules", nargs="+", default=["none", "mean_count"])
    parser.add_argument("--tasks", nargs="+", choices=sorted(TASKS))
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = load(options.model, "float32")
    cells = Cells(model, tokenizer, options.length, options.samples)
    name = {"kind": "words", **machine(options.threads), "model": options.model.rstrip("/").split("/")[-1]}
    for label in options.tasks or ["passkey_novel", "passkey_words_novel", "magic_single", "magic_words"]:
        for ratio, rule in settings(options.ratios, options.rules):
            print(json.dumps(name | cells.measure(label, KeyDiff(), ratio, rule)), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
