"""A long prompt of which few tokens are held, beside OpenVINO GenAI's own eviction: reading, decode, peak memory.

    PYTHONPATH=benchmarks python -m peers.eviction >> benchmarks/results/eviction.jsonl
    PYTHONPATH=benchmarks python -m peers.eviction --batch 4 --policies recent >> benchmarks/results/eviction.jsonl

Each is a process; one works at a time. Each reads the prompt once, one after the other, then they write tokens in turn.
Prints one JSON line: seconds of reading, tokens per second of all texts, for each of ours the median and the
quartiles of its rate over OpenVINO's in the same round, and the most memory of each process, weights included. OpenVINO
reads with all tokens and evicts afterwards; it maps its file of weights, which counts, and makes a copy.
"""

import argparse
import json
import os
import statistics
from typing import Any

import torch
from machine import machine
from peers.run import Worker, prepare
from peers.shape import shape_of

OTHER = "openvino"


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--budget", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--policies", default="recent,snapkv", help="of windlass, a process each")
    parser.add_argument("--weights", default="auto", choices=["auto", "int4"])
    parser.add_argument("--tokens", type=int, default=8, help="a turn writes so many")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    shape = shape_of(options.shape, options.layers)
    prepare(shape, ["windlass", OTHER], options.weights)
    common = [f"--budget={options.budget}", f"--batch={options.batch}", f"--weights={options.weights}"]
    workers = {OTHER: Worker(OTHER, shape, options.threads, common)}
    for policy in options.policies.split(","):
        more = [*common, f"--policy={policy}"]
        workers[f"windlass {policy}"] = Worker("windlass", shape, options.threads, more)
    rates: dict[str, list[float]] = {name: [] for name in workers}
    reading, peaks = {}, {}
    for name, worker in workers.items():  # the first turn warms up
        reading[name] = worker.ask("tg", options.tokens, options.prompt).hold_s
    for turn in range(options.rounds):
        for name in list(workers)[:: 1 if turn % 2 else -1]:
            answer = workers[name].ask("tg", options.tokens, options.prompt)
            rates[name].append(options.batch * options.tokens / answer.seconds)
            peaks[name] = answer.peak_bytes
    ratios = {}
    for name, each in rates.items():
        pairs = [ours / theirs for ours, theirs in zip(each, rates[OTHER], strict=True)]
        ratios[name] = statistics.quantiles(pairs, n=4, method="inclusive")
    line: dict[str, Any] = {"kind": "eviction", **machine(options.threads), "openvino": workers[OTHER].about.version}
    line |= {"shape": options.shape, "layers": options.layers, "weights": options.weights, "prompt": options.prompt}
    line |= {"budget": options.budget, "batch": options.batch, "tokens": options.tokens, "rounds": options.rounds}
    line |= {"reading_s": reading, "tokens_per_s": {name: statistics.median(each) for name, each in rates.items()}}
    line |= {"ratios": {name: each for name, each in ratios.items() if name != OTHER}, "peak_bytes": peaks}
    print(json.dumps(line), flush=True)
    for worker in workers.values():
        worker.stop()


if __name__ == "__main__":
    main()
