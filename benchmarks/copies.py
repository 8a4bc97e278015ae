"""Where the time of un-rotated keys goes: decode attention with a rotation, with a copy of the keys, with neither.

    python benchmarks/copies.py >> benchmarks/results/copies.jsonl

One query, one layer, bfloat16, the same kernel in all of them:

    neither        keys are stored rotated, and read where they are
    rotation       keys are stored un-rotated, and rotated in registers as they are read
    copy           keys are stored rotated, and copied before they are read
    concatenation  the same with a new tensor for each step, as a cache makes that grows by a token
    rotated copy   keys are stored un-rotated; a rotated copy of them is made by PyTorch, and read

Several layers are read in turn, so that none is left in the CPU's caches. Prints one JSON line per shape and depth,
with quartiles of the time of each over that of `neither`.
"""

import json
from collections.abc import Callable

import torch
from attention import Layers
from kernel_options import KERNEL_SHAPES, kernel_parser, parsed
from machine import machine
from turns import in_turn, medians, quartiles

from windlass.core.positions import rotate
from windlass.evals.speed.rows import SHAPES
from windlass.kernels import cpu

Copies = Callable[[torch.Tensor], torch.Tensor]


def works_of(layers: Layers) -> dict[str, Callable[[], None]]:
    """What each does with all layers."""
    place = torch.empty_like(layers.keys[0])
    cos, sin = (table.to(place.dtype) for table in layers.tables)  # as transformers casts them

    def with_copies(copied: Copies) -> Callable[[], None]:
        def work() -> None:
            for layer, keys in enumerate(layers.keys):
                layers.ours(layer, is_rotated=True, copy=copied(keys))

        return work

    def rotation() -> None:
        for layer in range(len(layers.keys)):
            layers.ours(layer, is_rotated=False)

    return {
        "neither": with_copies(lambda keys: keys),
        "rotation": rotation,
        "copy": with_copies(place.copy_),
        "concatenation": with_copies(lambda keys: torch.cat((keys[:, :, :-1], keys[:, :, -1:]), 2)),
        "rotated copy": with_copies(lambda keys: rotate(keys, cos, sin)),
    }


def main() -> None:
    """Measure and print."""
    parser = kernel_parser(__doc__, KERNEL_SHAPES, rounds=20)
    parser.add_argument("--depths", nargs="+", type=int, default=[512, 1024, 8192, 16384])
    options = parsed(parser)
    for name in options.shapes:
        for depth in options.depths:
            (shape, *_) = SHAPES[name].cached_layers(torch.bfloat16)
            layers = Layers.random(shape, depth)
            seconds = in_turn(works_of(layers), options.rounds)
            line = {"kind": "copies", **machine(options.threads), "kernel": cpu.instruction_set(), "shape": name}
            line |= {"depth": depth, "rounds": options.rounds}
            line |= {"seconds": {way: each / len(layers.keys) for way, each in medians(seconds).items()}}
            line |= {"ratios": {way: quartiles(each, seconds["neither"]) for way, each in seconds.items()}}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
