"""Decode attention alone: our kernel on un-rotated and rotated keys, PyTorch's attention, a plain read.

    python benchmarks/attention.py --depths 1024 8192 16384 >> benchmarks/results/attention.jsonl

One query reads a cache of random bfloat16 keys and values that several layers hold, so that no layer
is left in the CPU's caches from the last time. The four alternate; medians. PyTorch's attention gets
keys that were rotated beforehand, in the way that transformers calls it (`repeat_kv`) and in the way
that it does best (`enable_gqa`). Prints one JSON line per shape and depth.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from kernel_options import kernel_parser, parsed
from machine import machine
from torch.nn.functional import scaled_dot_product_attention

from windlass.core.inputs import AttentionInput, PackedStates, Visibility
from windlass.evals.speed.rows import SHAPES
from windlass.hf.kv_cache import LayerShape
from windlass.kernels import cpu
from windlass.positions.modes import Original

LAYER_BYTES = 2**28  # that all layers together hold at least


@dataclass(frozen=True)
class Layers:
    """What several layers hold at one depth, and one query."""

    queries: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    positions: torch.Tensor
    tables: tuple[torch.Tensor, torch.Tensor]

    @classmethod
    def random(cls, shape: LayerShape, depth: int) -> "Layers":
        """Enough layers to fill LAYER_BYTES."""
        size = shape.kv_heads, depth, shape.head_dim
        count = max(2, LAYER_BYTES // (4 * shape.kv_heads * depth * shape.head_dim))
        pairs = shape.head_dim // 2
        angles = torch.arange(depth)[:, None] / 10000 ** (torch.arange(pairs) / pairs)
        return cls(
            torch.randn(1, 1, shape.heads, shape.head_dim).bfloat16().transpose(1, 2),
            [torch.randn(1, *size).bfloat16() for _ in range(count)],
            [torch.randn(1, *size).bfloat16() for _ in range(count)],
            torch.arange(depth, dtype=torch.int32).reshape(1, 1, depth),
            (angles.cos(), angles.sin()),
        )

    def ours(self, layer: int, is_rotated: bool, copy: torch.Tensor | None = None) -> None:
        """One query, over keys that are rotated when they are read, or as they are; over a `copy` in their place."""
        at = self.positions[0, :, -1:].long()
        index = None if is_rotated else Original().rotary_index(self.positions, at)
        keys, values = self.keys[layer] if copy is None else copy, self.values[layer]
        cpu.attend(
            AttentionInput(
                self.queries,
                PackedStates(keys),
                PackedStates(values),
                self.positions,
                at,
                rotary_index=index,
                tables=None if is_rotated else self.tables,
                scale=keys.shape[-1] ** -0.5,
                visibility=Visibility(),
            )
        )

    def pytorch(self, layer: int, is_repeated: bool) -> None:
        """PyTorch's attention."""
        keys, values = self.keys[layer], self.values[layer]
        group = self.queries.shape[1] // keys.shape[1]
        if is_repeated and group > 1:
            keys, values = (
                states[:, :, None].expand(-1, -1, group, -1, -1).reshape(1, -1, *states.shape[2:])
                for states in (keys, values)
            )
        scaled_dot_product_attention(self.queries, keys, values, enable_gqa=group > 1 and not is_repeated)

    def read(self, layer: int) -> None:
        """Every byte of the keys and values, once."""
        self.keys[layer].view(torch.float32).sum()
        self.values[layer].view(torch.float32).sum()


def measure(layers: Layers, rounds: int) -> dict[str, float]:
    """Median seconds per layer of each."""
    works: dict[str, Callable[[int], None]] = {
        "unrotated": lambda layer: layers.ours(layer, is_rotated=False),
        "rotated": lambda layer: layers.ours(layer, is_rotated=True),
        "sdpa_repeat": lambda layer: layers.pytorch(layer, is_repeated=True),
        "sdpa_gqa": lambda layer: layers.pytorch(layer, is_repeated=False),
        "read": layers.read,
    }
    seconds: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, work in works.items():
            start = time.perf_counter()
            for layer in range(len(layers.keys)):
                work(layer)
            if turn:  # the first warms up
                seconds[name].append((time.perf_counter() - start) / len(layers.keys))
    return {name: statistics.median(each) for name, each in seconds.items()}


def main() -> None:
    """Measure and print."""
    parser = kernel_parser(__doc__, ("1b", "7b-mha"), rounds=15)
    parser.add_argument("--depths", nargs="+", type=int, default=[1024, 8192, 16384])
    options = parsed(parser)
    for name in options.shapes:
        for depth in options.depths:
            (shape, *_) = SHAPES[name].cached_layers(torch.bfloat16)
            seconds = measure(Layers.random(shape, depth), options.rounds)
            held = 4 * shape.kv_heads * shape.head_dim * depth
            about = {"kind": "attention", **machine(options.threads), "kernel": cpu.instruction_set()}
            print(json.dumps({**about, "shape": name, "depth": depth, "bytes": held, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
