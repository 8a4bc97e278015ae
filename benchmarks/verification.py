"""A pass that verifies several drafts against a pass of one token, and against the same pass taken whole.

    python benchmarks/verification.py >> benchmarks/results/verification.jsonl

A layer that evicts takes a pass of few tokens token by token, so that drafts change nothing. The matrix products
are those of one pass all the same. Behind a random text of `--depth` tokens; passes take turns, and each is rolled
back. Prints one JSON line per policy.
"""

import argparse
import json
import statistics
import time

import torch
from machine import machine

import windlass
from windlass.core.step import PROMPT, READ
from windlass.evals.speed.measure import fill
from windlass.evals.speed.rows import random_model, shape_of
from windlass.hf.forward import forward
from windlass.hf.kv_cache import layer_shapes

TOKENS = (1, 5, 16)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--depth", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--policy", default="recent,key_diff,h2o,snapkv")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = windlass.attach(random_model(shape_of(options.shape, options.layers)[0], torch.bfloat16))
    shapes = layer_shapes(model)
    ids = torch.randint(0, model.config.vocab_size, (1, max(TOKENS)), generator=torch.Generator().manual_seed(0))
    ways = [(tokens, how) for tokens in TOKENS for how in (READ, PROMPT) if tokens > 1 or how is READ]
    for policy in options.policy.split(","):
        cache = windlass.KVCache(model, options.budget, policy)
        fill(cache, shapes, options.depth)
        seconds: dict[str, list[float]] = {}
        for turn in range(options.rounds + 2):  # the first two warm up
            for tokens, how in ways:
                start = time.perf_counter()
                forward(model, ids[:, :tokens], None, cache, list(range(tokens)), how=how)
                taken = time.perf_counter() - start
                cache.rollback(tokens)
                if turn > 1:
                    name = f"{tokens}{' whole' if how is PROMPT else ''}"
                    seconds.setdefault(name, []).append(taken)
        line = {"kind": "verification", **machine(options.threads), "shape": options.shape, "layers": options.layers}
        line |= {"depth": options.depth, "budget": options.budget, "policy": policy, "rounds": options.rounds}
        line |= {"seconds": {name: statistics.median(samples) for name, samples in seconds.items()}}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
