"""Where the time of a decode step goes: attention, the matrix products of the weights, and the rest.

    python benchmarks/step_share.py --shape 1b --depth 1024 >> benchmarks/results/share.jsonl

Times each layer's step in the cache, the kernel within it, and all linear layers, over tokens fed one
by one. What a layer's step takes beyond its kernel is the cache's own overhead: to write, to observe,
to evict, and to prepare the call. What is left of a token is transformers' own: norms, residuals, the
identity rotation. Prints one JSON line.
"""

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from machine import machine
from torch import nn

import windlass
from windlass import kernels
from windlass.cache.slot_layer import SlotLayer
from windlass.engine.generate import prefill
from windlass.evals.speed.shapes import random_model, shape_of


class Clock:
    """Seconds spent in wrapped functions, by name, since the last reset."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, timed."""

        def timed(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **options)
            self.seconds[name] += time.perf_counter() - start
            return result

        return timed


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="1b")
    parser.add_argument("--depth", type=int, default=1024)
    parser.add_argument("--budget", type=int)
    parser.add_argument("--policy", default="recent")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = windlass.attach(random_model(shape_of(options.shape, None)[0], torch.bfloat16))
    cache = windlass.KVCache(model, budget=options.budget, policy=options.policy)
    clock = Clock()
    kernels.attend = clock.wrap("attention", kernels.attend)
    SlotLayer.step = clock.wrap("step", SlotLayer.step)  # type: ignore[method-assign]
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = clock.wrap("weights", module.forward)  # type: ignore[method-assign]
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(0, model.config.vocab_size, (options.depth,), generator=draw).tolist()
    prefill(model, cache, [ids])
    samples: list[dict[str, float]] = []
    for token in ids[: options.tokens]:
        clock.seconds.clear()
        start = time.perf_counter()
        model(input_ids=torch.tensor([[token]]), past_key_values=cache, logits_to_keep=1)
        samples.append({**clock.seconds, "token": time.perf_counter() - start})
    seconds = {name: statistics.median(sample[name] for sample in samples[8:]) for name in samples[0]}
    cache_share = (seconds["step"] - seconds["attention"]) / seconds["token"]
    other_share = (seconds["token"] - seconds["step"] - seconds["weights"]) / seconds["token"]
    line = {"kind": "share", **machine(options.threads), "shape": options.shape, "depth": options.depth}
    line |= {"budget": options.budget, "policy": repr(cache.policy), "seconds": seconds}
    print(json.dumps({**line, "cache_share": cache_share, "other_share": other_share}), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
