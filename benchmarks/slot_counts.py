"""Decode attention over round and odd numbers of slots, one after the other.

    python benchmarks/slot_counts.py >> benchmarks/results/slot_counts.jsonl

One query, one layer, bfloat16, keys stored un-rotated. Prints one JSON line per shape and group of slot counts: the
quartiles of the time per slot over that of the group's first count.
"""

import json

import torch
from attention import Layers
from kernel_options import kernel_parser, parsed
from machine import machine
from turns import in_turn, medians, quartiles

from windlass.evals.speed.rows import SHAPES
from windlass.kernels import cpu

GROUPS = ((1024, 1023, 1025, 1040), (4096, 4095, 4097, 4099, 4112))


def read_all(layers: Layers) -> None:
    """One query over each layer."""
    for layer in range(len(layers.keys)):
        layers.ours(layer, is_rotated=False)


def main() -> None:
    """Measure and print."""
    options = parsed(kernel_parser(__doc__, ("1b", "7b-mha"), rounds=20))
    for name in options.shapes:
        (shape, *_) = SHAPES[name].cached_layers(torch.bfloat16)
        for group in GROUPS:
            held = {slots: Layers.random(shape, slots) for slots in group}
            works = {str(slots): (lambda each=each: read_all(each)) for slots, each in held.items()}
            seconds = in_turn(works, options.rounds)
            per_slot = {
                slots: [taken / len(held[int(slots)].keys) / int(slots) for taken in each]
                for slots, each in seconds.items()
            }
            line = {"kind": "slot_counts", **machine(options.threads), "kernel": cpu.instruction_set(), "shape": name}
            line |= {"rounds": options.rounds, "seconds_per_slot": medians(per_slot)}
            line |= {"ratios": {slots: quartiles(each, per_slot[str(group[0])]) for slots, each in per_slot.items()}}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    with torch.inference_mode():
        main()
