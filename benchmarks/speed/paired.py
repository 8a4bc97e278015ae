"""Windlass against transformers on the same weights in one process, a token or a prompt of each in turn.

    PYTHONPATH=benchmarks python -m speed.paired --depth 0 >> benchmarks/results/paired.jsonl
    PYTHONPATH=benchmarks python -m speed.paired --prompt 512 --pairs 12 >> benchmarks/results/paired.jsonl

Two processes that take rotation by the second meet different neighbours on a shared machine. Here a pair is
as short as can be. Prints one JSON line: the medians, and the median of the pairs' ratios.
"""

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable

import torch
from machine import machine
from transformers import DynamicCache, PreTrainedModel

import windlass
from windlass.evals.speed.rows import random_model, shape_of

CHUNK = 512
ROOM = 16  # tokens that are written before both caches go back


class Pair:
    """A plain model and an attached one that share their weights."""

    def __init__(self, shape: str, layers: int | None) -> None:
        self.plain = random_model(shape_of(shape, layers)[0], torch.bfloat16)
        self.attached = windlass.attach(copy.deepcopy(self.plain, {id(p): p for p in self.plain.parameters()}))

    def read(self, model: PreTrainedModel, cache: DynamicCache | windlass.KVCache, ids: torch.Tensor) -> None:
        """Read all of `ids` in chunks. Returns the logits of the last token of each."""
        for piece in ids.split(CHUNK, 1):
            model(input_ids=piece, past_key_values=cache, logits_to_keep=torch.tensor([piece.shape[1] - 1]))

    def prompt(self, ids: torch.Tensor) -> tuple[Callable[[], None], Callable[[], None]]:
        """Each reads a prompt into a new cache."""
        return (
            lambda: self.read(self.attached, windlass.KVCache(self.attached, chunk=CHUNK), ids),
            lambda: self.read(self.plain, DynamicCache(config=self.plain.config), ids),
        )

    def token(self, ids: torch.Tensor) -> tuple[Callable[[], None], Callable[[], None]]:
        """Each writes a token behind `ids`."""
        depth, one = ids.shape[1], torch.zeros(1, 1, dtype=torch.int64)
        ours, theirs = windlass.KVCache(self.attached, chunk=CHUNK), DynamicCache(config=self.plain.config)
        self.read(self.attached, ours, ids)
        self.read(self.plain, theirs, ids)

        def windlass_token() -> None:
            if ours.tokens_seen[0] >= depth + ROOM:
                ours.rollback(ROOM)
            self.attached(input_ids=one, past_key_values=ours)

        def transformers_token() -> None:
            if theirs.get_seq_length() >= depth + ROOM:
                theirs.crop(-ROOM)
            self.plain(input_ids=one, past_key_values=theirs)

        return windlass_token, transformers_token


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--depth", type=int, default=0)
    parser.add_argument("--prompt", type=int, help="read prompts of so many tokens instead of writing")
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    pair = Pair(options.shape, options.layers)
    ids = torch.randint(0, 1000, (1, options.prompt or max(options.depth, 1)))
    works = pair.prompt(ids) if options.prompt else pair.token(ids)
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(options.pairs + 2):  # the first two warm up
        for which in (0, 1) if turn % 2 else (1, 0):
            start = time.perf_counter()
            works[which]()
            seconds[which].append(time.perf_counter() - start)
    ours, theirs = (each[2:] for each in seconds)
    line = {"kind": "paired", **machine(options.threads), "shape": options.shape, "layers": options.layers}
    line |= {"depth": None if options.prompt else options.depth, "prompt": options.prompt, "pairs": options.pairs}
    line |= {"seconds": {"windlass": statistics.median(ours), "transformers": statistics.median(theirs)}}
    ratios = sorted(b / a for a, b in zip(ours, theirs, strict=True))
    line |= {"ratio": statistics.median(ratios), "quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]]}
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
