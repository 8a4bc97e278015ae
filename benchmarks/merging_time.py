"""Time spent merging: a prompt read into a cache that merges what it evicts, and into one that drops it, in turn.

    python benchmarks/merging_time.py --shape 1b --layers 2 --prompts 2048 4096 >> benchmarks/results/merging_time.jsonl
    python benchmarks/merging_time.py --shape finder-3m >> benchmarks/results/merging_time.jsonl

Both are `KeyDiff` at a quarter of the prompt, in chunks, in one process, on one thread whose CPU time counts, so that
neighbours on the machine matter less; which one begins alternates. Prints one
JSON line per prompt and rule: the medians, and median and quartiles of the pairs' ratios (1.02: merging takes 2 %).
"""

import argparse
import json
import statistics
import time
from importlib import resources

import torch
from machine import machine
from transformers import PreTrainedModel

import windlass
from windlass.cli.demo import MODEL
from windlass.evals.speed.rows import random_model, shape_of
from windlass.hf.load import load

CHUNK = 512


def model_of(shape: str, layers: int | None) -> PreTrainedModel:
    """The shipped model, or random weights in bfloat16, attached."""
    if shape != MODEL:
        return windlass.attach(random_model(shape_of(shape, layers)[0], torch.bfloat16))
    with resources.as_file(resources.files("windlass") / "assets" / MODEL) as folder:
        return load(str(folder), "float32")[0]


def seconds_of(model: PreTrainedModel, ids: torch.Tensor, merge: str | None) -> float:
    """To read `ids` in chunks into a new cache; logits of the last token of each."""
    cache = windlass.KVCache(model, ids.shape[1] // 4, windlass.KeyDiff(), chunk=CHUNK, merge=merge)
    start = time.process_time()
    for piece in ids.split(CHUNK, 1):
        model(input_ids=piece, past_key_values=cache, logits_to_keep=torch.tensor([piece.shape[1] - 1]))
    return time.process_time() - start


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b", help=f"one of windlass bench's shapes, or {MODEL}")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--prompts", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--rules", nargs="+", default=["mean_count", "mean_count(next)"])
    parser.add_argument("--pairs", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = model_of(options.shape, options.layers)
    for prompt in options.prompts:
        ids = torch.randint(0, min(1000, model.config.vocab_size), (1, prompt))
        for rule in options.rules:
            seconds: dict[str | None, list[float]] = {None: [], rule: []}
            for turn in range(options.pairs + 2):  # the first two warm up
                for merge in (None, rule) if turn % 2 else (rule, None):
                    seconds[merge].append(seconds_of(model, ids, merge))
            without, merging = (each[2:] for each in seconds.values())
            ratios = sorted(a / b for a, b in zip(merging, without, strict=True))
            quartiles = [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]]
            line = {
                "kind": "merging_time",
                **machine(1),
                "shape": options.shape,
                "layers": options.layers,
            }
            line |= {"prompt": prompt, "budget": prompt // 4, "chunk": CHUNK, "merge": rule, "pairs": options.pairs}
            line |= {"seconds": {"merging": statistics.median(merging), "dropping": statistics.median(without)}}
            print(json.dumps({**line, "ratio": statistics.median(ratios), "quartiles": quartiles}), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
