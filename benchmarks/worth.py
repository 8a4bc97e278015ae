"""What a slot is worth: how much of a task a model still solves when its cache is a part of the text.

    python benchmarks/worth.py windlass/assets/passkey-3m -o benchmarks/results/worth.jsonl \\
        --tasks magic_single,passkey --policies key_diff,recent --budgets all,4x

The tasks, budgets and settings are those of `windlass eval`, with the same texts for the same seed, but some
texts are read together as the rows of a batch, which is several times as fast; `4x` is then a quarter of the
longest of them. Writes one JSON line per combination, with the mean score, its 95 % Wilson interval and the
bytes at rest per text; combinations that the file has already are not run again. `--storage rotated` keeps keys
as the model rotated them, to measure against.
"""

import argparse
import copy
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from machine import machine
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass import KVCache
from windlass.engine import generate as engine
from windlass.engine.text import encode
from windlass.evals.fit import Fitted, fit
from windlass.evals.grid import Grid, Lists, Settings, grid_of
from windlass.evals.report.summaries import wilson
from windlass.evals.speed.rotated import RotatedStorage
from windlass.evals.task import Task
from windlass.hf.load import open_model

STORAGES = {"unrotated": KVCache, "rotated": RotatedStorage}
IDENTITY = ("model", "task", "length", "policy", "budget", "merge", "positions", "store", "storage", "window", "chunk")
IDENTITY += ("seed", "samples", "is_aware")


@dataclass(frozen=True)
class Combination:
    """One line of results."""

    label: str
    task: Task
    length: int
    settings: Settings

    def texts(self, tokenizer: PreTrainedTokenizerBase, options: argparse.Namespace) -> list[Fitted]:
        """All its samples."""
        return [fit(self.task, self.label, tokenizer, self.length, options.seed, at) for at in range(options.samples)]

    def labels(self, options: argparse.Namespace) -> dict[str, object]:
        """What tells it from others."""
        of_settings = self.settings.labels
        return {
            "model": Path(options.model).name,
            "task": self.label,
            "length": self.length,
            "policy": of_settings["policy"],
            "budget": of_settings["asked_budget"],
            **{name: of_settings[name] for name in ("merge", "positions", "store")},
            **{name: getattr(options, name) for name in ("storage", "window", "chunk", "seed", "samples", "is_aware")},
        }


def main() -> None:
    """Measure what the output lacks."""
    options = _options()
    torch.set_num_threads(options.threads)
    lists = (options.tasks, options.policies, options.budgets, options.lengths)
    grid = grid_of(Lists(*lists, options.merge, options.positions, options.store))
    known = _known(options.output)
    left = [each for each in _combinations(grid) if tuple(each.labels(options).values()) not in known]
    model, tokenizer = open_model(options.model, "float32")
    made: dict[tuple[str, int], list[Fitted]] = {}
    for combination in left:
        key = combination.label, combination.length
        if key not in made:
            made = {key: combination.texts(tokenizer, options)}
        start = time.perf_counter()
        line = _measured(model, tokenizer, combination, made[key], options)
        line = {"kind": "worth", **combination.labels(options), **line, "seconds": time.perf_counter() - start}
        with options.output.open("a") as file:
            file.write(json.dumps({**line, **machine(options.threads)}) + "\n")


def _measured(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    combination: Combination,
    texts: list[Fitted],
    options: argparse.Namespace,
) -> dict[str, object]:
    """The mean score of all texts, those of each question where there are several, and the size of the caches."""
    scores: list[list[float]] = []  # per text, of each question
    slots, held = [], []
    for start in range(0, len(texts), options.rows):
        some = texts[start : start + options.rows]
        prompts = [encode(tokenizer, each.sample.context, is_start=True) for each in some]
        if options.is_aware:
            asked = (each.sample.turns[0].question for each in some)
            prompts = [
                ids + encode(tokenizer, question, is_start=False) for ids, question in zip(prompts, asked, strict=True)
            ]
        budget = combination.settings.budget.of(max(each.context_tokens for each in some))
        cache = _cache(model, combination.settings, budget, len(some), options)
        engine.prefill(model, cache, prompts)
        slots.append(max(layer.most_held for layer in cache.layers))
        scores += _answered(model, tokenizer, combination.task, cache, some, options.is_aware)
        held.append(cache.nbytes() / len(some))
    per_text = [fmean(each) for each in scores]
    mean = fmean(per_text)
    by_turn = [fmean(turn) for turn in zip(*scores, strict=True)]
    return {
        "score": mean,
        "interval": wilson(mean, len(per_text)),
        "by_turn": by_turn if len(by_turn) > 1 else None,
        "context_tokens": fmean(each.context_tokens for each in texts),
        "slots": max(slots),
        "bytes_held": fmean(held),
    }


def _answered(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    cache: KVCache,
    some: list[Fitted],
    is_aware: bool,
) -> list[list[float]]:
    """Per text the score of each question, every one asked of the cache as the text left it."""
    by_turn = []
    for number in range(task.turns):
        turns = [each.sample.turns[number] for each in some]
        prompts = [turn.prefix if is_aware and number == 0 else turn.question + turn.prefix for turn in turns]
        asked = cache if number == task.turns - 1 else copy.deepcopy(cache)
        results = engine.generate(model, tokenizer, prompts, asked, task.answer_tokens)
        by_turn.append([task.score(turn, result.text) for turn, result in zip(turns, results, strict=True)])
    return [list(each) for each in zip(*by_turn, strict=True)]


def _cache(
    model: PreTrainedModel, settings: Settings, budget: int | None, rows: int, options: argparse.Namespace
) -> KVCache:
    return STORAGES[options.storage](
        model,
        budget,
        settings.policy,
        window=options.window,
        chunk=options.chunk if budget is None else min(options.chunk, max(budget, 16)),
        positions=settings.positions,
        batch=rows,
        rollback=0,
        store=settings.store,
        merge=settings.merge,
    )


def _combinations(grid: Grid) -> Iterator[Combination]:
    for label, task in grid.tasks.items():
        for length in grid.lengths:
            for settings in grid.settings:
                yield Combination(label, task, length, settings)


def _known(output: Path) -> set[tuple[object, ...]]:
    """What the file holds."""
    lines = output.read_text().splitlines() if output.exists() else []
    return {tuple(json.loads(line)[name] for name in IDENTITY) for line in lines}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--tasks", default="passkey")
    parser.add_argument("--policies", default="recent,key_diff")
    parser.add_argument("--budgets", default="all,4x")
    parser.add_argument("--lengths", default="500")
    parser.add_argument("--merge", default="none")
    parser.add_argument("--positions", default="original")
    parser.add_argument("--store", default="plain")
    parser.add_argument("--storage", choices=STORAGES, default="unrotated")
    parser.add_argument("--window", type=int)
    parser.add_argument("--chunk", type=int, default=128)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--rows", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--aware", dest="is_aware", action="store_true")
    parser.add_argument("--threads", type=int, default=int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    return parser.parse_args()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
