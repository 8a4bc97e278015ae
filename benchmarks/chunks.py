"""A prompt read in chunks of several sizes: seconds, and the most memory above the weights.

    python benchmarks/chunks.py --layers 4 --budgets 1024 >> benchmarks/results/chunks.jsonl
    python benchmarks/chunks.py --layers 4 --budgets none >> benchmarks/results/chunks.jsonl

The sizes take turns in one process, which gives its freed memory back between them, and forgets its peak. Prints one
JSON line per budget: for each size the median seconds, the quartiles of the seconds over those of 512, and the bytes.
For Linux with glibc.
"""

import argparse
import ctypes
import gc
import json
import statistics
from collections.abc import Callable

import torch
from machine import machine
from peers.worker import forget_peak, peak_bytes
from prefill import resident
from transformers import PreTrainedModel
from turns import in_turn, medians, quartiles

import windlass
from windlass.engine.generate import prefill
from windlass.evals.speed.rows import random_model, shape_of

BASE = 512


class Reader:
    """Reads one prompt, and knows how far its peak rose each time."""

    def __init__(self, model: PreTrainedModel, prompt: list[int], budget: int | None, policy: str) -> None:
        self.model, self.prompt, self.budget, self.policy = model, prompt, budget, policy
        self.libc = ctypes.CDLL(None)
        self.bytes: dict[int, list[int]] = {}
        self.before = 0

    def read(self, chunk: int) -> Callable[[], None]:
        """What reads it in chunks of this size."""

        def work() -> None:
            self.before = resident("VmRSS")
            cache = windlass.KVCache(self.model, self.budget, self.policy, chunk=chunk)
            prefill(self.model, cache, [self.prompt])

        return work

    def note(self, chunk: int) -> Callable[[], None]:
        """What follows it: the peak is noted and forgotten."""

        def work() -> None:
            self.bytes.setdefault(chunk, []).append(peak_bytes() - self.before)
            gc.collect()
            self.libc.malloc_trim(0)
            forget_peak()

        return work


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--budgets", nargs="+", default=["1024", "none"])
    parser.add_argument("--policy", default="recent", help="with a budget")
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 128, 256, BASE, 1024, 2048, 4096])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = windlass.attach(random_model(shape_of(options.shape, options.layers)[0], torch.bfloat16))
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(model.config.vocab_size, (options.tokens,), generator=draw).tolist()
    for typed in options.budgets:
        reader = Reader(model, prompt, None if typed == "none" else int(typed), options.policy)
        chunks = {str(chunk): chunk for chunk in options.chunks}
        works = {name: reader.read(chunk) for name, chunk in chunks.items()}
        seconds = in_turn(works, options.rounds, {name: reader.note(chunk) for name, chunk in chunks.items()})
        line = {"kind": "chunks", **machine(options.threads), "shape": options.shape, "layers": options.layers}
        line |= {"tokens": options.tokens, "budget": reader.budget, "policy": options.policy, "rounds": options.rounds}
        line |= {"seconds": medians(seconds)}
        line |= {"ratios": {name: quartiles(each, seconds[str(BASE)]) for name, each in seconds.items()}}
        line |= {"bytes": {name: statistics.median(reader.bytes[chunk]) for name, chunk in chunks.items()}}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
