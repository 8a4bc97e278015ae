"""Decode of DeepSeek V3's shape, fewer layers: latents held once and read as they are, beside transformers' own cache.

    python benchmarks/latent.py --depths 4096 16384 >> benchmarks/results/latent.jsonl

Transformers expands all latents to keys and values at each step. Both caches are filled with random latents; the runs
take turns. `to_transformers` is a ratio of medians, `to_rotated` the median over pairs that ran one after the other.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from machine import machine
from transformers import DynamicCache, PreTrainedModel

import windlass
from windlass import KVCache, Recent
from windlass.evals.speed.measure import RotatedStorage, fill
from windlass.evals.speed.rows import random_model, shape_of
from windlass.hf.kv_cache import layer_shapes
from windlass.kernels import cpu

WRITTEN = 2  # tokens of one run of ours; transformers writes one


def own_cache(model: PreTrainedModel, depth: int) -> DynamicCache:
    """Transformers' cache, holding random latents."""
    config, cache = model.config, DynamicCache(config=model.config)
    for layer in range(config.num_hidden_layers):
        latents, shared = (
            torch.randn(1, 1, depth, width, dtype=model.dtype)
            for width in (config.kv_lora_rank, config.qk_rope_head_dim)
        )
        cache.update(latents, shared, layer)
    return cache


def filled(kind: type[KVCache], model: PreTrainedModel, depth: int) -> KVCache:
    """A cache of ours that stands behind a text of `depth` tokens."""
    cache = kind(model, policy=Recent(), positions="original")
    cache.reserve(depth + 64)
    fill(cache, layer_shapes(model), depth)
    return cache


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--depths", nargs="+", type=int, default=[4096, 16384])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--own-rounds", type=int, default=3, help="Rounds in which transformers runs, too.")
    options = parser.parse_args()
    shape, name = shape_of("dsv3", options.layers)
    model = windlass.attach(random_model(shape, torch.bfloat16))
    token = torch.zeros(1, 1, dtype=torch.long)
    for depth in options.depths:
        ours, rotated = (filled(kind, model, depth) for kind in (KVCache, RotatedStorage))
        theirs = own_cache(model, depth)

        def with_ours(cache: KVCache) -> None:
            for _ in range(WRITTEN):
                model(token, past_key_values=cache)
            cache.rollback(WRITTEN)

        def with_own(cache: DynamicCache = theirs) -> None:
            model(token, past_key_values=cache)
            cache.crop(-1)

        works: dict[str, tuple[Callable[[], None], int]] = {
            "unrotated": (partial(with_ours, ours), WRITTEN),
            "rotated": (partial(with_ours, rotated), WRITTEN),
            "transformers": (with_own, 1),
        }
        seconds: dict[str, list[float]] = {kind: [] for kind in works}
        for number in range(options.rounds + 1):
            for kind, (work, tokens) in works.items():
                if kind == "transformers" and number > options.own_rounds:
                    continue
                start = time.perf_counter()
                work()
                if number:  # the first warms up
                    seconds[kind].append((time.perf_counter() - start) / tokens)
        at = {kind: median(each) for kind, each in seconds.items()}
        line = {
            "kind": "latent",
            **machine(torch.get_num_threads()),
            "kernel": cpu.instruction_set(),
            "shape": name,
            "depth": depth,
            "tokens_per_s": {kind: 1 / each for kind, each in at.items()},
            "to_transformers": at["transformers"] / at["unrotated"],
            "to_rotated": median(
                turned / own for turned, own in zip(seconds["rotated"], seconds["unrotated"], strict=True)
            ),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    with torch.no_grad():
        main()
