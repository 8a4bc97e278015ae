"""Decode with a recall store of many tokens, against the same cache without one, and against a full cache.

    python benchmarks/recall.py >> benchmarks/results/recall.jsonl

A token of each in turn; random weights, and random keys and values in the place of a text. Prints one JSON line per
kind of weights: the quartiles of each cache's time over that of the cache which recalls nothing.
"""

import argparse
import json
from collections.abc import Callable

import torch
from machine import machine
from transformers import PreTrainedModel
from turns import in_turn, medians, quartiles

import windlass
from windlass import KVCache
from windlass.cache.options import CacheOptions
from windlass.evals.speed.measure import fill
from windlass.evals.speed.rows import random_model, shape_of
from windlass.hf.kv_cache import layer_shapes
from windlass.hf.weights import quantize

NONE = "none"


def caches_of(model: PreTrainedModel, options: argparse.Namespace) -> dict[str, KVCache]:
    """A cache that recalls nothing, those that recall, and one of all tokens, behind a text of that depth."""
    usual = {"budget": options.budget, "policy": "recent"}
    asked = {NONE: CacheOptions(**usual)}
    asked |= {name: CacheOptions(**usual, recall=options.recall, recall_store=name) for name in options.stores}
    if options.full:
        asked["full cache"] = CacheOptions(policy="recent")
    caches = {name: KVCache.from_options(model, each) for name, each in asked.items()}
    shapes = layer_shapes(model)
    for cache in caches.values():
        fill(cache, shapes, options.depth)
    return caches


def decoding(model: PreTrainedModel, cache: KVCache) -> Callable[[], object]:
    """What writes one token."""
    token = torch.zeros(1, 1, dtype=torch.long)
    return lambda: model(input_ids=token, past_key_values=cache)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--depth", type=int, default=100_000)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--recall", type=int, default=128)
    parser.add_argument("--stores", nargs="*", default=["int8", "int4"])
    parser.add_argument("--weights", nargs="+", default=["auto"], choices=["auto", "int8", "int4"])
    parser.add_argument("--full", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    spec, _ = shape_of(options.shape, options.layers)
    for weights in options.weights:
        model = random_model(spec, torch.bfloat16)
        quantize(model, weights)
        windlass.attach(model)
        caches = caches_of(model, options)
        seconds = in_turn({name: decoding(model, cache) for name, cache in caches.items()}, options.rounds)
        line = {"kind": "recall", **machine(options.threads), "shape": options.shape, "layers": options.layers}
        line |= {"weights": weights, "depth": options.depth, "budget": options.budget, "recall": options.recall}
        line |= {"rounds": options.rounds, "seconds": medians(seconds)}
        line |= {"ratios": {name: quartiles(each, seconds[NONE]) for name, each in seconds.items()}}
        line |= {"bytes_held": {name: cache.bytes_held for name, cache in caches.items()}}
        line |= {"recall_bytes": {name: cache.recall_bytes for name, cache in caches.items()}}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
