"""Decode, or the reading of prompts, with several policies or several stores in turn, in one process.

    python benchmarks/settings.py --policies recent h2o tova snapkv keydiff
    python benchmarks/settings.py --policies recent h2o tova --prompt 8192 --layers 2
    python benchmarks/settings.py --stores plain int8 int4 --weights int4 --depth 16384

Policies have a budget, stores hold every token. Texts are random; the one before a token that is written is not read.
Prints one JSON line: median seconds of each, and the quartiles of the first one's seconds over those of each.
"""

import argparse
import json

import torch
from machine import machine
from turns import in_turn, medians, quartiles
from unrotated import timer_of

import windlass
from windlass.cache.options import CacheOptions
from windlass.evals.speed.rows import USUAL, BenchSetup, random_model, shape_of
from windlass.evals.speed.workloads import Workload
from windlass.hf.weights import quantize


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    varied = parser.add_mutually_exclusive_group(required=True)
    varied.add_argument("--policies", nargs="+", default=[])
    varied.add_argument("--stores", nargs="+", default=[])
    parser.add_argument("--shape", default="1b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--weights", default="auto", choices=["auto", "int8", "int4"], help="auto: bfloat16")
    parser.add_argument("--budget", type=int, default=1024, help="of policies")
    parser.add_argument("--depth", type=int, default=2048, help="tokens before one that is written")
    parser.add_argument("--prompt", type=int, help="read prompts of so many tokens instead of writing")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    model = random_model(shape_of(options.shape, options.layers)[0], torch.bfloat16)
    quantize(model, options.weights)
    windlass.attach(model)
    budget = options.budget if options.policies else None
    caches = {name: CacheOptions(**{**USUAL, "policy": name}, budget=budget) for name in options.policies}
    caches |= {name: CacheOptions(**USUAL, store=name) for name in options.stores}
    workload = Workload(options.prompt is not None, options.prompt or 1, 0 if options.prompt else options.depth)
    timers = {
        name: timer_of(model, workload, BenchSetup(each, threads=options.threads)) for name, each in caches.items()
    }
    works = {name: lambda timer=timer: timer.run(lambda: 0.0) for name, timer in timers.items()}
    seconds = in_turn(works, options.rounds, {name: timer.take_back for name, timer in timers.items()})
    line = {"kind": "settings", **machine(options.threads), "shape": options.shape, "layers": options.layers}
    line |= {"weights": options.weights, "axis": "policy" if options.policies else "store", "budget": budget}
    line |= {"depth": workload.depth, "prompt": options.prompt, "rounds": options.rounds, "seconds": medians(seconds)}
    first = next(iter(seconds.values()))
    print(json.dumps(line | {"ratios": {name: quartiles(first, each) for name, each in seconds.items()}}), flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
